"""What a warpgroup of the Hopper kernels drops is what every backend drops: jit functions called as plain Python.

Words wrap as they do on a GPU: numpy's of 32 and 64 bits stand for tensors, whose layouts numpy does not have. That
none of it moves between threads is what ``assert_trivial`` says, which the compiler obeys (test_compile_gluon.py); by
which rule threads hold what is written out below.
"""

from functools import reduce
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from emulation.hopper_calls import bound_backward
from tilewise.kernels.hopper.backward.config import HopperD128Config
from tilewise.kernels.reference.dropout import keep_tile
from tilewise.masks import Span, window
from tilewise.problem import AttentionProblem
from tilewise.problem.options import ScoreOptions

dropout = pytest.importorskip("tilewise.kernels.hopper.backward.dropout", reason="Triton is not installed")
in_forward = pytest.importorskip("tilewise.kernels.hopper.dropout")
philox = pytest.importorskip("tilewise.kernels.hopper.philox")
STEP = 64  # keys of a warpgroup, and queries of a step
P = 0.3


class Tensor(np.ndarray):
    """An array with the methods of a tensor that the functions call."""

    def to(self, dtype):
        return self.astype(dtype)

    def permute(self, order):
        return self.transpose(order)


def tensor(values, dtype=np.int32):
    return np.asarray(values, dtype).view(Tensor)


def where(test, a, b):
    return np.where(test, *(tensor(value, np.uint32) if isinstance(value, int) else value for value in (a, b))).view(
        Tensor)


def joined(a, b):
    return np.stack(np.broadcast_arrays(a, b), -1).view(Tensor)


@pytest.fixture(scope="module", autouse=True)
def plain_python():
    """What of gl the functions call, on arrays, and their constants as numbers."""
    called = {"uint32": np.uint32, "uint64": np.uint64, "where": where, "join": joined, "static_range": range,
              "abs": np.abs, "arange": lambda start, stop, layout: tensor(np.arange(start, stop)),
              "SliceLayout": lambda dim, layout: None, "convert_layout": lambda value, layout, assert_trivial: value}
    with pytest.MonkeyPatch.context() as patch, np.errstate(over="ignore"):
        plain = {"gl": SimpleNamespace(**called), "ROUNDS": philox.ROUNDS.value, "_SPAN": 16, "SPAN": 16,
                 "FACTORS": [np.uint64(factor) for factor in philox.FACTORS.value],
                 "KEY_STEPS": [np.uint32(step) for step in philox.KEY_STEPS.value],
                 "philox_round": philox.philox_round.fn, "optimization_barrier": lambda number: number,
                 "layout_of_counters": lambda keys: None}
        for module in (dropout, in_forward, philox):
            for name in plain.keys() & vars(module).keys():
                patch.setattr(module, name, plain[name])
        yield


