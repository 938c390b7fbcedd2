"""benchmarks/mask_rates.py: its masks, what it holds them against, and its table."""

import sys
from dataclasses import fields

import pytest
import torch

from compiled.compile_process import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
try:
    import mask_rates
finally:
    sys.path.pop(0)

TOKENS = 1536


@pytest.mark.parametrize("kind", list(mask_rates.kinds(torch.device("cpu"), TOKENS)), ids=lambda kind: kind.name)
def test_pairs_are_counted_and_flexattention_decides_the_same(kind):
    at = torch.arange(TOKENS)
    visible = kind.mask if isinstance(kind.mask, torch.Tensor) else kind.mask.visible(TOKENS, TOKENS)
    visible = visible.reshape(TOKENS, TOKENS)
    assert int(visible.sum()) == kind.pairs
    asked = torch.vmap(torch.vmap(lambda i, j: kind.function(0, 0, i, j), (None, 0)), (0, None))(at, at)
    assert torch.equal(asked, visible)


def test_a_dense_call_has_the_pairs_of_the_mask_or_nearly_so():
    for kind in mask_rates.kinds(torch.device("cpu"), TOKENS):
        dense = kind.batch * int(kind.dense.visible(kind.length, kind.length).sum())
        assert dense == pytest.approx(kind.pairs, rel=0.1), kind.name
        assert dense == kind.pairs or kind.batch == 1, kind.name


def row_of(**values):
    return mask_rates.Row(**dict.fromkeys([field.name for field in fields(mask_rates.Row)], "x") | values)


def test_shares_are_rates_over_that_of_the_dense_call():
    rows = [row_of(kind="a", d=64, direction="forward", provider=provider, us_p50=us, pairs=1000)
            for provider, us in (("tilewise", 20.0), ("flex", 40.0), ("dense", 10.0))]
    assert [(row.provider, row.share) for row in mask_rates.with_shares(rows)] == [("tilewise", 0.5), ("flex", 0.25)]


def test_a_wrong_result_is_not_timed():
    right = tuple(torch.ones(4) for _ in range(4))
    wrong = (*right[:3], right[3] * 1.1)
    mask_rates.check("flex", right, right)
    with pytest.raises(AssertionError, match=r"flex: dv differs by 0\.1 of the largest number; allowed is 0\.02\."):
        mask_rates.check("flex", wrong, right)
    with pytest.raises(AssertionError, match="flex: out differs by nan"):
        mask_rates.check("flex", (right[0] * float("nan"), *right[1:]), right)


def test_the_table_has_a_line_a_mask_head_dim_and_pass(tmp_path):
    path = tmp_path / "rates.csv"
    rows = [row_of(kind="prefix", d=64, direction=direction, provider=provider, us_p50=us, pairs=7, share=share)
            for direction in ("forward", "backward")
            for provider, us, share in (("tilewise", 20.0, 0.954), ("tilewise:triton", 30.0, 0.5), ("flex", 50.0, 0.3))
            if (direction, provider) != ("backward", "flex")]
    mask_rates.write(rows, path)
    assert len(path.read_text().splitlines()) == 1 + 5
    assert mask_rates.table(path).splitlines() == [
        "| mask | head dim | pass | share of the dense rate | over `triton` | over FlexAttention |",
        "|---|---:|---|---:|---:|---:|",
        "| prefix | 64 | forward | 0.95 | 1.50× | 2.50× |",
        "| prefix | 64 | backward | 0.95 | 1.50× | – |", "", "x, torch x, Triton x, commit x."]
