"""Which positions a user's function is asked for: those of the call, in integers that hold a number of each pair."""

import os

import pytest
import torch
import triton
import triton.language as tl

from tilewise import attention, attention_varlen, causal, window
from tilewise.functions import MaskFunction, ScoreFunction
from tilewise.kernels.triton import backward, dbias, dq, forward, mask_plan
from tilewise.masks import Span
from tilewise.problem import AttentionProblem
from tilewise.problem.options import NO_OPERANDS, NO_SETTINGS

pytestmark = [pytest.mark.interpret,
              pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="notes positions in Python")]
ASKED = {"q": [], "k": []}
WIDTHS = set()  # in bits: of batch, head, positions of queries, of keys
KEYS = 2**24


def note(q_idx, k_idx):
    """Take notes, which a function can do in the interpreter alone."""
    for name, index in (("q", q_idx), ("k", k_idx)):
        ASKED[name] += [int(index.handle.data.min()), int(index.handle.data.max())]


@triton.jit
def watching(score, batch, head, q_idx, k_idx):
    note(q_idx, k_idx)
    return score


@triton.jit
def watching_derivative(dscore, score, batch, head, q_idx, k_idx):
    note(q_idx, k_idx)
    return dscore


@triton.jit
def watching_mask(batch, head, q_idx, k_idx):
    note(q_idx, k_idx)
    return tl.maximum(q_idx, k_idx) >= 0


