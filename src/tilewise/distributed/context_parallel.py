"""The public calls: attention of a sequence whose tokens lie on several ranks."""

from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tilewise.api import AttentionOutput, AttentionOutputWithMax, attention, attention_varlen
from tilewise.distributed.arguments import PACKED_NAMES, Arguments, arguments_of, packed_arguments_of
from tilewise.distributed.cost_model import SCHEDULES
from tilewise.distributed.layouts import Layout, named_layout
from tilewise.distributed.mesh import Ranks, check_ranks_agree, ranks_of
from tilewise.distributed.schedules import (
    ScheduleExplanation,
    check_blocks,
    choose_schedule,
    explain_schedule,
    run_schedule,
)
from tilewise.distributed.sharding import whole_length
from tilewise.problem.operands import seed_of
from tilewise.problem.options import AnyMask
from tilewise.validate.distributed import check_explained, check_schedule

Result = torch.Tensor | AttentionOutput | AttentionOutputWithMax


def context_parallel_attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mesh: DeviceMesh, layout: str | Layout,
        mask: AnyMask | None = None, scale: float | None = None, bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None,
        dropout_p: float = 0, dropout_seed: int | torch.Tensor | None = None, seqlens_q: torch.Tensor | None = None,
        seqlens_k: torch.Tensor | None = None, lengths: tuple[int, int] | None = None,
        return_aux: tuple[str, ...] = (), deterministic: bool | None = None, backend: str | None = None,
        schedule: str | None = None) -> Result:
    """Compute :func:`tilewise.attention` of a sequence whose tokens lie on several ranks, each with a shard.

    The result is this rank's part of what one device would compute from the whole, in both passes: partial results are
    put together by their log-sum-exp in float32. All ranks of the mesh call it together, with the same arguments but
    for the shards; they compare what has to be alike when a kind of call is new to them (``TILEWISE_CHECK=1``: always).

    Args:
        q: (b, hq, s, d): the shard of this rank, as :func:`shard` makes it; dtypes and strides as in ``attention``.
        k, v: (b, hk, s, d) and (b, hk, s, dv), sharded alike.
        mesh: a device mesh of one dim; or of two, over whose ranks, row by row, the sequence is cut. Of two, ranks of
            the second one exchange heads, as "ulysses" does, and ``schedule`` is that of the first one.
        layout: which positions a rank holds: "contiguous" (rank r the r-th of as many pieces as there are ranks),
            "zigzag" (of twice as many the r-th from the front and the r-th from the back, which divides the pairs of a
            causal mask evenly), or a :class:`Layout`, as :func:`balanced` makes. It is never guessed.
        mask: of the whole sequence: masks by position, and :func:`tilewise.documents` of the ids of all tokens (ids on
            the CPU let ranks leave out keys of other documents). Boolean tensors, alone or joined by ``&``, hold this
            rank's queries and all keys: they broadcast to (b, hq, s, length of all keys).
        scale, softcap: as in ``attention``.
        bias: broadcasts to (b, hq, s, length of all keys): the rows of this rank's queries.
        alibi_slopes, sinks: as in ``attention``, on every rank alike. Distances are those in the whole sequence.
        dropout_p, dropout_seed: as in ``attention``, on every rank alike: the same pairs are dropped as on one device.
            Without a seed the first rank's generator draws one for all.
        seqlens_q, seqlens_k: (b,): as in ``attention``, counted in the whole sequence. A bounded mask then needs the
            alignment "top_left" or an integer.
        lengths: numbers of queries and keys on all ranks together; None = those of the layout, if it is a
            :class:`Layout`, else this rank's times the number of ranks.
        return_aux, deterministic, backend: as in ``attention``. Sums over ranks have one order: ``deterministic`` is
            about the local calls.
        schedule: "ring" (keys and values come from one rank after another, only those that a rank's queries can see),
            "all_gather" (from all ranks at once, for all heads or for some after another), "ulysses" (ranks exchange
            the sequence for heads; of a mesh of one dim alone), or None to choose by a cost model: see :func:`explain`;
            with documents it then makes the plans of all ranks for each new batch, so name one where they change.

    Returns:
        out, (b, hq, s, dv), of this rank's queries; with ``return_aux`` a named tuple as of ``attention``.

    Gradients of q, k, v and of a bias's rows are those of this rank's shards. Of what every rank has a copy of (sinks,
    slopes, a bias without a query dim), a rank gets the part of its own queries (of its heads where these are
    exchanged): they are to be summed over the ranks, as gradients of all other parameters are.

    Raises:
        InvalidInput: an argument that has no meaning, here or on another rank; ranks that disagree.
        UnsupportedProblem: the schedule, or a backend, refuses; the message holds the reason.
    """
    given = {name: value for name, value in locals().items() if name not in ("mesh", "schedule")}
    ranks = ranks_of(mesh)
    check_schedule(schedule, SCHEDULES)
    if ranks.count == 1:
        for own, length in zip((q, k), lengths or (None, None), strict=True):
            named_layout(layout, whole_length(layout, own.shape[2], length, 1), 1)
        attend: Any = attention  # of its overloads, which is decided by a value
        result: Result = attend(
            q, k, v, mask=mask, scale=scale, bias=bias, alibi_slopes=alibi_slopes, softcap=softcap, sinks=sinks,
            dropout_p=dropout_p, dropout_seed=dropout_seed, seqlens_q=seqlens_q, seqlens_k=seqlens_k,
            return_aux=return_aux, deterministic=deterministic, backend=backend)
        return result
    return cast(Result, _attend(given, ranks, schedule))


