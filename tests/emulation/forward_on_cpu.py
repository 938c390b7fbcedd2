"""The Hopper forward kernel's source on the CPU: what of it is in plain words there, and how it is called."""

import math

import torch

from emulation.gluon_on_cpu import Descriptor, Pointer, run
from emulation.gluon_values import whole
from emulation.hopper_calls import bound_forward
from emulation.plan_on_cpu import plan_constants
from tilewise.kernels.hopper import (
    alibi,
    dropout,
    mask_plan,
    mask_ranges,
    pipeline,
    products,
    score_functions,
    softmax,
    varlen,
)
from tilewise.kernels.hopper import tile_scheduler as tiles
from tilewise.kernels.hopper.forward import epilogue, scores, split_kv
from tilewise.kernels.hopper.forward import kernel as forward
from tilewise.kernels.hopper.forward import producer as loading
from tilewise.kernels.reference.dropout import keep_tile
from tilewise.masks import Span
from tilewise.problem import AttentionProblem
from tilewise.problem.options import NO_OPERANDS, OperandSpec, ScoreOptions
from tilewise.testing import oracle

MODULES = (forward, alibi, loading, split_kv, varlen, pipeline, products, epilogue, softmax, tiles, mask_plan,
           mask_ranges, scores, score_functions, dropout)


