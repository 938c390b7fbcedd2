"""Packed sequences that cross the borders of ranks equal the one-device call."""

import pytest

from distributed.equality import TOLERANCE
from distributed.packed import CASES
from tilewise.distributed import Layout
from tilewise.distributed.layouts import joined
from tilewise.masks import Span

RUNS = (("ring", 2, "zigzag"), ("ring", 3, "contiguous"), ("ring", 4, "zigzag"), ("all_gather", 3, "zigzag"),
        ("all_gather", 4, "contiguous"), ("ring", (2, 2), "zigzag"), ("all_gather", (2, 2), "contiguous"),
        ("ulysses", 2, "zigzag"), ("ulysses", 4, "contiguous"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_sequences_are_those_of_one_device(workers, case):
    for schedule, ranks, layout in RUNS:
        for found in workers.run(ranks, "distributed.packed", "compare", case.name, layout, schedule):
            wrong = {name: error for name, error in found.items() if not error <= TOLERANCE}
            assert wrong == {}, (schedule, ranks, layout)


@pytest.mark.parametrize("case", [case for case in CASES if case.lengths_k is None], ids=str)
def test_packed_sequences_of_a_layout_of_many_pieces_are_those_of_one_device(workers, case):
    rows, held = sum(case.lengths) + case.behind, ([], [], [])
    for number, start in enumerate(range(0, rows, 3)):
        held[(0, 1, 0, 2, 2, 1, 0)[number % 7]].append(Span(start, min(rows, start + 3)))
    layout = Layout("dealt", tuple([joined(tuple(own)) for own in held]))
    for schedule in ("ring", "all_gather"):
        for found in workers.run(3, "distributed.packed", "compare", case.name, layout, schedule):
            assert {name: error for name, error in found.items() if not error <= TOLERANCE} == {}, schedule
