"""The cuDNN backend without a GPU: in which words it refuses, and what it makes of what a double of cuDNN computes."""

import contextlib
import threading
import time

import pytest
import torch

from conformance.calls import (
    assert_forward_within_budget,
    assert_gradients_within_budget,
    forward,
    forward_and_backward,
    operands_of,
    problem_of,
)
from tilewise import causal, dispatch, window
from tilewise.backends import cudnn
from tilewise.backends.base import Needs, Saved
from tilewise.kernels.cudnn import graph, lengths, library
from tilewise.kernels.cudnn.description import describe
from tilewise.masks import Mask
from tilewise.support.caches import clear_caches
from tilewise.testing.cases import CASES, Case, case_named
from tilewise.testing.inputs import make_inputs
from unit.cudnn_double import Double

pytest.importorskip("triton", reason="Triton is not installed")
HALF = torch.float16
SERVED = [case for case in CASES if not (
    case.mask.has_exceptions or case.mask_tensor or case.documents or case.softcap or case.dropout_p or case.alibi
    or case.max_logit)]


@pytest.fixture
def double(monkeypatch):
    """A cuDNN that runs on the CPU, and a backend that believes to be on a Hopper GPU."""
    double = Double()
    for module in (graph, library):
        monkeypatch.setattr(module, "frontend", lambda: double)
    monkeypatch.setattr(graph, "handle_of", lambda device: "handle")
    monkeypatch.setattr(graph, "_graphs", graph.Cache(256))
    monkeypatch.setattr(cudnn, "_wrong_machine", lambda problem: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    clear_caches()
    yield double
    clear_caches()


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_forward_stays_within_budget(double, case):
    inputs = make_inputs(case, HALF, "cpu")
    assert_forward_within_budget(case, inputs, forward(cudnn.backend, case, inputs))
    assert len(double.runs) == 1


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_gradients_stay_within_budget(double, case):
    inputs = make_inputs(case, HALF, "cpu")
    results = forward_and_backward(cudnn.backend, case, inputs)
    assert_gradients_within_budget(case, inputs, results.gradients)
    assert len(double.runs) == 2


MORE = [
    Case("bias_causal_bottom_right_fewer_queries", b=2, hq=4, hk=2, sq=24, sk=40, d=16, dv=16,
         mask=causal("bottom_right"), bias="1hqk"),
    Case("bias_causal_bottom_right_more_queries", b=2, hq=4, hk=2, sq=40, sk=24, d=16, dv=24,
         mask=causal("bottom_right"), bias="bhqk"),
    Case("bias_float32", b=2, hq=2, hk=2, sq=24, sk=40, d=16, dv=16, bias="bhqk", operand_dtype="float32"),
    Case("bias_window_of_late_keys", b=1, hq=2, hk=2, sq=24, sk=64, d=16, dv=16, mask=window(16, 3, "bottom_right"),
         bias="11qk", sinks=True),
    Case("sinks_more_queries", b=2, hq=4, hk=4, sq=40, sk=24, d=32, dv=32, mask=causal("bottom_right"), sinks=True),
    Case("window_past_the_keys", b=2, hq=2, hk=2, sq=80, sk=24, d=8, dv=8, mask=window(5, 2, "top_left")),
    Case("padded_kv_in_place", b=3, hq=4, hk=2, sq=32, sk=48, d=16, dv=16, layout="packed_kv", lengths_k=(48, 7, 0)),
    Case("padded_bias", b=2, hq=2, hk=2, sq=32, sk=48, d=16, dv=16, mask=causal("top_left"), bias="11qk",
         lengths_q=(20, 32), lengths_k=(9, 48)),
    Case("padded_sinks_bottom_right", b=3, hq=4, hk=2, sq=32, sk=48, d=16, dv=16, mask=causal("bottom_right"),
         sinks=True, lengths_q=(32, 0, 20), lengths_k=(11, 5, 48)),
    Case("packed_gaps_windows", b=3, hq=4, hk=2, sq=40, sk=48, d=16, dv=24, mask=window(9, 4, "bottom_right"),
         layout="bshd", lengths_q=(40, 3, 20), lengths_k=(11, 0, 48), packed="gaps"),
    Case("one_sequence", b=1, hq=2, hk=2, sq=1, sk=130, d=16, dv=16),
]


@pytest.mark.parametrize("case", MORE, ids=str)
def test_what_the_cases_leave_out_stays_within_budget_too(double, case):
    inputs = make_inputs(case, HALF, "cpu")
    side = problem_of(case, inputs).backward(lse_grad=False)
    if cudnn.backend.why_not(side) is None:
        results = forward_and_backward(cudnn.backend, case, inputs)
        assert_gradients_within_budget(case, inputs, results.gradients)
    else:
        assert case.name in ("padded_bias", "bias_float32"), cudnn.backend.why_not(side)
        results = forward(cudnn.backend, case, inputs)
    assert_forward_within_budget(case, inputs, results[:2])


def test_launches_belong_to_the_alignment_of_each_operand(double, monkeypatch):
    """One flag would stand for all of them: a kernel made for one odd address would be handed another."""
    seen = {name: set() for name in ("forward_plan", "backward_plan", "index_of", "_delta_launch")}
    for name, alignments in seen.items():
        monkeypatch.setattr(cudnn, name, _noting(getattr(cudnn, name), alignments))
    case = Case("padded_sinks", b=2, hq=2, hk=2, sq=32, sk=48, d=16, dv=16, sinks=True, lengths_q=(32, 20),
                lengths_k=(11, 48))
    inputs = make_inputs(case, HALF, "cpu")
    operands = operands_of(case, inputs)
    for name in ("seqlens_q", "seqlens_k"):
        given = getattr(operands, name).to(torch.int32)
        moved = operands._replace(**{name: torch.cat([given[:1], given])[1:]})
        results = forward_and_backward(cudnn.backend, case, inputs, "out", moved)
        assert_gradients_within_budget(case, inputs, results.gradients)
    assert {name: len(alignments) for name, alignments in seen.items()} == dict.fromkeys(seen, 2)


def _noting(function, alignments):
    def noting(*given):
        alignments.add(given[-1])
        return function(*given)
    return noting


def test_a_bias_that_hides_every_key_of_a_query_gives_zeros(double):
    case = Case("hidden", b=1, hq=2, hk=2, sq=16, sk=16, d=16, dv=16, bias="11qk")
    inputs = make_inputs(case, HALF, "cpu")
    plain = forward_and_backward(cudnn.backend, case, inputs)
    operands = operands_of(case, inputs)
    operands.bias[:, :, 3] = float("-inf")
    results = forward_and_backward(cudnn.backend, case, inputs, "out", operands)
    others = torch.arange(case.sq) != 3
    assert torch.equal(results.out[:, :, others], plain.out[:, :, others])
    assert not results.out[:, :, 3].any()
    assert (results.lse[:, :, 3] == float("-inf")).all()
    assert not results.dq[:, :, 3].any()
    assert not results.dbias[:, :, 3].any()
    assert all(gradient.isfinite().all() for gradient in results.gradients if gradient is not None)


def test_operands_that_begin_anywhere_are_copied_to_where_cudnn_takes_them(double):
    case = Case("anywhere", b=2, hq=4, hk=2, sq=24, sk=40, d=16, dv=16, mask=causal("bottom_right"), bias="1hqk",
                sinks=True)
    inputs = make_inputs(case, HALF, "cpu")
    operands = operands_of(case, inputs)
    moved = {name: torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)
             for name, tensor in (("bias", operands.bias), ("sinks", operands.sinks))}
    moved["sinks"] = torch.cat([operands.sinks[:1], operands.sinks]).float()[1:]
    assert all(tensor.data_ptr() % 16 for tensor in moved.values())
    results = forward_and_backward(cudnn.backend, case, inputs, "out", operands._replace(**moved))
    assert_forward_within_budget(case, inputs, results[:2])
    assert_gradients_within_budget(case, inputs, results.gradients)


