"""What every call of a problem through cuDNN has in common, worked out at the first.

A call's cost on the host is what a user of short sequences waits for. So a call is a look-up, the allocation of what it
returns and of what it needs on the way, at most one launch for lengths, the graph, and one for what sees nothing.
A plan holds no tensor: streams, threads, nested calls and CUDA graphs cannot meet in one.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch

from tilewise.kernels.cudnn.description import Borders, Core, core_of, describe, gradient_strides, lse_layout
from tilewise.kernels.cudnn.graph import Graph, graph_of
from tilewise.kernels.triton.launch import Launch
from tilewise.problem import AttentionProblem, Sizes, alignment_of
from tilewise.support.caches import registered

PLANS = 256  # as many as graphs, which they hold
_STEP = 4  # lengths of 32 bit in 16 bytes, where each row of them begins
Layout = tuple[Sizes, Sizes]  # shape and strides
Alignment = tuple[bool, ...]  # of each tensor that is the caller's; the others are aligned


class ForwardPlan(NamedTuple):
    """Of a forward pass.

    Attributes:
        graph: what cuDNN runs.
        core: the part of the call that it is handed; None = all.
        out: layout of the result.
        lse: its shape; it is contiguous.
        part: layout of the core's lse as cuDNN writes it, where that is not lse itself.
        blank: writes what sees nothing, where lengths are data; and lse, if cuDNN's is a part.
    """

    graph: Graph
    core: Core | None
    out: Layout
    lse: Sizes
    part: Layout | None
    blank: Launch | None


class BackwardPlan(NamedTuple):
    """Of a backward pass.

    Attributes:
        graph, core: as in a forward pass.
        out_strides: how the graph has out and its gradient.
        gradients: layouts of dq, dk and dv.
        part: layout of the lse that the graph reads, where that is not the saved one.
        blind: whether a query may see nothing and the graph be asked about it.
        blank: writes what sees nothing, where lengths are data.
    """

    graph: Graph
    core: Core | None
    out_strides: Sizes
    gradients: tuple[Layout, Layout, Layout]
    part: Layout | None
    blind: bool
    blank: Launch | None


class Index(NamedTuple):
    """Lengths and borders of the sequences: one tensor of int32, a row each."""

    shape: Sizes
    rows: tuple[str | Borders, ...]
    launch: Launch


# Of a plan and an index, ``operands``, ``lengths``: a launch keeps the kernel of its first call, which counts on
# addresses alike.
@registered
@lru_cache(maxsize=PLANS)
def forward_plan(problem: AttentionProblem, operands: Alignment) -> ForwardPlan:
    """Return the plan of a problem that was not refused, and of operands so aligned."""
    shape = (problem.b, problem.hq, problem.sq, problem.dv)
    core = _core(problem)
    is_lse = problem.sequences.packed is None and (core is None or len(core.queries) == problem.sq)
    return ForwardPlan(graph_for(problem), core, (shape, problem.out_strides), shape[:3],
                       None if is_lse else lse_layout(problem), _blank_out(problem))


@registered
@lru_cache(maxsize=PLANS)
def backward_plan(problem: AttentionProblem, dbias: bool, operands: Alignment) -> BackwardPlan:
    """Return the plan of a problem that was not refused; see :func:`forward_plan`."""
    core = _core(problem)
    blind = problem.sequences.are_data or problem.scores.bias is not None
    is_lse = not blind and (core is None or len(core.queries) == problem.sq)
    q, k, v = gradient_strides(problem)
    keys = problem.b, problem.hk, problem.sk
    gradients = (((problem.b, problem.hq, problem.sq, problem.d), q), ((*keys, problem.d), k), ((*keys, problem.dv), v))
    return BackwardPlan(
        graph_for(problem, dbias=dbias), core, problem.out_strides, gradients,
        None if is_lse else lse_layout(problem), blind, _blank_gradients(problem))


@registered
@lru_cache(maxsize=4 * PLANS)
def index_of(problem: AttentionProblem, borders: tuple[Borders, ...], lengths: Alignment) -> Index:
    """Return how lengths and these borders are made."""
    from tilewise.kernels.triton.zero_fill import lengths_launch

    of_queries, of_keys = (tuple(border for border in borders if border.side == side) for side in "qk")
    rows: tuple[str | Borders, ...] = ("seqlens_q", "seqlens_k")
    rows += (*of_queries, *of_keys)
    stride = -(-(problem.pairs[0] + 1) // _STEP) * _STEP
    return Index((len(rows), stride), rows, lengths_launch(problem, stride, *(
        tuple(border.stride for border in own) for own in (of_queries, of_keys))))


described = registered(lru_cache(maxsize=4096)(describe))


def graph_for(problem: AttentionProblem, *, dbias: bool = False) -> Graph:
    """Return the graph of a problem that was not refused."""
    answer = graph_of(described(problem, dbias=dbias), problem.device)
    if isinstance(answer, str):
        raise RuntimeError(f"the graph {answer}")
    return answer


def empty(layout: Layout, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of that shape and those strides."""
    return torch.empty_strided(*layout, dtype=dtype, device=device)


def alignment(tensors: Iterable[torch.Tensor | None]) -> Alignment:
    """Which of those that are there begin at multiples of 16 bytes; none of them is a fake one."""
    return alignment_of([tensor.data_ptr() for tensor in tensors if tensor is not None])


def _core(problem: AttentionProblem) -> Core | None:
    core = core_of(problem)
    return None if (len(core.queries), len(core.keys)) == (problem.sq, problem.sk) else core


def _blank_out(problem: AttentionProblem) -> Launch | None:
    if not problem.sequences.are_data:
        return None
    from tilewise.kernels.triton.zero_fill import zero_fill_out_launch

    return zero_fill_out_launch(problem)


def _blank_gradients(problem: AttentionProblem) -> Launch | None:
    if not problem.sequences.are_data:
        return None
    from tilewise.kernels.triton.zero_fill import zero_fill_gradients_launch

    return zero_fill_gradients_launch(problem, gradient_strides(problem))
