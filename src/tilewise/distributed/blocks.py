"""The local calls of a plan: the operators of attention on a block of a rank's queries and of a buffer of keys.

The forward pass gives a block's own out and lse. The backward pass is handed those of the whole row: with its lse the
probabilities of a block are the final ones, and with its out so is delta, so that gradients of blocks add up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from tilewise.autograd.fast_path import attend, attend_with, differentiate_with
from tilewise.autograd.function import is_plain
from tilewise.autograd.op import forward_op
from tilewise.dispatch import choose
from tilewise.distributed.packing import Borders
from tilewise.distributed.rows import rows_of
from tilewise.distributed.steps import Block, Step
from tilewise.masks import Mask, Span
from tilewise.masks.document_ranges import documents_of
from tilewise.problem import AttentionProblem
from tilewise.problem.operands import NO_LONGEST, Longest
from tilewise.problem.options import NO_OPERANDS, Operands, OperatorOptions
from tilewise.support.caches import registered

Tensors = tuple[torch.Tensor, ...]
Documents = tuple[torch.Tensor, torch.Tensor]


class BlockTensors:
    """What a plan's blocks make of documents and borders, on a device: each tensor is made once, by the first call.

    Args:
        device: of all tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moved: Documents | None = None
        self._documents: dict[Block, Tensors] = {}
        self._borders: dict[Block, Tensors] = {}

    def documents_of(self, block: Block, numbers: Documents) -> Tensors:
        """Return a block's documents in the form that kernels read.

        Args:
            block: of the plan.
            numbers: of all queries, (b|1, sq), and of all keys, (b|1, sk), on any device; the same at every call.
        """
        found = self._documents.get(block)
        if found is None:
            if numbers[0].device != self._device:
                if self._moved is None:
                    self._moved = (numbers[0].to(self._device, non_blocking=True),
                                   numbers[1].to(self._device, non_blocking=True))
                numbers = self._moved
            rows = (block.place.query_row, len(block.queries)), (block.place.key_row, len(block.keys))
            found = documents_of(*(own[:, first:first + length] for own, (first, length) in zip(
                numbers, rows, strict=True)))
            self._documents[block] = found
        return found

    def borders_of(self, block: Block, borders: Borders) -> Tensors:
        """Return cu_seqlens of the queries and keys of a block's packed sequences, (sequences + 1,), int32."""
        found = self._borders.get(block)
        if found is None:
            found = self._borders[block] = tuple(
                [torch.tensor(own, dtype=torch.int32, device=self._device) for own in borders])
        return found


@dataclass(frozen=True)
class Call:
    """What all blocks of a call have in common.

    Attributes:
        options: of the whole call; a block's mask takes the place of the mask.
        operands: of the rank, without sinks: rows of bias and mask are those of its queries, their columns all keys.
            Of packed sequences they are whole, (sequences|1, hq|1, longest|1, longest|1).
        documents: numbers of all queries, (b|1, sq), and of all keys, (b|1, sk), on any device; or None.
        tensors: of the plan's blocks.
        group: query heads that share a head of keys.
        packed: whether sequences are packed.
    """

    options: OperatorOptions
    operands: Operands
    documents: Documents | None
    tensors: BlockTensors
    group: int
    packed: bool = False

    def query_heads(self, heads: Span) -> Span:
        """Return the query heads of some heads of keys."""
        return Span(heads.start * self.group, heads.stop * self.group)

    def operands_of(self, block: Block, heads: Span) -> Operands:
        """Cut the operands of some query heads of a block."""
        cut: dict[str, Any] = {}
        for name in ("bias", "mask"):
            tensor = getattr(self.operands, name)
            if tensor is not None:
                cut[name] = tensor[places_of(tensor, block, heads, packed=self.packed)]
        slopes = self.operands.alibi_slopes
        if slopes is not None:
            cut["alibi_slopes"] = slopes[places_of(slopes, block, heads, packed=self.packed)]
        if self.documents is not None:
            cut["documents_q"], cut["documents_k"] = self.tensors.documents_of(block, self.documents)
        if block.borders is not None:
            cut["cu_seqlens_q"], cut["cu_seqlens_k"] = self.tensors.borders_of(block, block.borders)
        return NO_OPERANDS if self.operands.seed is None and not cut else self.operands._replace(**cut)

    def options_of(self, block: Block, *, float32_results: bool) -> OperatorOptions:
        """Return the options of a block; ``float32_results``: whether 16-bit inputs have results in float32."""
        longest: Longest = NO_LONGEST
        if block.borders is not None:
            of_pairs = [own for own in (self.operands.bias, self.operands.mask) if own is not None]
            of_q, of_k = (max((own.shape[dim] for own in of_pairs if own.shape[dim] > 1), default=None)
                          for dim in (2, 3))
            longest = of_q, of_k
        origin = (block.place.first_query, block.place.first_key) if self.options.dropout_p else (None, None)
        # Nothing looks at the alignment of a mask without bounds, and more backends take the call without one.
        names_alignment = block.mask.is_bounded or self.operands.alibi_slopes is not None
        return _options_of(self.options, block.mask, longest, origin, names_alignment, float32_results)


