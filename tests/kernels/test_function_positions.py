"""Which positions a user's function is asked for: those of the call alone, so that it may read its tensors there."""

import os

import pytest
import torch
import triton
import triton.language as tl

from tilewise import attention, attention_varlen, causal, window
from tilewise.functions import MaskFunction, ScoreFunction

pytestmark = [pytest.mark.interpret,
              pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="notes positions in Python")]
ASKED = {"q": [], "k": []}


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