def context_parallel_attention_varlen(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mesh: DeviceMesh, layout: str | Layout,
        cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor | None = None, seqused_q: torch.Tensor | None = None,
        seqused_k: torch.Tensor | None = None, max_seqlen_q: int | torch.Tensor | None = None,
        max_seqlen_k: int | torch.Tensor | None = None, mask: AnyMask | None = None, scale: float | None = None,
        bias: torch.Tensor | None = None, alibi_slopes: torch.Tensor | None = None, softcap: float | None = None,
        sinks: torch.Tensor | None = None, lengths: tuple[int, int] | None = None, return_aux: tuple[str, ...] = (),
        deterministic: bool | None = None, backend: str | None = None, schedule: str | None = None) -> Result:
    """Compute :func:`tilewise.attention_varlen` of packed sequences whose rows lie on several ranks.

    Sequences may cross the borders of ranks, and be of any length. Everything else is as in
    :func:`context_parallel_attention`; there is no dropout.

    Args:
        q: (rows of this rank, hq, d): the shard of all sequences' rows, one sequence behind the other.
        k, v: (rows of this rank, hk, d) and (rows of this rank, hk, dv).
        mesh, layout, schedule: as in :func:`context_parallel_attention`.
        cu_seqlens_q, cu_seqlens_k: as in ``attention_varlen``, of all ranks' rows together, on every rank alike. The
            plan of what is sent is made on the host, which reads them: leave them on the CPU to spare a wait.
        seqused_q, seqused_k: as there, on the device of cu_seqlens_q.
        max_seqlen_q, max_seqlen_k: as there.
        mask: as there; ids of documents are those of all rows. A boolean tensor is whole on every rank.
        bias: broadcasts to (sequences, hq, max_seqlen_q, max_seqlen_k), whole on every rank; the gradient is the part
            of this rank's queries.
        scale, alibi_slopes, softcap, sinks, return_aux, deterministic, backend: as there.
        lengths: numbers of rows of queries and of keys on all ranks together; None = as in
            :func:`context_parallel_attention`.

    Returns:
        out, (rows of this rank, hq, dv); with ``return_aux`` a named tuple, whose lse and max_logit are (hq, rows).

    Raises:
        InvalidInput, UnsupportedProblem: as :func:`context_parallel_attention`.
    """
    given = {name: value for name, value in locals().items() if name not in ("mesh", "schedule")}
    given["dropout_p"] = 0
    ranks = ranks_of(mesh)
    check_schedule(schedule, SCHEDULES)
    if ranks.count == 1:
        for own, length in zip((q, k), lengths or (None, None), strict=True):
            named_layout(layout, whole_length(layout, own.shape[0], length, 1), 1)
        attend: Any = attention_varlen  # of its overloads, which is decided by a value
        borders = {name: None if given[name] is None else given[name].to(q.device) for name in PACKED_NAMES}
        result: Result = attend(
            q, k, v, **borders, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, mask=mask, scale=scale, bias=bias,
            alibi_slopes=alibi_slopes, softcap=softcap, sinks=sinks, return_aux=return_aux,
            deterministic=deterministic, backend=backend)
        return result
    return cast(Result, _attend(given, ranks, schedule))