@registered
@lru_cache(maxsize=4096)
def _options_of(options: OperatorOptions, mask: Mask, longest: Longest, origin: tuple[int | None, int | None],
                names_alignment: bool, float32_results: bool) -> OperatorOptions:
    """Return the options of a block, of which this is known."""
    alignment = mask.alignment if names_alignment else None
    return options._replace(
        left=mask.left, right=mask.right, alignment=None if isinstance(alignment, int) else alignment,
        offset=alignment if isinstance(alignment, int) else None, prefix=mask.prefix, sink_tokens=mask.sink_tokens,
        chunk=mask.chunk, max_seqlen_q=longest[0], max_seqlen_k=longest[1], dropout_origin_q=origin[0],
        dropout_origin_k=origin[1], float32_results=float32_results)


class Summed(NamedTuple):
    """Which results of a rank's local calls are parts of sums: out, and dq, dk and dv.

    Of 16-bit inputs such parts are float32, and the sum is rounded once.
    """

    out: bool
    gradients: bool


NOT_SUMMED = Summed(out=False, gradients=False)


def summed_of(steps: Sequence[Step], rank: int) -> Summed:
    """Say what several local calls have parts of: those of this rank, and of gradients those of others too."""
    # Steps have the same heads, or no head in common.
    blocks = [(step.heads.start, block) for step in steps for block in step.blocks]
    calls = sorted((first, rows.start, rows.stop) for first, block in blocks for rows in block.query_runs)
    overlap = any(heads == next_heads and start < stop
                  for (heads, _, stop), (next_heads, start, _) in pairwise(calls))
    exchanges = any(step.sends or step.received(rank) for step in steps)
    return Summed(overlap, exchanges or len(blocks) > 1)


def places_of(operand: torch.Tensor, block: Block, heads: Span, *, packed: bool) -> tuple[slice, ...]:
    """Return where a block lies in an operand (b|1, hq|1, s|1, sk|1), or (b|1, hq); what is broadcast stays 1.

    Packed, the first dim is that of sequences, and the others belong to positions in one.
    """
    place = block.place
    if packed:
        count = 1 if block.borders is None else len(block.borders[0]) - 1
        sequences = slice(place.sequence, place.sequence + count)
        # Sequences of a block have all their positions; a single one may have some.
        rows = columns = slice(None)
        if block.borders is None:
            rows = slice(place.first_query, place.first_query + len(block.queries))
            columns = slice(place.first_key, place.first_key + len(block.keys))
    else:
        sequences, rows = slice(None), slice(block.queries.start, block.queries.stop)
        columns = slice(place.first_key, place.first_key + len(block.keys))
    found = (sequences, slice(heads.start, heads.stop), rows, columns)
    return tuple([own if size > 1 else slice(None) for own, size in zip(found, operand.shape, strict=False)])


