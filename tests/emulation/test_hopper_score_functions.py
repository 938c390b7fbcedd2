"""Score functions in the Hopper kernels: their source on the CPU, beside float64.

A function is one of plain Python here, in the place of Triton's. What it reads lies in a tensor of just the positions
that there are: an address outside of it ends the test.
"""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from emulation.backward_calls import MASKS, alibi_of, bias_of, call_of, compare, expected, taken_off_by, with_bias
from emulation.hopper_calls import bound_backward, bound_forward, problem_of
from tilewise.functions import FunctionCode
from tilewise.kernels.enqueue import addresses_in
from tilewise.kernels.hopper.arguments import (
    BackwardOperands,
    BackwardPointers,
    FirstPair,
    ForwardPointers,
    Lengths,
)
from tilewise.kernels.hopper.backward.config import D128Variant, HopperD128Config
from tilewise.kernels.hopper.forward.config import HopperForwardConfig
from tilewise.masks import Mask, causal, window
from tilewise.problem import AttentionProblem
from tilewise.problem.options import NO_SETTINGS, FunctionSpec, Operands, OperandSpec, ScoreOptions
from tilewise.problem.sequences import Sequences
from tilewise.testing import oracle

forward_on_cpu, backward_on_cpu, gluon_on_cpu, plan_on_cpu = (
    pytest.importorskip(f"emulation.{name}", reason="Triton is not installed") for name in (
        "forward_on_cpu", "backward_on_cpu", "gluon_on_cpu", "plan_on_cpu"))
forward_launch = pytest.importorskip("tilewise.kernels.hopper.forward.launch")
TWO, THREE = HopperForwardConfig(128, 2), HopperForwardConfig(128, 3, ping_pong=True)
WIDE = HopperForwardConfig(64, 2, q_stages=1, epilogue_passes=2)
NARROW = HopperForwardConfig(64, 2, kv_stages=4)  # the heuristic's
S_AHEAD = HopperD128Config(s_ahead=True, variant=D128Variant.DQ_FROM_REGISTERS)
STAGED, DETERMINISTIC = (HopperD128Config(variant=variant) for variant in (
    D128Variant.DQ_STAGED, D128Variant.DETERMINISTIC))
SHIFTED = window(96, 32, "bottom_right")  # of 300 and 556 keys the first 160 are not seen
SEED = torch.tensor([2**40 + 7])


def load(pointer):
    return gluon_on_cpu._load(pointer)


def bent(score, batch, head, q_idx, k_idx, of_queries, of_keys):
    """A curve, steeper by query, and a term by key; of both each head of each batch entry has its own."""
    own = batch * 4 + head
    return score / (1.0 + abs(score)) * load(of_queries + (own * 300 + q_idx)) + load(of_keys + (own * 556 + k_idx))


def bent_derivative(dscore, score, batch, head, q_idx, k_idx, of_queries, of_keys):
    return dscore * load(of_queries + ((batch * 4 + head) * 300 + q_idx)) / ((1.0 + abs(score)) * (1.0 + abs(score)))


def bent_twin(score, batch, head, q_idx, k_idx, of_queries, of_keys):
    return (score / (1.0 + score.abs()) * of_queries[batch, head, q_idx].to(score.dtype)
            + of_keys[batch, head, k_idx].to(score.dtype))


def far(score, batch, head, q_idx, k_idx):
    """A term by distance: infinite, or none, where a causal mask hides."""
    return score - 0.03125 * (q_idx - k_idx + 257.0).sqrt()


def far_twin(score, batch, head, q_idx, k_idx):
    return score - 0.03125 * (q_idx - k_idx + 257.0).to(score.dtype).sqrt()


def lifted(score, batch, head, q_idx, k_idx):
    """The first 192 keys alone, the later the higher: what a tile sees first says nothing of what comes."""
    return gluon_on_cpu._where(k_idx < 192, score + 0.5 * k_idx, -float("inf"))


