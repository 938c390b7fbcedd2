"""Attention functions that are wrong in one way each, for the torture suite to find."""

import math
import os
import time
from dataclasses import replace
from itertools import count

import torch

from tilewise.testing.torture import Implementation, Takes

TAKES = Takes(dtypes=(torch.float16, torch.bfloat16, torch.float32), head_dims=range(1, 577), other_value_dim=True,
              grouped_heads=True, masks=True, lse=True, deterministic=True, batch_invariant=True)


def visible(q, k, causal, mask, offset=None):
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    if causal:
        seen = seen.tril(k.shape[2] - q.shape[2] if offset is None else offset)
    return seen if mask is None else seen & mask


def grouped(q, k):
    return k.repeat_interleave(q.shape[1] // k.shape[1], 1)


def dense(q, k, v, *, causal, scale, mask=None, return_lse=False, seen=None):
    """Right in all of it, by rows that see nothing and keys that nobody sees too."""
    seen = visible(q, k, causal, mask) if seen is None else seen
    unseen = ~seen.flatten(0, -3).any(0).any(0) if seen.dim() > 2 else ~seen.any(0)
    k, v = (grouped(q, tensor).masked_fill(unseen[:, None], 0.0) for tensor in (k, v))
    blind = ~seen.any(-1, keepdim=True)
    q = q.masked_fill(blind, 0.0)
    scores = (q.float() @ k.float().mT * scale).masked_fill(~seen, -math.inf).masked_fill(blind, 0.0)
    out = (scores.softmax(-1) @ v.float()).masked_fill(blind, 0.0).to(q.dtype)
    if not return_lse:
        return out
    return out, scores.logsumexp(-1).masked_fill(blind[..., 0], -math.inf)


def dense_varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
    borders = zip(cu_seqlens_q.tolist(), cu_seqlens_q[1:].tolist(), cu_seqlens_k.tolist(), cu_seqlens_k[1:].tolist(),
                  strict=False)
    return torch.cat([dense(q[None, a:b].transpose(1, 2), *(t[None, c:d].transpose(1, 2) for t in (k, v)),
                            **options)[0].transpose(0, 1) for a, b, c, d in borders])


def drops_the_mask(q, k, v, *, causal, mask=None, **options):
    return dense(q, k, v, causal=False, **options)


def drops_the_boolean_mask(q, k, v, *, mask=None, **options):
    return dense(q, k, v, **options)


def aligns_at_the_other_corner(q, k, v, *, causal, mask=None, **options):
    return dense(q, k, v, causal=causal, seen=visible(q, k, causal, mask, offset=0), **options)


def wrong_scale(q, k, v, *, scale, **options):
    return dense(q, k, v, scale=q.shape[-1] ** -0.5, **options)


def without_a_maximum(q, k, v, *, causal, scale, mask=None, return_lse=False):
    scores = (q.float() @ grouped(q, k).float().mT * scale).masked_fill(~visible(q, k, causal, mask), -math.inf)
    weights = scores.exp()
    out = (weights @ grouped(q, v).float() / weights.sum(-1, keepdim=True)).to(q.dtype)
    return (out, scores.logsumexp(-1)) if return_lse else out


def adds_in_16_bits(q, k, v, *, causal, scale, mask=None, return_lse=False):
    _, lse = dense(q, k, v, causal=causal, scale=scale, mask=mask, return_lse=True)
    scores = (q.float() @ grouped(q, k).float().mT * scale).masked_fill(~visible(q, k, causal, mask), -math.inf)
    probs, values = scores.softmax(-1).to(q.dtype), grouped(q, v)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    for key in range(k.shape[2]):
        out = out + probs[..., key:key + 1] * values[:, :, key:key + 1]
    return (out, lse) if return_lse else out


def ignores_strides(q, k, v, **options):
    def as_if_dense(tensor):
        dense_strides = torch.empty(tensor.shape, device="meta").stride()
        if sum((size - 1) * stride for size, stride in zip(tensor.shape, dense_strides, strict=True)) >= (
                tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()):
            return tensor.contiguous()
        return tensor.as_strided(tensor.shape, dense_strides)

    return dense(*map(as_if_dense, (q, k, v)), **options)


_calls = count(1)


def other_bits_each_time(q, k, v, **options):
    result = dense(q, k, v, **options)
    noise = 1.0 + next(_calls) % 3 * torch.finfo(q.dtype).eps
    return (result[0] * noise, result[1]) if isinstance(result, tuple) else result * noise


def other_bits_in_a_batch(q, k, v, **options):
    result = dense(q, k, v, **options)
    noise = 1.0 + (q.shape[0] > 1) * torch.finfo(q.dtype).eps
    return (result[0] * noise, result[1]) if isinstance(result, tuple) else result * noise


def writes_into_q(q, k, v, **options):
    result = dense(q.clone(), k, v, **options)
    q.detach().mul_(1.5)
    return result


def only_whole_tiles(q, k, v, *, causal, mask=None, **options):
    seen = visible(q, k, causal, mask).clone()
    if k.shape[2] > 128:
        seen[..., k.shape[2] // 128 * 128:] = False
    return dense(q, k, v, causal=causal, seen=seen, **options)


def pads_keys_with_zeros(q, k, v, *, causal, scale, mask=None, return_lse=False):
    """Fill up to a tile with keys of zeros, and forget to hide them: each has a score of 0."""
    missing = -k.shape[2] % 128
    seen = torch.nn.functional.pad(visible(q, k, causal, mask), (0, missing), value=True)
    k, v = (torch.nn.functional.pad(tensor, (0, 0, 0, missing)) for tensor in (k, v))
    return dense(q, k, v, causal=False, scale=scale, seen=seen, return_lse=return_lse)


def wrong_groups(q, k, v, **options):
    return dense(q, *(tensor.repeat(1, q.shape[1] // tensor.shape[1], 1, 1) for tensor in (k, v)), **options)


def nan_where_nothing_is_seen(q, k, v, *, causal, scale, mask=None, return_lse=False):
    scores = (q.float() @ grouped(q, k).float().mT * scale).masked_fill(~visible(q, k, causal, mask), -math.inf)
    out = (scores.softmax(-1) @ grouped(q, v).float()).to(q.dtype)
    return (out, scores.logsumexp(-1)) if return_lse else out


def garbage_where_nothing_is_seen(q, k, v, *, causal, mask=None, **options):
    """Average all keys in a row that sees none."""
    seen = visible(q, k, causal, mask)
    return dense(q, k, v, causal=causal, seen=seen | ~seen.any(-1, keepdim=True), **options)


def swallows_nan(q, k, v, **options):
    return dense(q, k.nan_to_num(0.0), v, **options)


def shares_a_factor(q, k, v, **options):
    """Multiply by 1, made of all rows of a tile, so that an infinite one is NaN in all."""
    result, one = dense(q, k, v, **options), 1.0 + 0.0 * q.detach().sum()
    return (result[0] * one, result[1]) if isinstance(result, tuple) else result * one


def returns_zeros(q, k, v, **options):
    result = dense(q, k, v, **options)
    return (result[0] * 0.0, result[1] * 0.0) if isinstance(result, tuple) else result * 0.0


def takes_no_empty_tensors(q, k, v, **options):
    if not (q.numel() and k.numel()):
        raise ValueError("batch size must be positive")
    return dense(q, k, v, **options)


def hides_by_a_product(q, k, v, *, causal, scale, mask=None, return_lse=False):
    """Multiply what is hidden by 0, which leaves NaN and infinities."""
    seen = visible(q, k, causal, mask)
    scores = q.float() @ grouped(q, k).float().mT * scale * seen - 1e9 * ~seen
    out = (scores.softmax(-1) @ grouped(q, v).float()).to(q.dtype)
    return (out, scores.logsumexp(-1)) if return_lse else out


def adds_hidden_keys(q, k, v, *, causal, scale, mask=None, return_lse=False):
    """Hide by adding -10⁴, which a large score outweighs."""
    scores = q.float() @ grouped(q, k).float().mT * scale
    scores = scores - 1e4 * ~visible(q, k, causal, mask)
    out = (scores.softmax(-1) @ grouped(q, v).float()).to(q.dtype)
    return (out, scores.logsumexp(-1)) if return_lse else out


def base_2_lse(q, k, v, *, return_lse=False, **options):
    out, lse = dense(q, k, v, return_lse=True, **options)
    return (out, lse / math.log(2.0)) if return_lse else out


def wrong_at_head_dim_256(q, k, v, **options):
    return dense(q, k * (1.001 if q.shape[-1] == 256 and q.shape[0] > 1 else 1.0), v, **options)


def raises_where_lengths_are_odd(q, k, v, **options):
    if q.shape[2] % 2:
        raise RuntimeError("no kernel image for an odd length")
    return dense(q, k, v, **options)


def another_shape(q, k, v, **options):
    result = dense(q, k, v, **options)
    return (result[0].transpose(1, 2), result[1]) if isinstance(result, tuple) else result.transpose(1, 2)


def frozen_maximum(q, k, v, *, causal, scale, mask=None, return_lse=False):
    """Take a row's maximum from its first keys alone, in a narrow format of exponents."""
    scores = (q.float() @ grouped(q, k).float().mT * scale).masked_fill(~visible(q, k, causal, mask), -math.inf)
    largest = scores[..., :64].amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = (scores - largest).clamp(max=20.0).exp()
    out = (weights @ grouped(q, v).float() / weights.sum(-1, keepdim=True)).nan_to_num(0.0).to(q.dtype)
    return (out, scores.logsumexp(-1)) if return_lse else out


class _WrongBackward(torch.autograd.Function):
    """Right forward; ``fault`` names what the backward pass does wrong."""

    @staticmethod
    def forward(ctx, q, k, v, options, fault):
        ctx.save_for_backward(q, k, v)
        ctx.options, ctx.fault = options, fault
        return dense(q, k, v, **options)

    @staticmethod
    def backward(ctx, dout):
        leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            out = dense(*leaves, **ctx.options)
        return (*ctx.fault(leaves, out, dout), None, None)


def _with_backward(fault):
    def attention(q, k, v, *, return_lse=False, **options):
        out = _WrongBackward.apply(q, k, v, options, fault)
        return (out, dense(q, k, v, return_lse=True, **options)[1].detach()) if return_lse else out

    return attention


def _scaled_dq(leaves, out, dout):
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    return dq * 1.1, dk, dv


def _nan_of_one_query(leaves, out, dout):
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    return (dq, dk * math.nan, dv) if out.shape[2] == 1 else (dq, dk, dv)


def _reads_dout_as_dense(leaves, out, dout):
    if dout.stride() != torch.empty(dout.shape, device="meta").stride():
        dout = torch.zeros_like(dout, memory_format=torch.contiguous_format)
    return torch.autograd.grad(out, leaves, dout)


def _writes_into_dout(leaves, out, dout):
    gradients = torch.autograd.grad(out, leaves, dout.clone())
    dout.detach().zero_()
    return gradients


def _overflows(leaves, out, dout):
    """Let probabilities be made anew from a score and an lse that are both rounded."""
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    return (dq, dk, dv * (math.inf if leaves[1].abs().max() > 1e5 else 1.0))


def _dv_of_q(leaves, out, dout):
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    return dq, dk, dv if leaves[0].sum() != 0 else dv * 0.5


scales_dq = _with_backward(_scaled_dq)
nan_of_one_query = _with_backward(_nan_of_one_query)
reads_dout_as_dense = _with_backward(_reads_dout_as_dense)
writes_into_dout = _with_backward(_writes_into_dout)
overflows = _with_backward(_overflows)
halves_dv_of_zeros = _with_backward(_dv_of_q)


def forgets_gradients_of_v_alone(q, k, v, **options):
    return dense(q, k, v if q.requires_grad else v * 0.5 + v.detach() * 0.5, **options)


def _varlen_of_one_sequence(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
    return dense(*(tensor[None].transpose(1, 2) for tensor in (q, k, v)), **options)[0].transpose(0, 1)


def _varlen_faults_at_nothing(q, k, v, **options):
    if (options["cu_seqlens_q"].diff() == 0).any():
        return dense_varlen(q, k, v, **options) * math.nan
    return dense_varlen(q, k, v, **options)


def _varlen_of_32(q, k, v, **options):
    out = dense_varlen(q, k, v, **options)
    last = int(options["cu_seqlens_q"][:33][-1])
    return torch.cat((out[:last], torch.zeros_like(out[last:])))


def implementation(attention, varlen=dense_varlen, **takes):
    return Implementation(getattr(attention, "__name__", "broken"), attention, replace(TAKES, **takes), varlen)


def packed_as_one_sequence():
    return implementation(dense, _varlen_of_one_sequence)


def packed_nothing_is_nan():
    return implementation(dense, _varlen_faults_at_nothing)


def packed_of_32_at_most():
    return implementation(dense, _varlen_of_32)


def _ends_its_process(q, k, v, **options):
    """Die of one query of one key, and never return from 67 queries of it."""
    if k.shape[2] == 1 and q.shape[2] == 1:
        os._exit(11)
    if k.shape[2] == 1:
        time.sleep(600.0)
    return dense(q, k, v, **options)


# What MODULE:NAME finds.
RIGHT, WRONG = implementation(dense), implementation(scales_dq)
ENDS_ITS_PROCESS = implementation(_ends_its_process)
