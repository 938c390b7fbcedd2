"""The Hopper backward kernels of wide heads: their source on the CPU."""

import itertools
import math
import random
import time
from dataclasses import replace

import pytest
import torch

from emulation.backward_calls import (
    MASKS,
    SCALE,
    call_of,
    compare,
    compare_beside_a_hidden_overflow,
    dq_of_accum,
    expected,
    with_a_hidden_overflow,
)
from emulation.hopper_calls import bound_backward
from tilewise.kernels.hopper.arguments import NO_BACKWARD_OPERANDS, BackwardOperands, Lengths, WideHeadPointers
from tilewise.kernels.hopper.backward.config import HopperD192Config, HopperD256Config
from tilewise.kernels.reference.dropout import keep_tile
from tilewise.masks import Mask, Span, causal, window
from tilewise.problem.options import OperandSpec, ScoreOptions
from tilewise.problem.sequences import Sequences

d192 = pytest.importorskip("tilewise.kernels.hopper.backward.d192", reason="Triton is not installed")
(masking, epilogue, loading, d256, dq_d256, q_tile, dq_accum, draws_of_keys, draws_of_queries, pipeline, products,
 softmax, tiles, varlen, mask_plan, mask_ranges) = (pytest.importorskip(f"tilewise.kernels.hopper.{name}") for name in (
     "backward.masking", "backward.epilogue", "backward.producers", "backward.d256", "backward.dq_d256",
     "backward.q_tile", "backward.dq_accum", "backward.dropout", "dropout", "pipeline", "products", "softmax",
     "tile_scheduler", "varlen", "mask_plan", "mask_ranges"))
gluon_on_cpu, forward_on_cpu, backward_on_cpu, plan_on_cpu = (pytest.importorskip(f"emulation.{name}") for name in (
    "gluon_on_cpu", "forward_on_cpu", "backward_on_cpu", "plan_on_cpu"))
Descriptor, Pointer, run = gluon_on_cpu.Descriptor, gluon_on_cpu.Pointer, gluon_on_cpu.run

WIDE = HopperD256Config()
MODULES = (masking, epilogue, loading, d256, dq_d256, q_tile, d192, dq_accum, draws_of_keys, draws_of_queries, pipeline,
           products, softmax, tiles, varlen, mask_plan, mask_ranges)


def draw(*counters):
    """What the reference's draws need; test_gluon_dropout.py holds the kernel's own against them."""
    return counters


def signed(probs, counters, threshold):
    """Transposed probabilities, the dropped ones negative, by the reference's draws."""
    low, high, row, first_query, first_key = map(int, counters)
    kept = keep_tile(torch.tensor([high << 32 | low & 0xFFFFFFFF]), 1, Span(first_query, first_query + 64),
                     Span(first_key, first_key + 64), int(threshold) / 2**32, row)[0].mT
    return torch.where(kept, probs, -probs)


CONSTANTS = {(module, "QUERIES"): 64 for module in MODULES if hasattr(module, "QUERIES")} | {
    (module, "LOG2E"): math.log2(math.e) for module in (loading, softmax)} | {(loading, "LOST"): 2.0**24} | {
    (module, "pack_pairs"): forward_on_cpu.pack_pairs for module in (d256, dq_d256)} | {
    (d256, "clear_rows"): backward_on_cpu.clear_rows, (d256, "draw"): draw,
    (d256, "signed"): signed, (dq_d256, "drop"): forward_on_cpu.drop} | {
    (mask_ranges, "SPAN"): 16, (varlen, "_CHUNK"): 128, (varlen, "_CLEARED"): 32,
    (d256, "load_fragments"): lambda tile: tile.load(None), (d256, "FRAGMENT_COLUMNS"): 128,
    (d256, "as_operand"): lambda fragments, *_: fragments,
    (dq_d256, "K_STAGES"): 2, (softmax, "squashed"): forward_on_cpu.squashed,
    (d192, "multiply_rounded"): lambda probs, dprobs, dtype: (probs.float() * dprobs).to(dtype)
} | plan_on_cpu.plan_constants(MODULES)


