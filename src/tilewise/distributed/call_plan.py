"""The plan of a kind of call: made once, and kept for the calls that have the same layouts, mask and lengths.

The layers of a model call with the same tensors of documents or cu_seqlens. The first one plans; the others, and every
backward pass, find the plan by the identity of these tensors.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from tilewise.distributed.arguments import Arguments
from tilewise.distributed.blocks import BlockTensors, Summed, summed_of
from tilewise.distributed.cost_model import Links, groups_of, keeps_gathered
from tilewise.distributed.plan import Problem, all_gather_plan, cached_ring_plan, no_narrowing, ring_plan
from tilewise.distributed.segments import Segment, Segments, segments_of
from tilewise.distributed.steps import Step
from tilewise.distributed.tensor_cache import TensorCache, is_capturing, stream_of
from tilewise.masks import Mask, Span
from tilewise.support.caches import registered


@dataclass(frozen=True, eq=False)
class CallPlan:
    """What a rank does in a kind of call.

    Attributes:
        steps: in their order.
        summed: which results of its local calls are parts of sums.
        padding: rows of its queries that belong to no packed sequence.
        segments: of the blocks' queries.
        backwards: those of the backward pass, by :meth:`Segments.backwards`.
        keeps_last: whether the last step's messages are kept for the backward pass, which begins with that step: of a
            ring, and of an all-gather without groups where no rank receives more keys than each has of its own.
        takes_sinks: of each step's blocks which ones take the sinks, each row once; None where they are added behind.
        tensors: what the blocks' documents and borders become.
        packs_documents: whether documents are computed as packed sequences.
    """

    steps: tuple[Step, ...]
    summed: Summed
    padding: tuple[Span, ...]
    segments: Segments
    backwards: tuple[tuple[tuple[Segment, ...], ...], ...]
    keeps_last: bool
    takes_sinks: tuple[tuple[bool, ...], ...] | None
    tensors: BlockTensors
    packs_documents: bool = False


_plans = registered(TensorCache(256))
_documents = registered(TensorCache(64))
_TAKE_SINKS = (None, "gluon", "triton", "reference")  # backends


def call_plan(name: str, arguments: Arguments, rank: int) -> CallPlan:
    """Return the plan of a schedule of steps, "ring" or "all_gather", for a rank of the arguments' layouts."""
    device = arguments.q.device
    key = (name, rank, arguments.sizes, arguments.queries, arguments.keys, arguments.mask, arguments.merges,
           arguments.has_operands_of_pairs, arguments.step, bool(arguments.options.dropout_p),
           arguments.options.backend, arguments.stand_ins is None, device, stream_of(device))
    # Documents' numbers are the mask's own; cu_seqlens are the user's.
    plan = _plans.get(arguments.sources, key, lambda: _made(name, arguments, rank),
                      compares=arguments.sequences is not None)
    return replace(plan, tensors=BlockTensors(device)) if is_capturing(device) else plan


def _made(name: str, arguments: Arguments, rank: int) -> CallPlan:
    problem = planned_problem(arguments)
    packs_documents = problem.sequences is not None and arguments.sequences is None
    narrow = None if packs_documents else arguments.narrow
    if name == "all_gather":
        of_key, pieces = arguments.sizes.of_key, max(map(len, problem.queries.pieces))
        steps, most = all_gather_plan(problem, rank, lambda rows: groups_of(
            rows * of_key, problem.heads_apart, pieces, Links()), narrow or no_narrowing)
        keeps_last = keeps_gathered(len(steps), most, problem.keys)
    else:
        keeps_last = True
        steps = cached_ring_plan(problem, rank) if narrow is None else ring_plan(problem, rank, narrow)
    summed = summed_of(steps, rank)
    if arguments.stand_ins is not None:  # other ranks have parts of dk and dv
        summed = summed._replace(gradients=True)
    segments = segments_of(steps, arguments.q.shape[2])
    return CallPlan(steps, summed, arguments.padded_rows(rank), segments, segments.backwards(), keeps_last,
                    segments.first_blocks() if arguments.options.backend in _TAKE_SINKS else None,
                    BlockTensors(arguments.q.device), packs_documents)


def planned_problem(arguments: Arguments) -> Problem:
    """Return what the plan of a call is made from: documents that are computed as packed sequences are those there."""
    packed = _packed_documents(arguments)
    return arguments.problem if packed is None else replace(arguments.problem, sequences=packed, merges=True)


def with_packed_documents(arguments: Arguments) -> Arguments:
    """Return a call of the whole sequence whose documents are packed sequences, or the same call if they cannot be.

    Nor are they on a GPU where ``deterministic``: the Hopper kernels take a mask there, and no lengths that are data.
    """
    packed = _packed_documents(arguments)
    if packed is None or (arguments.options.deterministic and arguments.q.device.type != "cpu"):
        return arguments
    mask = replace(arguments.mask, alignment="top_left") if arguments.mask.is_bounded else Mask()
    borders = [0, *(stop for _, stop, _, _ in packed)]
    return replace(arguments, mask=mask, documents=None, sequences=packed, borders=[borders, borders])


def _packed_documents(arguments: Arguments) -> tuple[tuple[int, int, int, int], ...] | None:
    """Return what :func:`document_sequences` does, which looks at ids once; None of ids on a GPU."""
    if arguments.narrow is None:
        return None
    key = (arguments.queries, arguments.keys, arguments.mask, arguments.q.shape[0], arguments.has_operands_of_pairs,
           bool(arguments.options.dropout_p), arguments.options.backend)
    return _documents.get(arguments.sources, key, lambda: document_sequences(arguments), compares=False)


def document_sequences(arguments: Arguments) -> tuple[tuple[int, int, int, int], ...] | None:
    """Return documents as packed sequences, which share a local call where documents would have one for each part.

    None where they are none: several batch entries, documents that do not stand together, a mask that counts positions
    from the front of all, operands of the pairs, or a named backend that might take no packed sequences.
    """
    mask, documents = arguments.mask, arguments.documents
    if (documents is None or arguments.q.shape[0] != 1 or mask.has_exceptions or arguments.options.dropout_p
            or (mask.is_bounded and mask.offset(arguments.queries.length, arguments.keys.length) != 0)
            or arguments.has_operands_of_pairs or arguments.options.backend not in (None, "triton", "reference")):
        return None
    of_queries, of_keys = documents
    if of_queries.shape != of_keys.shape or len(of_queries) != 1 or not torch.equal(of_queries, of_keys):
        return None
    numbers, lengths = torch.unique_consecutive(of_queries[0], return_counts=True)
    if len(numbers.unique()) != len(numbers):
        return None
    return tuple([(*own, *own) for own in pairwise([0, *lengths.cumsum(0).tolist()])])
