"""The functions of ring_flash_attn 0.1, by their names, in their order, with their defaults and conventions.

Each rank calls with its own tokens: tensors are (b, s, h, d), or (rows, h, d) packed. Of the ``ring_`` and ``llama3_``
functions rank r holds the r-th of as many pieces as there are ranks, of the ``zigzag_`` ones the r-th from the front
and the r-th from the back of twice as many. Packed, it is each sequence that is cut so, but for ``llama3_``, where all
rows together are. Every window counts in the whole sequence. What ring_flash_attn refuses and tilewise does not is
computed: windows, ALiBi, dropout of batches, any head dim, ``zigzag_`` without a causal mask.

The group is any process group, NCCL's on GPUs; None is the default one.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tilewise.distributed import Layout, context_parallel_attention, context_parallel_attention_varlen
from tilewise.distributed.layouts import joined, named_layout
from tilewise.errors import InvalidInput, UnsupportedProblem
from tilewise.integrations.callers_terms import in_terms
from tilewise.integrations.flash_family import WORDS, heads_first, sides_of
from tilewise.masks import Mask, Span, window
from tilewise.problem.operands import as_batches
from tilewise.support.caches import registered
from tilewise.validate.values import check_switch, is_integer

__all__ = ["llama3_flash_attn_prepare_cu_seqlens", "llama3_flash_attn_varlen_func", "ring_flash_attn_func",
           "ring_flash_attn_varlen_func", "zigzag_ring_flash_attn_func", "zigzag_ring_flash_attn_varlen_func"]
Group = dist.ProcessGroup | None
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]
PreparedLengths = tuple[torch.Tensor, torch.Tensor, int, int, slice]
_attend = in_terms(context_parallel_attention, WORDS, heads_third=True)
_attend_packed = in_terms(context_parallel_attention_varlen, WORDS)
_PREPARED = "tilewise_prepared"  # an attribute of the lengths that are handed out: what they were made from


def ring_flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0,
                         softmax_scale: float | None = None, causal: bool = False,
                         window_size: tuple[int, int] = (-1, -1), alibi_slopes: torch.Tensor | None = None,
                         deterministic: bool = False, return_attn_probs: bool = False, group: Group = None) -> Result:
    """Attend as ``ring_flash_attn.ring_flash_attn_func``: rank r holds the r-th piece of the sequence.

    Args:
        q, k, v: (b, s, hq, d), (b, s, hk, d) and (b, s, hk, dv): this rank's tokens, equally many on all ranks.
        dropout_p: probability to drop a pair; the first rank's generator draws for all.
        softmax_scale: None = 1/sqrt(d).
        causal: query i of the whole sequence sees keys up to i.
        window_size: (left, right): keys kept on either side of a query's own, ends included; -1 = all.
        alibi_slopes: (hq,) or (b, hq), float32: adds ``-slope · |i - j|``, by positions in the whole sequence.
        deterministic: True demands bit-equal gradients; False leaves it to
            :func:`torch.use_deterministic_algorithms`.
        return_attn_probs: return (out, lse, None).
        group: the ranks; None = the default process group.

    Returns:
        out, (b, s, hq, dv), of this rank's tokens; with ``return_attn_probs`` also lse, (b, hq, s), float32, and None.

    Raises:
        InvalidInput: an argument that has no meaning, here or on another rank; ranks that disagree.
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, group)
    return _of_batch(q, k, v, options | {"layout": "contiguous"}, return_attn_probs)


