"""Launching the Hopper backward kernels of wide heads: one for dK and dV and one for dQ; each owns its gradients."""

import operator
from typing import Any

import torch

from tilewise.errors import InvalidInput
from tilewise.kernels.enqueue import Enqueue
from tilewise.kernels.hopper.arguments import (
    NO_BACKWARD_OPERANDS,
    BackwardNumbers,
    BackwardOperands,
    MaskBounds,
    PlanNumbers,
    Scales,
    TileGrid,
    WideHeadPointers,
)
from tilewise.kernels.hopper.backward.config import HopperBackwardConfig, HopperBackwardSchedule
from tilewise.kernels.hopper.backward.launch import (
    Allocate,
    HopperBackward,
    allocator_on,
    d256_kernel_config,
    gradient_form,
    gradient_scale,
    input_form,
    rows_of,
    wide_head_flags,
)
from tilewise.kernels.hopper.backward.launch_splits import HopperBackwardOfSplits, problem_of_splits
from tilewise.kernels.hopper.launch import OPTIONS, bounds_of, dropout_of, scaling_of
from tilewise.problem import AttentionProblem, Sizes, legal_strides


def backward_launch(problem: AttentionProblem, config: HopperBackwardConfig, schedule: HopperBackwardSchedule,
                    dq_strides: Sizes, num_sms: int, incoming: tuple[Sizes, Sizes] | None = None,
                    allocate: Allocate | None = None, plans: tuple[Sizes, ...] = ()
                    ) -> "HopperBackward | HopperBackwardApart | HopperBackwardOfSplits":
    """Bind the backward kernels that a config is for to a problem.

    ``plans``: the strides of the mask plans that they read, of tiles of keys, then, where dQ has a kernel of its own,
    of tiles of queries; none for a band. The rest: see :class:`HopperBackward`.
    """
    if schedule.group_splits > 1 and config.kernel == "d192":
        raise InvalidInput(f"group_splits={schedule.group_splits} of the kernel of head dims 129 to 192; allowed is 1.")
    launch: HopperBackward | HopperBackwardApart
    if config.kernel == "d256":
        launch = HopperBackwardApart(problem, config, schedule, plans)
    else:
        of_splits = problem_of_splits(problem, schedule.group_splits)
        launch = HopperBackward(of_splits, config, schedule, dq_strides, num_sms, incoming, allocate,
                                plans[0] if plans else None)
    if schedule.group_splits == 1:
        return launch
    return HopperBackwardOfSplits(problem, launch, schedule.group_splits, allocate or allocator_on(problem.device))


class HopperPart:
    """One of the kernels, of q, k, v, dout, some gradients, lse and delta, and of a seed, a mask plan and lengths.

    ``forms``: of q, k, v, dout and the gradients, of each a form a chunk of columns, or None. ``is_packed``: whether
    the gradients are those of packed sequences.

    Attributes:
        kernel, grid, scalars: what Triton compiles.
    """

    def __init__(self, kernel: Any, grid: int, scalars: tuple[Any, ...], forms: list[list[Any]],
                 is_packed: bool) -> None:
        self.kernel, self.grid, self.scalars, self.forms, self.is_packed = kernel, (grid,), scalars, forms, is_packed
        self.enqueue = Enqueue(kernel, self.grid, scalars, OPTIONS, specialized=kernel.arg_names.index("numbers"))
        self.places = operator.itemgetter(*[i if form else len(forms) for i, own in enumerate(forms) for form in own])

    def __call__(self, tensors: tuple[torch.Tensor, ...], lse: torch.Tensor, delta: torch.Tensor,
                 operands: BackwardOperands) -> None:
        """Enqueue it on the current stream of the current device."""
        addresses = self.places((*[tensor.data_ptr() for tensor in tensors], None))
        plain = operands is NO_BACKWARD_OPERANDS
        more = () if plain else [tensor.data_ptr() for tensor in (operands.seed, *self._packed(tensors),
                                                                  operands.lists, operands.bits, *operands.lengths)
                                     if tensor is not None]
        self.enqueue((*addresses, lse.data_ptr(), delta.data_ptr(), *more),
                     lambda: self.arguments(tensors, lse, delta, operands), alike=plain)

    def arguments(self, tensors: tuple[torch.Tensor, ...], lse: torch.Tensor, delta: torch.Tensor,
                  operands: BackwardOperands = NO_BACKWARD_OPERANDS) -> tuple[Any, ...]:
        """Return a descriptor of each chunk of a tensor's columns, and what goes by addresses."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        made: list[Any] = []
        for tensor, forms in zip(tensors, self.forms, strict=True):
            made += [form and TensorDescriptor(tensor, list(tensor.shape), legal_strides(tensor), *form)
                     for form in forms]
        return (*made, WideHeadPointers(lse, delta, operands.seed, *self._packed(tensors), operands.lists,
                                         operands.bits, operands.lengths))

    def _packed(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the one or two gradients of packed sequences, else None's."""
        first, *second = tensors[4:]
        return (first, *(second or [None])) if self.is_packed else (None, None)


