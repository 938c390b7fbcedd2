"""The pairs that dropout keeps: Philox's published answers, their share, and that a tile is a part of the whole."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewise.kernels.reference.dropout import keep_tile, philox
from tilewise.masks import Span
from tilewise.testing.strategies import spans

_SHAPE = 6, 21, 18


def _keep(seed, batch_heads, queries, keys, dropout_p):
    return keep_tile(torch.tensor([seed]), batch_heads, queries, keys, dropout_p)


@pytest.mark.parametrize(("counter", "key", "answer"), [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
])
def test_philox_gives_its_authors_known_answers(counter, key, answer):
    def words(text):
        return tuple(torch.tensor([int(word, 16)]) for word in text.split())

    assert " ".join(f"{int(word):08x}" for word in philox(words(counter), words(key))) == answer


def test_rows_are_numbered_from_the_first_one():
    whole = keep_tile(torch.tensor([3]), 7, Span(0, 9), Span(0, 13), 0.5)
    assert torch.equal(keep_tile(torch.tensor([3]), 2, Span(0, 9), Span(0, 13), 0.5, first_row=5), whole[5:])


@pytest.mark.parametrize(("i", "j", "query", "key", "word", "half"), [
    (0, 0, 0, 0, 0, 0), (4, 11, 4, 1, 2, 1), (10, 14, 2, 3, 1, 1), (15, 5, 7, 2, 3, 0), (18, 12, 10, 2, 0, 1),
    (25, 17, 9, 4, 3, 0),
])
def test_a_pair_reads_the_bits_of_its_place(i, j, query, key, word, half):
    """A half of a word of the counter (key, query, head, 0), under the seed's two halves."""
    seed, head = -(7 << 33) + 5, 3
    counter = tuple(torch.tensor([place]) for place in (key, query, head, 0))
    seeds = tuple(torch.tensor([part]) for part in (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    draw = int(philox(counter, seeds)[word]) >> 16 * half & 0xFFFF
    for dropout_p, kept in ((draw / 2**16, True), ((draw + 1) / 2**16, False)):
        assert bool(_keep(seed, 5, Span(0, 26), Span(0, 18), dropout_p)[head, i, j]) == kept


@pytest.mark.parametrize("dropout_p", [0.05, 0.5, 0.9])
def test_share_of_kept_pairs_is_one_minus_dropout_p(dropout_p):
    keep = _keep(2024, 4, Span(0, 500), Span(0, 500), dropout_p)
    five_sigma = 5 * (dropout_p * (1 - dropout_p) / keep.numel())**0.5
    assert keep.numel() == 10**6
    assert abs(keep.double().mean().item() - (1 - dropout_p)) < five_sigma


def test_nothing_is_dropped_at_probability_0():
    assert _keep(1, 2, Span(0, 64), Span(0, 64), 0.0).all()


@given(spans(_SHAPE[1]), spans(_SHAPE[2]), st.integers(-2**63, 2**63 - 1))
def test_a_tile_is_a_part_of_the_whole(queries, keys, seed):
    whole = _keep(seed, _SHAPE[0], Span(0, _SHAPE[1]), Span(0, _SHAPE[2]), 0.4)
    tile = _keep(seed, _SHAPE[0], queries, keys, 0.4)
    assert torch.equal(tile, whole[:, queries.start:queries.stop, keys.start:keys.stop])


def test_seeds_heads_and_queries_differ():
    keep = _keep(1, 3, Span(0, 3), Span(0, 64), 0.5)
    rows = [*keep.flatten(0, 1), *(_keep(seed, 1, Span(0, 1), Span(0, 64), 0.5)[0, 0] for seed in (2, 1 + (1 << 32)))]
    assert len({tuple(row.tolist()) for row in rows}) == len(rows) == 11
