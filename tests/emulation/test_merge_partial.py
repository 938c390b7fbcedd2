"""Merging a part into the result so far: the kernel against float64, in the interpreter without a GPU."""

import pytest
import torch

from tilewise.backends.base import Results
from tilewise.distributed.partial import PartialResults, merge_by_torch
from tilewise.distributed.segments import Segment
from tilewise.masks import Span

merging = pytest.importorskip("tilewise.kernels.triton.merge_partial", reason="Triton is not installed")
merge_partial = merging.merge_partial
INF = float("inf")


def rows_of(device, b=2, h=3, s=37, dv=40, dtype=torch.float32, seed=0, *, max_logit=True):
    """Return a partial result in which some rows have seen no key."""
    make = torch.Generator().manual_seed(seed)
    out, lse = torch.randn(b, s, h, dv, generator=make).transpose(1, 2), torch.randn(b, h, s, generator=make) * 5.0
    empty = torch.rand(b, h, s, generator=make) < 0.3
    out, lse = out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, -INF)
    largest = (lse + 1.0).to(device) if max_logit else None
    return Results(out.to(dtype).to(device), lse.to(device), largest)


def merged(result, part):
    """Return what two parts come to, in float64."""
    (out_a, lse_a), (out_b, lse_b) = ([own.double() for own in rows[:2]] for rows in (result, part))
    lse = torch.logaddexp(lse_a, lse_b)
    shift = lse.masked_fill(lse == -INF, 0.0)
    return (lse_a - shift).exp()[..., None] * out_a + (lse_b - shift).exp()[..., None] * out_b, lse


@pytest.mark.parametrize("max_logit", [True, False])
@pytest.mark.parametrize(("dv", "dtype"), [(40, torch.float32), (128, torch.float16), (1, torch.float32),
                                           (600, torch.float32)], ids=str)
def test_a_part_is_merged_in_place(device, dv, dtype, max_logit):
    result = rows_of(device, dv=dv, max_logit=max_logit)
    part = rows_of(device, dv=dv, dtype=dtype, seed=1, max_logit=max_logit)
    assert ((result.lse == -INF) & (part.lse == -INF)).any(), "a row that has seen no key in either"
    out, lse = merged(result, part)
    largest = torch.maximum(result.max_logit, part.max_logit) if max_logit else None
    merge_partial(result, part)
    torch.testing.assert_close(result.out.double(), out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.lse.double(), lse, rtol=1e-6, atol=1e-6)
    assert not max_logit or torch.equal(result.max_logit, largest)


@pytest.mark.parametrize(("dv", "dtype", "is_transposed"), [(40, torch.float16, False), (128, torch.float16, True),
                                                            (24, torch.float32, True)], ids=str)
def test_the_last_part_writes_out_in_the_dtype_and_strides_of_the_result(device, dv, dtype, is_transposed):
    result, part = rows_of(device, dv=dv), rows_of(device, dv=dv, seed=1)
    out, lse = merged(result, part)
    rounded = torch.full((2, 37, 3, dv), 9.0, dtype=dtype, device=device).transpose(1, 2)
    if not is_transposed:
        rounded = rounded.contiguous()
    sums = result.out.clone()
    expected = Results(sums.clone(), result.lse.clone(), result.max_logit.clone())
    merge_partial(expected, part)
    merge_partial(result, part, rounded)
    torch.testing.assert_close(rounded.double(), out, rtol=1e-5 if dtype is torch.float32 else 2 ** -11, atol=1e-5)
    assert torch.equal(rounded, expected.out.to(dtype)), "rounded once, of the same sum"
    torch.testing.assert_close(result.lse.double(), lse, rtol=1e-6, atol=1e-6)
    assert torch.equal(result.max_logit, expected.max_logit)
    assert torch.equal(result.out, sums), "nothing writes the sum that nobody reads"


def test_rows_and_heads_around_those_of_a_part_are_left_alone(device):
    whole = rows_of(device, h=5, s=50)
    before = [own.clone() for own in whole]
    where = (slice(None), slice(1, 3), slice(9, 30))
    inside, part = Results(*[own[where] for own in whole]), rows_of(device, h=2, s=21, seed=1)
    out, lse = merged(inside, part)
    merge_partial(inside, part)
    for own, old, new in zip(whole, before, (out, lse, torch.maximum(before[2][where], part.max_logit)), strict=True):
        torch.testing.assert_close(own[where], new.float(), rtol=1e-5, atol=1e-5)
        own[where] = old[where]
        assert torch.equal(own, old)


def test_without_a_row_there_is_nothing_to_launch(device):
    merge_partial(rows_of(device, s=0), rows_of(device, s=0))
    merge_partial(rows_of(device, b=0), rows_of(device, b=0))


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning")  # a GPU gives NaN silently
@pytest.mark.parametrize(("before", "added", "total"), [
    (INF, 0.0, INF), (0.0, INF, INF), (float("nan"), 0.0, float("nan")), (0.0, float("nan"), float("nan")),
    (-INF, -INF, -INF), (3e4, 3e4, 3e4), (-3e4, -INF, -3e4)])
def test_infinities_and_nan_become_what_they_do_elsewhere(device, before, added, total):
    """As in torch's way: an lse of +inf leaves a NaN in out, and one of -inf nothing."""
    found = []
    for merge in (merge_partial, merge_by_torch):
        result = Results(torch.ones(1, 1, 1, 16, device=device), torch.full((1, 1, 1), before, device=device),
                            torch.full((1, 1, 1), before, device=device))
        part = Results(torch.full((1, 1, 1, 16), 2.0, device=device), torch.full((1, 1, 1), added, device=device),
                          torch.full((1, 1, 1), added, device=device))
        merge(result, part)
        found.append(result)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-6, atol=1e-5)
    assert found[0].lse.item() == pytest.approx(total, abs=1.0, nan_ok=True)


@pytest.mark.gpu
def test_on_a_gpu_the_kernel_merges_parts(device, monkeypatch):
    counted = []
    monkeypatch.setattr(merging, "merge_partial", lambda *rows: counted.append(1) or merge_partial(*rows))
    rows = 5000  # warps of a CTA drift apart in some: what one still reads, another must not have written
    q = torch.zeros(2, 3, rows, 40, device=device, dtype=torch.bfloat16)
    results = PartialResults(q, 40, max_logit=True, summed=True, rounds=True)
    parts = [rows_of(device, s=rows, seed=seed) for seed in (0, 1)]
    out, lse = merged(*parts)
    for number, part in enumerate(parts):
        results.add(Span(0, 3), part, [Segment(Span(0, rows), Span(0, rows), number == 0, number == 1)])
    found = results.results()
    assert found.out.dtype is torch.bfloat16
    torch.testing.assert_close(found.out.double(), out, rtol=2 ** -8, atol=1e-5)
    torch.testing.assert_close(found.lse.double(), lse, rtol=1e-6, atol=1e-6)
    assert len(counted) == 1
