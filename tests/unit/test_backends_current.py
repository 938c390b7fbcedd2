"""Whether a launch needs a context for the tensors' device."""

import pytest
import torch

from tilewise.backends._support import current


@pytest.mark.parametrize(("devices", "device", "expected"), [
    (1, "cuda:0", True), (2, "cuda:1", True), (2, "cuda:0", False), (2, "cpu", True), (0, "cpu", True),
])
def test_tensors_are_where_triton_launches(monkeypatch, devices, device, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    current._one_device.cache_clear()
    try:
        assert current.is_current(torch.device(device)) is expected
    finally:
        current._one_device.cache_clear()
