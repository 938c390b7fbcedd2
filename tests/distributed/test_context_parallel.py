"""Context parallel attention equals the one-device call: every option, schedule, layout and number of ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from distributed.equality import CASES, TOLERANCE, Case
from tilewise.distributed import balanced
from tilewise.testing.strategies import masks

SCHEDULES = ("ring", "all_gather", "ulysses")
RUNS = ((2, "zigzag"), (3, "contiguous"), (4, "zigzag"), (4, "contiguous"))  # ranks and layout


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients_are_those_of_one_device(workers, case, schedule):
    for ranks, layout in RUNS:
        if schedule in case.refused or (schedule == "ulysses" and (ranks == 3 or layout == "contiguous")):
            continue
        for found in workers.run(ranks, "distributed.equality", "compare", case, layout, schedule):
            assert {name: error for name, error in found.items() if not error <= TOLERANCE} == {}, (ranks, layout)


@pytest.mark.parametrize("case", [case for case in CASES if case.hk % 2 == 0 and not case.dropout_p], ids=str)
def test_an_all_gather_of_two_groups_of_heads_gives_the_same(workers, case):
    """Long shards have several: here they are made to."""
    for found in workers.run(3, "distributed.equality", "compare_groups", case, "zigzag", 2):
        assert {name: error for name, error in found.items() if not error <= TOLERANCE} == {}


@pytest.mark.parametrize("schedule", ["ring", "all_gather"])
@pytest.mark.parametrize("case", [case for case in CASES if not case.dropout_p], ids=str)
def test_a_mesh_of_two_dims_gives_the_same(workers, case, schedule):
    for layout in ("zigzag", "contiguous"):
        for found in workers.run((2, 2), "distributed.equality", "compare", case, layout, schedule):
            assert {name: error for name, error in found.items() if not error <= TOLERANCE} == {}, layout


@pytest.mark.parametrize("shape", [(4, 1), (1, 4)])
def test_a_dim_of_one_rank_gives_the_same(workers, shape):
    case = Case("one_rank", 27, mask=tw.causal(), bias=(1, 0, 0, 0), sinks=True, documents=2)
    for found in workers.run(shape, "distributed.equality", "compare", case, "zigzag", None):
        assert {name: error for name, error in found.items() if not error <= TOLERANCE} == {}


@pytest.mark.parametrize(("schedule", "ranks"), [*((schedule, 4) for schedule in SCHEDULES), ("ring", (2, 2)),
                                                 ("all_gather", (2, 2))])
def test_a_balanced_layout_gives_the_same(workers, schedule, ranks):
    mask = tw.causal("top_left")
    case = Case("balanced", 40, mask=mask, sinks=True, bias=(0, 0, 0, 0))
    layout = balanced(mask & tw.documents(torch.arange(40) // 15), 40, 4, pieces=3)
    assert max(map(len, layout.pieces)) > 1
    for found in workers.run(ranks, "distributed.equality", "compare", case, layout, schedule):
        assert {name: error for name, error in found.items() if not error <= TOLERANCE} == {}


@settings(max_examples=25)
@given(sq=st.integers(0, 40), sk=st.integers(0, 40), mask=masks(), documents=st.integers(0, 4),
       options=st.fixed_dictionaries({name: st.booleans() for name in ("alibi", "sinks")}),
       ranks=st.sampled_from([2, 3, 4, (2, 2)]), layout=st.sampled_from(["zigzag", "contiguous"]),
       schedule=st.sampled_from(["ring", "all_gather"]))
def test_drawn_calls_are_those_of_one_device(workers, sq, sk, mask, documents, options, ranks, layout, schedule):
    case = Case("drawn", sq, sk if not documents else None, mask=mask, documents=documents if sq else 0, **options)
    for found in workers.run(ranks, "distributed.equality", "compare", case, layout, schedule):
        assert {name: error for name, error in found.items() if not error <= TOLERANCE} == {}


TRITON = [
    Case("every_option", 64, b=1, hq=2, hk=1, d=16, dv=16, mask=tw.prefix(5) & tw.window(20, 0) & tw.sink_tokens(2),
         documents=2, alibi=True, sinks=True, softcap=3.0, bias=(1, 0, 0, 0), dropout_p=0.3, dtype=torch.float32),
    Case("chunk", 56, 70, b=1, hq=2, hk=1, d=16, dv=16, mask=tw.causal("bottom_right") & tw.chunk(24),
         visible=(1, 1, 0, 0), dtype=torch.float32)]


@pytest.mark.interpret
@pytest.mark.parametrize(("schedule", "layout"), [("ring", "zigzag"), ("all_gather", "contiguous")])
@pytest.mark.parametrize("case", TRITON, ids=str)
def test_kernels_in_triton_compute_parts_of_the_whole(workers, case, schedule, layout):
    """Masks with an offset, and draws with an origin, by the kernels that GPUs run."""
    pytest.importorskip("triton", reason="Triton is not installed")
    for found in workers.run(2, "distributed.equality", "compare", case, layout, schedule, "triton"):
        assert {name: error for name, error in found.items() if not error <= 2e-5} == {}
