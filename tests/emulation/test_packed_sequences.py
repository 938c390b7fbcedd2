"""Where packed sequences lie, as the Triton kernels find it."""

import pytest
import torch

from tilewise import attention_varlen, causal

pytest.importorskip("triton", reason="Triton is not installed")


def test_the_first_border_is_taken_for_0_so_that_nothing_is_read_in_front_of_the_tensors(device, monkeypatch):
    """With another one, rows before it would be of sequence -1, of a length that lies in front of seqused_k."""
    monkeypatch.setattr("tilewise.problem.length_checks._may_look", lambda *_, **__: False)
    torch.manual_seed(0)
    rows, lengths = 150, torch.tensor([9, 30, 60], dtype=torch.int32, device=device)
    tensors = [torch.randn(rows, 1, 16, device=device).requires_grad_() for _ in range(3)]
    results = []
    for first in (0, 70):
        borders = torch.tensor([first, 20, 70, 140], dtype=torch.int32, device=device)
        out = attention_varlen(*tensors, cu_seqlens_q=borders, seqused_k=lengths, mask=causal("top_left"),
                               backend="triton")
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), tensors)))
    for got, wanted in zip(*results, strict=True):
        assert torch.equal(got, wanted)
        assert got[:140].abs().sum() > 0


@pytest.mark.parametrize("outside", [(20, 70, 400), (20, 400, 500), (-30, 70, 150), (-60, -20, 150)], ids=str)
def test_a_border_behind_or_in_front_of_the_tensors_is_taken_for_their_end_or_beginning(outside, device, monkeypatch):
    """Nothing is read or written there."""
    monkeypatch.setattr("tilewise.problem.length_checks._may_look", lambda *_, **__: False)
    torch.manual_seed(0)
    tensors = [torch.randn(150, 2, 16, device=device).requires_grad_() for _ in range(3)]
    results = []
    for borders in ((0, *outside), (0, *[max(0, min(border, 150)) for border in outside])):
        cu_seqlens = torch.tensor(borders, dtype=torch.int32, device=device)
        out, lse = attention_varlen(*tensors, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=150,
                                    max_seqlen_k=150, mask=causal("top_left"), return_aux=("lse",), backend="triton")
        results.append((out.detach(), lse.detach(), *torch.autograd.grad(out.square().sum(), tensors)))
    for got, wanted in zip(*results, strict=True):
        assert torch.equal(got, wanted)
