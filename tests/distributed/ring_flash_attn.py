"""What ranks do in the tests of ring_flash_attn's names: each holds its part against flash-attn's functions."""

from itertools import pairwise

import torch
import torch.distributed as dist

from distributed.behaviour import message_of
from distributed.equality import largest
from tilewise.integrations import flash_attn
from tilewise.integrations import ring_flash_attn as ring

BORDERS = (0, 8, 24, 24, 40)  # of whole sequences; pieces of four ranks are even where the zigzag needs it


def rows_of(layout, length, rank, ranks):
    """Return which positions a rank holds, from torch's own cutting."""
    at = torch.arange(length)
    if layout == "ring":
        return at.chunk(ranks)[rank]
    pieces = at.chunk(2 * ranks)
    return torch.cat((pieces[rank], pieces[-1 - rank]))


def pieces_of(layout, rank, ranks):
    return torch.cat([start + rows_of(layout, stop - start, rank, ranks) for start, stop in pairwise(BORDERS)
                      if stop > start])


def tensors_of(*shape):
    make = torch.Generator().manual_seed(4)
    return [torch.randn(*shape, heads, 8, generator=make, dtype=torch.float64) for heads in (4, 2, 2, 4)]


def differences(whole_call, own_call, tensors, own, dim):
    """Return the largest differences of out, lse and the gradients of a rank's part."""
    wholes = [one.clone().requires_grad_() for one in tensors[:3]]
    parts = [one.index_select(dim, own).requires_grad_() for one in tensors[:3]]
    out, lse, _ = whole_call(*wholes)
    got, got_lse, nothing = own_call(*parts)
    assert nothing is None
    out.backward(tensors[3])
    got.backward(tensors[3].index_select(dim, own))
    pairs = [(got, out.index_select(dim, own)), (got_lse, lse.index_select(-1, own))]
    pairs += [(part.grad, whole.grad.index_select(dim, own)) for part, whole in zip(parts, wholes, strict=True)]
    return [largest(one, other) for one, other in pairs]


def batches(mesh, layout, options):
    """Compare a function of batches."""
    group, call = mesh.get_group(), getattr(ring, {"ring": "", "zigzag": "zigzag_"}[layout] + "ring_flash_attn_func")
    own = rows_of(layout, 32, mesh.get_local_rank(), mesh.size())
    return differences(lambda *of: flash_attn.flash_attn_func(*of, **options, return_attn_probs=True),
                       lambda *of: call(*of, **options, return_attn_probs=True, group=group), tensors_of(2, 32), own, 1)


