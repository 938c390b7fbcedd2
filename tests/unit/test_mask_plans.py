"""Which calls share a mask plan, how large a plan may be, and of which queries and keys it is; without a GPU."""

import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tilewise.backends._support import mask_plans
from tilewise.backends._support.mask_plans import backward_planners, mask_plan, plan_bytes, planner_of, too_large
from tilewise.functions import FunctionCode, MaskKind
from tilewise.kernels.hooks import compile_only
from tilewise.kernels.hopper.backward.config import HopperD64Config, HopperD256Config
from tilewise.kernels.hopper.launch import STREAM_OF_THREAD
from tilewise.masks import Mask, Span, causal, prefix, window
from tilewise.problem import AttentionProblem
from tilewise.problem.options import NO_OPERANDS, FunctionSpec, Operands, OperandSpec, ScoreOptions
from tilewise.support.caches import clear_caches, is_registered


def problem_of(sq=512, sk=512, b=2, hq=4, mask=None, tensor=None, **scores):
    """A call with a mask by position, a boolean tensor of some shape, and what else scores have."""
    scores |= {} if tensor is None else {"mask": facts(*tensor)}
    return AttentionProblem(b=b, hq=hq, hk=2, sq=sq, sk=sk, d=64, dv=64, dtype=torch.bfloat16, scale=1.0,
                            device=torch.device("cuda", 0), mask=Mask() if mask is None else mask,
                            scores=ScoreOptions(**scores))


def facts(*shape, dtype=torch.bool):
    return OperandSpec(shape, (1,) * len(shape), dtype)


def documents_of(entries, length=512):
    return {name: facts(entries, 4, length, dtype=torch.int32) for name in ("documents_q", "documents_k")}


def function_of(**reads):
    return {"mask_function": FunctionSpec(FunctionCode("sees", None, None, None, 0, **reads), ())}