def attend_to_block(call: Call, block: Block, heads: Span, tensors: Tensors, sinks: torch.Tensor | None, *,
                    float32_results: bool) -> Any:
    """Return out, lse and, where it is wanted, max_logit of a block; out in float32 of 16-bit inputs if said so.

    Args:
        call: the whole call.
        block: which rows.
        heads: query heads.
        tensors: the rank's q, (b, hq, s, d), and the step's keys and values, (b, heads of keys, rows, d or dv).
        sinks: (hq,), of all heads, where they enter with this block.
    """
    q, k, v = _of_queries(tensors[0], block, heads), rows_of(tensors[1], block.keys), rows_of(tensors[2], block.keys)
    wide = float32_results and q.itemsize == 2  # others are plain calls
    operands, options = call.operands_of(block, heads), call.options_of(block, float32_results=wide)
    if sinks is not None:
        operands = operands._replace(sinks=sinks if len(sinks) == len(heads) else sinks[heads.start:heads.stop])
    if is_plain(operands, options):
        numbers = options.scale, options.deterministic, options.backend
        results = attend(q, k, v, options.mask, numbers, with_lse=True)
    else:
        results = attend_with(q, k, v, operands, options)
    return forward_op(q, k, v, *operands, *options) if results is None else results


def check_block(call: Call, block: Block, heads: Span, tensors: Tensors, summed: Summed) -> None:
    """Raise where no backend takes a block; ``heads``: of keys, ``tensors``: the rank's q, k and v, for their sizes."""
    of_queries = call.query_heads(heads)
    q, k, v = tensors
    # Keys of a buffer are dense; those of a view without memory would look like broadcast ones.
    buffers = [own.new_empty((own.shape[0], len(heads), len(block.keys), own.shape[3])) for own in (k, v)]
    whole = [_of_queries(q, block, of_queries), *buffers]
    check_backends(whole, call.operands_of(block, of_queries), call.options_of(block, float32_results=False), summed)


def check_backends(tensors: Sequence[torch.Tensor], operands: Operands, options: OperatorOptions,
                   summed: Summed = NOT_SUMMED) -> None:
    """Raise :class:`UnsupportedProblem` or :class:`InvalidInput` where no backend takes a call in both passes."""
    of_out, of_gradients = (AttentionProblem.from_call(
        tensors[0], tensors[1], tensors[2], operands, options._replace(float32_results=wide)) for wide in summed)
    choose(of_out, options.backend)
    choose(of_gradients.backward(lse_grad=False), options.backend)


def gradients_of_block(call: Call, block: Block, heads: Span, tensors: Tensors, rows: tuple[torch.Tensor | None, ...],
                       needs: tuple[bool, bool, bool, bool], *, float32_results: bool) -> list[torch.Tensor]:
    """Return a block's part of the gradients that are needed: dq, dk and dv, dbias, dalibi_slopes.

    dq, dk and dv are in float32 of 16-bit inputs if said so.

    Args:
        call, block, heads, tensors: as of :func:`attend_to_block`.
        rows: out, lse, dout and dlse of the whole call, (b, hq, s, dv) and (b, hq, s); dlse may be None.
        needs: which gradients; dk and dv come together.
    """
    q, k, v = _of_queries(tensors[0], block, heads), rows_of(tensors[1], block.keys), rows_of(tensors[2], block.keys)
    of_rows = [None if tensor is None else _of_queries(tensor, block, heads) for tensor in rows]
    wide = float32_results and q.itemsize == 2  # others are plain calls
    operands, options = call.operands_of(block, heads), call.options_of(block, float32_results=wide)
    return differentiate_with((q, k, v, *of_rows), operands, options, [*needs, False])


def _of_queries(tensor: torch.Tensor, block: Block, heads: Span) -> torch.Tensor:
    runs = [rows_of(tensor, rows, heads) for rows in block.query_runs]
    return runs[0] if len(runs) == 1 else torch.cat(runs, 2)
