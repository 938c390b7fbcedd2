"""The autograd Function of a plan: steps of blocks, with the messages of the next step under way meanwhile."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from tilewise.backends.base import Results
from tilewise.distributed.blocks import Call, Tensors, attend_to_block, gradients_of_block, places_of
from tilewise.distributed.call_plan import CallPlan
from tilewise.distributed.exchange import Message, TensorForm, Transfer, empty_message, pack, start, tensors_of, unpack
from tilewise.distributed.partial import PartialResults, QueryGradient, sinks_gradient, sum_dtype
from tilewise.distributed.rows import rows_of, write_rows
from tilewise.distributed.steps import Block, Part, Step
from tilewise.masks import Span


@dataclass(frozen=True)
class Planned:
    """A call with its plan, on one rank."""

    group: dist.ProcessGroup
    rank: int
    plan: CallPlan
    call: Call


class _Keys:
    """The keys and values of a step: those of others are under way until :meth:`get`.

    Args:
        planned: the call.
        step: of its plan.
        k, v: of the rank.
        before: of the step before, whose messages are sent again where they are the same.
        kept: the messages that this step had in the forward pass, () where it had none. All ranks have kept theirs, so
            nothing is sent or received.
    """

    def __init__(self, planned: Planned, step: Step, k: torch.Tensor, v: torch.Tensor,
                 before: "_Keys | None" = None, kept: Tensors | None = None) -> None:
        self._step, self._rank, self._own = step, planned.rank, (k, v)
        self._messages: dict[int, Message] = {}
        self._packed: dict[tuple[Span, ...], Message] = {}
        self._transfer: Transfer | None = None
        self._forms = {rank: _forms((k, v), step.heads, parts) for rank, parts in step.received(planned.rank).items()}
        if kept is not None:
            left = iter(kept)
            self._messages = {rank: tuple(islice(left, tensors_of(forms))) for rank, forms in self._forms.items()}
            return
        sends = {}
        for rank, parts in step.sent.items():
            same = step.heads, *[part.rows for part in parts]  # one message for all that want it
            if same not in self._packed:
                packed = None if before is None else before._packed.get(same)
                self._packed[same] = packed if packed is not None else pack(
                    [rows_of(tensor, part.rows, step.heads) for tensor in (k, v) for part in parts])
            sends[rank] = self._packed[same]
        for rank, forms in self._forms.items():
            self._messages[rank] = empty_message(forms, k.device)
        self._transfer = start(planned.group, sends, self._messages)

    @property
    def messages(self) -> Tensors:
        """What came from the step's other ranks, one behind the other, once it is there; () if nothing did."""
        return tuple(chain.from_iterable(self._messages.values()))

    def get(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of the buffer, (b, heads, rows, d or dv), once they are there."""
        if self._transfer is not None:
            self._transfer.wait()
        step, (k, v) = self._step, self._own
        views = {rank: unpack(self._messages[rank], forms) for rank, forms in self._forms.items()}
        if len(step.parts) == 1:  # without a copy
            (part,) = step.parts
            if part.rank == self._rank:
                return rows_of(k, part.rows, step.heads), rows_of(v, part.rows, step.heads)
            made = views[part.rank]
            return made[0], made[1]
        buffers = [own.new_empty((own.shape[0], len(step.heads), step.length, own.shape[3])) for own in (k, v)]
        for rank, parts in step.by_source.items():
            held = views.get(rank) or [rows_of(own, part.rows, step.heads) for own in (k, v) for part in parts]
            for buffer, of_tensor in zip(buffers, (held[:len(parts)], held[len(parts):]), strict=True):
                for part, rows in zip(parts, of_tensor, strict=True):
                    write_rows(rows_of(buffer, part.at), rows)
        return buffers[0], buffers[1]


def _steps_with_keys(planned: Planned, k: torch.Tensor, v: torch.Tensor, *, backwards: bool = False,
                     kept: Tensors | None = None) -> Iterator[tuple[int, Step, _Keys]]:
    """Yield each step with its number and its keys, while those of the next one are under way.

    Args:
        planned: the call.
        k, v: of the rank.
        backwards: whether the last step is the first one.
        kept: the messages of the first one, if they are there.
    """
    steps = list(enumerate(planned.plan.steps))[::-1 if backwards else 1]
    keys = _Keys(planned, steps[0][1], k, v, kept=kept)
    for (number, step), following in zip(steps, [*steps[1:], None], strict=True):
        coming = None if following is None else _Keys(planned, following[1], k, v, keys)
        yield number, step, keys
        if coming is not None:
            keys = coming


class _KeyGradients:
    """The gradients of the own keys and values: sums of what this rank and others computed, in the order of steps.

    Parts travel in the dtype of the sums. Rounded to 16 bits before, they gave dk and dv of a causal call on four ranks
    1.16 to 1.20 times the error of one device (bfloat16, CPU); in float32 they give 1.00 times it.
    """

    def __init__(self, planned: Planned, k: torch.Tensor, v: torch.Tensor) -> None:
        self._planned, self._like = planned, (k, v)
        self._dtypes = sum_dtype(k), sum_dtype(v)
        self._made: Tensors | None = None
        self._under_way: tuple[Step, Transfer, dict[int, Message], dict[int, list[TensorForm]]] | None = None

    def send(self, step: Step, gradients: Tensors) -> None:
        """Add what a step made for the own keys, and send the others' on their way to them."""
        rank, sends, receives = self._planned.rank, {}, {}
        for source, parts in step.by_source.items():
            if source == rank:
                for part in parts:
                    self._add(step.heads, part.rows, tuple([rows_of(own, part.at) for own in gradients]))
            else:
                sends[source] = pack([rows_of(own, part.at) for own in gradients for part in parts], self._dtypes[0])
        forms = {peer: _forms(self._like, step.heads, parts, self._dtypes[0]) for peer, parts in step.sent.items()}
        for peer, own in forms.items():
            receives[peer] = empty_message(own, self._like[0].device)
        if sends or receives:
            transfer = start(self._planned.group, sends, receives)
            self._add_arrived()
            self._under_way = step, transfer, receives, forms

    def get(self, *, rounds: bool) -> Tensors:
        """Return dk and dv, once all parts are there: in the dtype of k and v, or as sums."""
        last = self._arrived()
        if rounds and self._made is not None and len(last) == 1 and self._is_all(last[0][2]):
            _, _, views = last[0]
            return tuple([torch.add(total, view, out=torch.empty_like(like))
                          for total, view, like in zip(self._made, views, self._like, strict=True)])
        for arrived in last:
            self._add(*arrived)
        if not rounds:
            return self._sums()
        return tuple([total if total.dtype is like.dtype else torch.empty_like(like).copy_(total)
                      for total, like in zip(self._sums(), self._like, strict=True)])

    def _add_arrived(self) -> None:
        for arrived in self._arrived():
            self._add(*arrived)

    def _arrived(self) -> list[tuple[Span, Span, Tensors]]:
        """Wait for what is under way, and return it: heads, rows of the own keys, and dk and dv of these."""
        if self._under_way is None:
            return []
        (step, transfer, messages, forms), self._under_way = self._under_way, None
        transfer.wait()
        found: list[tuple[Span, Span, Tensors]] = []
        for peer, parts in step.sent.items():
            views = unpack(messages[peer], forms[peer])
            found += [(step.heads, part.rows, (of_k, of_v)) for part, of_k, of_v in zip(
                parts, views, views[len(parts):], strict=False)]
        return found

    def _add(self, heads: Span, rows: Span, parts: Tensors) -> None:
        """Add gradients of some keys; the first ones are kept, and changed, if they are of all own keys and no view."""
        if self._made is None and self._is_all(parts):
            self._made = parts
            return
        for total, part in zip(self._sums(), parts, strict=True):
            so_far = rows_of(total, rows, heads)
            write_rows(so_far, part, so_far)

    def _is_all(self, parts: Tensors) -> bool:
        return all(part.shape == own.shape and part.dtype is dtype and part.untyped_storage().nbytes() == part.nbytes
                   for part, own, dtype in zip(parts, self._like, self._dtypes, strict=True))

    def _sums(self) -> Tensors:
        if self._made is None:
            self._made = tuple([torch.zeros_like(tensor, dtype=dtype) for tensor, dtype in zip(
                self._like, self._dtypes, strict=True)])
        return self._made


class _Sum:
    """A gradient of parts that may overlap: their sum in float32 (float64), or the only part itself where it is all."""

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like
        self._only: torch.Tensor | None = None
        self._total: torch.Tensor | None = None

    def add(self, part: torch.Tensor, where: tuple[slice, ...]) -> None:
        """Add a part at some places; a dim that it lacks is summed by the operator already."""
        if self._total is None and self._only is None and part.shape == self._like.shape:
            self._only = part
            return
        if self._total is None:
            only, self._only, dtype = self._only, None, sum_dtype(self._like)
            self._total = torch.zeros_like(self._like, dtype=dtype) if only is None else only.to(dtype)
        self._total[where].add_(part)

    def get(self) -> torch.Tensor:
        """Return the sum, or the part that is all of it as it came."""
        if self._only is not None:
            return self._only
        return torch.zeros_like(self._like) if self._total is None else self._total


class StepsFunction(torch.autograd.Function):
    """Attention by a plan, with a gradient for q, k, v, bias, slopes and sinks, through out and lse.

    Of an operand that every rank has a copy of, each rank's gradient is the part of its own queries. With ``stand_ins``
    (heads.ToHeads) those of k and v go to them.
    """

    @staticmethod
    def forward(ctx: Any, planned: Planned, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                bias: torch.Tensor | None, slopes: torch.Tensor | None, sinks: torch.Tensor | None,
                *stand_ins: torch.Tensor) -> Tensors:
        """Return out, lse and, where the options want it, max_logit."""
        call, plan = planned.call, planned.plan
        wide = plan.summed.out
        # In float32 a backend that takes no sinks may be the fastest.
        takes_sinks = None if sinks is None or q.dtype is torch.float32 else plan.takes_sinks
        adds_sinks = sinks is not None and takes_sinks is None
        parts = PartialResults(q, v.shape[3], max_logit=call.options.max_logit, summed=wide, rounds=not adds_sinks)
        for number, step, keys in _steps_with_keys(planned, k, v):
            heads, (own_k, own_v) = call.query_heads(step.heads), keys.get()
            for place, (block, segments) in enumerate(zip(step.blocks, plan.segments.of_blocks[number], strict=True)):
                own_sinks = sinks if takes_sinks is not None and takes_sinks[number][place] else None
                parts.add(heads, Results(*attend_to_block(
                    call, block, heads, (q, own_k, own_v), own_sinks, float32_results=wide)), segments)
        for of_keys, rows in plan.segments.idle:
            parts.leave_empty(call.query_heads(of_keys), rows)
        if sinks is not None:
            if adds_sinks:
                parts.add_sinks(sinks)
            for rows in plan.padding:
                parts.clear_lse(rows)
        out, lse, max_logit = parts.results()
        ctx.planned = planned
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, bias, slopes, sinks, *(keys.messages if plan.keeps_last else ()))
        if max_logit is None:
            return out, lse
        ctx.mark_non_differentiable(max_logit)
        return out, lse, max_logit

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None,
                 *_: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return a gradient for each input, or None."""
        saved = ctx.saved_tensors
        if dout is None:  # only lse was used: a zero of no memory
            dout = saved[3].new_zeros(()).expand(saved[3].shape)
        return None, *_gradients(ctx.planned, saved, (dout, dlse), ctx.needs_input_grad[1:])


def _gradients(planned: Planned, saved: Tensors, incoming: tuple[torch.Tensor, torch.Tensor | None],
               wanted: Sequence[bool]) -> tuple[torch.Tensor | None, ...]:
    """Walk the steps from the last one back, keys and values coming as before and their gradients going back.

    In a ring the last step's keys are still there, and the first step's are the own ones: no rank waits for keys before
    its first block, nor for gradients behind its last one. An all-gather of one group may have kept all keys: then only
    gradients are sent.
    """
    q, k, v, out, lse, bias, slopes, sinks, *kept = saved
    call, summed, rows = planned.call, planned.plan.summed, (out, lse, *incoming)
    has_stand_ins = len(wanted) > 6
    needs = (wanted[0], any((*wanted[1:3], *wanted[6:])), wanted[3], wanted[4])
    of_q = QueryGradient(q)
    of_operands = [_Sum(tensor) for tensor, needed in ((bias, needs[2]), (slopes, needs[3])) if needed]
    of_keys = _KeyGradients(planned, k, v)
    for number, step, keys in _steps_with_keys(planned, k, v, backwards=True,
                                               kept=tuple(kept) if planned.plan.keeps_last else None):
        heads, (own_k, own_v) = call.query_heads(step.heads), keys.get()
        of_step = [_Sum(tensor) for tensor in (own_k, own_v)]
        sums = [*(of_step if needs[1] else ()), *of_operands]
        for block, segments in zip(step.blocks[::-1], planned.plan.backwards[number], strict=True):
            made = gradients_of_block(call, block, heads, (q, own_k, own_v), rows, needs,
                                      float32_results=summed.gradients)
            if needs[0]:
                of_q.add(heads, made.pop(0), segments)
            for total, part, where in zip(sums, made, _places(call, block, heads, needs, (bias, slopes)), strict=True):
                total.add(part, where)
        if needs[1]:
            of_keys.send(step, tuple([total.get() for total in of_step]))
    of_k_and_v = of_keys.get(rounds=not has_stand_ins) if needs[1] else (None, None)
    if needs[0]:
        for kv_heads, idle in planned.plan.segments.idle:
            of_q.leave_empty(call.query_heads(kv_heads), idle)
    found = iter([total.get() for total in of_operands])
    dbias, dslopes = (next(found).to(like.dtype) if needed else None
                      for like, needed in ((bias, needs[2]), (slopes, needs[3])))
    dsinks = None if sinks is None or not wanted[5] else sinks_gradient(sinks, lse, out, *incoming)
    dq = of_q.get() if needs[0] else None
    if has_stand_ins:
        return dq, None, None, dbias, dslopes, dsinks, *of_k_and_v
    return dq, *of_k_and_v, dbias, dslopes, dsinks


def _places(call: Call, block: Block, heads: Span, needs: tuple[bool, ...],
            operands: tuple[torch.Tensor | None, ...]) -> list[tuple[slice, ...]]:
    """Return where a block's gradients of keys, values and operands belong, in the order in which they are made."""
    keys = (slice(None), slice(None), slice(block.keys.start, block.keys.stop))
    of_operands = [() if own is None else (places_of(own, block, heads, packed=call.packed),) for own in operands]
    return [place for places, needed in zip([(keys, keys), *of_operands], needs[1:], strict=True) if needed
            for place in places]


def _forms(tensors: Sequence[torch.Tensor], heads: Span, parts: Sequence[Part],
           dtype: torch.dtype | None = None) -> list[TensorForm]:
    """Return what a message holds: of each tensor the rows of every part, in its dtype or in this one."""
    return [TensorForm((tensor.shape[0], len(heads), len(part.rows), tensor.shape[3]), dtype or tensor.dtype)
            for tensor in tensors for part in parts]