def lifted_twin(score, batch, head, q_idx, k_idx):
    return torch.where(k_idx < 192, score + 0.5 * k_idx.to(score.dtype), -torch.inf)


def poled(score, batch, head, q_idx, k_idx):
    """Infinite at 0, the score of a query that is not there, for which the last of 300 stands."""
    return gluon_on_cpu._where((score == 0.0) & (q_idx == 299), float("inf"), score)


def poled_twin(score, batch, head, q_idx, k_idx):
    return score


def halved(score, batch, head, q_idx, k_idx):
    return 0.5 * score


def halved_derivative(dscore, score, batch, head, q_idx, k_idx):
    return dscore * gluon_on_cpu._where((score == 0.0) & (q_idx == 299), float("inf"), 0.5)


def halved_twin(score, batch, head, q_idx, k_idx):
    return 0.5 * score


def far_derivative(dscore, score, batch, head, q_idx, k_idx):
    """NaN where a causal mask hides."""
    return dscore * (q_idx - k_idx + 31.0).sqrt() * 0.02


def far_product(score, batch, head, q_idx, k_idx):
    return score * (q_idx - k_idx + 31.0).sqrt() * 0.02


def far_product_twin(score, batch, head, q_idx, k_idx):
    return score * (q_idx - k_idx + 31.0).clamp(min=0.0).to(score.dtype).sqrt() * 0.02


BENT = FunctionCode("bent", bent, bent_twin, bent_derivative, 2)
FAR = FunctionCode("far", far, far_twin, None, 0)
POLED = FunctionCode("poled", poled, poled_twin, None, 0)
HALVED = FunctionCode("halved", halved, halved_twin, halved_derivative, 0)
FAR_PRODUCT = FunctionCode("far_product", far_product, far_product_twin, far_derivative, 0)
LIFTED = FunctionCode("lifted", lifted, lifted_twin, None, 0)


def tables(b=2):
    """What BENT reads: factors of each query, also negative, and terms of each key."""
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randn(b, 4, length, generator=generator) for length in (300, 556))


def hold_forward(config, code, mask=None, sizes=(300, 556), d=64, b=2, lengths=(), operands=None, settings=NO_SETTINGS):
    """Run the forward kernel with a function and compare it with float64; the length of a head's table is 300 or 556.
    """
    random.seed(0)
    torch.manual_seed(0)
    tensors = [torch.randn(b, *shape).half() for shape in ((4, sizes[0], d), (2, sizes[1], d), (2, sizes[1], d))]
    operands = Operands() if operands is None else operands
    if code is BENT and not operands.score_tensors:
        operands = operands._replace(score_tensors=tables(b))
    settings = settings._replace(score_function=code)
    problem = AttentionProblem.from_tensors(*tensors, operands, mask=Mask() if mask is None else mask, scale=0.5,
                                            settings=settings)
    problem = replace(problem, device=torch.device("cuda", 0))
    out, lse = forward_on_cpu.attend(problem, config, tensors, lengths=lengths, operands=operands)[:2]
    forward_on_cpu.check(problem, tensors, out, lse, oracle.Changes(operands, settings))


@pytest.mark.parametrize("config", [TWO, THREE, WIDE, NARROW], ids=["two", "three", "wide", "narrow"])
@pytest.mark.parametrize("mask", [Mask(), causal("bottom_right"), SHIFTED], ids=["full", "causal", "shifted"])
def test_a_function_changes_scores_by_batch_entry_head_and_positions(mask, config):
    hold_forward(config, BENT, mask, d=200 if config is WIDE else 64)


def test_what_a_function_makes_of_hidden_pairs_reaches_nothing():
    hold_forward(TWO, FAR, causal("bottom_right"))


def test_tiles_of_which_a_function_lifts_what_comes_later_are_computed_again(monkeypatch):
    loaded = forward_on_cpu.published_tiles(monkeypatch)
    hold_forward(TWO, LIFTED, causal("bottom_right"))
    assert any(numbers[-1] for numbers in loaded)


