"""Launching the Hopper backward kernels where a group's query heads are split among tiles: dk and dv are sums, then."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tilewise.errors import InvalidInput
from tilewise.kernels.enqueue import Enqueue
from tilewise.kernels.hopper.arguments import NO_BACKWARD_OPERANDS, BackwardOperands, StridedRows
from tilewise.kernels.hopper.launch import OPTIONS
from tilewise.problem import AttentionProblem, Sizes, dense_strides, padded_dim

if TYPE_CHECKING:
    from tilewise.kernels.hopper.backward.launch import Allocate, HopperBackward
    from tilewise.kernels.hopper.backward.launch_d256 import HopperBackwardApart


def problem_of_splits(problem: AttentionProblem, group_splits: int) -> AttentionProblem:
    """Return the call as the kernel that owns keys sees it: each split is a head of dk and dv, in float32."""
    if group_splits == 1:
        return problem
    if problem.group % group_splits:
        raise InvalidInput(f"group_splits={group_splits} of {problem.group} query heads that share a head of k; "
                           "allowed are their divisors.")
    return replace(problem, hk=problem.hk * group_splits, float32_results=True)


class HopperBackwardOfSplits:
    """The kernels bound to a problem whose groups are split, and the sum behind them; call it as HopperBackward.

    Attributes:
        launch: writes dq, and of dk and dv each split's.
        forms: sizes and strides of what it writes them to.
    """

    def __init__(self, problem: AttentionProblem, launch: "HopperBackward | HopperBackwardApart", group_splits: int,
                 allocate: "Allocate") -> None:
        from tilewise.kernels.hopper.backward.sum_splits import ROWS, hopper_sum_splits_kernel

        if not launch.reads_all:
            raise InvalidInput(f"group_splits={group_splits} of a call with queries or keys that are not read; allowed "
                               "is 1.")
        self.launch, self.allocate = launch, allocate
        self.takes_out, self.reads_all = launch.takes_out, launch.reads_all
        self.forms = [_form_of_splits((problem.b, problem.hk * group_splits, problem.sk, columns))
                       for columns in (problem.d, problem.dv)]
        self.enqueue_sum = Enqueue(
            hopper_sum_splits_kernel, (-(-problem.sk // int(ROWS)) * problem.b * problem.hk,),
            (problem.sk, problem.hk, group_splits, problem.d, problem.dv, padded_dim(problem.d),
             padded_dim(problem.dv)), OPTIONS)

    def __call__(self, *tensors: torch.Tensor, operands: BackwardOperands = NO_BACKWARD_OPERANDS) -> None:
        """Enqueue the kernels on the current stream of the current device."""
        splits = [self.allocate(*form, torch.float32) for form in self.forms]
        self.launch(*tensors[:7], *splits, operands=operands)
        summed = (*splits, *tensors[7:])
        self.enqueue_sum(tuple([tensor.data_ptr() for tensor in summed]), lambda: self.arguments(summed), alike=True)

    def arguments(self, summed: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        """Return the splits' dk and dv, and dk and dv, as the kernel takes them."""
        return tuple(StridedRows(tensor, *tensor.stride()[:3]) for tensor in summed)


def _form_of_splits(sizes: Sizes) -> tuple[Sizes, Sizes]:
    """Return sizes and strides of a tensor of splits, whose rows begin at multiples of 16 bytes."""
    return sizes, dense_strides((*sizes[:3], -(-sizes[3] // 4) * 4), (4, 3, 2, 1))
