"""Lengths, tables and indices that lead elsewhere: refused where somebody may look at their values.

On a CPU a call looks at its own. On a GPU that would make the host wait, so it is done on demand alone
(``TILEWISE_CHECK=1``) and one call late: the device finds what is wrong, its findings are copied into pinned memory
behind an event, and a later call that meets the event passed raises for the earlier one. Nothing looks where values
are not there (fake and meta tensors), are not one call's (functorch) or would enter a graph (compilers, CUDA graphs).
On a CPU the operator looks once more, at what a graph or a map of such a call hands it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from numbers import Integral
from typing import Any, NamedTuple

import torch

from tilewise import settings
from tilewise.errors import InvalidInput
from tilewise.problem.decode import CacheOperands, DecodeProblem

_Tensor, _INTEGERS = torch.Tensor, (torch.int32, torch.int64)
_is_compiling, _dispatch_modes = torch.compiler.is_compiling, torch._C._len_torch_dispatch_stack
_in_functorch, _tracing = torch._C._are_functorch_transforms_active, torch._C._get_tracing_state
_VALUES = 3  # numbers that a message may quote


class Rule(NamedTuple):
    """One thing that may be wrong, for all entries of a tensor at once.

    Attributes:
        wrong: (n,), bool.
        values: up to three integer tensors of n elements or one, which the message quotes at the first wrong entry.
        message: of that entry's place and of the values there.
    """

    wrong: torch.Tensor
    values: tuple[torch.Tensor, ...]
    message: Callable[..., str]


class Pending(NamedTuple):
    """Findings on their way to the host: of each rule whether one was broken, where first, and the values there."""

    findings: torch.Tensor
    have_arrived: Callable[[], bool]
    messages: tuple[Callable[..., str], ...]


# Never longer than the host may run ahead of a device: the driver makes it wait at some thousand launches.
_pending: deque[Pending] = deque()


def packed_lengths(q: Any, k: Any, lengths: Any, longest: tuple[Any, Any]) -> Any:
    """Return the lengths of packed sequences, keys' borders filled in, after a look at them where that is free.

    What is no tensor, or of a wrong shape or dtype, is left to the checks that come later.

    Args:
        q, k: (total, h, d).
        lengths: ``cu_seqlens_q``, ``cu_seqlens_k``, ``seqused_q`` and ``seqused_k``.
        longest: ``max_seqlen_q`` and ``max_seqlen_k``.

    Raises:
        InvalidInput: borders that do not begin with 0, descend or pass the last row; more rows in use than a sequence
            has; a sequence longer than the longest; with ``TILEWISE_CHECK=1`` also keys of another total than that of
            the queries whose borders they share, some of which would be left out.
    """
    borders_q, borders_k, *used = lengths
    if _may_look(borders_q):
        _look("attention_varlen", lambda: _rules_of_packed((q, k), (borders_q, borders_k), used, longest))
    return (borders_q, borders_q if borders_k is None else borders_k, *used)


def check_borders(q: torch.Tensor, k: torch.Tensor, lengths: tuple[torch.Tensor | None, ...],
                  longest: tuple[Any, Any]) -> None:
    """Do what :func:`packed_lengths` does, on a CPU, for calls that it let pass: compiled ones, and in torch.func.

    Args:
        q, k: (1, h, total, d), which may have no values.
        lengths, longest: as there; lengths have values.
    """
    borders_q, borders_k, *used = lengths
    if borders_q is not None and _is_on_host(borders_q) and _may_look(borders_q, in_transform=True):
        rows = q[0].transpose(0, 1), k[0].transpose(0, 1)
        _look("attention_varlen", lambda: _rules_of_packed(rows, (borders_q, borders_k), used, longest))


def check_cache(problem: DecodeProblem, rows: int, operands: CacheOperands) -> None:
    """Look at what says where the keys of each sequence lie in a cache, where that is free.

    Args:
        problem: the call, whose shapes and dtypes have been checked.
        rows: the rows, or pages, of the caches.
        operands: its tensors.

    Raises:
        InvalidInput: lengths above the capacity; indices and entries in use of a table that the caches have not; with
            ``TILEWISE_CHECK=1`` also new keys that there is no room for.
    """
    lengths, indices, table = operands.cache_seqlens, operands.cache_batch_idx, operands.block_table
    first = next((tensor for tensor in (lengths, indices, table) if tensor is not None), None)
    if first is not None and _may_look(first):
        _look("attention_decode", lambda: _rules_of_cache(problem, rows, operands))


def check_length(length: Any, k_cache: torch.Tensor, table: torch.Tensor | None) -> None:
    """Look at the length of every sequence if it is a number, which is free on every device.

    Raises:
        InvalidInput: it is above what the cache, or the pages of a table, can hold.
    """
    is_known = isinstance(length, Integral) and not isinstance(length, bool) and not _is_compiling()
    if not is_known or k_cache.dim() != 4 or not (table is None or (isinstance(table, _Tensor) and table.dim() == 2)):
        return
    capacity = k_cache.shape[2] * (1 if table is None else table.shape[1])
    if int(length) > capacity:
        raise InvalidInput(f"cache_seqlens is {length}; allowed are 0 to {capacity}, the positions that the "
                           f"{_holder(table is not None)}.")


def _may_look(tensor: Any, in_transform: bool = False) -> bool:
    """Whether values may be looked at, now or later; asked ahead of everything else, and quickly.

    ``in_transform``: of torch.func; for tensors that are known to have values there.
    """
    if _is_compiling() or tensor.__class__ is not _Tensor:
        return False
    if tensor.is_cuda:
        if not settings.checks_lengths() or torch.cuda.is_current_stream_capturing():
            return False
    elif not tensor.is_cpu:
        return False
    return not ((_in_functorch() and not in_transform) or _dispatch_modes() or _tracing() is not None)


def _look(caller: str, rules: Callable[[], Iterable[Rule]]) -> None:
    """Look at a call's own tensors if they are on the host; else at what is known of earlier calls, and ask anew."""
    if settings.checks_lengths():
        _raise_for_earlier_calls()
    found = [rule for rule in rules() if rule.wrong.numel()]
    if not found:
        return
    if not _is_on_host(found[0].wrong):
        copy, have_arrived = _copied_to_host(torch.stack([_finding(rule) for rule in found]))
        _pending.append(Pending(copy, have_arrived, tuple([_later(caller, rule.message) for rule in found])))
        return
    for rule in found:
        if rule.wrong.any():
            _, place, *values = _finding(rule).tolist()
            raise InvalidInput(rule.message(place, *values))


