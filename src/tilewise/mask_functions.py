"""Masks of the library's own that are mask functions: trees, intervals of hidden queries, blocks, prefixes.

Each is a :class:`tilewise.functions.MaskFunction` whose Triton function and torch twin are here already; what a call
wants to say are its tensors. These the constructors make anew, and no caller writes them: what backends derive from
them may be kept as long as they live. Nothing is waited for on the device.
"""

import copy
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from tilewise.functions import PAIR, MaskFunction, MaskKind, complete
from tilewise.masks import Alignment
from tilewise.validate.mask_functions import (
    check_known_mask,
    checked_bitmap,
    checked_block_size,
    checked_intervals,
    checked_parents,
    checked_prefixes,
    checked_segments,
    no_other_tensors,
)

__all__ = ["blocks", "intervals", "prefixes", "tree"]

_MOST = 2**31 - 1


@dataclass(frozen=True, eq=False)
class KnownMask(MaskFunction):
    """A mask function that the library has made itself, and its tensors too.

    Attributes:
        kind: which it is.
    """

    kind: MaskKind = field(kw_only=True)

    def __post_init__(self) -> None:
        complete(self, self.kind.name, None, PAIR, self.kind)

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.kind, *self.tensors)

    def __deepcopy__(self, memo: dict[int, Any]) -> "KnownMask":
        return cast("KnownMask", super().with_tensors(*copy.deepcopy(self.tensors, memo)))

    def with_tensors(self, *tensors: torch.Tensor) -> NoReturn:
        """Refuse: what the tensors hold is the library's own.

        Raises:
            InvalidInput: always.
        """
        raise no_other_tensors(self, self.kind.name)

    def _visible_rows(self, first: int, stop: int, lengths: tuple[int, int],
                      device: torch.device | None = None) -> torch.Tensor:
        shape = self.tensors[0].shape
        check_known_mask(self.kind, shape, (*shape[:2], *lengths), is_packed=False)
        return super()._visible_rows(first, stop, lengths, device)

    def __str__(self) -> str:
        return self.kind.text(self.tensors[0].shape)


def tree(segments: torch.Tensor, parents: Sequence[int] | Sequence[Sequence[int]] | torch.Tensor) -> MaskFunction:
    """Keep what lies on the way to the root of a tree: a query sees its own segment up to itself, and all ancestors'.

    For sequences that branch: rollouts behind one prompt, beams, drafts of speculative decoding, dialogues with a
    common history. A segment is a run of tokens, be it in one piece or not; its tokens follow one another as their
    positions do, and those of its children come behind all of them. There are as many queries as keys.

    Where no token stands before one of its ancestors', ``causal() & tree(...)`` is the same mask, and backends that do
    not see where a function hides tiles skip what lies ahead.

    Args:
        segments: (s,) or (b, s), an integer dtype: the segment of each token, numbered from 0. A token of any other
            number has no segment: it sees nothing, and no token sees it.
        parents: of each segment, the number of the one that it continues, which is less than its own; -1 = none. One
            list, or one for each batch entry. Read on the host: a tensor has to be on the CPU.

    Raises:
        InvalidInput: not such tensors or lists; at the call: another number of queries, keys or batch entries.

    >>> prompt_and_two_answers = tree(torch.tensor([0, 0, 1, 1, 2, 2]), parents=[-1, 0, 0])
    >>> print(prompt_and_two_answers.show(6, 6))
    ■ · · · · ·
    ■ ■ · · · ·
    ■ ■ ■ · · ·
    ■ ■ ■ ■ · ·
    ■ ■ · · ■ ·
    ■ ■ · · ■ ■
    """
    segments = checked_segments(segments)
    rows = checked_parents(parents, len(segments))
    width = max(map(len, rows))
    walks = [_walk(row) for row in rows]
    # Beside its segments each row has one for the tokens that have none, which comes last.
    number, last = (torch.tensor([(*walk[part], *(width,) * (width + 1 - len(walk[part]))) for walk in walks]).to(
        segments.device, non_blocking=True).expand(max(len(rows), len(segments)), -1) for part in (0, 1))
    is_in = (segments >= 0) & (segments < torch.tensor([len(row) for row in rows])[:, None].to(
        segments.device, non_blocking=True))
    own = torch.where(is_in, segments, width)
    in_order, order = number.gather(1, own).sort(stable=True, dim=1)
    ranks = torch.arange(order.shape[1], device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, ranks)
    end = torch.searchsorted(in_order, last.gather(1, own), right=True)
    table = torch.where(is_in[..., None], torch.stack((rank, end), -1), -1).int()[:, None]
    return _made(MaskKind("tree"), table, _numbers(table))