def split_halves(s):
    return s[:, :s.shape[1] // 2], s[:, s.shape[1] // 2:]


def squashed(s, squash, shares_reciprocal):
    return s if squash is None else (torch.tanh(s * squash / (2.0 * math.log2(math.e))) - 1.0) / 2.0


def squashed_with_overflow(s, squash, shares_reciprocal):
    """Where the CPU's fused products leave an infinite sum, tensor cores may have inf - inf."""
    return torch.where(s.isinf(), torch.nan, squashed(s, squash, shares_reciprocal))


def drop(p, first_key, draws, constants):
    """By the reference's draws; test_gluon_dropout.py holds the kernel's own against them."""
    if not constants.HAS_DROPOUT:
        return p
    seed = torch.tensor([int(draws.high) << 32 | int(draws.low) & 0xFFFFFFFF])
    first_query, first_key = int(draws.first_query), int(draws.first_key + first_key)
    kept = keep_tile(seed, 1, Span(first_query, first_query + 64), Span(first_key, first_key + p.shape[1]),
                     int(draws.threshold) / 2**32, int(draws.row))[0]
    return torch.where(kept, p, -p)


def pack_pairs(p, dtype, drops=False):
    return (torch.clamp(p, min=0.0) if drops else p).to(dtype)


# What is written in assembly, or moves values between threads, in plain words.
CONSTANTS = {(module, name): value for module in MODULES for name, value in (
    ("_CHUNK", 128), ("_CLEARED", 32), ("_kept", lambda values, below: torch.where(below < 0, values, 0.0)),
    ("NO_TILE", tiles.NO_TILE.value), ("OVERFLOW_SLOTS", pipeline.OVERFLOW_SLOTS.value),
    ("OVERFLOW_LAG", pipeline.OVERFLOW_LAG.value), ("LN2", math.log(2.0)), ("LOG2E", math.log2(math.e)),
    ("QUERIES", 64),
    ("HUGE", softmax.HUGE.value),
    ("split_halves", split_halves),
    ("pack_pairs", pack_pairs), ("in_float32", lambda numbers: numbers.float()), ("drop", drop), ("SPAN", 16),
    ("as_operand", lambda pairs, dtype, layout: pairs),
    ("scheduling_fence", lambda number: number), ("squashed", squashed),
    ("bytes_of", loading.bytes_of.fn), ("floats_per_partial", epilogue.floats_per_partial.fn),
    ("tile_size", varlen.tile_size.fn), ("registers", forward.registers.fn),
    ("corrects_rounding", softmax.corrects_rounding.fn)) if hasattr(module, name)} | plan_constants(MODULES)


def attend(problem, config, tensors, pack_gqa=1, split_kv=None, sinks=None, programs=3, lengths=(),
           plan=None, operands=NO_OPERANDS, max_logit=None):
    """Run the kernel; return out, lse and the partial results, as it left them.

    lengths: those on the device. plan: lists, bits and strides of a mask that is no band. operands: others. max_logit:
    written, where the problem wants it.
    """
    q, k, v = tensors
    *listed, strides = (None, None, None) if plan is None else plan
    bound = bound_forward(problem, config, programs, pack_gqa, split_kv, strides)
    out = torch.full((problem.b, problem.hq, problem.sq, problem.dv), float("nan"), dtype=problem.out_dtype)
    lse = torch.full(out.shape[:3], float("nan"))
    partial = torch.full(bound.partial_shape, float("nan"))
    counter = torch.zeros(1, dtype=torch.int32)
    bound.describe = lambda tensor, shape, strides, block, layout: Descriptor(tensor, block)
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqlens_q", "seqlens_k")
    operands = operands._replace(sinks=sinks, **dict(zip(names, lengths, strict=False)))
    described = bound.arguments((q, k, v, out, lse), counter, operands, max_logit if split_kv is None else partial,
                                listed)
    written = (lse, partial, counter, *(() if max_logit is None else (max_logit,)))
    handed = [as_kernels_have(given, written) for given in described]
    numbers, constants = bound.scalars
    run(bound.kernel, MODULES, bound.grid[0], (*handed, as_kernels_have(numbers), constants), CONSTANTS,
        together=programs)
    assert counter.item() == 0, "the next launch begins with another tile"
    return out, lse, partial


def as_kernels_have(given, written=()):
    """A tensor as a pointer, one that is ``written`` as a pointer to its own memory; an integer as a tensor's."""
    if isinstance(given, tuple):
        made = [as_kernels_have(one, written) for one in given]
        return given._make(made) if hasattr(given, "_make") else tuple(made)
    if isinstance(given, torch.Tensor):
        if any(given is one for one in written):
            return Pointer(given.view(-1))
        return Pointer(torch.empty(0, dtype=given.dtype).set_(given.untyped_storage()), given.storage_offset())
    return whole(given)


def published_tiles(monkeypatch, *, recomputed_only=False):
    """Return a list that receives the numbers of each tile that is published; the last says if it is recomputed."""
    found, publish_tile, no_tile = [], loading.publish_tile.fn, tiles.NO_TILE.value

    def watched(queue, count, tile, size):
        if tile[0] != no_tile and (tile[-1] or not recomputed_only):
            found.append(tuple(map(int, tile)))
        publish_tile(queue, count, tile, size)

    monkeypatch.setattr(loading, "publish_tile", watched)
    return found


def call_of(mask, sizes, heads, dims, b=1, sinks=False, dtype=torch.float16):
    torch.manual_seed(0)
    (sq, sk), (hq, hk), (d, dv) = sizes, heads, dims
    q, k, v = (torch.randn(b, *shape).to(dtype) for shape in ((hq, sq, d), (hk, sk, d), (hk, sk, dv)))
    facts = OperandSpec((hq,), (1,), torch.float32) if sinks else None
    problem = AttentionProblem(
        b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=d, dv=dv, dtype=dtype, device=torch.device("cuda", 0), scale=0.125,
        mask=mask, scores=ScoreOptions(sinks=facts), q_strides=q.stride(), k_strides=k.stride(), v_strides=v.stride())
    return problem, (q, k, v)


def combined(partial, columns):
    """Out and lse of the partial results of splits, as merging.py has it, in float64."""
    maxima = partial[:, :, -8].double() * math.log(2.0)
    sums = torch.where(maxima.isinf(), 1.0, partial[:, :, -7].double())
    top = maxima.amax(1, keepdim=True)
    weights = torch.exp(maxima - torch.where(top.isinf(), 0.0, top)) * sums
    total = weights.sum(1)
    values = torch.where(weights[..., None] > 0.0, partial[..., :columns].double(), 0.0)
    out = (weights[..., None] * values).sum(1) / torch.where(total == 0.0, 1.0, total)[:, None]
    return out, top[:, 0] + torch.where(total == 0.0, 0.0, total.log())


def check(problem, tensors, out, lse, changes=oracle.NO_CHANGES):
    want, want_lse = oracle.attend(*tensors, problem.mask, problem.scale, changes)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)
    error = 4e-3 if problem.dtype is torch.float16 else 3e-2
    torch.testing.assert_close(out.double(), want, rtol=error, atol=error)