@pytest.mark.parametrize("needs", [Needs(True, False), Needs(False, True), Needs(False, False, dbias=True)])
def test_only_what_is_needed_is_returned(double, needs):
    case = Case("some", b=1, hq=2, hk=2, sq=24, sk=24, d=16, dv=16, bias="11qk")
    inputs = make_inputs(case, HALF, "cpu")
    operands = operands_of(case, inputs)
    problem = problem_of(case, inputs, operands)
    out, lse, _ = cudnn.backend.forward(problem, *inputs[:3], operands)
    made = cudnn.backend.backward(problem.backward(lse_grad=False), Saved(*inputs[:3], out, lse, operands),
                                  inputs.dout, None, needs)
    assert [gradient is not None for gradient in made] == [needs.dq, needs.dkv, needs.dkv, needs.dbias, False, False]
    assert ("dBias" in double.runs[1][0].arguments) is needs.dbias


def _named(double, run):
    """The tensors of a run by their names in its graph."""
    graph, pack = double.runs[run]
    tensors = [*(value for value in graph.arguments.values() if hasattr(value, "uid")), *graph.results]
    names = [*(name for name, value in graph.arguments.items() if hasattr(value, "uid")),
             *(("out", "lse") if len(graph.results) == 2 else ("dq", "dk", "dv"))]
    return {name: (tensor, pack[tensor.uid]) for name, tensor in zip(names, tensors, strict=True)}


