"""What decoding is compared with: each sequence by itself, cut out of its cache, in float64."""

import torch


def rotated(x, places, cos, sin, interleaved):
    """Turn (h, s, d) pair by pair, as complex numbers."""
    half = cos.shape[1]
    parts = x[..., :2 * half]
    pairs = parts.reshape(*x.shape[:2], half, 2) if interleaved else torch.stack(parts.split(half, -1), -1)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin)[places]
    turned = torch.view_as_real(turned)
    turned = turned.flatten(-2) if interleaved else torch.cat(turned.unbind(-1), -1)
    return torch.cat((turned, x[..., 2 * half:]), -1)


def positions(cache, n, call):
    """View the cache of sequence n as a list of its positions, each (h, d), which can be written."""
    if (table := call.get("block_table")) is not None:
        return [cache[page, :, i] for page in table[n].tolist() for i in range(cache.shape[2])]
    row = n if call.get("cache_batch_idx") is None else int(call["cache_batch_idx"][n])
    return list(cache[row].unbind(1))


def expected(q, k_cache, v_cache, left=None, right=None, **call):
    """Return (out, lse), and append to the caches: the arguments of ``attention_decode``, float64, bounds apart."""
    outs, lses = [], []
    for n in range(len(q)):
        keys, values = positions(k_cache, n, call), positions(v_cache, n, call)
        before = int(call["cache_seqlens"][n]) if call.get("cache_seqlens") is not None else len(keys)
        own_q, length = q[n], before
        angles = [call.get(name) for name in ("rotary_cos", "rotary_sin")] + [call.get("rotary_interleaved", True)]
        if call.get("k") is not None:
            k, v = call["k"][n], call["v"][n]
            places = torch.arange(before, before + k.shape[1])
            room = max(0, len(keys) - before)
            if angles[0] is not None:
                k = torch.cat((rotated(k[:, :room], places[:room], *angles), k[:, room:]), 1)
                spread = torch.arange(q.shape[2]) if left is not None or right is not None else 0
                own_q = rotated(own_q, before + spread + torch.zeros(q.shape[2], dtype=int), *angles)
            for i in range(min(room, k.shape[1])):
                keys[before + i].copy_(k[:, i])
                values[before + i].copy_(v[:, i])
            length = min(before + k.shape[1], len(keys))
        out, lse = of_sequence(own_q, keys[:length], values[:length], n, (left, right), call)
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def of_sequence(q, keys, values, n, bounds, call):
    """Attend, query by query and head by head, to the keys that a query sees."""
    hq, sq, d = q.shape
    dv, length = v_dim(values, call), len(keys)
    out, lse = torch.zeros(hq, sq, dv, dtype=q.dtype), torch.full((hq, sq), -torch.inf, dtype=q.dtype)
    first = int(call["cache_leftpad"][n]) if call.get("cache_leftpad") is not None else 0
    for i in range(sq):
        place = length - sq + i
        seen = [j for j in range(first, length) if (bounds[0] is None or j >= place - bounds[0])
                and (bounds[1] is None or j <= place + bounds[1])]
        for h in range(hq):
            sink = [] if call.get("sinks") is None else [call["sinks"][h].to(q.dtype)]
            own = h // (hq // call["hk"])
            scores = [q[h, i] @ keys[j][own] * call.get("scale", d ** -0.5) for j in seen]
            if call.get("softcap"):
                scores = [call["softcap"] * torch.tanh(score / call["softcap"]) for score in scores]
            if call.get("alibi_slopes") is not None:
                slope = call["alibi_slopes"][n, h]
                scores = [score - slope * abs(place - j) for score, j in zip(scores, seen, strict=True)]
            if scores or sink:
                lse[h, i] = torch.stack(scores + sink).logsumexp(0)
            for score, j in zip(scores, seen, strict=True):
                out[h, i] += (score - lse[h, i]).exp() * values[j][own]
    return out, lse


def v_dim(values, call):
    return values[0].shape[-1] if values else call["dv"]