def test_a_function_comes_behind_a_softcap_and_before_bias_and_slopes():
    operands = Operands(bias=torch.randn(1, 4, 300, 556).half(), alibi_slopes=torch.tensor([[0.5, 0.1, 0.0, 0.02]]),
                        seed=SEED, score_tensors=tables())
    hold_forward(TWO, BENT, causal("bottom_right"), operands=operands,
                 settings=NO_SETTINGS._replace(softcap=2.0, dropout_p=0.25))


@pytest.mark.parametrize("mask", [causal("bottom_right"), window(None, None, "top_left")], ids=["causal", "full"])
def test_of_packed_sequences_a_function_gets_the_number_and_its_own_positions(mask):
    lengths_q, lengths_k = (120, 0, 180), (300, 40, 90)
    borders = [torch.tensor([0, *itertools.accumulate(own)], dtype=torch.int32) for own in (lengths_q, lengths_k)]
    operands = Operands(cu_seqlens_q=borders[0], cu_seqlens_k=borders[1], score_tensors=tables(3))
    hold_forward(TWO, BENT, mask, (300, 430), b=1, lengths=borders, operands=operands)


def with_function(problem, code, **others):
    """The problem with a score function, as a backward call has it."""
    spec = FunctionSpec(code, (torch.float32,) * code.tensors)
    return replace(problem, scores=problem.scores._replace(score_function=spec, **others))


def twin_of(problem, code, tensors, batches=None):
    """The function of scores of the queries and keys that take part."""
    queries, keys = problem.seeing_queries, problem.seen_keys
    batch = torch.arange(problem.b)[:, None, None, None] if batches is None else batches
    head = torch.arange(problem.hq)[None, :, None, None]
    q_idx = torch.arange(queries.start, queries.stop)[None, None, :, None]
    k_idx = torch.arange(keys.start, keys.stop)[None, None, None, :]
    return lambda scores: code.torch(scores, batch, head, q_idx, k_idx, *tensors)