def zigzag_ring_flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0,
                                softmax_scale: float | None = None, causal: bool = False,
                                window_size: tuple[int, int] = (-1, -1), alibi_slopes: torch.Tensor | None = None,
                                deterministic: bool = False, return_attn_probs: bool = False,
                                group: Group = None) -> Result:
    """Attend as ``ring_flash_attn.zigzag_ring_flash_attn_func``.

    Rank r holds the r-th piece from the front and the r-th from the back, an even number of tokens; all else is as in
    :func:`ring_flash_attn_func`.
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, group)
    if heads_first("q", q).shape[2] % 2:
        raise InvalidInput(f"q has {q.shape[1]} tokens on this rank; allowed are even numbers: half of them are of the "
                           "front of the sequence, half of the back.")
    return _of_batch(q, k, v, options | {"layout": "zigzag"}, return_attn_probs)


def ring_flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor,
                                max_seqlen: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
                                causal: bool = False, window_size: tuple[int, int] = (-1, -1),
                                alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
                                return_attn_probs: bool = False, group: Group = None) -> Result:
    """Attend as ``ring_flash_attn.ring_flash_attn_varlen_func``: rank r holds the r-th piece of each sequence.

    Args:
        q, k, v: (rows, hq, d), (rows, hk, d) and (rows, hk, dv): this rank's piece of each sequence, one behind the
            other.
        cu_seqlens: (sequences + 1,): 0, then where the pieces end, alike on all ranks: the whole sequences' divided by
            the number of ranks. They are read on the host, which on a GPU waits for them.
        max_seqlen: the longest piece; nothing needs it.
        dropout_p: 0.0 alone: packed sequences have no dropout.
        softmax_scale, causal, window_size, deterministic, group: as in :func:`ring_flash_attn_func`, by positions in a
            whole sequence.
        alibi_slopes: (hq,) or (sequences, hq), float32.
        return_attn_probs: return (out, lse, None).

    Returns:
        out, (rows, hq, dv), of this rank's rows; with ``return_attn_probs`` also lse, (hq, rows), float32, and None.

    Raises:
        InvalidInput: as :func:`ring_flash_attn_func`.
        UnsupportedProblem: dropout.
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, group)
    return _of_pieces(q, k, v, cu_seqlens, "contiguous", options, return_attn_probs)


