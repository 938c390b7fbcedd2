"""Context parallel attention equals the one-device call: every option, schedule, layout and number of ranks."""

import pytest

from distributed.equality import CASES, TOLERANCE

SCHEDULES = ("ring", "all_gather", "ulysses")
RUNS = ((2, "zigzag"), (3, "contiguous"), (4, "zigzag"), (4, "contiguous"))  # ranks and layout


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients_are_those_of_one_device(workers, case, schedule):
    for ranks, layout in RUNS:
        if schedule in case.refused or (schedule == "ulysses" and (ranks == 3 or layout == "contiguous")):
            continue
        for found in workers.run(ranks, "distributed.equality", "compare", case.name, layout, schedule):
            assert {name: error for name, error in found.items() if not error <= TOLERANCE} == {}, (ranks, layout)