@pytest.mark.parametrize("dims", [(192, 128), (130, 40)])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_the_source_of_those_in_chunks_computes_the_gradients_on_the_cpu(mask, dims):
    random.seed(0)
    problem, tensors = call_of(*mask, dims)
    compare(differentiate(problem, tensors, HopperD192Config()), expected(problem, tensors))


def differentiate(problem, tensors, config):
    """Return dq before it is scaled, dk and dv."""
    launch = bound_backward(problem, config)
    q, k, v, dout, lse, delta = tensors
    dk, dv = (torch.full_like(tensor, float("nan"), dtype=problem.out_dtype) for tensor in (k, v))
    accum = torch.zeros(math.prod(launch.accum_shape))
    described = launch._in_forms((q, k, v, dout, lse, delta, dk, dv), lambda tensor, form: (
        Pointer(tensor.flatten()) if form is None else Descriptor(tensor, form[0])))
    run(launch.kernel, MODULES, launch.grid[0], (*described, Pointer(accum), *launch.scalars), CONSTANTS)
    columns = sum(config.columns(problem)[0])
    dq = dq_of_accum(accum, columns, (problem.b, problem.hq), q.shape[2])[..., :problem.d]
    return dq, dk, dv


@pytest.mark.parametrize("dims", [(256, 256), (200, 100), (192, 192), (100, 250)])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_the_source_of_those_with_dq_apart_computes_the_gradients_on_the_cpu(mask, dims):
    random.seed(0)
    problem, tensors = call_of(*mask, dims)
    launch = bound_backward(problem, WIDE)
    gradients = run_part(launch.dq, tensors, tensors[:1]) + run_part(launch.dkdv, tensors, tensors[1:3])
    dq, dk, dv = expected(problem, tensors)
    compare(gradients, (dq * SCALE, dk, dv))


@pytest.mark.parametrize(("mask", "dims"), [("full", (256, 256)), ("causal", (192, 128)), ("window", (200, 100)),
                                            ("few", (100, 250))])
def test_gradients_go_through_the_derivative_of_a_softcap(mask, dims):
    random.seed(0)
    problem, tensors = call_of(*MASKS[mask], dims)
    capped = replace(problem, scores=ScoreOptions(softcap=1.5))
    launch = bound_backward(capped, WIDE)
    gradients = run_part(launch.dq, tensors, tensors[:1]) + run_part(launch.dkdv, tensors, tensors[1:3])
    dq, dk, dv = expected(problem, tensors, function=lambda scores: 1.5 * torch.tanh(scores / 1.5))
    compare(gradients, (dq * SCALE, dk, dv))
    plain = expected(problem, tensors)
    assert not torch.allclose(dk, plain[1], rtol=0.05, atol=0.05), "a softcap that is dropped does not show"


@pytest.mark.parametrize(("mask", "dims", "softcap"), [
    ("full", (256, 256), None), ("causal", (192, 128), None), ("window", (200, 100), 1.5), ("few", (100, 250), None)])
def test_gradients_leave_out_what_dropout_drops(mask, dims, softcap):
    random.seed(0)
    p, seed = 0.25, torch.tensor([-2**40 - 7])
    problem, tensors = call_of(*MASKS[mask], dims)
    queries, keys = problem.seeing_queries, problem.seen_keys
    launch = bound_backward(replace(problem, scores=ScoreOptions(dropout_p=p, softcap=softcap)), WIDE)
    operands = BackwardOperands(seed=seed)
    gradients = (run_part(launch.dq, tensors, tensors[:1], operands=operands)
                 + run_part(launch.dkdv, tensors, tensors[1:3], operands=operands))
    kept = keep_tile(seed, problem.b * problem.hq, queries, keys, p, 0).view(problem.b, problem.hq, len(queries), -1)
    function = None if softcap is None else lambda scores: softcap * torch.tanh(scores / softcap)
    dq, dk, dv = expected(problem, tensors, function=function, kept=kept.double() / (1.0 - p))
    compare(gradients, (dq * SCALE, dk, dv))