class Planner:
    """Counts its calls, each of which makes a plan of so many bytes."""

    def __init__(self, size=16, **scores):
        self.problem, self.size, self.calls = problem_of(**scores), size, 0

    def __call__(self, operands, allocate):
        self.calls += 1
        return torch.zeros(4, dtype=torch.int8), torch.zeros(self.size - 4, dtype=torch.int8)


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Answer for the current stream, with no plan kept before the test and none behind it."""
    state = SimpleNamespace(stream=1, captures=False)
    monkeypatch.setattr(mask_plans, "raw_stream", lambda: lambda device: state.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.captures)
    mask_plans._kept.clear()
    yield state
    mask_plans._kept.clear()


def plan_with(planner, operands=NO_OPERANDS):
    return mask_plan(planner, operands, None)


def documents():
    return Operands(documents_q=torch.zeros(1, 4, 8, dtype=torch.int32),
                    documents_k=torch.zeros(1, 4, 8, dtype=torch.int32))


def tiled(**others):
    """The operands of a boolean tensor with lists of its tiles."""
    return Operands(mask=torch.ones(1, 1, 8, 8, dtype=torch.bool), tiles_q=torch.zeros(3, dtype=torch.int32),
                    tiles_k=torch.zeros(3, dtype=torch.int32), **others)


@pytest.mark.parametrize("operands", [NO_OPERANDS, documents(), tiled(), tiled(sinks=torch.zeros(4))],
                         ids=["position", "documents", "tiled", "tiled with sinks"])
def test_calls_with_one_mask_share_a_plan(operands):
    planner = Planner()
    first = plan_with(planner, operands)
    again = plan_with(planner, operands._replace(seed=torch.zeros(1)))  # of another layer
    assert planner.calls == 1
    assert again is first


def test_each_planner_has_plans_of_its_own():
    one, other = Planner(), Planner()
    operands = documents()
    plans = [plan_with(planner, operands) for planner in (one, other, one, other)]
    assert (one.calls, other.calls) == (1, 1)
    assert plans[0] is plans[2] is not plans[1]
    assert plans[1] is plans[3]


@pytest.mark.parametrize("changed", ["documents_q", "documents_k"])
def test_equal_contents_in_another_tensor_are_another_mask(changed):
    planner, operands = Planner(), documents()
    plan_with(planner, operands)
    plan_with(planner, operands._replace(**{changed: getattr(operands, changed).clone()}))
    assert planner.calls == 2
    plan_with(planner, operands)
    assert planner.calls == 2, "the first one's plan is still there"


def test_other_lists_of_tiles_are_another_mask():
    """They are made anew where the tensor changes, which may be the same one."""
    planner, operands = Planner(), tiled()
    plan_with(planner, operands)
    plan_with(planner, operands._replace(tiles_q=operands.tiles_q.clone()))
    assert planner.calls == 2


def test_each_stream_has_plans_of_its_own(gpu):
    planner, operands = Planner(), documents()
    first = plan_with(planner, operands)
    gpu.stream = 2
    assert plan_with(planner, operands) is not first
    assert planner.calls == 2
    gpu.stream = 1
    assert plan_with(planner, operands) is first


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_captured_call_builds_its_own_plan_which_nobody_else_reads(is_kept, gpu):
    """A graph is replayed when others have long written where its tensors lie."""
    planner, operands = Planner(), documents()
    kept = plan_with(planner, operands) if is_kept else None
    gpu.captures, planner.calls = True, 0
    captured = [plan_with(planner, operands) for _ in range(2)]
    assert planner.calls == 2
    assert captured[0] is not captured[1]
    gpu.captures = False
    plan = plan_with(planner, operands)
    assert all(plan is not one for one in captured)
    assert not is_kept or plan is kept


@pytest.mark.parametrize("others", [NO_OPERANDS, documents()], ids=["alone", "documents"])
def test_the_plan_of_a_callers_boolean_tensor_is_built_in_every_call(others):
    planner, operands = Planner(), others._replace(mask=torch.ones(1, 1, 8, 8, dtype=torch.bool))
    for _ in range(3):
        plan_with(planner, operands)
    assert planner.calls == 3
    assert not mask_plans._kept


@pytest.mark.parametrize("tensors", [(), (torch.zeros(8),)], ids=["positions", "tensors"])
def test_the_plan_of_a_function_is_kept_unless_it_reads_tensors_of_the_callers(tensors):
    """They may be written at any time, and kernels that write them tell nobody."""
    code = FunctionCode("sees", None, None, None, len(tensors))
    planner = Planner(mask_function=FunctionSpec(code, tuple(tensor.dtype for tensor in tensors)))
    operands = documents()._replace(mask_tensors=tensors)
    for _ in range(3):
        plan_with(planner, operands)
    assert planner.calls == (3 if tensors else 1)
    assert len(mask_plans._kept) == (0 if tensors else 1)


def test_the_plan_of_a_mask_that_the_library_made_is_kept_as_long_as_its_tensors_live():
    code = FunctionCode("tree", None, None, None, 2, kind=MaskKind("tree"))
    planner = Planner(mask_function=FunctionSpec(code, (torch.int32, torch.int64), tables=((1, 1),)))
    operands = [NO_OPERANDS._replace(mask_tensors=(torch.zeros(1, 1, 8, 2), torch.zeros(2))) for _ in range(2)]
    plans = [plan_with(planner, own) for own in (*operands, *operands)]
    assert planner.calls == 2
    assert plans[0] is plans[2] is not plans[1]
    assert plans[1] is plans[3]


def test_a_tensor_at_the_address_of_one_that_died_is_not_taken_for_it(monkeypatch):
    monkeypatch.setattr(mask_plans, "id", lambda tensor: 7, raising=False)
    planner = Planner()
    operands = documents()
    first = plan_with(planner, operands)
    assert plan_with(planner, operands) is first
    del operands
    assert plan_with(planner, documents()) is not first
    assert planner.calls == 2


def test_plans_of_tensors_that_died_are_dropped_when_the_next_one_is_kept():
    planner, operands, position = Planner(), documents(), Planner()
    plan_with(position)
    plan_with(planner, operands)
    assert len(mask_plans._kept) == 2
    other = documents()  # before the first ones die, whose addresses it would take
    del operands
    plan_with(planner, other)
    assert [key[2] for key in mask_plans._kept] == [(), (id(other.documents_q), id(other.documents_k))]


def test_a_kept_plan_keeps_no_tensor_alive():
    operands = documents()
    plan_with(Planner(), operands)
    (kept,) = mask_plans._kept.values()
    del operands
    assert [source() for source in kept.sources] == [None, None]


def test_of_too_many_bytes_the_oldest_plan_goes_and_the_last_one_stays(monkeypatch):
    monkeypatch.setattr(mask_plans, "MOST_BYTES", 100)
    first, second, third, huge = Planner(40), Planner(60), Planner(1 + 40), Planner(1000)
    for planner in (first, second, first, second):
        plan_with(planner)
    assert (first.calls, second.calls) == (1, 1), "100 bytes are not too many"
    plan_with(third)
    assert [key[0] for key in mask_plans._kept] == [third], "with the second one they would be 101"
    for _ in range(2):
        plan_with(huge)
    assert [key[0] for key in mask_plans._kept] == [huge]
    assert huge.calls == 1
    plan_with(first)
    assert [key[0] for key in mask_plans._kept] == [first]


def test_a_stream_of_each_thread_has_no_plans(gpu):
    """One handle stands for several streams, and a plan of one may not be there yet for another."""
    gpu.stream, planner = STREAM_OF_THREAD, Planner()
    for _ in range(2):
        plan_with(planner)
    assert planner.calls == 2
    assert not mask_plans._kept


def test_calls_that_are_compiled_alone_launch_every_kernel_each_time():
    """Those of a mask by position have the same planner: a plan that was kept would hide its kernels from the next."""
    planner = Planner()
    with compile_only(lambda name, compile_kernel, file=None: None):
        for _ in range(2):
            plan_with(planner)
    assert planner.calls == 2
    assert not mask_plans._kept, "nothing is in such a plan"


def test_threads_share_plans_and_may_drop_them_all_the_while(monkeypatch):
    monkeypatch.setattr(mask_plans, "MOST_BYTES", 100)
    planners, failures = [Planner(40) for _ in range(4)], []

    def work():
        try:
            for number in range(3000):
                plan_with(planners[number % 4])
                if number % 100 == 0:
                    clear_caches()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_plan_in_use_is_kept_before_one_that_is_not(monkeypatch):
    monkeypatch.setattr(mask_plans, "MOST_BYTES", 100)
    first, second, third = Planner(40), Planner(60), Planner(41)
    for planner in (first, second, first, third):
        plan_with(planner)
    assert [key[0] for key in mask_plans._kept] == [first, third]


def test_clear_caches_drops_every_plan():
    planner, operands = Planner(), documents()
    plan_with(planner, operands)
    assert is_registered(mask_plans._kept)
    clear_caches()
    assert not mask_plans._kept
    plan_with(planner, operands)
    assert planner.calls == 2


@pytest.mark.parametrize(("problem", "pairs"), [
    (problem_of(mask=prefix(3)), 576 * 512), (problem_of(384, 256, mask=prefix(3)), 384 * 256),
    (problem_of(385, 257, mask=prefix(3)), 576 * 384), (problem_of(1, 1, **documents_of(1)), 192 * 128),
    (problem_of(**documents_of(2)), 2 * 576 * 512), (problem_of(tensor=(1, 1, 512, 512)), 576 * 512),
    (problem_of(tensor=(1, 4, 512, 512)), 4 * 576 * 512), (problem_of(tensor=(2, 1, 1, 512)), 2 * 576 * 512),
    (problem_of(tensor=(1, 4, 512, 512), **documents_of(2)), 8 * 576 * 512),
    (problem_of(**function_of()), 8 * 576 * 512), (problem_of(**function_of(reads_head=False)), 2 * 576 * 512),
    (problem_of(**function_of(reads_batch=False)), 4 * 576 * 512),
    (problem_of(**function_of(reads_batch=False, reads_head=False)), 576 * 512),
    (problem_of(mask_function=function_of()["mask_function"]._replace(tables=((2, 1),))), 2 * 576 * 512),
], ids=str)
def test_a_plan_has_a_bit_a_pair_of_padded_tiles_of_each_mask_that_differs(problem, pairs):
    assert plan_bytes(problem) == pairs // 8
    assert too_large(problem) is None


@pytest.mark.parametrize(("problem", "reason"), [
    (problem_of(91968, 93312, mask=prefix(3)), None),
    (problem_of(92160, 93312, mask=prefix(3)),
     "takes masks whose plan has up to 1024 MiB, got 1025 MiB"),
    (problem_of(4096, 4096, b=512, **documents_of(512, 4096)),
     "takes masks whose plan has up to 1024 MiB, got 1056 MiB"),
    (problem_of(64, 64, b=65535, **documents_of(65535, 64)), None),
    (problem_of(64, 64, b=65536, **documents_of(65536, 64)),
     "takes up to 65535 masks of up to 4194304 queries and keys, got 65536 of 64 and 64"),
    (problem_of(2**22, 64, **documents_of(1)), None),
    (problem_of(2**22 + 1, 64, **documents_of(1)),
     "takes up to 65535 masks of up to 4194304 queries and keys, got 1 of 4194305 and 64"),
    (problem_of(64, 2**22 + 1, **documents_of(1)),
     "takes up to 65535 masks of up to 4194304 queries and keys, got 1 of 64 and 4194305"),
], ids=str)
def test_plans_that_are_too_large_are_refused_with_their_size(problem, reason):
    assert too_large(problem) == reason


def test_a_mask_between_two_bounds_has_no_planner(monkeypatch):
    monkeypatch.setitem(sys.modules, "tilewise.kernels.triton.mask_plan", None)  # and Triton is not asked for
    for mask in (Mask(), causal(), window(100, 0)):
        for problem in (problem_of(mask=mask), problem_of(mask=mask).backward(lse_grad=False)):
            assert planner_of(problem, rows=2, columns=2, keys_first=False) is None
            assert backward_planners(problem, HopperD256Config()) == ()


@pytest.mark.parametrize(("problem", "queries", "keys"), [
    (problem_of(512, 512, mask=causal()), Span(0, 512), Span(0, 512)),
    (problem_of(700, 512, mask=causal("bottom_right")), Span(188, 700), Span(0, 512)),
    (problem_of(512, 700, mask=window(100, 0, "bottom_right")), Span(0, 512), Span(88, 700)),
    (problem_of(700, 512, mask=window(100, 50, "top_left")), Span(0, 612), Span(0, 512)),
], ids=str)
def test_a_plan_is_of_all_queries_forward_and_of_those_that_see_a_key_backward(problem, queries, keys, monkeypatch):
    made = []
    monkeypatch.setitem(sys.modules, "tilewise.kernels.triton.mask_plan", SimpleNamespace(
        MaskPlanner=lambda *given, **named: made.append((given, named)) or "planner"))
    problem = replace(problem, scores=ScoreOptions(**documents_of(1)))
    assert planner_of(problem, rows=3, columns=2, keys_first=False) == "planner"
    backward = problem.backward(lse_grad=False)
    assert backward_planners(backward, HopperD64Config()) == ("planner",)
    assert backward_planners(backward, HopperD256Config()) == ("planner", "planner")
    of_keys, of_queries = {"rows": 1, "columns": 1, "keys_first": True}, {"rows": 2, "columns": 1, "keys_first": False}
    assert made == [
        ((problem, Span(0, problem.sq), keys), {"rows": 3, "columns": 2, "keys_first": False}),
        ((backward, queries, keys), of_keys | {"rows": 2}),
        ((backward, queries, keys), of_keys), ((backward, queries, keys), of_queries)]
