"""The accumulator that the Hopper backward kernel writes comes out as dQ."""

import math
from itertools import accumulate

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
from tilewise.kernels.hopper.arguments import StridedRows
from tilewise.kernels.hopper.backward.dq_postprocess import hopper_dq_kernel, hopper_zero_kernel

B, H = 2, 3


def held_by_threads(part):
    """What the threads of a warpgroup hold of a product of 64 rows: four values a thread, eight columns at a time.

    Warp w has rows 16 w to 16 w + 15; its lane 4 g + l the columns 2 l and 2 l + 1 of rows g and g + 8.
    """
    warp, lane = torch.arange(128) // 32, torch.arange(128) % 32
    row, column = 16 * warp + lane // 4, 2 * (lane % 4)
    return torch.stack([torch.stack([part[row + below, first + column + right]
                                     for below in (0, 8) for right in (0, 1)], 1)
                        for first in range(0, part.shape[1], 8)])


def sums_of(dq, width, cuts):
    """Cut dq, padded, into parts: of 64 queries some columns each."""
    padded = torch.zeros(B, H, math.ceil(dq.shape[2] / 64) * 64, width)
    padded[:, :, :dq.shape[2], :dq.shape[3]] = dq
    cut = [part for line in padded.flatten(0, 1) for rows in line.split(64)
           for part in rows.split(cuts, dim=1)]
    return torch.cat([held_by_threads(part).flatten() for part in cut])


@pytest.mark.parametrize(("cuts", "sq", "d", "parts"), [
    ([64, 64], 130, 96, 2), ([32, 32], 200, 40, 2), ([32, 32], 64, 64, 2), ([64, 64], 129, 128, 2),
    ([128, 128], 130, 200, 2), ([128, 64], 130, 192, 3)])  # of the last one the first part is two
def test_the_dq_accumulator_becomes_dq(cuts, sq, d, parts, device):
    dq = torch.randn(B, H, sq, d)
    sums = sums_of(dq, sum(cuts), cuts).to(device)
    all_parts = parts * math.ceil(sq / 64)
    got = torch.full((B, sq, H, d), float("nan"), dtype=torch.float16, device=device).transpose(1, 2)
    hopper_dq_kernel[(all_parts * B * H,)](
        sums, StridedRows(got, *got.stride()[:3]), None, None, sq, sq, H, all_parts, None, 0.5, d, sum(cuts) // parts,
        parts)
    assert torch.equal(got.cpu(), (dq * 0.5).half())