def zigzag_ring_flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor,
                                       max_seqlen: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
                                       causal: bool = False, window_size: tuple[int, int] = (-1, -1),
                                       alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
                                       return_attn_probs: bool = False, group: Group = None) -> Result:
    """Attend as ``ring_flash_attn.zigzag_ring_flash_attn_varlen_func``.

    Rank r holds of each sequence the r-th piece from the front and the r-th from the back, an even number of rows; all
    else is as in :func:`ring_flash_attn_varlen_func`.
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, group)
    return _of_pieces(q, k, v, cu_seqlens, "zigzag", options, return_attn_probs)


@dataclass(frozen=True)
class _Prepared:
    """What :func:`llama3_flash_attn_prepare_cu_seqlens` was given, and the slice that it handed out."""

    borders: tuple[int, ...]
    causal: bool
    rank: int
    world_size: int
    local_k_slice: slice


def llama3_flash_attn_prepare_cu_seqlens(cu_seqlens: torch.Tensor, causal: bool, rank: int,
                                         world_size: int) -> PreparedLengths:
    """Return the lengths of a rank's rows, as ``ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens``.

    Args:
        cu_seqlens: (sequences + 1,): 0, then where each sequence ends, of all ranks' rows. The host reads them.
        causal: whether keys behind the rank's last query are left out.
        rank, world_size: the rank, and how many there are; they divide the number of rows.

    Returns:
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k and local_k_slice: of the sequences that the rank holds a
        part of, its queries, the keys that they see, and which of all rows these are.

    Raises:
        InvalidInput: no such lengths, or rows that the ranks do not divide.
    """
    check_switch("causal", causal)
    borders = _borders_of("cu_seqlens", cu_seqlens)
    for name, value, least in (("rank", rank, 0), ("world_size", world_size, 1)):
        if not is_integer(value) or value < least:
            raise InvalidInput(f"{name} is {value!r}; allowed is an integer >= {least}.")
    if borders[-1] % world_size:
        raise InvalidInput(f"cu_seqlens ends at {borders[-1]}; allowed is a number of rows that {world_size} ranks "
                           "divide.")
    first, stop = (number * (borders[-1] // world_size) for number in (rank, rank + 1))
    own = [(start, end) for start, end in pairwise(borders) if start < stop and end > first]
    whole = own or [(first, first)]
    begin, end = whole[0][0], stop if causal else whole[-1][1]
    ends_q = [0, *(min(end, stop) - first for _, end in whole)]
    ends_k = [0, *(last - begin for _, last in whole[:-1]), end - begin]
    of_q, of_k = (torch.tensor(ends, dtype=cu_seqlens.dtype, device=cu_seqlens.device) for ends in (ends_q, ends_k))
    prepared = _Prepared(tuple(borders), causal, rank, world_size, slice(begin, end))
    for lengths in (of_q, of_k):
        setattr(lengths, _PREPARED, prepared)
    longest = [max(stop - start for start, stop in pairwise(ends)) for ends in (ends_q, ends_k)]
    return of_q, of_k, longest[0], longest[1], prepared.local_k_slice


def llama3_flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
                                  cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, heads_k_stride: int,
                                  local_k_slice: slice, dropout_p: float = 0.0, softmax_scale: float | None = None,
                                  causal: bool = False, window_size: tuple[int, int] = (-1, -1),
                                  alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
                                  return_attn_probs: bool = False, group: Group = None) -> Result:
    """Attend as ``ring_flash_attn.llama3_flash_attn_varlen_func``: rank r holds the r-th piece of all rows.

    Args:
        q, k, v: (rows, hq, d), (rows, hk, d) and (rows, hk, dv): this rank's rows of all sequences.
        cu_seqlens_q, cu_seqlens_k, local_k_slice: the very objects that
            :func:`llama3_flash_attn_prepare_cu_seqlens` returned: the ranks need all sequences' lengths, which it
            keeps with them.
        max_seqlen_q, max_seqlen_k: nothing needs them.
        heads_k_stride: a divisor of the number of heads of keys; how many travel at once is chosen by tilewise.
        dropout_p: 0.0 alone: packed sequences have no dropout.
        softmax_scale, causal, window_size, deterministic, group: as in :func:`ring_flash_attn_func`.
        alibi_slopes: (hq,) or (sequences of all ranks, hq), float32.
        return_attn_probs: return (out, lse, None).

    Returns:
        As :func:`ring_flash_attn_varlen_func`.

    Raises:
        InvalidInput: as :func:`ring_flash_attn_func`; lengths that were made elsewhere, or for another call.
        UnsupportedProblem: dropout.
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, group)
    prepared: object = getattr(cu_seqlens_q, _PREPARED, None)
    of_keys: object = getattr(cu_seqlens_k, _PREPARED, None)
    if not isinstance(prepared, _Prepared) or of_keys != prepared or local_k_slice != prepared.local_k_slice:
        raise InvalidInput("cu_seqlens_q, cu_seqlens_k and local_k_slice are not of one call of "
                           "tilewise.integrations.ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens; allowed are "
                           "the very objects that it returned.")
    mesh: DeviceMesh = options["mesh"]
    for name, was, now in (("causal", prepared.causal, causal), ("rank", prepared.rank, mesh.get_local_rank()),
                           ("world_size", prepared.world_size, mesh.size())):
        if was != now:
            raise InvalidInput(f"cu_seqlens_q was prepared with {name}={was}, and it is {now} here: they must be "
                               "equal.")
    kv_heads = as_batches(q, k, v)[1].shape[1]
    if not is_integer(heads_k_stride) or heads_k_stride < 1 or kv_heads % heads_k_stride:
        raise InvalidInput(f"heads_k_stride is {heads_k_stride!r} and k has {kv_heads} heads; allowed is a divisor of "
                           "their number.")
    options |= {"layout": "contiguous", "cu_seqlens_q": _whole_borders(prepared.borders, 1),
                "schedule": "all_gather"}
    return _of_packed(q, k, v, options, return_attn_probs)


def _options(dropout_p: float, softmax_scale: float | None, causal: bool, window_size: tuple[int, int],
             alibi_slopes: torch.Tensor | None, deterministic: bool, group: Group) -> dict[str, Any]:
    """Translate what is neither q, k, v nor a length."""
    check_switch("causal", causal)
    left, right = sides_of(window_size)
    mask: Mask = window(left, 0 if causal else right, "top_left")
    return {"mask": mask, "scale": softmax_scale, "alibi_slopes": alibi_slopes, "dropout_p": dropout_p,
            "deterministic": deterministic or None, "schedule": "ring", "mesh": _mesh_of(group)}