def _run(given: dict[str, Any], ranks: Ranks, schedule: str | None) -> Result:
    given["seed"] = None if given["dropout_p"] == 0 else _seed(given, ranks)
    arguments = _agreed_arguments(given, ranks, schedule)
    padded_q, _ = arguments.padding
    name = choose_schedule(arguments, schedule, ranks.shape)
    out, lse, *largest = run_schedule(name, _without_padding(arguments), ranks)
    if padded_q is not None:
        out, rows = out.masked_fill(padded_q, 0.0), padded_q.squeeze(-1)
        lse, *largest = (own.masked_fill(rows, float("-inf")) for own in (lse, *largest))
    if arguments.sequences is not None:
        out, lse, *largest = out.squeeze(0).transpose(0, 1), *(own.squeeze(0) for own in (lse, *largest))
    if not given["return_aux"]:
        return out
    return AttentionOutputWithMax(out, lse, largest[0]) if largest else AttentionOutput(out, lse)


_disable: Any = torch.compiler.disable  # has no types
_attend = _disable(_run, reason="tilewise.distributed sends messages between ranks, outside of a compiled graph")


def explain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mesh: DeviceMesh, layout: str | Layout,
            schedule: str | None = None, **options: Any) -> ScheduleExplanation:
    """Tell which schedule this call of :func:`context_parallel_attention` would use, and what was estimated of each.

    Nothing is sent or computed; the numbers are those of a model (bytes and pairs of the slowest rank are counted, the
    rates are those of one machine), and not measured on your links. Any one rank may ask.

    Args:
        q, k, v, mesh, layout, schedule: as there.
        options: any other argument of that function.

    Returns:
        A :class:`ScheduleExplanation`, which prints as a table.

    Raises:
        InvalidInput, UnsupportedProblem: as that function.
    """
    check_explained(options, _OPTIONS)
    ranks = ranks_of(mesh)
    given = {**_OPTIONS, **options, "q": q, "k": k, "v": v, "layout": layout}
    given["seed"] = None if given["dropout_p"] == 0 else seed_of(q, given["dropout_p"], 0)
    return explain_schedule(arguments_of(given, ranks.rank, ranks.count), schedule, ranks.shape)


# Arguments that have a default, and what it is.
_OPTIONS: dict[str, Any] = {
    "mask": None, "scale": None, "bias": None, "alibi_slopes": None, "softcap": None, "sinks": None, "dropout_p": 0,
    "dropout_seed": None, "seqlens_q": None, "seqlens_k": None, "lengths": None, "return_aux": (),
    "deterministic": None, "backend": None}


def _agreed_arguments(given: dict[str, Any], ranks: Ranks, schedule: str | None) -> Arguments:
    """Check the arguments on this rank, and against those of the others where they are new."""
    checked: list[Arguments] = []

    def describe() -> str:
        check = arguments_of if "cu_seqlens_q" not in given else packed_arguments_of
        checked.append(check(given, ranks.rank, ranks.count))
        return checked[0].description(schedule)

    check_ranks_agree(ranks, describe, lambda: check_blocks(choose_schedule(
        checked[0], schedule, ranks.shape), checked[0], ranks))
    return checked[0]


def _seed(given: dict[str, Any], ranks: Ranks) -> torch.Tensor | None:
    """Return the seed of the dropout; without one, what the first rank draws."""
    seed = seed_of(given["q"], given["dropout_p"], given["dropout_seed"])
    if given["dropout_seed"] is None and seed is not None:
        for group in (ranks.heads, ranks.group):  # the first rank of each row, then the first row
            if group is not None:
                dist.broadcast(seed, dist.get_global_rank(group, 0), group=group)
    return seed


def _without_padding(arguments: Arguments) -> Arguments:
    """Set what is padding to 0, since a hidden NaN would be multiplied by 0."""
    padded_q, padded_k = arguments.padding
    if padded_q is padded_k is None:
        return arguments
    q, k, v = arguments.q, arguments.k, arguments.v
    if padded_q is not None:
        q = q.masked_fill(padded_q, 0.0)
    if padded_k is not None:
        k, v = k.masked_fill(padded_k, 0.0), v.masked_fill(padded_k, 0.0)
    return replace(arguments, q=q, k=k, v=v)
