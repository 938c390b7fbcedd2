"""Packed sequences that cross the borders of ranks equal the one-device call."""

import pytest

from distributed.equality import TOLERANCE
from distributed.packed import CASES

RUNS = (("ring", 2, "zigzag"), ("ring", 3, "contiguous"), ("ring", 4, "zigzag"), ("all_gather", 3, "zigzag"),
        ("all_gather", 4, "contiguous"), ("ring", (2, 2), "zigzag"), ("all_gather", (2, 2), "contiguous"),
        ("ulysses", 2, "zigzag"), ("ulysses", 4, "contiguous"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_sequences_are_those_of_one_device(workers, case):
    for schedule, ranks, layout in RUNS:
        for found in workers.run(ranks, "distributed.packed", "compare", case.name, layout, schedule):
            wrong = {name: error for name, error in found.items() if not error <= TOLERANCE}
            assert wrong == {}, (schedule, ranks, layout)