def intervals(start: torch.Tensor, stop: torch.Tensor) -> MaskFunction:
    """Hide one or two intervals of queries from each key: ``start <= query < stop``.

    The column-wise form of FlashMask (Wang et al., 2024), whose ``startend_row_indices`` are such starts and stops. It
    says what documents, trees, prefixes and windows say, in any mixture, by up to four numbers a key.

    Args:
        start, stop: (b|1, hq|1, sk) or, with up to two intervals, (b|1, hq|1, sk, 1|2), an integer dtype. Where stop is
            not more than start, the interval is empty. Positions outside of the queries are as good as their ends.

    Raises:
        InvalidInput: not such tensors; at the call: another number of keys, batch entries or heads.

    >>> start, stop = torch.tensor([[[3, 4, 4, 4]]]), torch.tensor([[[5, 5, 5, 5]]])
    >>> print(intervals(start, stop).show(5, 4))
    ■ ■ ■ ■
    ■ ■ ■ ■
    ■ ■ ■ ■
    · ■ ■ ■
    · · · ·
    """
    start, stop = checked_intervals(start, stop)
    table = torch.stack((start, stop), -1).flatten(3).clamp(0, _MOST).int()
    if table.shape[3] == 2:
        table = torch.nn.functional.pad(table, (0, 2))  # a second interval, which is empty
    return _made(MaskKind("intervals"), table.contiguous(), _numbers(table))


def blocks(bitmap: torch.Tensor, size: int | tuple[int, int] = 128) -> MaskFunction:
    """Keep whole blocks of pairs: block-sparse attention.

    Args:
        bitmap: (blocks of queries, blocks of keys), or (b|1, hq|1, blocks of queries, blocks of keys), bool: True where
            the pairs of a block take part. Copied: written later, it changes nothing.
        size: queries and keys of a block, one number for both or a pair. The last blocks may reach past the ends.

    Raises:
        InvalidInput: not such a tensor or size; at the call: another number of blocks, batch entries or heads.

    >>> print(blocks(torch.tensor([[True, False], [True, True]]), size=2).show(4, 4))
    ■ ■ · ·
    ■ ■ · ·
    ■ ■ ■ ■
    ■ ■ ■ ■
    """
    table, sides = checked_bitmap(bitmap).to(torch.uint8), checked_block_size(size)
    return _made(MaskKind("blocks", sides), table.contiguous(), _numbers(table, table.shape[3], *sides))


def prefixes(lengths: torch.Tensor, alignment: Alignment | int | None = None) -> MaskFunction:
    """Mask the future but for a prefix: as :func:`tilewise.prefix`, with a length for each batch entry.

    Args:
        lengths: (b,) or (1,), an integer dtype: keys of the prefix. Copied: written later, they change nothing.
        alignment: "top_left", or the key that query 0 stands on. May be left out while both lengths are equal.

    Joined to a window it is bounded on the right, too, where the window is: ``prefixes(lengths) & window(left, None)``.

    Raises:
        InvalidInput: not such a tensor or alignment; at the call: another number of batch entries, or no alignment
            where lengths differ.

    >>> print(prefixes(torch.tensor([3])).show(5, 5))
    ■ ■ ■ · ·
    ■ ■ ■ · ·
    ■ ■ ■ · ·
    ■ ■ ■ ■ ·
    ■ ■ ■ ■ ■
    """
    lengths, offset = checked_prefixes(lengths, alignment)
    table = lengths.clamp(0, _MOST).int()[:, None].contiguous()
    return _made(MaskKind("prefixes", (offset,)), table, _numbers(table, offset or 0))