LENGTHS = {
    "packed": ((120, 0, 180, 1), (211, 40, 50, 70), None),
    "packed_padded": ((120, 60, 180), (211, 40, 110), ((100, 60, 131), (64, 0, 97))),  # 36 and 34 queries see no key
    "padded": ((190, 190), (230, 230), ((150, 0), (201, 230)))}
BANDS = {"full": Mask(), "causal": causal("bottom_right"), "window": window(60, 10, "top_left")}


@pytest.mark.parametrize(("lengths", "mask", "dims", "options"), [
    ("packed", "full", (256, 256), {}), ("packed", "causal", (192, 128), {}), ("packed", "window", (72, 136), {}),
    ("packed_padded", "causal", (256, 256), {}), ("packed_padded", "window", (192, 192), {"dropout_p": 0.25}),
    ("padded", "full", (192, 128), {"softcap": 1.5}), ("padded", "causal", (256, 256), {"dropout_p": 0.25}),
    ("padded", "window", (136, 40), {})])
def test_sequences_are_alone_among_others_and_padding_reaches_nothing(lengths, mask, dims, options):
    """Padding is NaN, and what queries that see no key have, in every input but lse, and every gradient of it is 0."""
    random.seed(0)
    torch.manual_seed(0)
    (of_q, of_k, used), (d, dv), seed = LENGTHS[lengths], dims, torch.tensor([2**40 + 7])
    packed, (hq, hk), used = lengths != "padded", (4, 2), used or (of_q, of_k)
    entries, sizes = (1, (sum(of_q), sum(of_k))) if packed else (len(of_q), (of_q[0], of_k[0]))
    q, k, v, dout = (torch.full((entries, heads, size, columns), torch.nan, dtype=torch.float16)
                     for heads, size, columns in ((hq, sizes[0], d), (hk, sizes[1], d), (hk, sizes[1], dv),
                                                  (hq, sizes[0], dv)))
    lse, delta = torch.full(q.shape[:3], -torch.inf), torch.full(q.shape[:3], torch.nan)
    borders = [[0, *itertools.accumulate(own)] for own in (of_q, of_k)]
    wanted = [torch.zeros_like(one, dtype=torch.float64) for one in (q, k, v)]
    function = (lambda scores: 1.5 * torch.tanh(scores / 1.5)) if "softcap" in options else None
    p = options.get("dropout_p", 0.0)
    for n, (sq, sk) in enumerate(zip(*used, strict=True)):
        whole, own = call_of(BANDS[mask], (max(sq, 1), max(sk, 1)), (hq, hk), dims, b=1)
        entry, (row_q, row_k) = (0, (borders[0][n], borders[1][n])) if packed else (n, (0, 0))
        rows_q, rows_k = slice(row_q, row_q + sq), slice(row_k, row_k + sk)
        torch.manual_seed(n)
        for one, rows in ((q, rows_q), (dout, rows_q), (k, rows_k), (v, rows_k)):
            one[entry, :, rows] = torch.randn_like(one[entry, :, rows])
        lse[entry, :, rows_q], delta[entry, :, rows_q] = torch.randn(2, hq, sq) + torch.tensor([[[4.0]], [[0.0]]])
        if not sq or not sk:
            for one in (q, dout, delta):
                one[entry, :, rows_q] = torch.nan
            lse[entry, :, rows_q] = -torch.inf
            continue
        visible = BANDS[mask].visible(sq, sk)
        blind = ~visible.any(1)
        lse[entry, :, rows_q][:, blind] = -torch.inf
        for one in (q, dout, delta):
            one[entry, :, rows_q][:, blind] = torch.nan
        own = [one[entry:entry + 1, :, rows] for one, rows in (
            (q, rows_q), (k, rows_k), (v, rows_k), (dout, rows_q), (lse, rows_q), (delta, rows_q))]
        own[4] = own[4].masked_fill(own[4].isinf(), torch.inf)  # P is 0 of those that see nothing
        kept = keep_tile(seed, hq, Span(0, sq), Span(0, sk), p, n * hq).double() / (1.0 - p)
        own = [one.nan_to_num(0.0, torch.inf) for one in own]
        found = expected(replace(whole, sq=sq, sk=sk), own, visible=visible, function=function, kept=kept)
        for one, part, rows in zip(wanted, found, (rows_q, rows_k, rows_k), strict=True):
            one[entry, :, rows] = part[0]
    spec = OperandSpec((len(of_q) + 1,), (1,), torch.int32)
    of_used = OperandSpec((len(of_q),), (1,), torch.int32) if used != (of_q, of_k) else None
    sequences = Sequences(len(of_q), spec, spec, of_used, of_used) if packed else Sequences(
        seqlens_q=of_used, seqlens_k=of_used)
    problem = replace(whole, b=entries, sq=sizes[0], sk=sizes[1], mask=BANDS[mask], sequences=sequences,
                      scores=ScoreOptions(**options))
    cu = [torch.tensor(own, dtype=torch.int32) if packed else None for own in borders]
    some = [torch.tensor(own, dtype=torch.int32) if of_used else None for own in used]
    operands = BackwardOperands(Lengths(*cu, *some), seed if p else None)
    launch, tensors = bound_backward(problem, WIDE), (q, k, v, dout, lse, delta)
    dq, dk, dv = (run_part(launch.dq, tensors, tensors[:1], operands=operands)
                  + run_part(launch.dkdv, tensors, tensors[1:3], operands=operands))
    compare((dq, dk, dv), (wanted[0] * SCALE, *wanted[1:]))