def _mesh_of(group: Group) -> DeviceMesh:
    """Return the mesh of a group's ranks."""
    if group is None:
        if not dist.is_initialized():
            raise InvalidInput("group is None and there is no default process group; allowed is a process group, or "
                               "None after torch.distributed.init_process_group().")
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidInput(f"group is {group!r}; allowed is a process group that this process is in, or None for the "
                           "default one.")
    return _known_mesh(group)


@registered
@lru_cache(maxsize=16)
def _known_mesh(group: dist.ProcessGroup) -> DeviceMesh:
    # Messages go by the tensors' device; that of a mesh is where its own would be.
    return DeviceMesh.from_group(group, "cpu" if dist.get_backend(group) == "gloo" else "cuda")


def _of_batch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any], with_lse: bool) -> Result:
    found = _attend(*(heads_first(name, own) for name, own in (("q", q), ("k", k), ("v", v))), **options,
                    return_aux=("lse",) if with_lse else ())
    return (found[0].transpose(1, 2), found[1], None) if with_lse else found.transpose(1, 2)


def _of_pieces(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, name: str,
               options: dict[str, Any], with_lse: bool) -> Result:
    """Attend where each sequence is cut over the ranks."""
    borders, ranks = tuple(_borders_of("cu_seqlens", cu_seqlens)), options["mesh"].size()
    rows = as_batches(q, k, v)[0].shape[2]
    if borders[-1] != rows:
        raise InvalidInput(f"cu_seqlens ends at {borders[-1]} and q has {rows} rows: they must be equal.")
    odd = next((stop - start for start, stop in pairwise(borders) if (stop - start) % 2), None)
    if name == "zigzag" and odd is not None:
        raise InvalidInput(f"cu_seqlens has a piece of {odd} rows; allowed are even ones: half of them are of the "
                           "front of a sequence, half of the back.")
    options |= {"layout": _layout_of_pieces(name, borders, ranks),
                "cu_seqlens_q": _whole_borders(borders, ranks)}
    return _of_packed(q, k, v, options, with_lse)


def _of_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any], with_lse: bool) -> Result:
    dropout_p = options.pop("dropout_p")
    if dropout_p != 0:
        raise UnsupportedProblem(f"dropout_p is {dropout_p}; allowed is 0.0: packed sequences over ranks have no "
                                 "dropout.", {})
    found = _attend_packed(q, k, v, **options, return_aux=("lse",) if with_lse else ())
    return (found[0], found[1], None) if with_lse else found


@registered
@lru_cache(maxsize=64)
def _whole_borders(borders: tuple[int, ...], ranks: int) -> torch.Tensor:
    """Return cu_seqlens of all ranks' rows: one tensor for all layers, by which their plan is found."""
    with torch.inference_mode(False):  # what is made of a tensor of that mode is not kept
        return torch.tensor(borders, dtype=torch.int64, device="cpu") * ranks


@registered
@lru_cache(maxsize=64)
def _layout_of_pieces(name: str, borders: tuple[int, ...], ranks: int) -> Layout:
    """Lay out packed sequences, of each of which a rank has as many rows as the borders say."""
    held: list[list[Span]] = [[] for _ in range(ranks)]
    for start, stop in pairwise(borders):
        of_sequence = named_layout(name, (stop - start) * ranks, ranks)
        for own, pieces in zip(held, of_sequence.pieces, strict=True):
            own += [Span(start * ranks + piece.start, start * ranks + piece.stop) for piece in pieces]
    return Layout(f"{name} in each sequence", tuple([joined(tuple(own)) for own in held]))


def _borders_of(name: str, cu_seqlens: torch.Tensor) -> list[int]:
    """Return lengths as numbers; raises :class:`InvalidInput` for what are none."""
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (
            torch.int32, torch.int64):
        got = f"a {type(cu_seqlens).__name__}"
        if isinstance(cu_seqlens, torch.Tensor):
            got = f"a tensor of {cu_seqlens.dtype} and shape {tuple(cu_seqlens.shape)}"
        raise InvalidInput(f"{name} is {got}; allowed is a tensor of int32 or int64, (sequences + 1,).")
    borders: list[int] = cu_seqlens.tolist()
    if not borders or borders[0] != 0 or any(stop < start for start, stop in pairwise(borders)):
        raise InvalidInput(f"{name} is {borders}; allowed are 0, then where each sequence ends, ascending.")
    return borders