def _made(kind: MaskKind, *tensors: torch.Tensor) -> KnownMask:
    return KnownMask(_in_triton(kind.name), _TWINS[kind.name], tensors, kind=kind)


def _in_triton(name: str) -> Any:
    """Return the Triton function; None where Triton is not installed, as the triton backend then says."""
    if importlib.util.find_spec("triton") is None:
        return None
    from tilewise.kernels.triton import mask_functions

    return getattr(mask_functions, name)


def _numbers(table: torch.Tensor, *others: int) -> torch.Tensor:
    """Return a table's strides of batch entries and heads, 0 where all share one, and others: int64, on its device."""
    per_head = table[0, 0].numel()
    strides = [per_head * (table.shape[1] if dim == 0 else 1) if size > 1 else 0
               for dim, size in enumerate(table.shape[:2])]
    # Filled on the device: to copy them there would wait for it.
    return torch.stack([torch.full((), number, dtype=torch.int64, device=table.device)
                        for number in (*strides, *others)])


def _walk(parents: list[int]) -> tuple[list[int], list[int]]:
    """Number segments in the order of a walk that goes down first; return each one's number, and its subtree's last."""
    sizes = [1] * len(parents)
    for segment in range(len(parents) - 1, -1, -1):  # children come behind their parents
        if parents[segment] >= 0:
            sizes[parents[segment]] += sizes[segment]
    numbers, free, next_root = [], [0] * len(parents), 0
    for segment, parent in enumerate(parents):
        number = next_root if parent < 0 else free[parent]
        if parent < 0:
            next_root += sizes[segment]
        else:
            free[parent] += sizes[segment]
        free[segment] = number + 1
        numbers.append(number)
    return numbers, [number + size - 1 for number, size in zip(numbers, sizes, strict=True)]


def _at(batch: Tensor, head: Tensor, table: Tensor, numbers: Tensor,
        *within: Tensor) -> tuple[Tensor, ...]:
    """Read a table at some places within the part of a batch entry and head."""
    start, of_all = batch * numbers[0] + head * numbers[1], table.flatten()
    return tuple([of_all[start + place] for place in within])


def _intervals(batch: Tensor, head: Tensor, q_idx: Tensor, k_idx: Tensor, *tensors: Tensor) -> Tensor:
    start, stop, start_2, stop_2 = _at(batch, head, *tensors, *(k_idx * 4 + i for i in range(4)))
    return ~(((q_idx >= start) & (q_idx < stop)) | ((q_idx >= start_2) & (q_idx < stop_2)))


def _tree(batch: Tensor, head: Tensor, q_idx: Tensor, k_idx: Tensor, *tensors: Tensor) -> Tensor:
    rank, begin, end = _at(batch, head, *tensors, q_idx * 2, k_idx * 2, k_idx * 2 + 1)
    return (rank >= begin) & (rank < end)


def _blocks(batch: Tensor, head: Tensor, q_idx: Tensor, k_idx: Tensor, *tensors: Tensor) -> Tensor:
    columns, *sides = tensors[1][2:]
    (state,) = _at(batch, head, *tensors, q_idx // sides[0] * columns + k_idx // sides[1])
    return state.ne(0)


def _prefixes(batch: Tensor, head: Tensor, q_idx: Tensor, k_idx: Tensor, *tensors: Tensor) -> Tensor:
    (length,) = _at(batch, head, *tensors, torch.zeros_like(batch))
    return (k_idx <= q_idx + tensors[1][2]) | (k_idx < length)


_TWINS: dict[str, Callable[..., Tensor]] = {
    "intervals": _intervals, "tree": _tree, "blocks": _blocks, "prefixes": _prefixes}