@pytest.mark.parametrize("mask", [None, causal("bottom_right"), window(9, 20, "bottom_right")], ids=str)
@pytest.mark.parametrize("functions", ["score", "mask"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_functions_are_asked_for_positions_of_the_call(with_bias, functions, mask):
    ASKED.update(q=[], k=[])
    q, k = (torch.randn(1, 2, length, 16, requires_grad=True) for length in (67, 101))
    given = {"mask": mask, "bias": torch.zeros(1, 2, 67, 101, requires_grad=True) if with_bias else None}
    if functions == "score":
        given["score_function"] = ScoreFunction(watching, derivative=watching_derivative)
    else:
        given["mask"] = MaskFunction(watching_mask) if mask is None else mask & MaskFunction(watching_mask)
    attention(q, k, k, **given, dropout_p=0.5, backend="triton").sum().backward()
    assert (min(ASKED["q"]), max(ASKED["q"])) == (0, 66)
    assert (min(ASKED["k"]), max(ASKED["k"])) == (0, 100)


def test_functions_are_asked_for_positions_inside_of_each_sequence():
    ASKED.update(q=[], k=[])
    q = torch.randn(150, 2, 16, requires_grad=True)
    lengths = torch.tensor([0, 70, 70, 150], dtype=torch.int32)
    function = ScoreFunction(watching, derivative=watching_derivative)
    attention_varlen(q, q, q, cu_seqlens_q=lengths, score_function=function, max_seqlen_q=80, max_seqlen_k=80,
                     bias=torch.zeros(3, 1, 80, 80, requires_grad=True), backend="triton").sum().backward()
    for name in "qk":
        assert (min(ASKED[name]), max(ASKED[name])) == (0, 79)


def test_functions_are_asked_for_positions_of_the_call_where_tiles_are_listed():
    ASKED.update(q=[], k=[])
    q, k = (torch.randn(1, 1, length, 16, requires_grad=True) for length in (200, 290))
    mask = (torch.ones(200, 290, dtype=torch.bool) & MaskFunction(watching_mask)).tiled(200, 290)
    attention(q, k, k, mask=mask, backend="triton").sum().backward()
    assert (min(ASKED["q"]), max(ASKED["q"])) == (0, 199)
    assert (min(ASKED["k"]), max(ASKED["k"])) == (0, 289)


def plan_of(q_length, k_length, mask, keys_first):
    """Build the plan of a call's mask, joined by a function that takes notes."""
    q, k = (torch.zeros(2, 2, length, 16) for length in (q_length, k_length))
    settings = NO_SETTINGS._replace(mask_function=mask.function.code)
    problem = AttentionProblem.from_tensors(q, k, k, mask=mask.band, settings=settings)
    queries = problem.seeing_queries if keys_first else Span(0, q_length)
    planner = mask_plan.MaskPlanner(problem, queries, problem.seen_keys, rows=2, columns=1, keys_first=keys_first)
    planner(NO_OPERANDS, lambda sizes, strides, dtype: torch.zeros(sizes, dtype=dtype))


@pytest.mark.parametrize("keys_first", [False, True])
@pytest.mark.parametrize(("mask", "firsts"), [(causal("bottom_right"), (0, 0)),
                                              (window(9, 20, "bottom_right"), (0, 25))], ids=str)
def test_a_plan_asks_functions_for_positions_of_the_call(mask, firsts, keys_first):
    ASKED.update(q=[], k=[])
    plan_of(167, 201, mask & MaskFunction(watching_mask), keys_first)
    assert (min(ASKED["q"]), max(ASKED["q"])) == (firsts[0], 166)
    assert min(ASKED["k"]) <= firsts[1]
    assert max(ASKED["k"]) == 200


@triton.jit
def weighing(score, batch, head, q_idx, k_idx):
    WIDTHS.add(tuple([index.dtype.primitive_bitwidth for index in (batch, head, q_idx, k_idx)]))
    return score


@triton.jit
def weighing_derivative(dscore, score, batch, head, q_idx, k_idx):
    return weighing(dscore, batch, head, q_idx, k_idx)


@triton.jit
def weighing_mask(batch, head, q_idx, k_idx):
    return weighing(q_idx, batch, head, q_idx, k_idx) >= 0


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("functions", ["score", "mask"])
def test_every_kernel_asks_functions_with_positions_as_wide_as_the_launch_says(functions, wide, monkeypatch):
    """Of batch and head the numbers are 64 bits in any case: ``head * sq * sk`` passes 2^31 in calls of every day."""
    for module in (forward, backward, dq, dbias):
        monkeypatch.setattr(module, "needs_int64", lambda *_: wide)
    given = {"score_function": ScoreFunction(weighing, derivative=weighing_derivative)} if functions == "score" else {
        "mask": MaskFunction(weighing_mask)}
    keys = 21 if wide else 22  # launches are kept for each problem
    shapes = {"q": (2, 2, 19, 16), "k": (2, 1, keys, 16), "bias": (1, 1, 19, keys)}  # two heads share: dbias's kernel
    tensors = {name: torch.randn(shape, requires_grad=True) for name, shape in shapes.items()}
    out = attention(tensors["q"], tensors["k"], tensors["k"], bias=tensors["bias"], **given, backend="triton")
    for own in tensors:
        WIDTHS.clear()
        torch.autograd.grad(out.sum(), tensors[own], retain_graph=True)
        assert {(64, 64, *(64 if wide else 32,) * 2)} == WIDTHS, own


@pytest.mark.parametrize("wide", [False, True])
def test_a_plan_asks_functions_with_positions_as_wide_as_the_launch_says(wide, monkeypatch):
    monkeypatch.setattr(mask_plan, "needs_int64", lambda *_: wide)
    for keys_first in (False, True):
        WIDTHS.clear()
        plan_of(67, 70, causal("bottom_right") & MaskFunction(weighing_mask), keys_first)
        assert {(64, 64, *(64 if wide else 32,) * 2)} == WIDTHS


@triton.jit
def by_number(score, batch, head, q_idx, k_idx):
    return score + ((q_idx * (1 << 24) + k_idx) >> 28)


def by_number_twin(score, batch, head, q_idx, k_idx):
    return score + ((q_idx * KEYS + k_idx) >> 28)


@triton.jit
def of_every_second(batch, head, q_idx, k_idx):
    return ((q_idx * (1 << 24) + k_idx) >> 31) + k_idx % 2 == 1


def of_every_second_twin(batch, head, q_idx, k_idx):
    return ((q_idx * KEYS + k_idx) >> 31) + k_idx % 2 == 1


@pytest.mark.parametrize("functions", ["score", "mask"])
def test_the_number_of_a_pair_past_2_31_is_right(functions):
    """In 32 bits ``q_idx * sk + k_idx`` wrapped from 46341 queries and keys on, and a table was read elsewhere."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 1, 150, 16, generator=generator, requires_grad=True)
    k, v = torch.randn(2, 1, 1, 1, 16, generator=generator).expand(-1, -1, -1, KEYS, -1)
    near = window(40, 9, "bottom_right")
    given = {"mask": near}
    if functions == "score":
        given["score_function"] = ScoreFunction(by_number, by_number_twin)
    else:
        given["mask"] = near & MaskFunction(of_every_second, of_every_second_twin)
    out, expected = (attention(q, k, v, **given, return_aux=("lse",), backend=backend)
                     for backend in ("triton", "reference"))
    torch.testing.assert_close(out.lse, expected.lse)
    torch.testing.assert_close(*(torch.autograd.grad(result.lse.sum(), q)[0] for result in (out, expected)))
