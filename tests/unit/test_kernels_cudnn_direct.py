"""Running a graph by addresses: in which order they are handed over, and when the front end's own way is taken."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from tilewise.kernels.cudnn import direct

NUMBERS = {"q": 3, "k": 1, "v": 2, "out": 4}


def _graph(order=(1, 2, 3, 4), engine=None, plan=5):
    """What a built graph of the front end has, and what its plan was run with."""
    runs = []

    def execute(address, count, *rest):
        runs.append(((ctypes.c_uint64 * count).from_address(address)[:], *rest))

    lowered = SimpleNamespace(_execute_with_raw_ptrs=execute, _prepare_variant_pack_template=lambda: None,
                              _get_variant_pack_uids_sorted=lambda: order)
    plans = [] if plan == "none" else [None, SimpleNamespace(cpp_index=plan)]
    return SimpleNamespace(_lowered_graph=lowered, selected_engine=engine, _plan_index=1, _plans=plans), runs


@pytest.fixture(autouse=True)
def version(monkeypatch):
    monkeypatch.setattr(direct, "frontend_version", lambda: (1, 28))


@pytest.mark.parametrize(("plan", "said"), [(5, 5), (None, -1), ("none", -1)])
def test_addresses_are_handed_over_by_number_to_the_plan_that_was_built(plan, said):
    graph, runs = _graph(plan=plan)
    tensors = {name: torch.zeros(4) for name in NUMBERS}
    workspace = torch.zeros(8)
    direct.direct_run(graph, NUMBERS)(tensors, workspace, SimpleNamespace(backend_handle=7))
    assert runs == [([tensors[name].data_ptr() for name in ("k", "v", "q", "out")], workspace.data_ptr(), 7, said)]


def test_what_the_graph_does_not_ask_for_is_left_out():
    graph, runs = _graph(order=(1, 4))
    tensors = {name: torch.zeros(4) for name in NUMBERS}
    direct.direct_run(graph, NUMBERS)(tensors, torch.zeros(8), SimpleNamespace(backend_handle=7))
    assert runs[0][0] == [tensors["k"].data_ptr(), tensors["out"].data_ptr()]


@pytest.mark.parametrize("case", ["unread version", "no front end", "engine of its own", "no order", "unknown number",
                                  "another lowered graph", "not lowered"])
def test_the_front_ends_own_way_is_taken_where_this_one_is_not_known(case, monkeypatch):
    graph, _ = _graph(order={"no order": (), "unknown number": (1, 9)}.get(case, (1, 2)),
                      engine="one" if case == "engine of its own" else None)
    if case in ("unread version", "no front end"):
        monkeypatch.setattr(direct, "frontend_version", lambda: (1, 99) if case == "unread version" else None)
    elif case == "another lowered graph":
        del graph._lowered_graph._execute_with_raw_ptrs
    elif case == "not lowered":
        graph._lowered_graph = None
    assert direct.direct_run(graph, NUMBERS) is None
