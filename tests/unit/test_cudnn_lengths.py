"""Lengths that the cuDNN backend keeps on the device."""

from types import SimpleNamespace

import torch

from tilewise.kernels.cudnn import lengths


def test_a_constant_is_made_once_never_while_captured_and_not_beyond_a_bound(monkeypatch):
    monkeypatch.setattr(lengths, "_kept", {})
    monkeypatch.setattr(lengths, "_MOST", 1)
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    device = torch.device("cpu")
    assert lengths.constant_lengths(2, 5, device) is None
    capturing[0] = False
    made = lengths.constant_lengths(2, 5, device)
    assert made.tolist() == [5, 5]
    assert made.dtype is torch.int32
    assert lengths.constant_lengths(2, 6, device) is None
    monkeypatch.setattr(lengths, "_MOST", 9)
    assert lengths.constant_lengths(lengths._LARGEST + 1, 6, device) is None
    capturing[0] = True
    assert lengths.constant_lengths(2, 5, device) is made


def test_a_constant_is_waited_for_by_the_stream_alone_and_not_captured_before_it_is_written(monkeypatch):
    device, capturing, done, waits = torch.device("cpu"), [False], [False], []
    event = SimpleNamespace(query=lambda: done[0])
    own = lengths._Constant(torch.full((2,), 5, dtype=torch.int32), event)
    monkeypatch.setattr(lengths, "_kept", {(2, 5, device): own})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(wait_event=waits.append))
    assert lengths.constant_lengths(2, 5, device) is own.lengths
    assert waits == [event]
    capturing[0] = True
    assert lengths.constant_lengths(2, 5, device) is None
    capturing[0], done[0] = False, True
    assert lengths.constant_lengths(2, 5, device) is own.lengths
    capturing[0] = True
    assert lengths.constant_lengths(2, 5, device) is own.lengths
    assert waits == [event]