@pytest.mark.parametrize(("config", "d"), [(S_AHEAD, 64), (STAGED, 128), (DETERMINISTIC, 128)], ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_gradients_go_through_the_derivative(mask, config, d):
    """Whatever query and key is the first that takes part, and of the keys behind the last one."""
    random.seed(0)
    problem, tensors = call_of(*mask, (d, d))
    read = tables()
    got = backward_on_cpu.differentiate(with_function(problem, BENT), tensors, config, 3, 3, function_tensors=read)
    compare(got, expected(problem, tensors, function=twin_of(problem, BENT, read)))


@pytest.mark.parametrize("code", [POLED, HALVED], ids=lambda code: code.name)
@pytest.mark.parametrize("config", [STAGED, DETERMINISTIC], ids=lambda config: config.variant)
def test_what_a_function_makes_of_queries_that_are_not_there_reaches_no_gradient(config, code):
    """Of 300 queries the last block has 20 more, in which scores are 0."""
    random.seed(0)
    problem, tensors = call_of(Mask(), (300, 256), (2, 1), (128, 128))
    got = backward_on_cpu.differentiate(with_function(problem, code), tensors, config, 3, 3)
    compare(got, expected(problem, tensors, function=twin_of(problem, code, ())))


def test_a_derivative_that_is_nan_where_the_mask_hides_reaches_no_gradient():
    random.seed(0)
    problem, tensors = call_of(causal("bottom_right"), (300, 330), (2, 1), (64, 64))
    got = backward_on_cpu.differentiate(with_function(problem, FAR_PRODUCT), tensors, S_AHEAD, 3, 3)
    compare(got, expected(problem, tensors, function=twin_of(problem, FAR_PRODUCT, ())))


def test_gradients_pass_a_function_without_a_derivative_unchanged():
    random.seed(0)
    problem, tensors = call_of(causal("bottom_right"), (270, 330), (2, 2), (64, 64))
    distances = torch.arange(270)[:, None] + 60.0 - torch.arange(330)
    taken_off = 0.03125 * (distances - 60.0 + 257.0).sqrt()
    got = backward_on_cpu.differentiate(with_function(problem, FAR), tensors, S_AHEAD, 3, 3)
    compare(got, expected(problem, tensors, taken_off=taken_off.nan_to_num()))


@pytest.mark.parametrize(("config", "d"), [(S_AHEAD, 64), (STAGED, 128)], ids=str)
def test_gradients_go_through_derivative_and_softcap_with_slopes_behind_both(config, d):
    random.seed(0)
    problem, tensors = call_of(*MASKS["window"], (d, d))
    slopes, read = torch.tensor([[0.5, -0.01], [-0.02, 1.0]]), tables()
    spec = OperandSpec(tuple(slopes.shape), slopes.stride(), slopes.dtype)
    changed = with_function(problem, BENT, softcap=1.5, alibi_slopes=spec)
    function = twin_of(problem, BENT, read)
    got = backward_on_cpu.differentiate(changed, tensors, config, 3, 3, slopes=slopes, function_tensors=read)
    compare(got, expected(problem, tensors, taken_off=alibi_of(problem, slopes),
                          function=lambda scores: function(1.5 * torch.tanh(scores / 1.5))))


def test_gradients_go_through_the_derivative_beside_a_bias():
    random.seed(0)
    problem, tensors = call_of(*MASKS["causal"], (64, 64))
    bias, read = bias_of(problem, 1, 2), tables()
    got = backward_on_cpu.differentiate(with_function(with_bias(problem, bias), BENT), tensors, S_AHEAD, 3, 3,
                                        added=bias, function_tensors=read)
    compare(got, expected(problem, tensors, taken_off=taken_off_by(problem, bias),
                          function=twin_of(problem, BENT, read)))


def test_gradients_go_through_the_derivative_where_a_plan_lists_blocks():
    random.seed(0)
    problem, tensors = call_of(Mask(), (200, 300), (2, 1), (64, 64))
    visible, read = torch.rand(1, 1, 200, 300) < 0.5, tables()
    visible[..., 64:128, 128:256] = True
    visible[..., 128:, :128] = False
    documents = OperandSpec((1, 4, 200), (800, 200, 1), torch.int32)
    changed = with_function(problem, BENT, documents_q=documents, documents_k=documents)
    got = backward_on_cpu.differentiate(changed, tensors, S_AHEAD, 3, 3, function_tensors=read,
                                        plan=plan_on_cpu.plan_of(visible, 2, 1, keys_first=True))
    compare(got, expected(problem, tensors, visible, function=twin_of(problem, BENT, read)))


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_gradients_of_packed_sequences_go_through_the_derivative_of_each(alignment):
    random.seed(0)
    lengths_q, lengths_k = (120, 0, 180), (211, 40, 50)
    mask, borders = causal(alignment), [[0, *itertools.accumulate(own)] for own in (lengths_q, lengths_k)]
    problem, tensors = call_of(window(None, None, alignment), (300, 301), (2, 1), (64, 64), b=1)
    visible, read = torch.zeros(300, 301, dtype=torch.bool), tables(3)
    for number, own in enumerate(zip(lengths_q, lengths_k, strict=True)):
        visible[tuple(slice(border[number], border[number + 1]) for border in borders)] = mask.visible(*own)

    def of_sequences(scores):
        made = scores.clone()
        for number, own in enumerate(zip(lengths_q, lengths_k, strict=True)):
            part = (..., *(slice(border[number], border[number + 1]) for border in borders))
            sequence = replace(problem, sq=own[0], sk=own[1])
            if all(own):
                made[part] = twin_of(sequence, BENT, read, torch.full((1, 1, 1, 1), number))(scores[part])
        return made

    spec = OperandSpec((4,), (1,), torch.int32)
    packed = with_function(replace(problem, mask=mask, sequences=Sequences(3, spec, spec)), BENT)
    got = backward_on_cpu.differentiate(packed, tensors, HopperD128Config(), 4, 1, function_tensors=read, borders=[
        torch.tensor(border, dtype=torch.int32) for border in borders])
    compare(got[1:], expected(problem, tensors, visible, function=of_sequences)[1:])


@pytest.mark.parametrize(("length", "is_large", "wide"), [(64, False, False), (64, True, True), (2**16, False, True)])
def test_positions_have_64_bits_where_their_products_may_pass_32(length, is_large, wide):
    plain = problem_of(length, length, d=64)
    problem = replace(plain, scores=ScoreOptions(score_function=FunctionSpec(FAR, (), is_large)))
    for bound in (bound_forward(problem, TWO), bound_backward(problem.backward(lse_grad=False), STAGED)):
        flags = bound.scalars[-1]
        assert flags.HAS_FUNCTION
        assert bool(flags.INT64) is wide
    flags = bound_forward(plain, TWO).scalars[-1]
    assert not flags.HAS_FUNCTION
    assert not flags.INT64


def test_the_kernels_get_a_functions_tensors_before_the_lengths(monkeypatch):
    """The forward kernel is compiled without the derivative."""
    monkeypatch.setattr(forward_launch, "counter_of", lambda device: torch.zeros(1, dtype=torch.int32))
    lengths, read, asked = torch.tensor([200, 100], dtype=torch.int32), tables(), []
    problem, (q, k, v, dout, lse, delta) = call_of(Mask(), (200, 300), (2, 1), (64, 64))
    problem = with_function(replace(problem, q_strides=q.stride(), k_strides=k.stride(), v_strides=v.stride(),
                                    sequences=Sequences(seqlens_k=OperandSpec((2,), (1,), torch.int32))), BENT)
    operands = Operands(seqlens_k=lengths, score_tensors=read)
    forward = bound_forward(problem, TWO)
    backward = bound_backward(problem, STAGED, allocate=lambda sizes, strides, dtype: torch.empty_strided(
        sizes, strides, dtype=dtype))
    for bound in (forward, backward):
        bound.enqueue = lambda addresses, arguments, alike: asked.append((addresses, arguments(), alike))
    backward.enqueue_dq = lambda *_, **__: None
    addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
    forward(lambda: (q, k, v), addresses, q.clone(), lse, operands)
    backward(q, k, v, dout, lse, delta, q.clone(), k.clone(), v.clone(),
             operands=BackwardOperands(Lengths(*operands.lengths), score_tensors=read))
    for (given, arguments, alike), kind, derivative in zip(asked, (ForwardPointers, BackwardPointers),
                                                           (None, bent_derivative), strict=True):
        assert list(given) == addresses_in(arguments)
        assert not alike, "the alignment of a function's tensors may change from call to call"
        (pointers,) = (argument for argument in arguments if isinstance(argument, kind))
        assert pointers.function == (bent, derivative, read)
        (own,) = (argument for argument in arguments if isinstance(argument, Lengths))
        assert own.k is lengths


def test_the_kernels_are_told_the_first_query_and_key_that_they_are_given_and_how_scores_become_natural():
    plain = replace(problem_of(300, 556, SHIFTED, d=64), scale=0.25)
    for softcap, of_forward, of_backward in ((None, 0.25, 0.25), (30.0, 60.0, 30.0)):
        problem = replace(plain, scores=ScoreOptions(softcap, score_function=FunctionSpec(FAR, ())))
        forward, backward = (bound.scalars[0] for bound in (
            bound_forward(problem, TWO), bound_backward(problem.backward(lse_grad=False), STAGED)))
        assert (forward.first_pair, backward.first_pair) == (FirstPair(0, 160), FirstPair(0, 160))
        assert (forward.scaling.to_natural, backward.scales.to_natural) == (of_forward, of_backward)
    assert bound_forward(plain, TWO).scalars[0].first_pair == FirstPair()