@pytest.mark.parametrize("name", ["packed_kv", "packed_qkv_gqa"])
def test_packed_projections_are_handed_on_in_place_with_their_strides(double, name):
    case = case_named(name)
    inputs = make_inputs(case, HALF, "cpu")
    results = forward_and_backward(cudnn.backend, case, inputs)
    for run in (0, 1):
        handed = _named(double, run)
        for like, tensor in zip("qkv", inputs[:3], strict=True):
            port, given = handed[like]
            assert given.data_ptr() == tensor.data_ptr()
            assert tuple(port.dim) == tensor.shape
            assert all(own == stride for own, stride, size in zip(port.stride, tensor.stride(), port.dim, strict=True)
                       if size > 1)
    assert handed["o"][1].data_ptr() == results.out.data_ptr()
    assert handed["dO"][1].data_ptr() == inputs.dout.data_ptr()
    for name in ("dq", "dk", "dv"):
        assert handed[name][1].data_ptr() == getattr(results, name).data_ptr()


def test_a_gradient_that_is_laid_out_unlike_out_is_copied_and_none_else(double):
    case = case_named("packed_kv")
    inputs = make_inputs(case, HALF, "cpu")
    laid_out = inputs._replace(dout=inputs.dout.transpose(2, 3).contiguous().transpose(2, 3))
    results = forward_and_backward(cudnn.backend, case, laid_out)
    assert_gradients_within_budget(case, laid_out, results.gradients)
    handed = _named(double, 1)["dO"][1]
    assert handed.data_ptr() != laid_out.dout.data_ptr()
    assert handed.stride() == results.out.stride()


@pytest.mark.parametrize("given", ["k", "q", "qk"])
def test_lengths_in_int32_are_handed_on_in_place_and_constants_for_others(double, given):
    case = Case("padded", b=2, hq=2, hk=2, sq=24, sk=40, d=16, dv=16, lengths_q=(24, 3) if "q" in given else None,
                lengths_k=(7, 40) if "k" in given else None)
    inputs = make_inputs(case, HALF, "cpu")
    operands = operands_of(case, inputs)
    operands = operands._replace(**{f"seqlens_{side}": getattr(operands, f"seqlens_{side}").to(torch.int32)
                                    for side in given})
    results = forward_and_backward(cudnn.backend, case, inputs, "out", operands)
    assert_gradients_within_budget(case, inputs, results.gradients)
    for run in (0, 1):
        handed = _named(double, run)
        for side, argument, length in (("q", "seq_len_q", 24), ("k", "seq_len_kv", 40)):
            tensor = handed[argument][1]
            if side in given:
                assert tensor.data_ptr() == getattr(operands, f"seqlens_{side}").data_ptr()
            else:
                assert tensor is lengths.constant_lengths(2, length, torch.device("cpu"))
                assert tensor.tolist() == [length, length]


@pytest.mark.parametrize("how", ["int64", "off"])
def test_other_lengths_are_written_anew_and_no_more_than_there_are(double, how):
    case = Case("padded", b=2, hq=2, hk=2, sq=24, sk=40, d=16, dv=16, lengths_k=(7, 40))
    inputs = make_inputs(case, HALF, "cpu")
    operands = operands_of(case, inputs)
    given = torch.tensor([7, 99], dtype=torch.int64 if how == "int64" else torch.int32)
    given = given if how == "int64" else torch.cat([given[:1], given])[1:]
    forward(cudnn.backend, case, inputs, operands._replace(seqlens_k=given))
    assert _named(double, 0)["seq_len_kv"][1][:2].tolist() == [7, 40]


def test_where_no_constant_may_be_made_lengths_are_written(double, monkeypatch):
    monkeypatch.setattr(cudnn, "constant_lengths", lambda count, length, device: None)
    case = Case("odd_keys", sq=256, sk=192)
    inputs = make_inputs(case, HALF, "cpu")
    results = forward_and_backward(cudnn.backend, case, inputs)
    assert_gradients_within_budget(case, inputs, results.gradients)
    handed = _named(double, 1)
    assert [handed[name][1][0].item() for name in ("seq_len_q", "seq_len_kv")] == [256, 192]