def visible_pairs(entries, heads, sq, sk):
    """Blocks of 64 x 64 pairs that are hidden, whole or visible in part, a third each, under queries that see none."""
    kinds = torch.randint(3, (entries, heads, -(-sq // 64), -(-sk // 64)))
    wide = kinds.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :sq, :sk]
    visible = (wide == 2) | (wide == 1) & (torch.rand(entries, heads, sq, sk) < 0.5)
    visible[:, :, :5], visible[:, :, 130:] = False, visible[:, :, 130:] & (torch.arange(sk) >= 64)
    return visible


@pytest.mark.parametrize(("entries", "own_heads", "heads", "lengths", "dims", "options"), [
    (1, 1, (2, 1), (330, 270), (256, 256), {}), (2, 1, (2, 2), (200, 150), (192, 128), {"softcap": 1.5}),
    (1, 2, (2, 2), (150, 200), (200, 100), {"dropout_p": 0.25}), (2, 2, (2, 2), (130, 190), (72, 136), {})])
def test_the_source_reads_lists_and_bits(entries, own_heads, heads, lengths, dims, options):
    """Of a mask of all batch entries and heads, and of one of each of either."""
    random.seed(0)
    problem, tensors = call_of(Mask(), lengths, heads, dims)
    visible, seed, p = visible_pairs(entries, own_heads, *lengths), torch.tensor([7]), options.get("dropout_p", 0.0)
    facts = OperandSpec(tuple(visible.shape), visible.stride(), torch.bool)
    problem = replace(problem, scores=ScoreOptions(mask=facts, **options))
    of_keys, of_queries = (plan_on_cpu.plan_of(visible, rows, 1, keys_first) for rows, keys_first in (
        (1, True), (2, False)))
    launch = bound_backward(problem, WIDE, plans=(of_keys[2], of_queries[2]))
    gradients = []
    for part, (lists, bits, _), like in ((launch.dq, of_queries, tensors[:1]), (launch.dkdv, of_keys, tensors[1:3])):
        operands = BackwardOperands(seed=seed if p else None, lists=lists, bits=bits)
        gradients += run_part(part, tensors, like, operands=operands)
    kept = keep_tile(seed, problem.b * problem.hq, *[Span(0, length) for length in lengths], p, 0)
    function = (lambda scores: 1.5 * torch.tanh(scores / 1.5)) if "softcap" in options else None
    kept = kept.view(problem.b, problem.hq, *lengths).double() / (1.0 - p)
    dq, dk, dv = expected(problem, tensors, visible, function=function, kept=kept)
    compare(gradients, (dq * SCALE, dk, dv))


def test_a_hidden_score_that_overflows_adds_nothing_to_gradients_under_a_softcap():
    random.seed(0)
    problem, tensors = with_a_hidden_overflow(*call_of(*MASKS["causal"], (192, 192)))
    launch = bound_backward(replace(problem, scores=ScoreOptions(softcap=1.5)), WIDE)
    overflows = {(softmax, "squashed"): forward_on_cpu.squashed_with_overflow}
    dq, dk, dv = (run_part(launch.dq, tensors, tensors[:1], overflows)
                  + run_part(launch.dkdv, tensors, tensors[1:3], overflows))
    wanted = expected(problem, tensors, function=lambda scores: 1.5 * torch.tanh(scores / 1.5))
    compare_beside_a_hidden_overflow((dq / SCALE, dk, dv), wanted)


def test_what_is_asked_for_late_changes_no_bit_of_dq():
    problem, tensors = call_of(window(100, 30, "top_left"), (300, 280), (1, 1), (192, 192), b=1)
    part = bound_backward(problem, WIDE).dq
    random.seed(1)
    (first,) = run_part(part, tensors, tensors[:1])
    random.seed(2)  # copies land at other times
    assert torch.equal(first, *run_part(part, tensors, tensors[:1]))


@pytest.mark.parametrize("dout_stages", [2, 1])
def test_nothing_is_written_over_before_the_slowest_warpgroup_has_read_it(dout_stages):
    def wait_long(left, deps):
        time.sleep(random.random() * 8e-3)  # longer than a copy needs
        return gluon_on_cpu.wait_for_products(left, deps)

    random.seed(0)
    problem, tensors = call_of(window(200, 0, "top_left"), (400, 400), (2, 1), (192, 256), b=1)
    part = bound_backward(problem, HopperD256Config(dout_stages=dout_stages)).dkdv
    slow = {(module, "warpgroup_mma_wait"): wait_long for module in (d256, products)}
    first = run_part(part, tensors, tensors[1:3])
    for one, other in zip(first, run_part(part, tensors, tensors[1:3], slow), strict=True):
        assert torch.equal(one, other)


def run_part(part, tensors, like, constants=None, operands=NO_BACKWARD_OPERANDS):
    """Run one of the kernels, and return its gradients, which are shaped as ``like``."""
    gradients = [torch.full_like(tensor, float("nan")) for tensor in like]
    *read, lse, delta = tensors
    read, written = ([form and Descriptor(tensor, form[0]) for tensor, own in zip(some, forms, strict=True)
                      for form in own] for some, forms in ((read, part.forms[:4]), (gradients, part.forms[4:])))
    seed, lists, bits, *lengths = (one if one is None else Pointer(one) for one in (
        operands.seed, operands.lists, operands.bits, *operands.lengths))
    by_pointers = [Pointer(one.view(-1)) for one in gradients] if part.is_packed else []
    pointers = WideHeadPointers(Pointer(lse.flatten()), Pointer(delta.flatten()), seed,
                                *[*by_pointers, None, None][:2], lists, bits, Lengths(*lengths))
    numbers, fixed = part.scalars
    run(part.kernel, MODULES, part.grid[0],
        (*read, *written, pointers, forward_on_cpu.as_kernels_have(numbers), fixed),
        CONSTANTS | (constants or {}))
    return gradients
