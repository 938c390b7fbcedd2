"""Launches the Hopper forward kernel: its arguments from a problem."""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from tilewise.kernels.enqueue import Enqueue
from tilewise.kernels.hopper.arguments import (
    ForwardNumbers,
    ForwardPointers,
    KVSplits,
    Lengths,
    MaskBounds,
    PlanNumbers,
    Scaling,
    ScoreOperands,
    TileGrid,
)
from tilewise.kernels.hopper.forward.config import HopperForwardConfig, HopperForwardSchedule
from tilewise.kernels.hopper.launch import (
    OPTIONS,
    bounds_of,
    counter_of,
    diagonal_of,
    dropout_of,
    first_pair_of,
    function_flags,
    function_of,
    gluon_dtype,
    place_of_bias,
    scaling_of,
    with_tensors,
)
from tilewise.masks import Span
from tilewise.problem import AttentionProblem, Sizes, legal_strides
from tilewise.problem.options import NO_OPERANDS, Operands

Plan = tuple[torch.Tensor | None, torch.Tensor | None]  # lists and bits
NO_PLAN: Plan = (None, None)
# Which of q, k, v, out and bias each descriptor is of: two chunks of the first three.
_DESCRIBED = (0, 0, 1, 1, 2, 2, 3, 4)


class HopperForward:
    """The forward kernel bound to a problem.

    Args:
        problem: the call.
        config: its tiles.
        schedule: their order, and what else was chosen. Where it splits tiles, their partial results are
            float32, of :attr:`partial_shape`; the kernel that combines them takes the sinks. Some
            tiles may be whole only without a bound, so that the rows of the others are the last ones.
        num_sms: of the device; one CTA runs on each.
        plan: the strides of the mask plan (arguments.PlanNumbers), where the problem needs one.
    """

    def __init__(self, problem: AttentionProblem, config: HopperForwardConfig, schedule: HopperForwardSchedule,
                 num_sms: int, plan: Sizes | None = None) -> None:
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from tilewise.kernels.hopper.forward.epilogue import floats_per_partial
        from tilewise.kernels.hopper.forward.kernel import hopper_forward_kernel

        self.kernel, self.describe = hopper_forward_kernel, TensorDescriptor
        self.device, self.keys = problem.device, problem.seen_keys
        chunks, columns = config.head_dim_chunks(problem), config.out_buffers(problem)[0]
        self.is_packed = problem.sequences.packed is not None
        lower, upper, count, _is_shifted = bounds_of(problem)
        pack_gqa, split_kv = schedule.pack_gqa, schedule.split_kv
        heads = problem.hq if pack_gqa == 1 else problem.hk
        tiles = problem.sequences.slots(problem.sq * pack_gqa, 64 * config.consumers)
        total = tiles * heads * problem.b
        self.splits = split_kv is not None
        whole, num_splits = split_kv or (total, 1)
        self.grid = (min(whole + (total - whole) * num_splits, num_sms),)
        # The first row of lse whose splits are combined; with pack_gqa all tiles are split or none.
        first_row = whole // tiles * problem.sq + whole % tiles * 64 * config.consumers
        self.split_rows = range(first_row, problem.b * problem.hq * problem.sq)
        self.partial_shape = len(self.split_rows), num_splits, floats_per_partial.fn(chunks[1])
        sinks = problem.scores.sinks
        self.sinks_stride = None if sinks is None or sinks.strides[0] == 1 else sinks.strides[0]
        self.place_of_bias = place_of_bias(problem) if config.bias_stages(problem) else None
        self.scalars = (
            ForwardNumbers(
                TileGrid(tiles, heads, problem.b, schedule.heads_per_swizzle),
                MaskBounds(problem.sq, len(self.keys), lower or 0, upper or 0), problem.group, count,
                scaling_of_scores(problem), KVSplits() if split_kv is None else KVSplits(whole, num_splits, first_row),
                self.sinks_stride if split_kv is None else None, None if plan is None else PlanNumbers(*plan),
                diagonal_of(problem), dropout_of(problem, 0), first_pair_of(problem, 0),
                self.place_of_bias),
            _kernel_config(problem, config, schedule))
        self.enqueue = Enqueue(self.kernel, self.grid, self.scalars, OPTIONS,
                               specialized=self.kernel.arg_names.index("lengths"))
        # Of each tensor's one or two chunks of head dims; of out its buffers.
        rows = [64] if pack_gqa == 1 else [64 // pack_gqa, pack_gqa]
        blocks = [None if i >= len(widths) else [1, 1, *sizes, widths[i]]
                  for sizes, widths in zip((rows, *[[config.block_n]] * 2), (chunks[0], *chunks), strict=True)
                  for i in range(2)]
        blocks += [[1, 1, *rows, columns], None if self.place_of_bias is None else [1, 1, 64, config.block_n]]
        self.group = None if pack_gqa == 1 else problem.group
        bias = problem.scores.bias
        dtypes = [*[problem.dtype] * 6, problem.out_dtype, problem.dtype if bias is None else bias.dtype]
        self.blocks = [block and (block, gl.NVMMASharedLayout.get_default_for(block, gluon_dtype(dtype)))
                       for block, dtype in zip(blocks, dtypes, strict=True)]
        self.described = operator.itemgetter(*[i if block else 5 for block, i in zip(blocks, _DESCRIBED, strict=True)])
        # Where the first row that is read begins, in bytes.
        self.offsets = tuple(self.keys.start * strides[2] * problem.dtype.itemsize
                             for strides in (problem.k_strides, problem.v_strides))
        self.added, self.function = _strides_of_operands(problem), function_of(problem)._replace(derivative=None)

    def __call__(self, tensors: Callable[[], tuple[torch.Tensor, ...]], addresses: tuple[int, int, int],
                 out: torch.Tensor, lse: torch.Tensor, operands: Operands = NO_OPERANDS,
                 more: torch.Tensor | None = None, aligned: bool = False, plan: Plan = NO_PLAN) -> None:
        """Enqueue the kernel on the current stream of the current device.

        Args:
            tensors: returns q, k and v, which lie at the addresses.
            addresses: theirs.
            out, lse: are written.
            operands: sinks, seed, bias, ALiBi slopes, the score function's tensors and lengths; others are not read.
                With split-KV, none.
            more: is written too: with split-KV the partial results, else max_logit where the problem wants it.
            aligned: whether each operand is known to begin at a multiple of 16 bytes.
            plan: the lists and bits of the mask plan, where the problem needs one.
        """
        counter = counter_of(self.device)
        (at_q, at_k, at_v), (offset_k, offset_v), at_out = addresses, self.offsets, out.data_ptr()
        at_bias = None if self.place_of_bias is None else operands.bias.data_ptr()
        described = self.described((at_q, at_k + offset_k, at_v + offset_v, at_out, at_bias, None))
        rest = [] if more is None else [more.data_ptr()]
        if operands is not NO_OPERANDS or plan is not NO_PLAN:
            sinks, seed, *others = self._taken(operands)
            given = (out if self.is_packed else None, sinks, seed, *plan, more, *operands.score_tensors, *others)
            rest = [tensor.data_ptr() for tensor in given if tensor is not None]
        # What torch allocates is aligned, as the backend wants q, k and v to be; so are the rows that are read.
        self.enqueue((*described, lse.data_ptr(), counter.data_ptr(), *rest),
                     lambda: self.arguments((*tensors(), out, lse), counter, operands, more, plan),
                     alike=aligned or operands is NO_OPERANDS)

    def arguments(self, tensors: tuple[torch.Tensor, ...], counter: torch.Tensor, operands: Operands = NO_OPERANDS,
                  more: torch.Tensor | None = None, plan: Plan = NO_PLAN) -> tuple[Any, ...]:
        """Return descriptors of q, k, v, out and bias by chunks, then what the kernel reads and writes by addresses."""
        q, k, v, out, lse = tensors
        sinks, seed, bias, slopes, *_others = self._taken(operands)
        partial, max_logit = (more, None) if self.splits else (None, more)
        function = with_tensors(self.function, operands.score_tensors)
        pointers = ForwardPointers(out if self.is_packed else None, partial, sinks, seed, *plan, max_logit, function)
        k, v = _rows(k, self.keys), _rows(v, self.keys)
        q, out = _grouped(q, self.group), _grouped(out, self.group)
        place, read = self.place_of_bias, None
        if place is not None:
            read, bias = operands.bias[:None if place.own_batch else 1, :None if place.own_head else 1], None
        described = [block and self.describe(tensor, list(tensor.shape), legal_strides(tensor), *block)
                     for tensor, block in zip([(q, k, v, out, read)[i] for i in _DESCRIBED], self.blocks, strict=True)]
        added = self.added._replace(bias=bias, slopes=slopes)
        return (*described, lse, counter, pointers, added, Lengths(*operands.lengths))

    def _taken(self, operands: Operands) -> tuple[torch.Tensor | None, ...]:
        """Return what the kernel takes of a call's operands alone: sinks, seed, bias, slopes, and the lengths."""
        bias = operands.bias if self.place_of_bias is None else None
        if bias is not None and self.keys.start and bias.shape[3] > 1:
            bias = bias[..., self.keys.start:]
        return (operands.sinks, operands.seed, bias, operands.alibi_slopes, *operands.lengths)


def _kernel_config(problem: AttentionProblem, config: HopperForwardConfig, schedule: HopperForwardSchedule) -> Any:
    """Return what is fixed when the kernel is compiled."""
    from tilewise.kernels.hopper.forward.types import Config

    (d_chunks, dv_chunks), (columns, out_slots) = config.head_dim_chunks(problem), config.out_buffers(problem)
    lower, upper, count, is_shifted = bounds_of(problem)
    splits = 0 if schedule.split_kv is None else 2 if schedule.split_kv.whole > 0 else 1
    return Config(
        PACK_GQA=schedule.pack_gqa, D=d_chunks, DV=dv_chunks, OUT=columns, OUT_SLOTS=out_slots, BLOCK_N=config.block_n,
        CONSUMERS=config.consumers, KV_STAGES=config.kv_stages, Q_STAGES=config.q_stages, PING_PONG=config.ping_pong,
        HAS_LOWER=lower is not None, HAS_UPPER=upper is not None, TILES_FROM_END=schedule.tiles_from_end,
        SKIP_PADDING=schedule.skip_padding, PARTS=schedule.softmax_parts, FROZEN_MAX=schedule.frozen_max,
        SINK_BLOCK_FIRST=schedule.sink_block_first, SPLIT_KV=splits, MASK_PLAN=not problem.is_banded,
        **function_flags(problem),
        HAS_BIAS=problem.scores.bias is not None, BIAS_STAGES=config.bias_stages(problem),
        HAS_ALIBI=problem.scores.alibi_slopes is not None,
        SEES_AHEAD=problem.sees_ahead, HAS_DROPOUT=problem.scores.dropout_p > 0.0, VARLEN=count is not None,
        HAS_CU_SEQLENS=problem.sequences.packed is not None, BOTTOM_RIGHT=is_shifted)


def scaling_of_scores(problem: AttentionProblem) -> Scaling:
    """Return what scores are multiplied by; natural ones where something is added, or a function changes them."""
    scale_log2, squash = scaling_of(problem)
    softcap = problem.scores.softcap
    if not (problem.scores.adds_to_scores or problem.scores.score_function is not None):
        if softcap is None:
            return Scaling(scale_log2, None, exact_scale_of(scale_log2))
        return Scaling(2.0 * scale_log2, squash, exact_scale_of(2.0 * scale_log2))
    log2e = math.log2(math.e)
    return Scaling(log2e, squash, exact_scale_of(log2e), problem.scale if softcap is None else 2.0 * softcap)


def _strides_of_operands(problem: AttentionProblem) -> ScoreOperands:
    """Return the strides of the bias and the slopes, broadcast to all pairs."""
    bias, slopes = problem.scores.bias, problem.scores.alibi_slopes
    strides = [*([None] * 4 if bias is None else bias.expanded(problem.pairs)),
               *([None] * 2 if slopes is None else slopes.expanded(problem.pairs[:2]))]
    return ScoreOperands(None, None, *[None if stride == 1 else stride for stride in strides])


def exact_scale_of(scale_log2: float) -> float:
    """Return the least power of two that is no less than a positive number, or float32's largest one."""
    fraction, exponent = math.frexp(scale_log2)
    return math.ldexp(1.0, min(exponent - (fraction == 0.5), 127))


def _grouped(tensor: torch.Tensor, group: int | None) -> torch.Tensor:
    """(b, hq, s, d) as (b, hk, s, group, d), or as it is."""
    return tensor if group is None else tensor.unflatten(1, (-1, group)).transpose(2, 3)


def _rows(tensor: torch.Tensor, rows: Span) -> torch.Tensor:
    return tensor if len(rows) == tensor.shape[2] else tensor[:, :, rows.start:rows.stop]