def packed(mesh, layout, options):
    """Compare a function of packed sequences, each of which is cut."""
    group, ranks = mesh.get_group(), mesh.size()
    call = getattr(ring, {"ring": "", "zigzag": "zigzag_"}[layout] + "ring_flash_attn_varlen_func")
    ends = torch.tensor(BORDERS, dtype=torch.int32)
    return differences(
        lambda *of: flash_attn.flash_attn_varlen_func(*of, ends, ends, 16, 16, **options, return_attn_probs=True),
        lambda *of: call(*of, ends // ranks, 16 // ranks, **options, return_attn_probs=True, group=group),
        tensors_of(40), pieces_of(layout, mesh.get_local_rank(), ranks), 0)


def llama3(mesh, options):
    """Compare the function of packed sequences whose rows are cut."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    ends = torch.tensor([0, 7, 25, 25, 40], dtype=torch.int32)
    q, k, q_longest, k_longest, rows = ring.llama3_flash_attn_prepare_cu_seqlens(
        ends, options.get("causal", False), rank, ranks)
    return differences(
        lambda *of: flash_attn.flash_attn_varlen_func(*of, ends, ends, 18, 18, **options, return_attn_probs=True),
        lambda *of: ring.llama3_flash_attn_varlen_func(
            *of, q, k, q_longest, k_longest, heads_k_stride=1, local_k_slice=rows, **options, return_attn_probs=True,
            group=mesh.get_group()),
        tensors_of(40), rows_of("ring", 40, rank, ranks), 0)


def prepared_alone(mesh):
    """Compare what the lengths mean to flash-attn itself, given this rank's queries and the keys of the slice."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    ends = torch.tensor([0, 7, 25, 25, 40], dtype=torch.int32)
    tensors, own = tensors_of(40), rows_of("ring", 40, rank, ranks)
    found = []
    for causal in (True, False):
        whole = flash_attn.flash_attn_varlen_func(*tensors[:3], ends, ends, 18, 18, causal=causal)
        q, k, *longest, rows = ring.llama3_flash_attn_prepare_cu_seqlens(ends, causal, rank, ranks)
        part = flash_attn.flash_attn_varlen_func(tensors[0][own], tensors[1][rows], tensors[2][rows], q, k, *longest,
                                                 causal=causal)
        found.append(largest(part, whole[own]))
        found += [length - int(own.diff().max()) for length, own in zip(longest, (q, k), strict=True)]
    return found


def surroundings(mesh):
    """Return whether out comes alone, whether the default group serves, and whether dropout drops on every rank."""
    q, k, v, _ = tensors_of(2, 32)
    own = rows_of("ring", 32, mesh.get_local_rank(), mesh.size())
    parts = [one[:, own] for one in (q, k, v)]
    alone = ring.ring_flash_attn_func(*parts)
    dropped = ring.ring_flash_attn_func(*parts, dropout_p=0.5)
    return tuple(alone.shape), bool((dropped - alone).abs().max() > 0.1), bool(dropped.isfinite().all())


def lengths_of_layers(mesh):
    """Return how many tensors of lengths two layers hand on, of which each brings its own copy of cu_seqlens."""
    group, ranks, handed_on, attend = mesh.get_group(), mesh.size(), [], ring._attend_packed
    rows = [torch.zeros(8, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]

    def recording(*given, **options):
        handed_on.append(options["cu_seqlens_q"])
        return attend(*given, **options)

    ring._attend_packed = recording
    try:
        for _ in range(2):
            ring.ring_flash_attn_varlen_func(*rows, torch.tensor([0, 2, 8], dtype=torch.int32), 6, group=group)
    finally:
        ring._attend_packed = attend
    return handed_on[0].tolist() == [0, 2 * ranks, 8 * ranks], len(set(map(id, handed_on)))


def wrong_calls(mesh):
    """Return the errors of calls that are wrong alike on all ranks, by name."""
    group, rank, ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()
    q, k, v, _ = tensors_of(2, 8)
    rows, ends = [one[0] for one in (q, k, v)], torch.tensor([0, 2, 8])

    def batch(*given, call=ring.ring_flash_attn_func, **options):
        return message_of(lambda: call(*(given or (q, k, v)), **{"group": group} | options))

    def varlen(lengths=ends, call=ring.ring_flash_attn_varlen_func, **options):
        return message_of(lambda: call(*rows, lengths, 6, group=group, **options))

    def llama(changed=(), borders=ends * ranks, prepared=True, **options):
        def call():
            made = list(ring.llama3_flash_attn_prepare_cu_seqlens(borders, prepared, rank, ranks))
            for place, value in changed:
                made[place] = value
            given = {"causal": True, "heads_k_stride": 2} | options
            return ring.llama3_flash_attn_varlen_func(*rows, *made[:4], local_k_slice=made[4], group=group, **given)
        return message_of(call)

    of_other = ring.llama3_flash_attn_prepare_cu_seqlens(ends * ranks, True, 1 - rank, ranks)
    return {
        "causal": batch(causal=(3, 0)), "window": batch(window_size=3), "group": batch(group="cp"),
        "dims": batch(q[0], k, v), "scale": batch(softmax_scale="1"), "disagreement": batch(causal=bool(rank)),
        "odd": batch(q[:, :7], k[:, :7], v[:, :7], call=ring.zigzag_ring_flash_attn_func),
        "odd_piece": varlen(torch.tensor([0, 3, 8]), ring.zigzag_ring_flash_attn_varlen_func),
        "rows": varlen(torch.tensor([0, 2, 7])), "list": varlen([0, 8]), "descending": varlen(torch.tensor([0, 9, 8])),
        "floats": varlen(ends.double()), "dropout": varlen(dropout_p=0.1),
        "copied": llama([(0, ends)]), "slice": llama([(4, slice(0, 3))]), "unlike": llama(prepared=False),
        "stride": llama(heads_k_stride=3), "divided": llama(borders=torch.tensor([0, 8 * ranks + 1])),
        "llama_dropout": llama(dropout_p=0.5),
        "rank": message_of(lambda: ring.llama3_flash_attn_prepare_cu_seqlens(ends, True, -1, ranks)),
        "ranks": message_of(lambda: ring.llama3_flash_attn_prepare_cu_seqlens(ends, True, 0, 0)),
        "packed_dims": message_of(lambda: ring.ring_flash_attn_varlen_func(q, k, v, ends, 6, group=group)),
        "other_rank": message_of(lambda: ring.llama3_flash_attn_varlen_func(
            *rows, *of_other[:4], 2, of_other[4], causal=True, group=group)),
    }


def default_group(mesh):
    """Return the error of a process that is in no group."""
    kept, dist.is_initialized = dist.is_initialized, lambda: False
    try:
        q, k, v, _ = tensors_of(2, 8)
        return message_of(lambda: ring.ring_flash_attn_func(q, k, v))
    finally:
        dist.is_initialized = kept
