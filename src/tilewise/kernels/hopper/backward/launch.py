"""Launching the Hopper backward kernels: their arguments from a problem, and the accumulator of dQ."""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from tilewise.errors import InvalidInput
from tilewise.kernels.enqueue import Enqueue
from tilewise.kernels.hopper.arguments import (
    NO_BACKWARD_OPERANDS,
    BackwardNumbers,
    BackwardOperands,
    BackwardPointers,
    MaskBounds,
    PlanNumbers,
    Scales,
    StridedRows,
    TileGrid,
)
from tilewise.kernels.hopper.backward.config import HopperBackwardConfig, HopperBackwardSchedule
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
from tilewise.problem import AttentionProblem, Sizes, dense_strides, legal_strides, padded_dim

# As in backends/_support/memory.py, which kernels do not know.
Allocate = Callable[[Sizes, Sizes, torch.dtype], torch.Tensor]  # of sizes, strides and dtype, its memory anything


class HopperBackward:
    """The backward kernels bound to a problem; call it with (q, k, v, dout, lse, delta, dq, dk, dv), and its operands.

    A bias has strides as :meth:`.GluonBackend.why_not` says. ``plan``: the strides of a mask plan.
    ``dq_strides``: those of dq. ``num_sms``: of the device; one CTA runs on each SM at a time. ``incoming``: the
    strides of out and dout, the last 1, where delta has no gradient of lse and no other kernel needs it; out then comes
    in its place if ``takes_out`` says so. ``allocate``: allocates memory on the device. lse and delta are contiguous,
    delta as the Triton backend's kernel computes it; dout and the gradients have a last stride of 1 and others that are
    legal for a descriptor. Queries that see no key, and keys that none sees, are not read: their gradients are left as
    they are.
    """

    def __init__(self, problem: AttentionProblem, config: HopperBackwardConfig, schedule: HopperBackwardSchedule,
                 dq_strides: Sizes, num_sms: int, incoming: tuple[Sizes, Sizes] | None = None,
                 allocate: Allocate | None = None, plan: Sizes | None = None) -> None:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from tilewise.kernels.hopper.backward.augmented_k import EXTRA_COLUMNS, HeadSlopes, hopper_augmented_k_kernel
        from tilewise.kernels.hopper.mask_ranges import QUERIES

        self.kernel, constants = _kernel_of(problem, config)
        self.config, self.describe = config, TensorDescriptor
        self.allocate = allocate or allocator_on(problem.device)
        self.queries, self.keys = problem.seeing_queries, problem.seen_keys
        self.reads_all = len(self.queries) == problem.sq and len(self.keys) == problem.sk
        chunks, sq, block = config.columns(problem), len(self.queries), int(QUERIES)
        width, sequences, heads = sum(chunks[0]), problem.sequences, problem.b * problem.hk
        tiles = sequences.slots(len(self.keys), config.block_n)
        self.narrow, self.has_two_chunks = config.kernel == "d64", len(chunks[0]) > 1
        self.takes_no_lengths = self.has_two_chunks or self.narrow
        self.packed, self.are_data = sequences.packed is not None, sequences.are_data
        self.writes_dq = writes_dq(problem, config)
        # Queries, too, count from the first one that is read.
        *bounds, count, _is_shifted = bounds_of(problem)
        lower, upper = (0 if bound is None else bound + self.queries.start for bound in bounds)
        ctas = heads if config.head_persistent else tiles * heads
        swizzle, most = schedule.kv_heads_per_swizzle, _heads_at_once(config, num_sms)
        is_persistent = config.head_persistent or config.dynamic_tiles
        self.grid = (config.ctas_per_head * min(ctas, most) if is_persistent else ctas,)
        self.scalars = (
            BackwardNumbers(TileGrid(tiles, problem.hk, problem.b, swizzle),
                            MaskBounds(sq, len(self.keys), lower, upper), problem.group, _scales_of(problem), count,
                            dropout_of(problem, problem.seeing_queries.start),
                            None if plan is None else PlanNumbers(*plan), *_alibi_of(problem),
                            place_of_bias(problem), schedule.kv_head_divisor,
                            first_pair_of(problem, self.queries.start)),
            constants)
        self.has_bias, self.function = problem.scores.bias is not None, function_of(problem)
        self.forms = self._forms(problem, chunks)
        self.places = operator.itemgetter(*[i if form else len(self.forms) for i, forms in enumerate(self.forms)
                                            for form in forms or [True]])
        columns = min(width // 2, *chunks[0])  # of a part of dQ: what a warpgroup computes, or half of it
        blocks = sequences.slots(sq, block)
        self._plan_accum(problem, blocks, width, columns)
        any_from = self.kernel.arg_names.index("numbers" if self.takes_no_lengths else "lengths")
        self.enqueue = Enqueue(self.kernel, self.grid, self.scalars, OPTIONS, specialized=any_from)
        (*self.slopes_strides, _diagonal), self.make_slopes = _alibi_of(problem), HeadSlopes
        has_alibi = problem.scores.alibi_slopes is not None  # then queries past the last one have columns too
        self.columns_shape = (problem.b, problem.hq, blocks * block if has_alibi else sq, int(EXTRA_COLUMNS))
        self.columns_strides = dense_strides(self.columns_shape, (4, 3, 2, 1))
        self.takes_out = config.augmented_k and incoming is not None and self.reads_all
        self.incoming = [strides[:3] for strides in incoming] if incoming and self.takes_out else None
        self.dq_strides = dq_strides[:3]
        zeros = 1 if self.has_semaphores else 0 if config.head_persistent else 64 * width
        self.enqueue_augmented_k = Enqueue(
            hopper_augmented_k_kernel, (problem.b * problem.hq * blocks,),
            (sq, problem.hq, blocks, problem.scale, problem.dv, padded_dim(problem.dv), zeros), OPTIONS)
        self._bind_dq(problem, blocks, width, columns)

    def _bind_dq(self, problem: AttentionProblem, blocks: int, width: int, columns: int) -> None:
        """Bind the kernels that zero the dQ accumulator of packed sequences and make dq of it; as ``_plan_accum``."""
        from tilewise.kernels.hopper.backward.dq_postprocess import hopper_dq_kernel, hopper_zero_kernel

        sizes, packed, parts = (len(self.queries), len(self.keys)), problem.sequences.packed, width // columns
        self.enqueue_dq = Enqueue(hopper_dq_kernel, (parts * blocks * problem.b * problem.hq,),
                                  (*sizes, problem.hq, parts * blocks, packed, gradient_scale(problem), problem.d,
                                   columns, parts), OPTIONS)
        self.enqueue_zero = Enqueue(hopper_zero_kernel, (blocks * problem.hq,), (*sizes, blocks, packed, width),
                                    OPTIONS)

    def _plan_accum(self, problem: AttentionProblem, blocks: int, width: int, columns: int) -> None:
        """Say how the dQ accumulator lies in memory. columns: of a part of dQ; blocks: of a head's queries."""
        from triton.experimental.gluon import language as gl

        config = self.config
        owns_head = config.head_persistent and config.ctas_per_head == 1
        all_blocks = (self.grid[0] * problem.group if owns_head else problem.b * problem.hq) * blocks
        self.accum_rows = all_blocks * width // 4
        self.has_semaphores = config.deterministic and not owns_head
        # The semaphores, which count the tiles that have added to a block, stand behind the accumulator.
        self.accum_shape = (self.accum_rows + (math.ceil(all_blocks / 256) if self.has_semaphores else 0), 256)
        # The row of this that the kernel's workspace_ptr points to, and its type; None where it is the counter of the
        # tile scheduler, or nothing.
        self.workspace = (0, torch.float32) if config.head_persistent else (
            self.accum_rows, torch.int32) if self.has_semaphores else None
        self.accum_block = [(width if self.narrow else columns) // 4, 256]
        self.accum_layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)

    def _forms(self, problem: AttentionProblem, chunks: tuple[Sizes, Sizes]) -> list[list[Any]]:
        """Blocks and layouts of what the kernel takes: a form a chunk, None for a second chunk like the first."""
        from triton.experimental.gluon import language as gl

        from tilewise.kernels.hopper.backward.augmented_k import EXTRA_COLUMNS

        forms = [[None if i and columns == widths[0] else make(problem, columns) for i, columns in enumerate(widths)]
                 for make, widths in zip((*[input_form] * 4, *[gradient_form] * 2),
                                         (chunks[of_v] for of_v in (0, 0, 1, 1, 0, 1)), strict=True)]
        of_lse = [_form([1, 1, 64, int(EXTRA_COLUMNS)], gl.bfloat16)] if self.config.augmented_k else []
        if self.has_two_chunks:
            return [*forms[:4], of_lse, [], *forms[4:]]
        bias = problem.scores.bias
        of_delta: list[Any] = [None] if self.narrow else []  # the kernel of narrow heads reads none
        if bias is not None:
            of_delta = [_form([1, 1, 64, 64], gluon_dtype(bias.dtype))]
        of_dq = [None]
        if self.config.head_persistent:
            # By way of an own tile in dq's dtype, or of the float32 one in which a warpgroup's half of dQ is staged.
            of_dq = [gradient_form(problem, chunks[0][0]) if self.narrow else _form(
                [1, 1, 64, chunks[0][0] // 2], gluon_dtype(problem.out_dtype))]
        return [*forms[:4], of_lse, of_delta, *forms[4:], of_dq]

    def taken(self, tensors: tuple[torch.Tensor, ...], lse: torch.Tensor,
              bias: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Return what the kernel takes of (q, k, v, dout, lse, delta, dq, dk, dv), with lse or the extra columns given.

        Beside extra columns it reads no delta, and gets lse in its place, which has the same type. A bias, of the
        queries that are read, stands there too.
        """
        q, k, v, dout, own_lse, delta, dq, dk, dv = tensors
        in_place = own_lse if self.config.augmented_k else delta
        return (q, k, v, dout, lse, in_place if bias is None else bias, dk, dv,
                *(() if self.has_two_chunks else (dq,)))

    def __call__(self, *tensors: torch.Tensor, operands: BackwardOperands = NO_BACKWARD_OPERANDS) -> None:
        """Enqueue the kernels on the current stream of the current device."""
        read = self._read(tensors)
        dq = read[6]
        plain = operands is NO_BACKWARD_OPERANDS  # then alignments belong to the problem: of lse, the first row's
        borders = operands.lengths.cu_q, operands.lengths.cu_k if self.writes_dq else None
        accum, lse = self._begin(*read[3:6], operands.slopes, borders)
        bias = None if operands.bias is None else self._bias_read(operands.bias)
        more = read[5] if self.has_bias and not self.config.augmented_k else None
        mine = self.taken(read, lse, bias)
        accum_at = accum.data_ptr()
        counter = counter_of(accum.device) if self.config.dynamic_tiles else None
        workspace = _address_of(counter) if self.workspace is None else accum_at + self.workspace[0] * 1024
        self.enqueue((*self.places((*[tensor.data_ptr() for tensor in mine], None)), accum_at,
                      *(() if self.has_two_chunks else (workspace,)),
                      *(() if plain else [tensor.data_ptr() for tensor in self._optional(read[6:], operands, more)
                                          if tensor is not None])),
                     lambda: self.arguments(mine, accum, operands, counter, more), alike=plain)
        if not self.config.head_persistent:
            self.enqueue_dq((accum_at, dq.data_ptr(), *map(_address_of, borders)),
                            lambda: (accum, StridedRows(dq, *self.dq_strides), *borders), alike=plain)

    def _begin(self, dout: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor, slopes: torch.Tensor | None = None,
               borders: tuple[torch.Tensor | None, ...] = (None, None)) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate the dQ accumulator, and return it with what the kernel reads in place of lse: extra columns, or lse.

        An accumulator that is added to in any order begins at zero. One that is first set may hold anything, but where
        lengths are data, since then no tile sets the blocks of queries that see no key; its semaphores begin at zero.
        ``borders``: as hopper_zero_kernel takes them.
        """
        accum = self.allocate(self.accum_shape, (self.accum_shape[1], 1), torch.float32)
        zeroed = accum[self.accum_rows:] if self.has_semaphores and not self.are_data else accum
        if not self.config.augmented_k:
            if self.packed and not self.has_semaphores:
                self.enqueue_zero((accum.data_ptr(), *map(_address_of, borders)), lambda: (accum, *borders))
            else:
                zeroed.zero_()
            return accum, lse
        columns = self.allocate(self.columns_shape, self.columns_strides, torch.bfloat16)
        if self.incoming is None:
            at_read: tuple[int | None, ...] = lse.data_ptr(), delta.data_ptr()
        else:  # out stands in delta's place
            at_read = delta.data_ptr(), dout.data_ptr(), lse.data_ptr(), None
        at_slopes = () if slopes is None else (slopes.data_ptr(),)
        self.enqueue_augmented_k((*at_read, *at_slopes, columns.data_ptr(), zeroed.data_ptr()),
                                 lambda: (*self._rows_read(dout, lse, delta),
                                          self.make_slopes(slopes, *self.slopes_strides), columns, zeroed), alike=True)
        return accum, columns

    def _rows_read(self, dout: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> tuple[Any, ...]:
        """Return what extra columns are made of: out, which stands in delta's place, and dout, or delta; and lse."""
        if self.incoming is None:
            return StridedRows(None), StridedRows(None), lse, delta
        of_out, of_dout = self.incoming
        return StridedRows(delta, *of_out), StridedRows(dout, *of_dout), lse, None

    def _bias_read(self, bias: torch.Tensor) -> torch.Tensor:
        """Return the rows of queries that are read, once of batch entries or heads that share them."""
        place = self.scalars[0].bias
        own = [slice(None) if own else slice(1) for own in (place.own_batch, place.own_head)]
        return bias[own[0], own[1], self.queries.start:self.queries.stop]

    def arguments(self, tensors: tuple[torch.Tensor, ...], accum: torch.Tensor,
                  operands: BackwardOperands = NO_BACKWARD_OPERANDS, counter: torch.Tensor | None = None,
                  delta: torch.Tensor | None = None) -> tuple[Any, ...]:
        """Return the tensors in order, all but lse and delta as descriptors, the accumulator and the workspace.

        Extra columns and the accumulator have descriptors too, the latter but where dQ is added from registers. Heads
        of two chunks have no workspace. What only some calls have follows, as far as the kernel takes it. ``delta``:
        where a bias stands in its place.
        """
        described = self._in_forms(tensors, lambda tensor, form: tensor if form is None else self.describe(
            tensor, list(tensor.shape), legal_strides(tensor), *form))
        target = accum if self.config.dq_from_registers else self.describe(
            accum, [self.accum_rows, 256], list(accum.stride()), self.accum_block, self.accum_layout)
        workspace = counter if self.config.dynamic_tiles else None
        if self.workspace is not None:
            workspace = accum[self.workspace[0]:].view(self.workspace[1])
        if self.has_two_chunks:
            return (*described, target)
        if self.takes_no_lengths:
            return (*described, target, workspace,
                    BackwardPointers(None, None, None, operands.lists, operands.bits, operands.slopes))
        dk, dv = tensors[6:8] if self.packed else (None, None)
        function = with_tensors(self.function, operands.score_tensors)
        of_dq = StridedRows(tensors[8], *self.dq_strides) if self.writes_dq else None
        pointers = BackwardPointers(dk, dv, operands.seed, operands.lists, operands.bits, operands.slopes, delta,
                                    function, of_dq)
        return (*described, target, workspace, pointers, operands.lengths)

    def _in_forms(self, tensors: tuple[torch.Tensor, ...], make: Callable[[torch.Tensor, Any], Any]) -> list[Any]:
        """Make an argument of each tensor in each of its forms; lse and delta may have none, and a form may be None."""
        made: list[Any] = []
        for tensor, forms in zip(tensors, self.forms, strict=True):
            made += [form and make(tensor, form) for form in forms] if forms else [make(tensor, None)]
        return made

    def _optional(self, gradients: tuple[torch.Tensor, ...], operands: BackwardOperands,
                  delta: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return what only some calls have, in the order of the arguments, each a tensor or None.

        ``gradients``: dq, dk and dv.
        """
        dq, *own = gradients
        return (*(own if self.packed else ()), operands.seed, operands.lists, operands.bits, operands.slopes, delta,
                *operands.score_tensors, dq if self.writes_dq else None, *operands.lengths)

    def _read(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Leave out the rows that are not read."""
        return tensors if self.reads_all else rows_of(tensors, self.queries, self.keys)


def _address_of(tensor: torch.Tensor | None) -> int | None:
    """Return where a tensor that may not be there lies."""
    return None if tensor is None else tensor.data_ptr()


def _heads_at_once(config: HopperBackwardConfig, num_sms: int) -> int:
    """Return how many heads CTAs share at a time; all CTAs of a head have to run at once."""
    if config.ctas_per_head > num_sms:
        raise InvalidInput(
            f"ctas_per_head={config.ctas_per_head} for {num_sms} multiprocessors; allowed are as many.")
    return num_sms // config.ctas_per_head


def allocator_on(device: torch.device) -> Allocate:
    """Return what makes memory on a device in PyTorch's way."""
    return lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype, device=device)


def _form(block: list[int], dtype: Any) -> tuple[list[int], Any]:
    from triton.experimental.gluon import language as gl

    return block, gl.NVMMASharedLayout.get_default_for(block, dtype)


def input_form(problem: AttentionProblem, columns: int) -> tuple[list[int], Any]:
    """Return block and layout of 64 rows of some columns of an input."""
    return _form([1, 1, 64, columns], gluon_dtype(problem.dtype))


def gradient_form(problem: AttentionProblem, columns: int) -> tuple[list[int], Any]:
    """Return block and layout of what is written at once of 64 rows of so many columns of a gradient.

    It is staged where a tile of the inputs was, which holds half of the columns in float32.
    """
    at_once = columns * problem.dtype.itemsize // problem.out_dtype.itemsize
    return _form([1, 1, 64, at_once], gluon_dtype(problem.out_dtype))


def _kernel_of(problem: AttentionProblem, config: HopperBackwardConfig) -> tuple[Any, Any]:
    """Return the kernel, and what is fixed when it is compiled."""
    if config.kernel == "d192":
        from tilewise.kernels.hopper.backward.d192 import hopper_backward_d192_kernel

        return hopper_backward_d192_kernel, d256_kernel_config(problem, config)
    if config.kernel == "d64":
        from tilewise.kernels.hopper.backward.d64 import hopper_backward_d64_kernel

        return hopper_backward_d64_kernel, _d64_kernel_config(problem, config)
    from tilewise.kernels.hopper.backward.d128 import hopper_backward_kernel

    return hopper_backward_kernel, _kernel_config(problem, config)


def d256_kernel_config(problem: AttentionProblem, config: HopperBackwardConfig) -> Any:
    """Return what is fixed when a kernel of heads above 128 columns that owns keys is compiled."""
    from tilewise.kernels.hopper.backward.d256_types import Config

    d_chunks, dv_chunks = config.columns(problem)
    return Config(D=d_chunks, DV=dv_chunks, CONSUMERS=config.block_n // 64, Q_STAGES=config.q_stages,
                  DOUT_STAGES=config.dout_stages, **wide_head_flags(problem))


def wide_head_flags(problem: AttentionProblem) -> dict[str, bool]:
    """Return what kernels of heads above 128 columns are compiled for beside their tiles."""
    lower, upper, count, is_shifted = bounds_of(problem)
    return {"HAS_LOWER": lower is not None, "HAS_UPPER": upper is not None, "VARLEN": count is not None,
            "HAS_CU_SEQLENS": problem.sequences.packed is not None, "BOTTOM_RIGHT": is_shifted,
            "HAS_DROPOUT": problem.scores.dropout_p > 0.0, "MASK_PLAN": not problem.is_banded}


def _d64_kernel_config(problem: AttentionProblem, config: HopperBackwardConfig) -> Any:
    """Return what is fixed when the kernel of heads up to 64 columns is compiled."""
    from tilewise.kernels.hopper.backward.d64_types import Config

    lower, upper, _count, _is_shifted = bounds_of(problem)
    return Config(
        WIDTH=config.columns(problem)[0][0], Q_STAGES=config.q_stages, DOUT_STAGES=config.dout_stages,
        DETERMINISTIC=config.deterministic, HEAD_PERSISTENT=config.head_persistent,
        CTAS_PER_HEAD=config.ctas_per_head, KV_STAGES=config.kv_stages, DYNAMIC_TILES=config.dynamic_tiles,
        HAS_LOWER=lower is not None, HAS_UPPER=upper is not None, MASK_PLAN=not problem.is_banded,
        HAS_ALIBI=problem.scores.alibi_slopes is not None, BIAS_STAGES=config.bias_stages(problem))


def _kernel_config(problem: AttentionProblem, config: HopperBackwardConfig) -> Any:
    """Return what is fixed when the kernel of other heads up to 128 columns is compiled."""
    from tilewise.kernels.hopper.backward.types import Config

    lower, upper, count, is_shifted = bounds_of(problem)
    return Config(
        WIDTH=config.columns(problem)[0][0], CONSUMERS=config.block_n // 64, Q_STAGES=config.q_stages,
        DOUT_STAGES=config.dout_stages, S_AHEAD=config.s_ahead, DQ_FROM_REGISTERS=config.dq_from_registers,
        DETERMINISTIC=config.deterministic, AUGMENTED_K=config.augmented_k, HEAD_PERSISTENT=config.head_persistent,
        HAS_LOWER=lower is not None, HAS_UPPER=upper is not None, VARLEN=count is not None,
        HAS_CU_SEQLENS=problem.sequences.packed is not None, BOTTOM_RIGHT=is_shifted,
        HAS_DROPOUT=problem.scores.dropout_p > 0.0, MASK_PLAN=not problem.is_banded,
        HAS_ALIBI=problem.scores.alibi_slopes is not None, SEES_AHEAD=problem.sees_ahead,
        BIAS_STAGES=config.bias_stages(problem), WRITES_DQ=writes_dq(problem, config), **function_flags(problem))


def writes_dq(problem: AttentionProblem, config: HopperBackwardConfig) -> bool:
    """Whether tiles that have all keys of a packed sequence write its dq, past the accumulator."""
    return problem.sequences.packed is not None and config.kernel == "d128" and config.dq_from_registers


def _alibi_of(problem: AttentionProblem) -> tuple[int | None, int | None, int | None]:
    """Return the strides of ALiBi's slopes and the diagonal (arguments.BackwardNumbers)."""
    slopes = problem.scores.alibi_slopes
    if slopes is None:
        return None, None, None
    diagonal = diagonal_of(problem)
    stride_b, stride_h = slopes.expanded(problem.pairs[:2])
    return stride_b, stride_h, None if diagonal is None else diagonal + problem.seeing_queries.start


def _scales_of(problem: AttentionProblem) -> Scales:
    """Return what dK and dQ, and scores are multiplied by."""
    to_natural, scores = None, problem.scores
    if scores.score_function is not None:
        to_natural = problem.scale if scores.softcap is None else scores.softcap
    return Scales(gradient_scale(problem), *scaling_of(problem), to_natural)


def gradient_scale(problem: AttentionProblem) -> float:
    """Return what dK and dQ are multiplied by: the scale. With dropout dS is computed times 2 (1 - p)."""
    dropout_p = problem.scores.dropout_p
    return problem.scale * 0.5 / (1.0 - dropout_p) if dropout_p else problem.scale


def rows_of(tensors: tuple[torch.Tensor, ...], queries: Span, keys: Span) -> tuple[torch.Tensor, ...]:
    """Return (q, k, v, dout, lse, delta, dq, dk, dv) of some queries and keys."""
    q, k, v, dout, lse, delta, dq, dk, dv = tensors
    q, dout, lse, delta, dq = (tensor[:, :, queries.start:queries.stop] for tensor in (q, dout, lse, delta, dq))
    k, v, dk, dv = (tensor[:, :, keys.start:keys.stop] for tensor in (k, v, dk, dv))
    return q, k, v, dout, lse.contiguous(), delta.contiguous(), dq, dk, dv
