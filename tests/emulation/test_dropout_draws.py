"""Dropout's draws belong to their pairs, whatever the tile, and loops start where the draws' order does."""

from dataclasses import replace

import pytest
import torch

from tilewise import Mask, causal, chunk, window
from tilewise.dispatch import get_backend
from tilewise.kernels.triton.backward import dkdv_launch
from tilewise.kernels.triton.config import DbiasConfig, DkdvConfig, DqConfig, ForwardConfig
from tilewise.kernels.triton.dbias import dbias_launch
from tilewise.kernels.triton.dq import dq_launch
from tilewise.kernels.triton.forward import forward_launch
from tilewise.kernels.triton.launch import is_unaligned, modifiers_of
from tilewise.problem import AttentionProblem
from tilewise.problem.options import Operands, ScoreSettings
from tilewise.testing.oracle import dropout_keep

SEED, P, SIZE = 11, 0.4, 80
TILES = [(16, 16), (16, 64), (64, 16), (128, 32)]


def problem_of(mask, device, sq=SIZE, sk=SIZE, origin=(0, 0), **operands):
    q, k, v = (torch.zeros(1, 2, size, SIZE, dtype=torch.float16, device=device) for size in (sq, sk, sk))
    operands = Operands(seed=torch.tensor([SEED], device=device), **operands)
    problem = AttentionProblem.from_tensors(q, k, v, operands, mask=mask, settings=ScoreSettings(
        dropout_p=P, dropout_origin_q=origin[0], dropout_origin_k=origin[1]))
    return problem, modifiers_of(problem, operands)


@pytest.mark.parametrize("mask", [causal(), window(20, 9, "top_left")], ids=str)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "x".join(map(str, tile)))
def test_every_kernel_keeps_the_same_scores_with_every_tile(tile, mask, device):
    """Scores are 0, and an identity takes the place of v, dout or k: what a kernel writes shows each pair alone."""
    kept = dropout_keep(SEED, (1, 2, SIZE, SIZE), P, device) & mask.visible(SIZE, SIZE, device)
    for written in written_by_kernels(tile, mask, device):
        assert not written.isnan().any()
        assert torch.equal(written != 0, kept)


def test_a_part_of_a_sequence_draws_as_the_whole_does(device):
    kept = dropout_keep(SEED, (1, 2, SIZE + 16, SIZE + 48), P, device)[:, :, 16:, 48:]
    for written in written_by_kernels((16, 64), Mask(), device, origin=(16, 48)):
        assert torch.equal(written != 0, kept)


@pytest.mark.parametrize("origin", [(8, 0), (0, 17), (2**24, 0)], ids=str)
def test_a_part_that_begins_inside_of_a_block_of_draws_is_refused(origin, device):
    problem, _ = problem_of(Mask(), device, origin=origin)
    assert get_backend("triton").why_not(problem) == (
        "takes dropout of a part of a sequence that begins at a multiple of 16 below 16777216, got queries from "
        f"{origin[0]} on and keys from {origin[1]} on; backend='reference' takes them")
    assert str(problem.scores) == f"dropout 0.4 from {origin[0]}, {origin[1]}"


def written_by_kernels(tile, mask, device, origin=(0, 0)):
    """Return out, dv transposed, dq and dbias, each of which is not 0 where a pair is kept."""
    problem, modifiers = problem_of(mask, device, origin=origin, bias=torch.zeros(1, 2, SIZE, SIZE, device=device))
    zeros = torch.zeros(1, 2, SIZE, SIZE, dtype=torch.float16, device=device)
    one = torch.eye(SIZE, dtype=torch.float16, device=device).expand_as(zeros).contiguous()
    ones, delta = torch.full_like(zeros, 0.25), zeros[..., 0].float().contiguous()
    out, dk, dv, dq, dbias = (torch.full_like(zeros, float("nan")) for _ in range(5))
    lse = torch.full_like(delta, float("nan"))
    strides = zeros.stride()
    forward_launch(problem, ForwardConfig(*tile, 4, 1), "ieee")(zeros, zeros, one, out, lse, None, modifiers)
    problem = replace(problem, direction="backward")
    dkdv_launch(problem, DkdvConfig(*tile, 4, 1), "ieee", strides, (strides, strides), (True, True))(
        zeros, zeros, zeros, one, lse, delta, dk, dv, None, None, None, modifiers)
    dq_launch(problem, DqConfig(*tile, 4, 1), "ieee", strides, strides)(
        zeros, one, ones, ones, lse, delta, dq, None, None, None, None, None, modifiers)
    dbias_launch(problem, DbiasConfig(*tile, 4, 1), "ieee", strides)(
        zeros, zeros, ones, ones, lse, delta, dbias, modifiers)
    return out, dv.mT, dq, dbias


@pytest.mark.parametrize(("mask", "sq", "sk", "expected"), [
    (causal(), 80, 80, False), (causal("top_left"), 80, 90, False), (causal("bottom_right"), 80, 90, True),
    (causal("bottom_right"), 80, 96, False), (window(32, 16), 80, 80, False), (window(31, 0), 80, 80, True),
    (window(32, 9), 80, 80, True), (chunk(48), 80, 80, False), (chunk(40), 80, 80, True),
    (chunk(48, "bottom_right"), 80, 90, True),
], ids=str)
def test_mask_ranges_in_multiples_of_16_start_where_the_draws_order_does(mask, sq, sk, expected, device):
    problem, modifiers = problem_of(mask, device, sq, sk)
    assert is_unaligned(problem) is expected
    assert modifiers.dropout.unaligned == (1.0 if expected else None)


def test_lengths_and_documents_may_start_anywhere(device):
    lengths = torch.tensor([70], dtype=torch.int32, device=device)
    for mask, expected in ((causal("top_left"), False), (causal("bottom_right"), True)):
        assert is_unaligned(problem_of(mask, device, seqlens_q=lengths, seqlens_k=lengths)[0]) is expected
    numbers = torch.zeros(1, 4, SIZE, dtype=torch.int32, device=device)
    assert is_unaligned(problem_of(causal(), device, documents_q=numbers, documents_k=numbers)[0])
