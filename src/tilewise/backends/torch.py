"""Runs torch's own fused attention on the calls that are plain enough for it.

torch's operators know no window, give lse 0 where a query sees no key, and put the diagonal of ``is_causal`` through
the top left corner on CPUs but through the bottom right one on GPUs. So they are handed only the *core* of a call:
the queries that see a key, and the keys that are seen. What lies outside is neither read nor written by them.
"""

from typing import NamedTuple, cast

import torch

from tilewise.backends.base import Gradients, Needs, Results, Saved
from tilewise.masks import Span
from tilewise.problem import AttentionProblem, Sizes, dense_strides
from tilewise.problem.options import NO_OPERANDS, Operands, ScoreOptions

_aten = torch.ops.aten
_GPU_DTYPES = (torch.float16, torch.bfloat16)
_replaced: set[str] = set()  # dispatch keys whose flash attention is tilewise itself, by its integration


def replace_flash_attention(dispatch_key: str, is_ours: bool) -> None:
    """Note whether tilewise stands in for torch's operators; what was chosen before is for the caller to forget."""
    (_replaced.add if is_ours else _replaced.discard)(dispatch_key)


class TorchBackend:
    """``aten::_scaled_dot_product_flash_attention`` and its sibling for CPUs, behind tilewise's contract."""

    name = "torch"

    def why_not(self, problem: AttentionProblem) -> str | None:
        """Return the reason against, if there is one."""
        if problem.sequences.are_data:
            return "takes no lengths that are data: neither seqlens nor packed sequences"
        if problem.deterministic:
            # On a CPU out changed with the batch (3 queries, 700 keys, d 40, float32, 2 threads, torch 2.13); on CUDA
            # devices dq is added up in no fixed order.
            return "gives a sequence bits that depend on its batch, and a deterministic result was asked for"
        if problem.is_empty:
            return "needs at least one query that sees a key; here none does"
        if problem.d != problem.dv:
            return f"needs equal head dims, got {problem.d} for q and k and {problem.dv} for v"
        if problem.lse_grad:
            return "has no gradient through lse"
        if problem.float32_results:
            return f"writes results in the inputs' dtype, got {problem.dtype} with results in float32"
        option = _option(problem.scores)
        if option is not None:
            return f"takes no {option}"
        if problem.mask.has_exceptions:
            return f"takes no prefix, sink tokens or chunks, got {problem.mask}"
        for name, strides in (("q", problem.q_strides), ("k", problem.k_strides), ("v", problem.v_strides)):
            if strides[3] != 1 and problem.d > 1:
                return f"needs stride 1 in the last dim, got {strides[3]} for {name}"
        core = _core(problem)
        if core is None:
            return ("takes no mask, or a causal one without a window whose first seeing query sees one key; "
                    f"got {problem.mask} with {problem.sq} queries and {problem.sk} keys")
        if problem.device.type == "cpu":
            return None
        if problem.device.type != "cuda" or torch.version.hip is not None:
            return f"runs on CPUs and CUDA devices, got {'ROCm' if torch.version.hip else problem.device}"
        return _why_not_cuda(problem, core)

    def forward(self, problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                operands: Operands = NO_OPERANDS) -> Results:
        """See :class:`tilewise.backends.base.Backend`."""
        core = cast(_Core, _core(problem))  # why_not refuses where there is none
        parts = core.cut(q, k, v)
        if problem.device.type == "cpu":
            part_out, part_lse = _aten._scaled_dot_product_flash_attention_for_cpu(
                *parts, 0.0, core.is_causal, scale=problem.scale)
        else:
            part_out, part_lse = _aten._scaled_dot_product_flash_attention(
                *parts, 0.0, core.is_causal, False, scale=problem.scale)[:2]
            # The kernel writes +inf where a score is NaN; from it the backward pass would make gradients of 0.
            part_lse = part_lse.masked_fill(part_lse == float("inf"), float("nan"))
        shape = (problem.b, problem.hq, problem.sq, problem.dv)
        out = _placed(part_out, core.queries, shape, problem.out_strides, 0.0)
        lse = _placed(part_lse, core.queries, shape[:3], (shape[1] * shape[2], shape[2], 1), float("-inf"))
        return Results(out, lse)

    def backward(self, problem: AttentionProblem, saved: Saved, dout: torch.Tensor, dlse: torch.Tensor | None,
                 needs: Needs = Needs()) -> Gradients:  # noqa: B008 - a value, never changed
        """See :class:`tilewise.backends.base.Backend`; the operator computes all three gradients whatever is needed."""
        core = cast(_Core, _core(problem))  # why_not refuses where there is none
        q, k, v, out, lse, _ = saved
        part_dout, part_out, part_lse = (_cut(tensor, core.queries) for tensor in (dout, out, lse))
        if part_dout.stride(-1) != 1:  # the gradient of a sum is one number, expanded
            part_dout = part_dout.contiguous()
        tensors = (part_dout, *core.cut(q, k, v), part_out, part_lse.contiguous())
        if problem.device.type == "cpu":
            parts = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *tensors, 0.0, core.is_causal, scale=problem.scale)
        else:
            # No packed sequences, so no cumulative lengths; no dropout, so the random state is never read.
            random_state = q.new_empty(2, dtype=torch.uint64)
            parts = _aten._scaled_dot_product_flash_attention_backward(
                *tensors, None, None, len(core.queries), len(core.keys), 0.0, core.is_causal,
                random_state, random_state, scale=problem.scale)
        return Gradients(*(
            _placed(part, positions, like.shape, dense_strides(like.shape, like.stride()), 0.0) if needed else None
            for part, positions, like, needed in zip(
                parts, (core.queries, core.keys, core.keys), (q, k, v), (needs.dq, needs.dkv, needs.dkv), strict=True)
        ))