def drawn(seed, row, first_query, first_key):
    halves = (tensor(np.uint32(half)) for half in (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    return dropout.draw.fn(*halves, tensor(row), tensor(first_query), tensor(first_key))


def threshold_of(dropout_p):
    return np.uint32(int(dropout_p * 2**16) << 16)


def kept(words, dropout_p):
    """What of 64 keys by 64 queries is kept."""
    ones = np.ones((STEP, STEP), np.float32).view(Tensor)
    ones.type = SimpleNamespace(layout=None)
    return dropout.signed.fn(ones, words, threshold_of(dropout_p)) > 0


SPANS = st.integers(0, 2**20).map(lambda spans: 16 * spans)


@given(st.integers(-2**63, 2**63 - 1), st.integers(0, 2**31 - 1), SPANS, SPANS, st.sampled_from((2**-16, 0.1, P, 0.75)))
@example(-1, 2**31 - 1, 0, 0, 0.5)
@example(2011, 0, 64, 2**24, 1 - 2**-16)
def test_a_step_keeps_what_the_reference_keeps(seed, row, first_query, first_key, dropout_p):
    dropout_p = int(dropout_p * 2**16) / 2**16
    own = kept(drawn(seed, row, first_query, first_key), dropout_p)
    expected = keep_tile(torch.tensor([seed]), 1, Span(first_query, first_query + STEP),
                         Span(first_key, first_key + STEP), dropout_p, first_row=row)[0]
    assert np.array_equal(own, expected.T.numpy())


@pytest.mark.parametrize("keys", [64, 128])
@given(seed=st.integers(-2**63, 2**63 - 1), row=st.integers(0, 2**31 - 1), first_query=SPANS, first_key=SPANS,
       dropout_p=st.sampled_from((2**-16, 0.1, P, 0.75)))
@example(seed=-1, row=2**31 - 1, first_query=0, first_key=0, dropout_p=0.5)
def test_a_block_of_the_forward_pass_keeps_what_the_reference_keeps(keys, seed, row, first_query, first_key, dropout_p):
    dropout_p = int(dropout_p * 2**16) / 2**16
    low, high = (tensor(half, np.uint32) for half in (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    draws = in_forward.Draws(low, high, tensor(row), threshold_of(dropout_p), first_query, 32)
    words = in_forward.words_of.fn(draws, tensor(first_key), keys)
    ones = np.ones((64, keys), np.float32).view(Tensor)
    ones.type = SimpleNamespace(layout=None)
    expected = keep_tile(torch.tensor([seed]), 1, Span(first_query, first_query + 64),
                         Span(first_key + 32, first_key + 32 + keys), dropout_p, first_row=row)[0]
    assert np.array_equal(in_forward.signed.fn(ones, words, draws.threshold) > 0, expected.numpy())


def test_each_thread_holds_the_counters_of_its_scores_and_needs_no_word_of_another():
    """A result of 64 rows: warp w has rows 16w + lane div 4 and 8 more, and of each 8 columns two, 2 (lane mod 4)."""
    layout = dropout._COUNTERS.value
    for thread in range(128):
        lane, warp = thread % 32, thread // 32
        first = reduce(np.bitwise_xor, [np.array(base) for bit, base in enumerate(
            (*layout.lane_bases, *layout.warp_bases)) if thread >> bit & 1], np.zeros(2, int))
        counters = {tuple((first ^ reduce(np.bitwise_xor, [np.array(base) for bit, base in enumerate(layout.reg_bases)
                                                           if register >> bit & 1], np.zeros(2, int))).tolist())
                    for register in range(8)}
        scores = {(16 * warp + lane // 4 + 8 * down, 8 * block + 2 * (lane % 4) + right)
                  for down in range(2) for block in range(8) for right in range(2)}
        # A counter is one of the first 8 keys of 16, and of the first 8 queries.
        assert counters == {(key // 16 * 8 + key % 8, query // 16 * 8 + query % 8) for key, query in scores}
        assert len(scores) == 4 * len(counters) == 32


def test_the_gradient_of_scores_is_that_of_the_formula_times_what_the_host_divides_by():
    g = np.random.default_rng(3)
    probs, dprobs, delta = (g.standard_normal((STEP, STEP)) for _ in range(3))
    probs, keep = np.abs(probs), g.random((STEP, STEP)) > P
    signed = np.where(keep, probs, -probs)
    own = dropout.score_gradient.fn(signed, dprobs, delta * 2 * (1 - P))
    np.testing.assert_allclose(own / 2 / (1 - P), probs * (keep * dprobs / (1 - P) - delta), atol=1e-12)


def test_the_launch_hands_over_what_the_kernel_draws_and_scales_by():
    """None where nothing is dropped: the kernel is then the one that has no such thing."""
    def bound(dropout_p):
        problem = AttentionProblem(
            b=1, hq=2, hk=1, sq=512, sk=768, d=64, dv=64, dtype=torch.bfloat16, device=torch.device("cuda", 0),
            scale=0.25, mask=window(80, 0, "bottom_right"), scores=ScoreOptions(dropout_p=dropout_p))
        numbers, constants = (launch := bound_backward(problem, HopperD128Config())).scalars
        return numbers.scales.gradient, launch.enqueue_dq.scalars[-4], *numbers.dropout, constants.HAS_DROPOUT

    assert bound(0.0) == (0.25, 0.25, None, None, None, None, None, False)
    # dS comes times 2 (1 - p) = 1.5; the first key that is seen is number 176.
    assert bound(0.25) == (0.25 / 1.5, 0.25 / 1.5, 2**14, 1.5, 1 / 0.75, 0, 176, True)