@pytest.mark.parametrize("first", [0, 150], ids=["from_0", "from_another_border"])
@pytest.mark.parametrize("lengths", [[130, 0, 1, 64, 63, 0], [3] * 200, []], ids=["odd", "many", "none"])
def test_accumulator_blocks_of_packed_sequences_become_their_rows(lengths, first, device):
    """Each sequence begins a step of its own, and its rows follow those of the one before; the first border is 0."""
    borders, width, behind, columns = [0, *accumulate(lengths)], 64, 70, 40
    steps = (borders[-1] + behind) // 64 + len(lengths) + 1
    dq = torch.randn(1, 1, borders[-1] + behind, columns)
    spread = torch.full((B, H, steps * 64, columns), float("nan"))
    for n, (begin, rows) in enumerate(zip(borders, [*lengths, behind], strict=True)):
        top = (begin // 64 + n) * 64
        spread[:, :, top:top + rows] = dq[:, :, begin:begin + rows]
    sums = sums_of(spread, width, [width // 2] * 2).to(device)
    got = torch.full((1, dq.shape[2], H, columns), float("nan"), dtype=torch.float16, device=device).transpose(1, 2)
    cu_seqlens = torch.tensor([first, *borders[1:]], device=device)
    hopper_dq_kernel[(2 * steps * H,)](
        sums, StridedRows(got, *got.stride()[:3]), cu_seqlens, None, dq.shape[2], 0, H, 2 * steps, len(lengths), 0.5,
        columns, width // 2, 2)
    assert torch.equal(got.cpu(), (dq * 0.5).half().expand(1, H, -1, -1))


@pytest.mark.parametrize("borders", [(0, 100, 180), (0, -64, 130), (0, -200, -64)], ids=str)
def test_a_border_behind_or_in_front_of_dq_leads_no_write_there(borders, device):
    rows, width, steps, around = 130, 64, 5, 64
    sums = sums_of(torch.ones(B, H, steps * 64, width), width, [width // 2] * 2).to(device)
    whole = torch.full((1, H, around + rows + around, width), float("nan"), dtype=torch.float16, device=device)
    got = whole[:, :, around:around + rows]
    hopper_dq_kernel[(2 * steps * H,)](sums, StridedRows(got, *got.stride()[:3]), torch.tensor(borders, device=device),
                                       None, rows, 0, H, 2 * steps, 2, 0.5, width, width // 2, 2)
    assert (got == 0.5).all() or min(borders) < 0, "where borders decrease some rows may be left out"
    assert not (got == 0.0).any()
    assert whole[:, :, :around].isnan().all()
    assert whole[:, :, around + rows:].isnan().all()


@pytest.mark.parametrize(("of_q", "of_k", "rows_k", "summed"), [
    ((0, 100, 200, 300), (0, 200, 400, 500), 300, ((0, 100), (200, 300))),  # the last one begins behind the keys
    ((0, 64, 128, 192), (0, 64, 400, 464), 128, ((128, 192),)),
    ((0, 100, 200, 300), (0, 300, 100, 400), 400, ((0, 300),)), ((0, 50, 120), (0, 100, 200), 120, ())], ids=str)
def test_a_sequence_whose_tile_is_not_there_is_summed(of_q, of_k, rows_k, summed, device):
    """Nobody else writes its dq: borders behind the keys, or such as decrease, give its first slot to others."""
    width, steps = 64, of_q[-1] // 64 + len(of_q)
    cu_q, cu_k = (torch.tensor(borders, device=device) for borders in (of_q, of_k))
    accum, rows = torch.full((steps * 64, width), float("nan"), device=device), of_q[-1]
    hopper_zero_kernel[(steps,)](accum, cu_q, cu_k, rows, rows_k, steps, len(of_q) - 1, width)
    got = torch.full((1, 1, rows, width), float("nan"), dtype=torch.float16, device=device)
    hopper_dq_kernel[(2 * steps,)](accum, StridedRows(got, *got.stride()[:3]), cu_q, cu_k, rows, rows_k, 1, 2 * steps,
                                   len(of_q) - 1, 0.5, width, width // 2, 2)
    made = torch.zeros(rows, dtype=torch.bool)
    for begin, stop in summed:
        made[begin:stop] = True
    assert torch.equal(got.cpu() == 0.0, made[:, None].expand_as(got))


def test_sequences_whose_keys_are_one_tile_are_left_out(device):
    """The accumulator has nothing of theirs, nor between sequences, and is not set to 0 there."""
    lengths_q, lengths_k, width, behind = (70, 130, 3), (128, 129, 0), 64, 10
    of_q, of_k = ([0, *accumulate(lengths)] for lengths in (lengths_q, lengths_k))
    rows, steps = of_q[-1] + behind, (of_q[-1] + behind) // 64 + 4
    begins = [(begin // 64 + n) * 64 for n, begin in enumerate(of_q)]
    cu_q, cu_k = (torch.tensor(borders, device=device) for borders in (of_q, of_k))
    accum = torch.full((H, steps * 64, width), float("nan"), device=device)
    hopper_zero_kernel[(steps * H,)](accum, cu_q, cu_k, rows, of_k[-1] + 129, steps, 3, width)
    zeroed = torch.zeros(steps * 64, dtype=torch.bool)
    for begin, own in ((begins[1], 130), (begins[3], behind)):  # behind the last sequence are more keys than a tile has
        zeroed[begin:begin + -(-own // 64) * 64] = True
    assert torch.equal(accum.cpu() == 0.0, zeroed[:, None].expand_as(accum))
    got = torch.full((1, H, rows, width), float("nan"), dtype=torch.float16, device=device)
    hopper_dq_kernel[(2 * steps * H,)](accum, StridedRows(got, *got.stride()[:3]), cu_q, cu_k, rows, of_k[-1] + 129, H,
                                       2 * steps, 3, 0.5, width, width // 2, 2)
    made = torch.zeros(rows, dtype=torch.bool)
    made[of_q[1]:of_q[2]] = made[of_q[3]:] = True
    assert torch.equal(got.cpu() == 0.0, made[:, None].expand_as(got))