def _raise_for_earlier_calls() -> None:
    while _pending and _pending[0].have_arrived():
        pending = _pending.popleft()
        for message, (is_wrong, *numbers) in zip(pending.messages, pending.findings.tolist(), strict=True):
            if is_wrong:
                raise InvalidInput(message(*numbers))


def _later(caller: str, message: Callable[..., str]) -> Callable[..., str]:
    return lambda *numbers: f"An earlier call of {caller} was wrong (TILEWISE_CHECK=1): {message(*numbers)}"


def _finding(rule: Rule) -> torch.Tensor:
    """Return five numbers: whether something is wrong, where first, and the values there; the host knows none."""
    place = rule.wrong.int().argmax(0, keepdim=True)
    count = rule.wrong.numel()
    # By index_select: an index that is a tensor without dims would be read by the host.
    values = [value.to(torch.int64).expand(count).index_select(0, place) for value in rule.values]
    blank = [torch.zeros_like(place)] * (_VALUES - len(values))
    return torch.cat([rule.wrong.any().long().view(1), place, *values, *blank])


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu


def _copied_to_host(findings: torch.Tensor) -> tuple[torch.Tensor, Callable[[], bool]]:
    """Copy findings to the host, without waiting; return the copy, and what tells whether it has arrived."""
    copy = torch.empty(findings.shape, dtype=findings.dtype, pin_memory=True)
    copy.copy_(findings, non_blocking=True)
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(findings.device))
    return copy, event.query


def _rules_of_packed(rows: tuple[Any, Any], borders: tuple[Any, Any], used: Iterable[Any],
                     longest: tuple[Any, Any]) -> Iterator[Rule]:
    is_shared = borders[1] is None or borders[1] is borders[0]
    for side, tensor, own, in_use, most in zip("qk", rows, borders, used, longest, strict=True):
        own, name = (borders[0], "cu_seqlens_q") if own is None else (own, f"cu_seqlens_{side}")
        if not (_has_integers(own, borders[0].device) and own.numel() and isinstance(tensor, _Tensor)
                and tensor.dim() == 3):
            continue
        own, total = own.to(torch.int64), tensor.shape[0]
        if side == "q" or not is_shared:
            yield from _rules_of_borders(name, own, side, total)
        why = (": keys have the borders of queries, since cu_seqlens_k is left out"
               if side == "k" and borders[1] is None else "")
        yield Rule(own[1:] > total, (own[1:],), lambda at, got, _, __, name=name, side=side, total=total, why=why: (
            f"{name} ends sequence {at} at {got} and {side} has {total} rows{why}; allowed are ends up to {total}."))
        if why and settings.checks_lengths() and total != rows[0].shape[0]:
            yield Rule(own[-1:] < total, (own[-1:],), lambda _, end, __, ___, total=total: (
                f"k has {total} rows and its sequences end at {end}, as those of q do, since cu_seqlens_k is left out; "
                f"allowed with TILEWISE_CHECK=1 are {end} rows, or as many as q has."))
        lengths = own.diff()
        if in_use is not None:
            if not _has_integers(in_use, own.device) or in_use.shape != lengths.shape:
                continue
            yield Rule(in_use > lengths, (in_use, lengths), lambda at, got, length, _, name=name, side=side: (
                f"seqused_{side} is {got} at [{at}] and {name} gives sequence {at} a length of {length}; allowed are "
                f"0 to {length}."))
            lengths = torch.minimum(lengths, in_use)
        most = _number(most, own.device)
        if most is not None:
            bound = torch.zeros_like(lengths) + most
            yield Rule(lengths > bound, (bound, lengths), lambda at, got, length, _, side=side: (
                f"max_seqlen_{side} is {got} and sequence {at} has a length of {length}; allowed is the longest one's "
                "or more."))