def test_a_key_that_nobody_sees_is_not_handed_on(double):
    """NaN there reaches nothing: 24 queries see the last 24 + 16 of 64 keys."""
    case = Case("late", b=1, hq=2, hk=2, sq=24, sk=64, d=16, dv=16, mask=window(16, 0, "bottom_right"))
    inputs = make_inputs(case, HALF, "cpu")
    inputs.k[:, :, :24] = float("nan")
    inputs.v[:, :, :24] = float("inf")
    results = forward_and_backward(cudnn.backend, case, inputs)
    assert results.out.isfinite().all()
    assert not results.dk[:, :, :24].any()
    assert not results.dv[:, :, :24].any()


@pytest.mark.parametrize(("case", "count"), [
    (Case("even", sq=256, sk=256), 0), (Case("odd_keys", sq=256, sk=192), 1),
    (Case("odd_queries", sq=192, sk=256), 0), (Case("one_query", sq=1, sk=256), 1),
], ids=str)
def test_lengths_guard_the_backward_pass_where_cudnn_is_known_to_give_nan(double, case, count):
    """pytorch#196678 and cudnn-frontend#1072: without lengths exp(0 − lse) overflows past the last key.

    So it did on an H200 with cuDNN 9.19, for 192 keys and for one query, and with lengths it did not.
    """
    problem = problem_of(case, make_inputs(case, HALF, "cpu"))
    assert describe(problem).lengths == 0
    assert describe(problem.backward(lse_grad=False)).lengths == count
    inputs = make_inputs(case, HALF, "cpu")
    forward_and_backward(cudnn.backend, case, inputs)
    assert double.runs[1][0].arguments.get("use_padding_mask", False) is bool(count)


@pytest.mark.parametrize(("mask", "sizes", "expected"), [
    (Mask(), (8, 8), (False, None, None)), (causal(), (8, 8), (False, None, 0)),
    (causal("top_left"), (8, 16), (False, None, 0)), (causal("bottom_right"), (8, 16), (True, None, 0)),
    (causal("bottom_right"), (16, 8), (False, None, 0)), (window(3, 0), (8, 8), (False, 4, 0)),
    (window(3, 2, "bottom_right"), (8, 16), (False, 1, 5)), (causal("bottom_right") & window(10, 0), (8, 16),
                                                            (True, 11, 0)),
    (window(100, 100), (8, 8), (False, None, None)),
], ids=str)
def test_bounds_are_said_in_cudnns_words(mask, sizes, expected):
    """cuDNN's left bound counts the diagonal's own key; a bound that hides nothing is not said."""
    problem = problem_of(Case("case", sq=sizes[0], sk=sizes[1], mask=mask), make_inputs(Case("case", sq=sizes[0],
                                                                                            sk=sizes[1]), HALF, "cpu"))
    description = describe(problem)
    assert (description.bottom_right, description.left_bound, description.right_bound) == expected


def test_a_graph_is_built_once_whoever_asks_for_it(double):
    case = case_named("packed_kv")
    inputs = make_inputs(case, HALF, "cpu")
    problem = problem_of(case, inputs)
    together, answers = threading.Barrier(4), []

    def ask():
        together.wait()
        answers.append(cudnn.backend.why_not(problem))

    double.while_building = lambda: time.sleep(0.05)
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [None] * 4
    assert len(double.graphs) == 1
    forward(cudnn.backend, case, inputs)
    assert len(double.graphs) == 1
    assert double.graphs[0].options == {"io_data_type": "HALF", "intermediate_data_type": "FLOAT",
                                        "compute_data_type": "FLOAT", "handle": "handle"}


def test_threads_do_not_run_one_graph_at_once(double):
    case = case_named("mha")
    inputs = make_inputs(case, HALF, "cpu")
    problem = problem_of(case, inputs)
    inside, together = [], threading.Barrier(3)

    def run():
        inside.append(1)
        time.sleep(0.02)
        assert len(inside) == 1
        inside.pop()

    def call():
        together.wait()
        cudnn.backend.forward(problem, *inputs[:3])
        done.append(1)

    done, double.while_running = [], run
    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 3


def test_cudnns_own_refusal_is_asked_for_once_and_told(double):
    double.refusal = "no engine\n  for this graph"
    problem = problem_of(case_named("mha"), make_inputs(case_named("mha"), HALF, "cpu"))
    for _ in range(2):
        assert cudnn.backend.why_not(problem) == "is refused by cuDNN itself: no engine for this graph"
    assert len(double.graphs) == 1