class HopperBackwardApart:
    """The kernels bound to a problem; call it as HopperBackward. ``plans``: see :func:`backward_launch`.

    Attributes:
        dkdv, dq: the kernels.
    """

    def __init__(self, problem: AttentionProblem, config: HopperBackwardConfig, schedule: HopperBackwardSchedule,
                 plans: tuple[Sizes, ...] = ()) -> None:
        from tilewise.kernels.hopper.backward.d256 import hopper_backward_d256_kernel
        from tilewise.kernels.hopper.backward.d256_types import DQConfig
        from tilewise.kernels.hopper.backward.dq_d256 import hopper_dq_d256_kernel

        self.takes_out = False
        self.queries, self.keys = problem.seeing_queries, problem.seen_keys
        self.reads_all = len(self.queries) == problem.sq and len(self.keys) == problem.sk
        of_splits = problem_of_splits(problem, schedule.group_splits)
        (of_q, of_v), (of_dk, of_dv), (of_dq, _) = (
            [[make(call, size) for size in sizes] + [None] * (2 - len(sizes)) for sizes in config.columns(problem)]
            for make, call in ((input_form, problem), (gradient_form, of_splits), (gradient_form, problem)))
        sources, sequences = [of_q, of_q, of_v, of_v], problem.sequences
        *bounds, count, _is_shifted = bounds_of(problem)
        lower, upper = (0 if bound is None else bound + self.queries.start for bound in bounds)
        sq, sk = len(self.queries), len(self.keys)
        mask, scales = MaskBounds(sq, sk, lower, upper), Scales(gradient_scale(problem), *scaling_of(problem))
        dropout = dropout_of(problem, self.queries.start)
        of_keys, of_queries = [PlanNumbers(*strides) for strides in plans] or (None, None)
        tiles, tiles_q = sequences.slots(sk, 64), sequences.slots(sq, 128)
        self.dkdv = HopperPart(
            hopper_backward_d256_kernel, tiles * problem.b * of_splits.hk,
            (BackwardNumbers(TileGrid(tiles, of_splits.hk, problem.b, schedule.kv_heads_per_swizzle), mask,
                             of_splits.group, scales, count, dropout, of_keys, group_splits=schedule.kv_head_divisor),
             d256_kernel_config(problem, config)),
            [*sources, of_dk, of_dv], sequences.packed is not None)
        self.dq = HopperPart(
            hopper_dq_d256_kernel, tiles_q * problem.b * problem.hq,
            (BackwardNumbers(TileGrid(tiles_q, problem.hq, problem.b, schedule.dq_heads_per_swizzle), mask,
                             problem.group, scales, count, dropout, of_queries),
             DQConfig(**wide_head_flags(problem))),
            [*sources, of_dq], sequences.packed is not None)

    def __call__(self, *tensors: torch.Tensor, operands: BackwardOperands = NO_BACKWARD_OPERANDS) -> None:
        """Enqueue the kernels on the current stream of the current device; they read a seed, mask plans and lengths."""
        q, k, v, dout, lse, delta, dq, dk, dv = self._read(tensors)
        self.dkdv((q, k, v, dout, dk, dv), lse, delta, operands)
        if operands.dq_lists is not None:
            operands = operands._replace(lists=operands.dq_lists, bits=operands.dq_bits)
        self.dq((q, k, v, dout, dq), lse, delta, operands)

    def _read(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tensors if self.reads_all else rows_of(tensors, self.queries, self.keys)
