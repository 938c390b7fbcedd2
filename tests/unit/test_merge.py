"""Merging partial results: equal to attending at once, and safe where a part saw nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewise import InvalidInput, Mask, attention, merge
from tilewise.testing.oracle import attend

_EMPTY = float("-inf")


def _parts(generator_seed=0, shape=(1, 2, 5, 4)):
    """Two random parts in float64: row 0 is empty in the first, row 1 in the second, row 2 in both."""
    generator = torch.Generator().manual_seed(generator_seed)
    out_a, out_b = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    lse_a, lse_b = (torch.randn(shape[:-1], generator=generator, dtype=torch.float64) for _ in range(2))
    for out, lse, rows in ((out_a, lse_a, [0, 2]), (out_b, lse_b, [1, 2])):
        out[:, :, rows] = 0.0
        lse[:, :, rows] = _EMPTY
    return out_a, lse_a, out_b, lse_b


@given(st.integers(0, 7), st.integers(0, 100))
def test_merged_parts_equal_attention_over_all_keys(cut, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, 7, 6, generator=generator, dtype=torch.float64) for _ in range(3))
    a, b = (attention(q, k[:, :, part], v[:, :, part], return_aux=("lse",), backend="reference")
            for part in (slice(0, cut), slice(cut, 7)))
    out, lse = merge(*a, *b)
    whole = attend(q, k, v, Mask(), None)
    torch.testing.assert_close(out, whole[0])
    torch.testing.assert_close(lse, whole[1])


def test_row_empty_in_one_part_is_the_other_part():
    out_a, lse_a, out_b, lse_b = _parts()
    out, lse = merge(out_a, lse_a, out_b, lse_b)
    for row, part_out, part_lse in ((0, out_b, lse_b), (1, out_a, lse_a)):
        torch.testing.assert_close(out[:, :, row], part_out[:, :, row])
        torch.testing.assert_close(lse[:, :, row], part_lse[:, :, row])


def test_row_empty_in_both_parts_gives_zero_and_minus_infinity():
    out, lse = merge(*_parts())
    assert not out[:, :, 2].any()
    assert (lse[:, :, 2] == _EMPTY).all()
    assert out.isfinite().all()


def test_gradient_of_rows_empty_in_both_parts_is_zero_and_not_nan():
    """The gradient of torch.logaddexp(-inf, -inf) is NaN; through it one empty row spoiled a whole backward pass."""
    leaves = [tensor.requires_grad_() for tensor in _parts()]
    out, lse = merge(*leaves)
    lse = lse.masked_fill(lse == _EMPTY, 0.0)
    (out.sum() + lse.sum()).backward()
    for leaf in leaves:
        assert leaf.grad.isfinite().all()
        assert not leaf.grad[:, :, 2].any()
        assert leaf.grad[:, :, 4].any()


def test_plus_infinity_says_too_that_a_part_saw_nothing():
    """flash-attn 2 has it so, and so has its face here: merged, such a row was NaN, and its gradients with it."""
    results = []
    for empty in (_EMPTY, -_EMPTY):
        out_a, lse_a, out_b, lse_b = _parts()
        given = out_a, lse_a.masked_fill(lse_a == _EMPTY, empty), out_b, lse_b.masked_fill(lse_b == _EMPTY, empty)
        leaves = [tensor.requires_grad_() for tensor in given]
        out, lse = merge(*leaves)
        (out.sum() + lse.masked_fill(lse == _EMPTY, 0.0).sum()).backward()
        results.append((out, lse, *(leaf.grad for leaf in leaves)))
    for got, wanted in zip(*results, strict=True):
        assert torch.equal(got, wanted)


def test_nan_beside_plus_infinity_is_not_hidden():
    out_a, lse_a, out_b, lse_b = _parts()
    out_a[:, :, 3], lse_a[:, :, 3] = float("nan"), float("inf")
    assert merge(out_a, lse_a, out_b, lse_b)[0][:, :, 3].isnan().all()


def test_gradient_agrees_with_finite_differences():
    filled = [tensor[:, :, 3:].clone().requires_grad_() for tensor in _parts()]
    assert torch.autograd.gradcheck(merge, filled)


def test_large_lse_do_not_overflow():
    out_a, lse_a, out_b, lse_b = (tensor[:, :, 3:].float() for tensor in _parts())
    out, lse = merge(out_a, lse_a + 1e4, out_b, lse_b + 1e4)
    expected_out, expected_lse = merge(*(t.double() for t in (out_a, lse_a + 1e4, out_b, lse_b + 1e4)))
    torch.testing.assert_close(out.double(), expected_out, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-7, atol=0.0)


def test_result_has_the_dtypes_of_the_first_part():
    out_a, lse_a, out_b, lse_b = _parts()
    out, lse = merge(out_a.half(), lse_a.float(), out_b.half(), lse_b.float())
    assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)


@pytest.mark.parametrize(("index", "name", "expected"), [
    (2, "out_b", "(1, 2, 5, 4)"), (1, "lse_a", "(1, 2, 5)"), (3, "lse_b", "(1, 2, 5)")])
def test_message_names_the_part_whose_shape_is_wrong(index, name, expected):
    parts = list(_parts())
    parts[index] = parts[index][:, :, :3]
    with pytest.raises(InvalidInput) as caught:
        merge(*parts)
    assert str(caught.value) == f"merge: {name} has shape {tuple(parts[index].shape)}; out_a asks for {expected}."


@pytest.mark.parametrize(("place", "given", "words"), [
    (0, [0.0], "merge: out_a is a list; allowed is a tensor"),
    (3, None, "merge: lse_b is a NoneType; allowed is a tensor"),
    (1, torch.zeros(1, 2, 3, dtype=torch.float16), "merge: lse_a has dtype torch.float16; allowed are torch.float32"),
    (0, torch.zeros(1, 2, 3, 4, dtype=torch.int64), "merge: out_a has dtype torch.int64 and out_b torch.float32; "),
    (2, torch.zeros(1, 2, 3, 4, dtype=torch.float64), "out_a has dtype torch.float32 and out_b torch.float64; allowed"),
    (2, torch.zeros(1, 2, 3, 4, device="meta"), "merge: out_b is on meta and out_a is on cpu: move them to one")],
    ids=str)
def test_what_cannot_be_merged_is_named(place, given, words):
    parts = [torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)] * 2
    parts[place] = given
    with pytest.raises(InvalidInput, match=words):
        merge(*parts)