def test_the_words_of_many_engines_are_told_once(double):
    """As cuDNN 9.19 says it of a graph that none takes, shortened."""
    one = ("{engine} Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: only Blackwell is supported at: !(1000 <= version)\n"
           "Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: ptr->isSupported()\n")
    double.refusal = "No valid engine configs for ____\n" + 2 * one + one.replace("only Blackwell is", "no pattern was")
    problem = problem_of(case_named("mha"), make_inputs(case_named("mha"), HALF, "cpu"))
    assert cudnn.backend.why_not(problem) == ("is refused by cuDNN itself: no engine of it takes the graph (only "
                                              "Blackwell is supported; no pattern was supported)")


def test_another_error_of_cudnns_is_no_refusal(double):
    def fail():
        raise RuntimeError("CUDNN_STATUS_INTERNAL_ERROR")

    double.while_building = fail
    problem = problem_of(case_named("mha"), make_inputs(case_named("mha"), HALF, "cpu"))
    with pytest.raises(RuntimeError, match="INTERNAL"):
        cudnn.backend.why_not(problem)


def test_the_cache_keeps_the_values_that_were_asked_for_last():
    cache, made = graph.Cache(2), []

    def get(key):
        return cache.get(key, lambda: made.append(key) or key)

    assert [get(key) for key in (1, 2, 1, 3, 1, 2)] == [1, 2, 1, 3, 1, 2]
    assert made == [1, 2, 3, 2]
    assert len(cache) == 2


def _in_threads(*functions):
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    return threads


def test_values_of_two_keys_are_made_side_by_side():
    """Every build waited for every other: a second each, whatever its problem."""
    cache, both, made = graph.Cache(8), threading.Barrier(2, timeout=10), []

    def make(key):
        both.wait()  # broken, if the other is not begun meanwhile
        return key

    threads = _in_threads(*(lambda key=key: made.append(cache.get(key, lambda: make(key))) for key in "ab"))
    for thread in threads:
        thread.join()
    assert sorted(made) == ["a", "b"]


def test_a_value_whose_making_fails_fails_for_all_that_wait_and_is_made_anew():
    cache, waiting, raised = graph.Cache(8), threading.Event(), []

    def fail():
        waiting.wait(10)
        raise RuntimeError("no memory")

    def ask():
        try:
            cache.get("key", fail)
        except RuntimeError as error:
            raised.append(str(error))

    threads = _in_threads(ask, ask)
    waiting.set()
    for thread in threads:
        thread.join()
    assert raised == ["no memory"] * 2
    assert cache.get("key", lambda: 1) == 1


def test_explain_answers_where_asking_cudnn_fails(double):
    def fail():
        raise RuntimeError("CUDNN_STATUS_INTERNAL_ERROR\n  at once")

    double.while_building = fail
    problem = problem_of(case_named("mha"), make_inputs(case_named("mha"), HALF, "cpu"))
    explanation = dispatch.explain_problem(problem, "cudnn")
    assert explanation.forward is None
    assert explanation.reasons["forward", "cudnn"] == (
        "could not be asked, RuntimeError: CUDNN_STATUS_INTERNAL_ERROR at once")


def test_a_graph_that_is_captured_outlives_the_cache(double, monkeypatch):
    case = case_named("mha")
    inputs = make_inputs(case, HALF, "cpu")
    forward(cudnn.backend, case, inputs)
    kept = set()
    monkeypatch.setattr(graph, "_captured", kept)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    forward(cudnn.backend, case, inputs)
    (held,) = kept
    assert held is graph.graph_of(held.description, torch.device("cpu"))


def test_each_thread_has_a_handle_and_sets_the_stream_in_every_call(monkeypatch):
    double, streams = Double(), {0: 7}
    monkeypatch.setattr(library, "frontend", lambda: double)
    monkeypatch.setattr(library, "_handles", threading.local())
    monkeypatch.setattr(library, "stream_of", streams.get)
    device = torch.device("cuda", 0)

    def ask():
        library.handle_of(device)
        streams[0] = 9
        assert library.handle_of(device) in double.handles

    ask()
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert double.handles == ["handle 0", "handle 1"]
    assert double.streams == [("handle 0", 7), ("handle 0", 9), ("handle 1", 9), ("handle 1", 9)]


def test_nothing_is_kept_of_a_call(double):
    """Every run has a workspace and results of its own, so that streams and nested calls cannot meet in one."""
    case = case_named("mha")
    inputs = make_inputs(case, HALF, "cpu")
    one, other = (forward(cudnn.backend, case, inputs) for _ in range(2))
    assert one.out.data_ptr() != other.out.data_ptr()
    assert one.lse.data_ptr() != other.lse.data_ptr()
    assert len(double.graphs) == 1
