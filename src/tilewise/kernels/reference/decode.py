"""Decoding in plain PyTorch: the meaning, position by position; any device, no synchronisation.

Keys and values are gathered, (b, h, capacity, d), and all scores of a call are made at once.
"""

import torch

from tilewise.problem.decode import CacheOperands, DecodeProblem


def attend_cached(problem: DecodeProblem, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                  operands: CacheOperands) -> tuple[torch.Tensor, torch.Tensor]:
    """Append k and v; return out (b, hq, sq, dv), strides ``problem.out_strides``, and lse (b, hq, sq)."""
    before = operands.cache_seqlens
    if before is None:
        before = torch.full((problem.b,), problem.capacity, device=problem.device)
    before = before.to(torch.int64).clamp(min=0)
    queries = torch.arange(problem.sq, device=problem.device)
    if problem.new:
        append(problem, k_cache, v_cache, operands, before)
    if problem.rotary_dim:
        q = rotated(problem, q, operands, before[:, None] + (queries if problem.mask.is_bounded else 0 * queries))
    dtype = problem.lse_dtype
    k, v = (in_order(problem, cache, operands).to(dtype) for cache in (k_cache, v_cache))
    keys = torch.arange(problem.capacity, device=problem.device)
    length = (before + problem.new).clamp(max=problem.capacity)[:, None, None, None]
    places = length - problem.sq + queries[:, None]  # the key that a query stands on, (b, 1, sq, 1)
    visible = (keys < length).expand(-1, -1, problem.sq, -1)
    if operands.cache_leftpad is not None:
        visible = visible & (keys >= operands.cache_leftpad[:, None, None, None])
    if problem.mask.left is not None:
        visible = visible & (keys >= places - problem.mask.left)
    if problem.mask.right is not None:
        visible = visible & (keys <= places + problem.mask.right)
    scores = _scores(problem, q.to(dtype), k, operands, (places - keys).abs()).masked_fill(
        ~visible[:, :, None], float("-inf"))
    # What nobody sees may be anything, NaN included.
    v = v.masked_fill(~visible.any(2)[..., None], 0.0)
    return _attended(problem, scores, v, operands)


def append(problem: DecodeProblem, k_cache: torch.Tensor, v_cache: torch.Tensor, operands: CacheOperands,
           before: torch.Tensor) -> None:
    """Write new keys, turned, and values behind those there are; what there is no room for is not written.

    Instead of it the last one that has room is written again, or what stands there: thus the host need not know.
    """
    k, v = operands.k, operands.v
    assert k is not None
    assert v is not None
    room = (problem.capacity - before)[:, None]
    index = torch.minimum(torch.arange(problem.new, device=problem.device), room - 1).clamp(min=0)
    places = before[:, None] + index
    if problem.rotary_dim:
        angles = before[:, None] + torch.arange(problem.new, device=problem.device)
        k = rotated(problem, k, operands, angles)
    places = places.clamp(max=problem.capacity - 1)
    if operands.block_table is not None:
        rows, places = operands.block_table.long().gather(1, places // problem.page), places % problem.page
    else:
        rows = _rows(problem, operands)[:, None].expand_as(places)
    batch = torch.arange(problem.b, device=problem.device)[:, None]
    for cache, new in ((k_cache, k), (v_cache, v)):
        written = torch.where((room > 0)[..., None, None], new[batch, :, index], cache[rows, :, places])
        cache[rows, :, places] = written


def rotated(problem: DecodeProblem, x: torch.Tensor, operands: CacheOperands, places: torch.Tensor) -> torch.Tensor:
    """Turn the first ``rotary_dim`` dims of (b, h, s, d) by the angles of places (b, s)."""
    cos, sin = operands.rotary_cos, operands.rotary_sin
    assert cos is not None
    assert sin is not None
    places = places.clamp(max=len(cos) - 1)
    cos, sin = (angles[places][:, None].to(problem.lse_dtype) for angles in (cos, sin))
    turning, rest = x[..., :problem.rotary_dim].to(problem.lse_dtype), x[..., problem.rotary_dim:]
    half = problem.rotary_dim // 2
    pairs = (turning.reshape(*x.shape[:3], half, 2) if problem.interleaved
             else turning.reshape(*x.shape[:3], 2, half).mT)
    first, second = pairs.unbind(-1)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1)
    turned = turned.flatten(-2) if problem.interleaved else turned.mT.flatten(-2)
    return torch.cat((turned.to(x.dtype), rest), -1)


def in_order(problem: DecodeProblem, cache: torch.Tensor, operands: CacheOperands) -> torch.Tensor:
    """Gather the cache of each sequence, position after position: (b, hk, capacity, d)."""
    if operands.block_table is None:
        return cache if operands.cache_batch_idx is None else cache[operands.cache_batch_idx.long()]
    # A table may hold anything past the end of a sequence.
    pages = operands.block_table.long().clamp(0, len(cache) - 1)
    return cache[pages].transpose(1, 2).flatten(2, 3)


def _rows(problem: DecodeProblem, operands: CacheOperands) -> torch.Tensor:
    if operands.cache_batch_idx is not None:
        return operands.cache_batch_idx.long()
    return torch.arange(problem.b, device=problem.device)


def _scores(problem: DecodeProblem, q: torch.Tensor, k: torch.Tensor, operands: CacheOperands,
            distance: torch.Tensor) -> torch.Tensor:
    """Scores of all pairs, masks aside, (b, hk, group, sq, capacity)."""
    groups = q.reshape(problem.b, problem.hk, problem.group, problem.sq, problem.d)
    scores: torch.Tensor = groups @ k[:, :, None].mT * problem.scale
    if problem.softcap is not None:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if operands.alibi_slopes is not None:
        slopes = operands.alibi_slopes.reshape(problem.b, problem.hk, problem.group, 1, 1)
        scores = scores - slopes * distance[:, :, None]
    return scores


def _attended(problem: DecodeProblem, scores: torch.Tensor, v: torch.Tensor,
              operands: CacheOperands) -> tuple[torch.Tensor, torch.Tensor]:
    lse = scores.logsumexp(-1)
    if operands.sinks is not None:
        lse = torch.logaddexp(lse, operands.sinks.to(lse.dtype).view(problem.hk, problem.group, 1))
    shift = lse.masked_fill(lse == float("-inf"), 0.0)
    made = ((scores - shift[..., None]).exp() @ v[:, :, None]).flatten(1, 2)
    out = torch.empty_strided(made.shape, problem.out_strides, dtype=problem.dtype, device=problem.device)
    return out.copy_(made), lse.flatten(1, 2)
