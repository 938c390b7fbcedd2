"""The self-check on the GPU that it is for: it passes where the kernels are right, and a newer Triton is then used."""

import pytest
import torch

import tilewise as tw
from tilewise.backends._support import hopper, self_check, self_check_calls
from tilewise.support.caches import clear_caches

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]


@pytest.mark.parametrize(("family", "dims"), [(family, dims) for family, calls in self_check_calls.CALLS.items()
                                              for dims in calls])
def test_each_call_of_the_check_is_within_its_budget(family, dims, device):
    assert self_check_calls.deviation(family, dims, torch.device(device.type, 0)) is None


def test_with_a_triton_that_is_not_known_a_training_step_runs_the_kernels_after_the_check(device, monkeypatch,
                                                                                          tmp_path):
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(hopper, "RUN_ON_GPU", frozenset())
    self_check.forget()
    clear_caches()
    try:
        q, k, v = (torch.randn(2, 16, 2048, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
                   for _ in range(3))
        with pytest.warns(RuntimeWarning, match="self-check of its Hopper kernels on .* has passed") as caught:
            tw.attention(q, k, v, mask=tw.causal()).sum().backward()
        assert len([warning for warning in caught if "self-check" in str(warning.message)]) == 1
        found = tw.explain(q, k, v, mask=tw.causal())
        assert (found.forward, found.backward) == ("gluon", "gluon")
        assert sorted(path.name.rpartition("-")[0] for path in tmp_path.iterdir()) == [
            "self-check-backward", "self-check-forward"]
        assert torch.isfinite(q.grad).all()
    finally:
        monkeypatch.undo()
        self_check.forget()
        clear_caches()


def test_a_call_that_is_first_made_in_a_graph_goes_to_another_backend_until_it_is_made_outside(device, monkeypatch,
                                                                                               tmp_path):
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    q = torch.randn(1, 16, 4096, 128, dtype=torch.bfloat16, device=device)
    served = []
    tw.attention(q, q, q, backend="triton")  # compiled before the capture
    monkeypatch.setattr(hopper, "RUN_ON_GPU", frozenset())
    gluon = tw.dispatch.get_backend("gluon")
    forward = type(gluon).forward
    monkeypatch.setattr(type(gluon), "forward", lambda self, *call: served.append("gluon") or forward(self, *call))
    self_check.forget()
    clear_caches()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            tw.attention(q, q, q)
        assert served == []
        with pytest.warns(RuntimeWarning, match="has passed"):
            tw.attention(q, q, q)
        assert served == ["gluon"]
    finally:
        monkeypatch.undo()
        self_check.forget()
        clear_caches()
