"""What the public calls are given, checked once and put into the form that schedules take."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from tilewise import settings
from tilewise.backends._support.current import autocast_dtype
from tilewise.distributed.blocks import BlockTensors, Call, Documents
from tilewise.distributed.cost_model import Sizes
from tilewise.distributed.layouts import Layout, named_layout
from tilewise.distributed.plan import Narrow, Problem
from tilewise.distributed.sharding import whole_length
from tilewise.distributed.tensor_cache import TensorCache, is_capturing, stream_of
from tilewise.functions import NO_FUNCTIONS
from tilewise.masks import Mask, Span
from tilewise.masks.cutting import MaskBlock, cut_mask
from tilewise.problem import AttentionProblem
from tilewise.problem.length_checks import packed_lengths
from tilewise.problem.operands import NO_LENGTHS, NO_LISTS, as_batches, longest_of, operands_of, parted
from tilewise.problem.options import DRAW_SPAN, Operands, OperatorOptions
from tilewise.problem.problem import problem_from_specs, specs_of_inputs, specs_of_operands
from tilewise.support.caches import registered
from tilewise.validate.call import check_distances
from tilewise.validate.distributed import (
    check_documents,
    check_equal_counts,
    check_four_dims,
    check_mask_to_cut,
    check_padding,
    check_shard_length,
    checked_lengths,
)
from tilewise.validate.tensors import SpecKey, check_inputs, check_lengths_are_tensors
from tilewise.validate.values import check_choices, check_numbers

PACKED_NAMES = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
Lengths = tuple[torch.Tensor | None, ...]  # of these names
Sequences = tuple[tuple[tuple[int, int, int, int], ...], list[list[int]]]  # Arguments.sequences and .borders
_sequences_read = registered(TensorCache(64))
_lengths_on_device = registered(TensorCache(64))


@dataclass(frozen=True, eq=False)
class Arguments:
    """A call on one rank, checked.

    Attributes:
        q, k, v: the rank's shards.
        queries, keys: their layouts.
        mask: by position, of the whole sequences.
        operands: of the rank, the sinks among them; bias and mask have its query rows and all key columns.
        options: of the call, without a mask.
        documents: numbers of all queries, (b|1, sq), and of all keys, on the device that the user had them on; or None.
        sequences: of packed ones, as :class:`tilewise.distributed.plan.Problem` has them; None of one a batch entry.
        padding: of queries and keys of this rank: (b, 1, s, 1), bool, True = padding; or None.
        borders: of packed sequences, cu_seqlens of queries and keys.
        sources: the user's tensors that say what a rank computes: lengths, then documents.
        stand_ins: what takes the gradients of k and v where other ranks have parts of them
            (:class:`tilewise.distributed.heads.ToHeads`); else None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    queries: Layout
    keys: Layout
    mask: Mask
    operands: Operands
    options: OperatorOptions
    documents: Documents | None
    sequences: tuple[tuple[int, int, int, int], ...] | None
    padding: tuple[torch.Tensor | None, torch.Tensor | None]
    borders: list[list[int]] | None = None
    sources: tuple[torch.Tensor | None, ...] = ()
    stand_ins: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def has_operands_of_pairs(self) -> bool:
        """Whether a bias, a boolean mask or slopes say something of each pair of positions."""
        operands = self.operands
        return any(own is not None for own in (operands.bias, operands.mask, operands.alibi_slopes))

    @property
    def keys_with_gradient(self) -> tuple[str, ...]:
        """Which of k and v get a gradient."""
        return tuple([name for name, tensor in (("k", self.k), ("v", self.v))
                      if tensor.requires_grad and torch.is_grad_enabled()])

    @property
    def merges(self) -> bool:
        """Whether blocks may become one: nothing is said of each pair."""
        return not self.has_operands_of_pairs and self.documents is None and not self.options.dropout_p

    @property
    def problem(self) -> Problem:
        """What a plan is made from."""
        return Problem(self.queries, self.keys, self.mask, self.merges, self.k.shape[1], self.step, self.sequences)

    @property
    def step(self) -> int:
        """Where a mask trims a block, it begins at a multiple of this: dropout draws for so many positions at once."""
        return DRAW_SPAN if self.options.dropout_p else 1

    @property
    def packed_lengths(self) -> dict[str, Any] | None:
        """What :func:`tilewise.attention_varlen` is told of the sequences; None where none are packed."""
        if self.sequences is None or self.borders is None:
            return None
        sequences, borders, device = self.sequences, self.borders, self.q.device
        key = device, stream_of(device), self.queries.length, self.keys.length

        def make() -> list[torch.Tensor | None]:
            used = [[own[side + 1] - own[side] for own in sequences] for side in (0, 2)]
            of_user = self.sources[2:4]  # seqused_q and seqused_k; documents have two sources
            gives_used = any(own is not None for own in of_user)
            return [None if own is None else torch.tensor(own, dtype=torch.int32, device=device)
                    for own in (*borders, *(used if gives_used else (None, None)))]

        made = make() if is_capturing(device) else _lengths_on_device.get(self.sources, key, make)
        return {**dict(zip(PACKED_NAMES, made, strict=True)), "max_seqlen_q": self.options.max_seqlen_q,
                "max_seqlen_k": self.options.max_seqlen_k}

    def padded_rows(self, rank: int) -> tuple[Span, ...]:
        """Return which rows of a rank's queries belong to no packed sequence."""
        if self.sequences is None:
            return ()
        starts = [0, *(own[1] for own in self.sequences)]
        stops = [*(own[0] for own in self.sequences), self.queries.length]
        return tuple([rows for start, stop in zip(starts, stops, strict=True)
                      for _, rows in self.queries.local_spans(rank, Span(start, stop))])

    @property
    def sizes(self) -> Sizes:
        """What a cost is estimated from."""
        b, hq, _, d = self.q.shape
        return Sizes(b, hq, self.k.shape[1], d, self.v.shape[3], self.q.element_size())

    def call(self, tensors: BlockTensors, *, packs_documents: bool) -> Call:
        """Return what the blocks of a plan have in common.

        Args:
            tensors: of the plan.
            packs_documents: whether the plan's blocks have borders where documents were.
        """
        operands = self.operands._replace(sinks=None, bias=_detached(self.operands.bias),
                                          alibi_slopes=_detached(self.operands.alibi_slopes))
        return Call(self.options, operands, None if packs_documents else self.documents, tensors,
                    self.q.shape[1] // self.k.shape[1], packed=self.sequences is not None)

    @property
    def narrow(self) -> Narrow | None:
        """What narrows the blocks of a plan; None where position alone decides, or nobody may look at the ids."""
        if self.documents is None or self.sequences is not None or self.documents[0].device.type != "cpu":
            return None
        return _narrow_to_documents(self.documents, self.mask, (self.queries.length, self.keys.length), self.step)

    def description(self, schedule: str | None) -> str:
        """Say what has to be alike on all ranks."""
        (b, hq, _, d), dtype = self.q.shape, str(self.q.dtype).removeprefix("torch.")
        given = [name for name in ("bias", "alibi_slopes", "mask", "sinks") if getattr(self.operands, name) is not None]
        if self.documents is not None:  # where they lie and who computes them decides what is sent
            given.append(f"documents on {self.documents[0].device.type} for backend {self.options.backend!r}")
        needs = self.keys_with_gradient
        packed = ""
        if self.sequences is not None:
            packed = f"{len(self.sequences)} packed sequences, "
            if settings.checks_lengths():  # else each new batch would be a new kind of call
                packed += f"of rows {self.sequences}, "
        return (f"layout {self.queries.name!r} of {self.queries.length} queries and {self.keys.length} keys, "
                f"b{b} h{hq}/{self.k.shape[1]} d{d}/{self.v.shape[3]} {dtype}, {self.mask}, schedule {schedule!r}, "
                f"{packed}operands {', '.join(given) or 'none'}, dropout_p {self.options.dropout_p}, gradients of "
                f"{' and '.join(needs) or 'no key'}")


def arguments_of(given: dict[str, Any], rank: int, ranks: int) -> Arguments:
    """Check a call's arguments on one rank.

    Args:
        given: the arguments of :func:`tilewise.distributed.context_parallel_attention` by name.
        rank, ranks: the own one, and how many there are.

    Raises:
        InvalidInput: an argument that has no meaning; the message names it.
    """
    check_numbers(given["softcap"], given["dropout_p"], given["return_aux"])
    check_choices(given["scale"], given["deterministic"], given["backend"])
    check_inputs(given["q"], given["k"], given["v"])
    q, k, v = _autocast(given["q"], given["k"], given["v"])
    band, visible, documents, sources = _parted(given["mask"])
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_four_dims(name, tensor)
    queries, keys = _layouts((q, k, v), given, rank, ranks)
    seqlens = {name: given[name] for name in ("seqlens_q", "seqlens_k") if given[name] is not None}
    if seqlens:
        check_padding(band, q, seqlens)
    kept, padding = _padding((given["seqlens_q"], given["seqlens_k"]), (queries, keys), q, rank)
    if kept is not None:
        visible = kept if visible is None else visible & kept
    operands = operands_of(given["bias"], given["alibi_slopes"], visible, given["sinks"], given["seed"], NO_LENGTHS,
                           NO_LISTS, NO_FUNCTIONS)
    options = _options(given)
    if operands.alibi_slopes is not None:
        check_distances(band, queries.length, keys.length, are_data=False)
    band = _resolved(band, queries.length, keys.length)
    _check_problem(specs_of_inputs(q, k, v), keys.length, specs_of_operands(operands), options)
    if documents is not None:
        _check_documents(documents, q.shape[0], (queries.length, keys.length))
    return Arguments(q, k, v, queries, keys, band, operands, options, documents, None, padding, sources=sources)


def packed_arguments_of(given: dict[str, Any], rank: int, ranks: int) -> Arguments:
    """Check the arguments of :func:`tilewise.distributed.context_parallel_attention_varlen` on one rank.

    Arguments and errors are those of :func:`arguments_of`.
    """
    check_numbers(given["softcap"], 0, given["return_aux"])
    check_choices(given["scale"], given["deterministic"], given["backend"])
    q, k, v = _autocast(*as_batches(given["q"], given["k"], given["v"]))
    band, visible, documents, of_documents = _parted(given["mask"])
    queries, keys = _layouts((q, k, v), given, rank, ranks)
    longest = longest_of(given["max_seqlen_q"], given["max_seqlen_k"],
                         needed=given["bias"] is not None or visible is not None)
    lengths = tuple([given[name] for name in PACKED_NAMES])
    sequences, borders = _sequences(lengths, (given["max_seqlen_q"], given["max_seqlen_k"]),
                                    (queries.length, keys.length))
    if band.alignment is None and (given["cu_seqlens_k"] is None or given["cu_seqlens_k"] is given["cu_seqlens_q"]):
        band = replace(band, alignment="top_left")  # lengths of queries and keys are the same
    operands = operands_of(given["bias"], given["alibi_slopes"], visible, given["sinks"], None, NO_LENGTHS, NO_LISTS,
                           NO_FUNCTIONS)
    options = _options(given)._replace(max_seqlen_q=longest[0], max_seqlen_k=longest[1])
    whole = [own.new_empty(()).expand(1, own.shape[1], length, own.shape[3]) for own, length in (
        (q, queries.length), (k, keys.length), (v, keys.length))]
    like = [q.new_empty(len(own), dtype=torch.int32) for own in borders]
    AttentionProblem.from_call(whole[0], whole[1], whole[2], operands._replace(
        cu_seqlens_q=like[0], cu_seqlens_k=like[1]), options._replace(
            left=band.left, right=band.right, alignment=band.alignment if isinstance(band.alignment, str) else None,
            offset=band.alignment if isinstance(band.alignment, int) else None))
    if documents is not None:
        _check_documents(documents, 1, (queries.length, keys.length))
    return Arguments(q, k, v, queries, keys, band, operands, options, documents, sequences, (None, None), borders,
                     (*lengths, *of_documents))


def _sequences(lengths: Lengths, most: tuple[Any, Any], totals: tuple[int, int]) -> Sequences:
    """Read the lengths of packed sequences as :func:`_read` does; of tensors that were read before, remember it.

    On a GPU the host waits for lengths once, and not in every layer.
    """
    check_lengths_are_tensors(PACKED_NAMES, (lengths[0], lengths[0] if lengths[1] is None else lengths[1],
                                             *lengths[2:]))
    tensors, numbers = ([own if isinstance(own, torch.Tensor) is is_tensor else None for own in most]
                        for is_tensor in (True, False))
    return _sequences_read.get((*lengths, *tensors), (totals, *numbers, settings.checks_lengths()),
                               lambda: _read(lengths, most, totals))


def _read(lengths: Lengths, most: tuple[Any, Any], totals: tuple[int, int]) -> Sequences:
    """Read where packed sequences begin and end, and how much of each takes part; wait for them if on a GPU."""
    on_host = [None if own is None else own.cpu() for own in lengths]
    rows = [torch.empty(()).expand(total, 1, 1) for total in totals]
    found = packed_lengths(rows[0], rows[1], tuple(on_host), most)
    borders = [own.tolist() for own in found[:2]]
    check_equal_counts(*map(len, borders))
    spans = []
    for own, used in zip(borders, found[2:], strict=True):
        ends = own[1:] if used is None else [begin + max(0, min(end - begin, length)) for begin, end, length in zip(
            own, own[1:], used.tolist(), strict=False)]
        spans.append(list(zip(own, ends, strict=False)))
    return tuple([(*of_q, *of_k) for of_q, of_k in zip(*spans, strict=True)]), borders


def _layouts(tensors: tuple[torch.Tensor, ...], given: dict[str, Any], rank: int, ranks: int) -> tuple[Layout, Layout]:
    """Return the layouts of queries and keys, which the shards have to fit."""
    (q, k, v), lengths = tensors, checked_lengths(given["lengths"])
    queries, keys = (named_layout(given["layout"], whole_length(given["layout"], own.shape[2], length, ranks), ranks)
                     for own, length in ((q, lengths[0]), (k, lengths[1])))
    for name, own, layout in (("q", q, queries), ("k", k, keys), ("v", v, keys)):
        check_shard_length(name, own.shape[2], layout, rank)
    return queries, keys


def _options(given: dict[str, Any]) -> OperatorOptions:
    """Return the options of a call, without a mask."""
    deterministic, scale = given["deterministic"], given["scale"]
    return OperatorOptions(
        None if scale is None else float(scale), None, None, None, softcap=given["softcap"],
        dropout_p=given["dropout_p"], max_logit="max_logit" in given["return_aux"],
        deterministic=torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        backend=given["backend"] or settings.default_backend())


def _parted(mask: Any) -> tuple[Mask, torch.Tensor | None, Documents | None, tuple[torch.Tensor | None, ...]]:
    """Part a mask into its band, its tensor and its documents' numbers, which are views of the last two tensors."""
    band, visible, lists, function = parted(mask)
    check_mask_to_cut(mask, has_function=function is not None, is_tiled=lists[2] is not None)
    documents = None if lists[0] is None or lists[1] is None else (lists[0][:, 0], lists[1][:, 0])
    return band, visible, documents, lists[:2]


@registered
@lru_cache(maxsize=1024)
def _resolved(band: Mask, query_length: int, key_length: int) -> Mask:
    """Name the alignment by its offset; raises :class:`InvalidInput` where there are two."""
    offset = band.offset(query_length, key_length) if band.is_bounded or band.alignment is not None else 0
    return Mask(band.left, band.right, offset, band.prefix, band.sink_tokens, band.chunk)


@registered
@lru_cache(maxsize=1024)
def _check_problem(tensors: tuple[SpecKey, SpecKey, SpecKey], key_length: int, operands: tuple[SpecKey, ...],
                   options: OperatorOptions) -> None:
    """Check tensors against one another as :func:`tilewise.attention` does, with keys of all ranks."""
    of_q, *of_keys = tensors
    of_k, of_v = ((name, (b, heads, key_length, d), (0, 0, 0, 0), dtype, device)
                  for name, (b, heads, _, d), _, dtype, device in of_keys)
    # The mask has been resolved; what it says of distances does not matter to the checks.
    problem_from_specs((of_q, of_k, of_v), operands, options._replace(alignment="top_left").mask, options.scale,
                       options.settings, options.deterministic)


def _check_documents(documents: Documents, b: int, lengths: tuple[int, int]) -> None:
    for numbers, length, what in zip(documents, lengths, ("queries", "keys"), strict=True):
        check_documents(numbers, what, b, length)


def _padding(seqlens: tuple[torch.Tensor | None, torch.Tensor | None], layouts: tuple[Layout, Layout], q: torch.Tensor,
             rank: int) -> tuple[torch.Tensor | None, tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Return which keys take part, (b, 1, 1, sk), and what of the own queries and keys is padding, (b, 1, s, 1)."""
    kept: torch.Tensor | None = None
    found: list[torch.Tensor | None] = []
    for side, (own, layout) in enumerate(zip(seqlens, layouts, strict=True)):
        if own is None:
            found.append(None)
            continue
        places = torch.cat([torch.arange(0, device=q.device), *(
            torch.arange(piece.start, piece.stop, device=q.device) for piece in layout.pieces[rank])])
        found.append((places >= own[:, None])[:, None, :, None])
        if side == 1:
            kept = (torch.arange(layout.length, device=q.device) < own[:, None])[:, None, None]
    return kept, (found[0], found[1])


def _narrow_to_documents(documents: Documents, mask: Mask, lengths: tuple[int, int], step: int) -> Narrow:
    """Return what trims a block to keys and queries of documents that both sides may have."""
    numbers_q, numbers_k = documents

    def trimmed(numbers: torch.Tensor, span: Span, others: torch.Tensor) -> Span:
        own = numbers[:, span.start:span.stop]
        low, high = others.amin(1, keepdim=True), others.amax(1, keepdim=True)
        inside = ((own >= low) & (own <= high)).any(0).nonzero()
        if not len(inside):
            return Span(span.start, span.start)
        first = (span.start + int(inside[0])) // step * step
        return Span(max(span.start, first), span.start + int(inside[-1]) + 1)

    def narrow(block: MaskBlock) -> tuple[MaskBlock, ...]:
        queries, keys = block.queries, block.keys
        keys = trimmed(numbers_k, keys, numbers_q[:, queries.start:queries.stop])
        if not len(keys):
            return ()
        queries = trimmed(numbers_q, queries, numbers_k[:, keys.start:keys.stop])
        return cut_mask(mask, queries, keys, lengths, step) if len(queries) else ()

    return narrow


def _detached(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach()


def _autocast(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dtype = autocast_dtype(q.device.type)
    if dtype is None:
        return q, k, v
    q, k, v = (one.to(dtype) if one.is_floating_point() and one.dtype != torch.float64 else one for one in (q, k, v))
    return q, k, v