class _Core(NamedTuple):
    """What is left of a problem without the queries that see nothing and the keys that nobody sees.

    With ``is_causal``, query i of the core sees the core's keys up to i; without, it sees all of them.
    """

    queries: Span
    keys: Span
    is_causal: bool

    def cut(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return _cut(q, self.queries), _cut(k, self.keys), _cut(v, self.keys)


def _option(scores: ScoreOptions) -> str | None:
    """Name an option that is more than scale and band; torch's operators know of none, or give no lse with it."""
    options = {"bias": scores.bias is not None, "ALiBi slopes": scores.alibi_slopes is not None,
               "mask tensor": scores.mask is not None, "softcap": scores.softcap is not None,
               "sinks": scores.sinks is not None, "max_logit": scores.max_logit,
               "dropout": bool(scores.dropout_p or scores.dropout_origin_q or scores.dropout_origin_k),
               "documents": scores.documents_q is not None,
               "score function": scores.score_function is not None, "mask function": scores.mask_function is not None}
    return next((name for name, is_there in options.items() if is_there), None)


def _core(problem: AttentionProblem) -> _Core | None:
    """Return the problem's core, or None if it is neither unmasked nor causal from its top left corner."""
    queries, keys, band = problem.seeing_queries, problem.seen_keys, problem.band
    if band.shared_keys_of(queries, problem.sk) == keys:
        return _Core(queries, keys, is_causal=False)
    last_query = Span(queries.stop - 1, queries.stop)
    is_left_open = band.keys_of(last_query, problem.sk).start <= keys.start
    if is_left_open and band.upper == keys.start - queries.start:
        return _Core(queries, keys, is_causal=True)
    return None


def _why_not_cuda(problem: AttentionProblem, core: _Core) -> str | None:
    if "CUDA" in _replaced:
        return ("calls torch's flash attention, whose place tilewise itself has taken; "
                "torch.nn.attention.restore_flash_attention_impl() puts torch's own back")
    if problem.dtype not in _GPU_DTYPES:
        return f"computes in float16 and bfloat16 on CUDA devices, got {problem.dtype}"
    if problem.d > 256:
        return f"needs a head dim up to 256 on CUDA devices, got {problem.d}"
    if problem.d % 8:
        return f"needs a head dim that is a multiple of 8 on CUDA devices, got {problem.d}"
    if core.is_causal and len(core.queries) != len(core.keys):
        return f"takes a causal mask of equal lengths on CUDA devices, got {problem.sq} queries and {problem.sk} keys"
    capability = torch.cuda.get_device_capability(problem.device)
    if capability < (8, 0):
        return f"needs CUDA compute capability 8.0 or newer, got {capability[0]}.{capability[1]}"
    if problem.direction == "backward" and problem.d > 192 and capability not in ((8, 0), (9, 0), (10, 0)):
        return f"needs a head dim up to 192 for the backward pass on this device, got {problem.d}"
    return None


def _cut(tensor: torch.Tensor, positions: Span) -> torch.Tensor:
    return tensor[:, :, positions.start:positions.stop]


def _placed(part: torch.Tensor, positions: Span, shape: Sizes, strides: Sizes, elsewhere: float) -> torch.Tensor:
    """Return a tensor of this shape and strides that holds ``part`` at the positions and ``elsewhere`` outside."""
    if part.shape == shape and part.stride() == strides:
        return part
    whole = part.new_empty_strided(shape, strides)
    if part.shape != whole.shape:
        whole.fill_(elsewhere)
    _cut(whole, positions).copy_(part)
    return whole


backend = TorchBackend()
