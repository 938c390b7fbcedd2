"""Rows that are copied, or added to others, and rounded: the kernel against torch, in the interpreter without a GPU."""

import pytest
import torch

from tilewise.distributed import rows

writing = pytest.importorskip("tilewise.kernels.triton.write_rows", reason="Triton is not installed")
write_rows = writing.write_rows


def rows_of(device, dtype=torch.float32, b=2, h=3, s=37, d=40, *, is_transposed=False):
    """Return (b, h, s, d) numbers, with or without the order of strides of (b, s, h, d)."""
    if is_transposed:
        return torch.randn(b, s, h, d).transpose(1, 2).to(dtype).to(device)
    return torch.randn(b, h, s, d).to(dtype).to(device)


@pytest.mark.parametrize("has_total", [True, False])
@pytest.mark.parametrize(("d", "dtype", "is_transposed"), [
    (40, torch.float16, False), (128, torch.float16, True), (1, torch.float32, False), (600, torch.float32, True)],
    ids=str)
def test_a_sum_is_rounded_once(device, d, dtype, is_transposed, has_total):
    torch.manual_seed(0)
    part, total = rows_of(device, d=d, is_transposed=True), rows_of(device, d=d) if has_total else None
    out = torch.full_like(rows_of(device, dtype, d=d, is_transposed=is_transposed), 9.0)
    kept = None if total is None else total.clone()
    write_rows(out, part, total)
    assert torch.equal(out, (part if total is None else total + part).to(dtype))
    assert total is None or torch.equal(total, kept), "a sum that nobody reads is not written"


def test_rows_and_heads_around_those_of_a_part_are_left_alone(device):
    torch.manual_seed(0)
    part, total = rows_of(device, h=2, s=21), rows_of(device, h=5, s=50)
    out, where = rows_of(device, torch.float16, h=5, s=50), (slice(None), slice(1, 3), slice(9, 30))
    before = out.clone()
    write_rows(out[where], part, total[where])
    assert torch.equal(out[where], (total[where] + part).half())
    out[where] = before[where]
    assert torch.equal(out, before)


def test_without_a_row_there_is_nothing_to_launch(device):
    write_rows(rows_of(device, s=0), rows_of(device, s=0))
    write_rows(*[rows_of(device, b=0)] * 3)


def test_a_part_of_16_bits_is_copied_and_added_in_place_in_float32(device):
    torch.manual_seed(0)
    part, total = rows_of(device, torch.float16), rows_of(device)
    copied, wanted = torch.empty_like(part), total + part
    write_rows(copied, part)
    assert torch.equal(copied, part)
    write_rows(total, part, total)
    assert torch.equal(total, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "dims", "by_kernel"), [
    (torch.float32, 4, True), (torch.bfloat16, 4, True), (torch.float64, 4, False), (torch.float32, 3, False)], ids=str)
def test_on_a_gpu_the_kernel_has_what_it_takes(device, monkeypatch, dtype, dims, by_kernel):
    counted = []
    monkeypatch.setattr(writing, "write_rows", lambda *given: counted.append(1) or write_rows(*given))
    part, total = (rows_of(device, dtype).flatten(0, 4 - dims) for _ in range(2))
    out = torch.empty_like(part)
    rows.write_rows(out, part, total)
    assert torch.equal(out, (total.double() + part.double()).to(dtype))
    assert bool(counted) == by_kernel