def _rules_of_borders(name: str, borders: torch.Tensor, side: str, total: int) -> Iterator[Rule]:
    def hint(of_all: int) -> str:
        if of_all != total:
            return ""
        return (f" Its entries add up to the {total} rows of {side}, as lengths do: pass "
                "torch.nn.functional.pad(lengths.cumsum(0), (1, 0)) instead.")

    of_all = borders.sum().view(1)
    yield Rule(borders[:1] != 0, (borders[:1], of_all), lambda _, got, of_all, __: (
        f"{name} begins with {got}; allowed is 0, followed by the end of each sequence.{hint(of_all)}"))
    yield Rule(borders[1:] < borders[:-1], (borders[1:], borders[:-1], of_all), lambda at, end, start, of_all: (
        f"{name} has {start} at [{at}] and {end} at [{at + 1}]: sequence {at} would end before it begins; allowed is "
        f"{start} or more.{hint(of_all)}"))


def _has_integers(tensor: Any, device: torch.device) -> bool:
    return (tensor.__class__ is _Tensor and tensor.dim() == 1 and tensor.dtype in _INTEGERS
            and tensor.device == device)


def _number(most: Any, device: torch.device) -> Any:
    """Return the size of the longest sequence, if it is there and nobody has to wait for it."""
    if isinstance(most, _Tensor):
        known = most.__class__ is _Tensor and most.dtype in _INTEGERS and most.numel() == 1 and most.device == device
        return most.reshape(1) if known else None
    return None if most is None or isinstance(most, torch.SymInt) else int(most)


def _rules_of_cache(problem: DecodeProblem, rows: int, operands: CacheOperands) -> Iterator[Rule]:
    lengths, indices, table = operands.cache_seqlens, operands.cache_batch_idx, operands.block_table
    capacity, new = problem.capacity, problem.new
    if lengths is not None:
        holder = _holder(bool(problem.page))
        yield Rule(lengths > capacity, (lengths,), lambda at, got, _, __: (
            f"cache_seqlens has {got} at [{at}]; allowed are numbers up to {capacity}, the positions that the "
            f"{holder}."))
        if new and settings.checks_lengths():
            yield Rule(lengths.clamp(min=0) + new > capacity, (lengths,), lambda at, got, _, __: (
                f"cache_seqlens has {got} at [{at}] and k has {new} positions to append: there is no room for them in "
                f"the {capacity} that the {holder}; allowed with TILEWISE_CHECK=1 are numbers up to {capacity - new}."))
    if indices is not None:
        yield Rule((indices < 0) | (indices >= rows), (indices,), lambda at, got, _, __: (
            f"cache_batch_idx has {got} at [{at}]; allowed are 0 to {rows - 1}, for k_cache has {rows} rows."))
    if table is not None:
        count = table.shape[1]
        wrong = _used_entries(problem, operands, table) & ((table < 0) | (table >= rows))
        yield Rule(wrong.flatten(), (table.flatten(),), lambda at, got, _, __: (
            f"block_table has {got} at [{at // count}, {at % count}]; allowed are 0 to {rows - 1}, for k_cache has "
            f"{rows} pages."))


def _holder(is_paged: bool) -> str:
    return "block_table covers" if is_paged else "cache has for a sequence"


def _used_entries(problem: DecodeProblem, operands: CacheOperands, table: torch.Tensor) -> torch.Tensor:
    """Return which pages are read or written, (b, pages of a sequence); the entries of others may hold anything."""
    before, capacity = operands.cache_seqlens, problem.capacity
    before = table.new_full((problem.b,), capacity) if before is None else before.clamp(min=0)
    length = (before + problem.new).clamp(max=capacity)
    first = torch.zeros_like(length) if operands.cache_leftpad is None else operands.cache_leftpad
    if problem.mask.left is not None:
        first = torch.maximum(first, length - problem.sq - problem.mask.left)
    if problem.new:
        first = torch.minimum(first, before.clamp(max=capacity - 1))
    pages = torch.arange(table.shape[1], device=table.device)
    return (pages >= first[:, None] // problem.page) & (pages * problem.page < length[:, None])
