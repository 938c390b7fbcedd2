"""The public calls: names, defaults, docstrings. Checks live in validate/, choices in dispatch.py."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, Never, cast, overload

import torch

from tilewise import settings
from tilewise.autograd.fast_path import attend, attend_with
from tilewise.autograd.function import run
from tilewise.backends._support.current import autocast_dtype
from tilewise.dispatch import Explanation, explain_problem
from tilewise.functions import NO_FUNCTIONS, CallFunctions, ScoreFunction, call_functions
from tilewise.masks import Mask
from tilewise.problem import AttentionProblem, are_aligned
from tilewise.problem.length_checks import packed_lengths
from tilewise.problem.operands import (
    NO_LENGTHS,
    NO_LONGEST,
    Longest,
    as_batches,
    longest_of,
    operands_of,
    parted,
    seed_of,
    with_lengths,
)
from tilewise.problem.options import AnyMask, Operands, OperatorOptions
from tilewise.validate.names import check_packed, refuses_unknown, unknown_argument
from tilewise.validate.tensors import check_inputs
from tilewise.validate.values import check_choices, check_numbers, check_switch

_LSE = ("lse",)
_PADDED_NAMES = (None, None, "seqlens_q", "seqlens_k")
_PACKED_NAMES = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")


class AttentionOutput(NamedTuple):
    """What :func:`attention` returns for ``return_aux=("lse",)``.

    Attributes:
        out: (b, hq, sq, dv).
        lse: (b, hq, sq), float32 (float64 of float64 inputs): natural logarithm of the softmax denominator, the sink's
            part included; -inf where a query sees no key and there is no sink.
    """

    out: torch.Tensor
    lse: torch.Tensor


class AttentionOutputWithMax(NamedTuple):
    """What :func:`attention` returns when ``return_aux`` names "max_logit".

    Attributes:
        out, lse: as in :class:`AttentionOutput`.
        max_logit: (b, hq, sq), of lse's dtype: the largest score that a query sees, as it enters the softmax, the sink
            not counted; -inf where it sees none. Without a gradient.
    """

    out: torch.Tensor
    lse: torch.Tensor
    max_logit: torch.Tensor


@overload
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: AnyMask | None = None,
              scale: float | None = None, bias: torch.Tensor | None = None, alibi_slopes: torch.Tensor | None = None,
              score_function: ScoreFunction | None = None, softcap: float | None = None,
              sinks: torch.Tensor | None = None, dropout_p: float = 0,
              dropout_seed: int | torch.Tensor | None = None, seqlens_q: torch.Tensor | None = None,
              seqlens_k: torch.Tensor | None = None, return_aux: tuple[()] = (),
              deterministic: bool | None = None, backend: str | None = None,
              double_backward: bool = False) -> torch.Tensor: ...
@overload
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: AnyMask | None = None,
              scale: float | None = None, bias: torch.Tensor | None = None, alibi_slopes: torch.Tensor | None = None,
              score_function: ScoreFunction | None = None, softcap: float | None = None,
              sinks: torch.Tensor | None = None, dropout_p: float = 0,
              dropout_seed: int | torch.Tensor | None = None, seqlens_q: torch.Tensor | None = None,
              seqlens_k: torch.Tensor | None = None, return_aux: tuple[Literal["lse"]],
              deterministic: bool | None = None, backend: str | None = None,
              double_backward: bool = False) -> AttentionOutput: ...
@overload
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: AnyMask | None = None,
              scale: float | None = None, bias: torch.Tensor | None = None, alibi_slopes: torch.Tensor | None = None,
              score_function: ScoreFunction | None = None, softcap: float | None = None,
              sinks: torch.Tensor | None = None, dropout_p: float = 0,
              dropout_seed: int | torch.Tensor | None = None, seqlens_q: torch.Tensor | None = None,
              seqlens_k: torch.Tensor | None = None,
              return_aux: tuple[Literal["max_logit"]] | tuple[Literal["lse"], Literal["max_logit"]],
              deterministic: bool | None = None, backend: str | None = None,
              double_backward: bool = False) -> AttentionOutputWithMax: ...


@refuses_unknown
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: AnyMask | None = None,
              scale: float | None = None, bias: torch.Tensor | None = None, alibi_slopes: torch.Tensor | None = None,
              score_function: ScoreFunction | None = None, softcap: float | None = None,
              sinks: torch.Tensor | None = None, dropout_p: float = 0,
              dropout_seed: int | torch.Tensor | None = None, seqlens_q: torch.Tensor | None = None,
              seqlens_k: torch.Tensor | None = None, return_aux: tuple[str, ...] = (),
              deterministic: bool | None = None, backend: str | None = None,
              double_backward: bool = False,
              **unknown: Never) -> torch.Tensor | AttentionOutput | AttentionOutputWithMax:
    """Compute exact attention, ``dropout(softmax(softcap(scale · q kᵀ) + bias + mask)) v``, in O(s) memory.

    The formula is equation 1 of docs/maths.md (scaled dot-product attention, Vaswani et al., 2017); the order in which
    the options act is that of section 11. There are gradients for q, k, v, bias, alibi_slopes and sinks, and any
    subset of the options may be used together.

    Args:
        q: (b, hq, sq, d); float16, bfloat16, float32 or float64 (which Triton's kernels do not take). Any
            strides: (b, s, h, d) storage comes as a transposed view, packed qkv as slices, without a copy.
        k: (b, hk, sk, d), same dtype and device. ``hq`` is a multiple of ``hk``: each key/value head serves
            ``hq // hk`` consecutive query heads (GQA, MQA), without being expanded.
        v: (b, hk, sk, dv). Head dims d and dv are 1 or more and may differ; Triton's kernels take d to 576 and dv to
            512. Lengths sq and sk are 0 or more.
        mask: which pairs take part: :func:`causal`, :func:`window`, :func:`prefix`, :func:`chunk`,
            :func:`sink_tokens`, :func:`documents`, a boolean tensor that broadcasts to (b, hq, sq, sk), True = take
            part, or a :class:`tilewise.functions.MaskFunction`; any of these joined by ``&``; None = all.
        scale: factor of the scores, from 2⁻¹²⁶ to 2¹²⁷; None = 1/sqrt(d).
        bias: broadcasts to (b, hq, sq, sk), in q's dtype or float32 (of float64 inputs in float64 alone); added to the
            scaled (and capped) scores. Its gradient is summed over the broadcast dims.
        alibi_slopes: (hq,) or (b, hq), float32 (float64 of float64 inputs): ``−slope · |i + offset − j|`` is added to
            the score of query i and key j (ALiBi; Press et al., 2021), with the mask's alignment (offset 0, sk − sq or
            a number).
        score_function: a :class:`tilewise.functions.ScoreFunction`: what a scaled (and capped) score becomes, written
            by you in Triton, in torch, or in both; bias and slopes are added to its result.
        softcap: scores become ``softcap · tanh(score / softcap)`` before bias and mask (Gemma 2); from 2⁻¹²⁶ to 2¹²⁷,
            None = off.
        sinks: (hq,), in a dtype that bias may have: a logit for each head that enters the softmax's denominator and
            has no value (gpt-oss); lse includes it. A head whose sink is −inf has none.
        dropout_p: probability to drop a pair, 0 <= dropout_p < 1; what is kept is divided by 1 − dropout_p.
        dropout_seed: an integer, or an int64 tensor of shape (1,) on q's device; the same seed drops the same pairs,
            on every backend (:func:`tilewise.testing.oracle.dropout_keep` shows which). None draws one from torch's
            default generator.
        seqlens_q, seqlens_k: (b,), int32 or int64, on q's device: how many queries and keys of a batch entry, the
            first ones, take part; None = all. The rest is padding: not read, 0 in out and in every gradient, -inf in
            lse. Never read by the host: less than 0 counts as 0, and more than there are as all (in ``cudnn`` they must
            be within). "bottom_right" is each entry's own, by its two lengths.
        return_aux: names of further outputs: "lse", the log-sum-exp, which has a gradient, and "max_logit".
        deterministic: True demands bit-equal results on every run and, of a sequence, in every batch, whatever the
            number and the lengths of its neighbours; None follows
            :func:`torch.are_deterministic_algorithms_enabled`.
        backend: "gluon", "triton", "cuda", "cuda_ieee", "torch", "cudnn" or "reference"; None chooses (see
            :func:`explain`, :func:`use_backend`).
        double_backward: True computes by operations that torch itself differentiates, any number of times, in reverse
            and in forward mode (:func:`torch.func.jvp`): the reference does, and no other backend. A gradient that is
            itself recorded (``create_graph=True``), or made by :func:`torch.func.grad`, takes O(sq x sk) memory.

    Returns:
        out, (b, hq, sq, dv) in the dtype of q, dense, its dims b, h and s in q's memory order, whichever of the six
        that is, and d innermost; or an :class:`AttentionOutput` (with "max_logit" an
        :class:`AttentionOutputWithMax`) when ``return_aux`` names something.
        A query that sees no key gives out 0, lse -inf (the sink, where there is one) and zero gradients. A key that
        no query sees by its position is not read: NaN there reaches nothing.

    Raises:
        InvalidInput: an argument that has no meaning; the message names it.
        UnsupportedProblem: the backend asked for (or every one) refuses; the message holds each reason.

    Under autocast, q, k and v are cast to the autocast dtype, as torch's own attention does. Without
    ``double_backward=True`` the gradient is not differentiable again: a second derivative raises, and so do forward
    mode and gradients inside transforms of ``torch.func``.

    >>> import torch, tilewise as tw
    >>> q, k, v = (torch.randn(1, 8, 128, 64) for _ in range(3))
    >>> tw.attention(q, k, v, mask=tw.causal()).shape
    torch.Size([1, 8, 128, 64])
    >>> out, lse = tw.attention(q, k, v, bias=torch.zeros(128, 128), softcap=30.0, return_aux=("lse",))
    """
    if (not unknown and bias is None and alibi_slopes is None and score_function is None and softcap is None
            and sinks is None and dropout_p == 0 and seqlens_q is None and seqlens_k is None
            and double_backward is False and (mask is None or mask.__class__ is Mask)
            and (return_aux == () or return_aux == _LSE)):
        results = attend(q, k, v, mask, (scale, deterministic, backend), bool(return_aux))
        if results is not None:
            return AttentionOutput(*results) if return_aux else results[0]
    if unknown:
        raise unknown_argument("attention", unknown)
    check_numbers(softcap, dropout_p, return_aux)
    band, visible, lists, mask_function = parted(mask)
    q, k, v = _autocast(q, k, v)
    lengths = NO_LENGTHS
    if seqlens_q is not None or seqlens_k is not None:
        band, lengths = with_lengths(band, (None, None, seqlens_q, seqlens_k), _PADDED_NAMES)
    functions = NO_FUNCTIONS
    if score_function is not None or mask_function is not None:
        functions = call_functions(score_function, mask_function)
    operands = operands_of(bias, alibi_slopes, visible, sinks, seed_of(q, dropout_p, dropout_seed), lengths, lists,
                         functions)
    options = _options(scale, band, softcap, dropout_p, return_aux, functions, NO_LONGEST, deterministic, backend)
    results = _attend(q, k, v, operands, options, double_backward, bool(return_aux))
    return _named(results, return_aux) if return_aux else results[0]


@overload
def attention_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cu_seqlens_q: torch.Tensor,
                     cu_seqlens_k: torch.Tensor | None = None, seqused_q: torch.Tensor | None = None,
                     seqused_k: torch.Tensor | None = None, max_seqlen_q: int | torch.Tensor | None = None,
                     max_seqlen_k: int | torch.Tensor | None = None, mask: AnyMask | None = None,
                     scale: float | None = None, bias: torch.Tensor | None = None,
                     alibi_slopes: torch.Tensor | None = None, score_function: ScoreFunction | None = None,
                     softcap: float | None = None,
                     sinks: torch.Tensor | None = None, dropout_p: float = 0,
                     dropout_seed: int | torch.Tensor | None = None, return_aux: tuple[()] = (),
                     deterministic: bool | None = None, backend: str | None = None,
                     double_backward: bool = False) -> torch.Tensor: ...
@overload
def attention_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cu_seqlens_q: torch.Tensor,
                     cu_seqlens_k: torch.Tensor | None = None, seqused_q: torch.Tensor | None = None,
                     seqused_k: torch.Tensor | None = None, max_seqlen_q: int | torch.Tensor | None = None,
                     max_seqlen_k: int | torch.Tensor | None = None, mask: AnyMask | None = None,
                     scale: float | None = None, bias: torch.Tensor | None = None,
                     alibi_slopes: torch.Tensor | None = None, score_function: ScoreFunction | None = None,
                     softcap: float | None = None,
                     sinks: torch.Tensor | None = None, dropout_p: float = 0,
                     dropout_seed: int | torch.Tensor | None = None, return_aux: tuple[Literal["lse"]],
                     deterministic: bool | None = None, backend: str | None = None,
                     double_backward: bool = False) -> AttentionOutput: ...
@overload
def attention_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cu_seqlens_q: torch.Tensor,
                     cu_seqlens_k: torch.Tensor | None = None, seqused_q: torch.Tensor | None = None,
                     seqused_k: torch.Tensor | None = None, max_seqlen_q: int | torch.Tensor | None = None,
                     max_seqlen_k: int | torch.Tensor | None = None, mask: AnyMask | None = None,
                     scale: float | None = None, bias: torch.Tensor | None = None,
                     alibi_slopes: torch.Tensor | None = None, score_function: ScoreFunction | None = None,
                     softcap: float | None = None,
                     sinks: torch.Tensor | None = None, dropout_p: float = 0,
                     dropout_seed: int | torch.Tensor | None = None,
                     return_aux: tuple[Literal["max_logit"]] | tuple[Literal["lse"], Literal["max_logit"]],
                     deterministic: bool | None = None, backend: str | None = None,
                     double_backward: bool = False) -> AttentionOutputWithMax: ...


@refuses_unknown
def attention_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cu_seqlens_q: torch.Tensor,
                     cu_seqlens_k: torch.Tensor | None = None, seqused_q: torch.Tensor | None = None,
                     seqused_k: torch.Tensor | None = None, max_seqlen_q: int | torch.Tensor | None = None,
                     max_seqlen_k: int | torch.Tensor | None = None, mask: AnyMask | None = None,
                     scale: float | None = None, bias: torch.Tensor | None = None,
                     alibi_slopes: torch.Tensor | None = None, score_function: ScoreFunction | None = None,
                     softcap: float | None = None,
                     sinks: torch.Tensor | None = None, dropout_p: float = 0,
                     dropout_seed: int | torch.Tensor | None = None, return_aux: tuple[str, ...] = (),
                     deterministic: bool | None = None, backend: str | None = None, double_backward: bool = False,
                     **unknown: Never) -> torch.Tensor | AttentionOutput | AttentionOutputWithMax:
    """Compute attention over packed sequences of any lengths, which the host never reads.

    Sequence ``n`` is rows ``cu_seqlens[n]`` to ``cu_seqlens[n + 1]`` of q, of k and v; its queries see its keys alone.
    Everything else is as in :func:`attention`; positions, in masks, bias, slopes and dropout, count from the start of
    the sequence. The lengths stay on the device: no synchronisation, no recompilation, nothing that a CUDA graph could
    not replay with other lengths.

    Args:
        q: (total_q, hq, d), any strides.
        k, v: (total_k, hk, d) and (total_k, hk, dv).
        cu_seqlens_q: (sequences + 1,), int32 or int64, on q's device: 0, then where each sequence ends. Lengths may
            be 0. Rows past the last one are padding. Other numbers raise on a CPU. Those on a GPU are never read by
            the host: there wrong ones give results that mean nothing (``TILEWISE_CHECK=1`` finds them, one call late).
        cu_seqlens_k: the same of k and v; None = cu_seqlens_q.
        seqused_q, seqused_k: (sequences,), int32 or int64: how many rows of each sequence, the first ones and no more
            than it has, take part; None = all. The rest is padding: not read, 0 in out and gradients, -inf in lse.
        max_seqlen_q, max_seqlen_k: an integer, a tensor or None. Nothing needs them but a bias or a boolean mask with
            a query or key dim, whose size each must be; an integer then. No sequence may be longer than that: the
            device alone knows, and what kernels would read of such a bias or mask is not its own.
        mask: as in :func:`attention`; ids of :func:`documents` are (total,), a boolean tensor broadcasts to
            (sequences, hq, max_seqlen_q, max_seqlen_k). A bounded mask needs an alignment, unless queries and keys
            share their lengths (``cu_seqlens_k`` left out, or the same tensor).
        bias: broadcasts to (sequences, hq, max_seqlen_q, max_seqlen_k).
        alibi_slopes: (hq,) or (sequences, hq), of the dtype in :func:`attention`.
        scale, softcap, sinks, dropout_p, dropout_seed, return_aux, deterministic, backend, double_backward: as in
            :func:`attention`.
        score_function: as in :func:`attention`; to a function, ``batch`` is the number of the sequence.

    Returns:
        out, (total_q, hq, dv); with ``return_aux`` a named tuple, whose lse and max_logit are (hq, total_q).

    Raises:
        InvalidInput, UnsupportedProblem: as :func:`attention`.

    >>> import torch, tilewise as tw
    >>> q, k, v = (torch.randn(9, 4, 32) for _ in range(3))
    >>> lengths = torch.tensor([0, 3, 3, 9], dtype=torch.int32)
    >>> tw.attention_varlen(q, k, v, cu_seqlens_q=lengths, mask=tw.causal()).shape
    torch.Size([9, 4, 32])
    """
    if unknown:
        raise unknown_argument("attention_varlen", unknown)
    check_numbers(softcap, dropout_p, return_aux)
    band, visible, lists, mask_function = parted(mask)
    longest = NO_LONGEST
    if max_seqlen_q is not None or max_seqlen_k is not None:
        longest = longest_of(max_seqlen_q, max_seqlen_k, needed=bias is not None or visible is not None)
    batched = partial(as_batches, q, k, v)
    lengths = packed_lengths(q, k, (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), (max_seqlen_q, max_seqlen_k))
    band, lengths = with_lengths(band, lengths, _PACKED_NAMES)
    functions = NO_FUNCTIONS
    if score_function is not None or mask_function is not None:
        functions = call_functions(score_function, mask_function)
    operands = operands_of(bias, alibi_slopes, visible, sinks, seed_of(q, dropout_p, dropout_seed), lengths, lists,
                         functions)
    options = _options(scale, band, softcap, dropout_p, return_aux, functions, longest, deterministic, backend)
    results = attend_with(q, k, v, operands, options, batched) if double_backward is False else None
    if results is not None:  # plain tensors, without a gradient
        out = _packed_rows(results[0])
    else:
        results = _attend(*_autocast(*batched()), operands, options, double_backward, bool(return_aux))
        # Squeezed: the gradient of an index would be a copy of dout among zeros.
        out = results[0].squeeze(0).transpose(0, 1)
    return _named((out, *(row.squeeze(0) for row in results[1:])), return_aux) if return_aux else out


@refuses_unknown
def explain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: AnyMask | None = None,
            scale: float | None = None, bias: torch.Tensor | None = None, alibi_slopes: torch.Tensor | None = None,
            score_function: ScoreFunction | None = None, softcap: float | None = None,
            sinks: torch.Tensor | None = None, dropout_p: float = 0,
            dropout_seed: int | torch.Tensor | None = None, seqlens_q: torch.Tensor | None = None,
            seqlens_k: torch.Tensor | None = None, cu_seqlens_q: torch.Tensor | None = None,
            cu_seqlens_k: torch.Tensor | None = None, seqused_q: torch.Tensor | None = None,
            seqused_k: torch.Tensor | None = None, max_seqlen_q: int | torch.Tensor | None = None,
            max_seqlen_k: int | torch.Tensor | None = None, return_aux: tuple[str, ...] = (),
            deterministic: bool | None = None, backend: str | None = None,
            double_backward: bool = False, **unknown: Never) -> Explanation:
    """Tell which backend each pass of this call would use, and every other backend's reason.

    Arguments and errors are those of :func:`attention`, or, where ``cu_seqlens_q`` is given, of
    :func:`attention_varlen`; nothing is computed, and a refusal is an answer. For :func:`attention_decode` there is
    :func:`tilewise.decode.explain_decode`.

    >>> import torch, tilewise as tw
    >>> q = torch.randn(1, 2, 16, 8)
    >>> tw.explain(q, q, q, mask=tw.window(3, 3)).forward
    'reference'
    """
    if unknown:
        raise unknown_argument("explain", unknown)
    check_numbers(softcap, dropout_p, return_aux)
    check_choices(scale, deterministic, backend)
    check_switch("double_backward", double_backward)
    band, visible, lists, mask_function = parted(mask)
    packed = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q,
              "seqused_k": seqused_k, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    lengths, longest = NO_LENGTHS, NO_LONGEST
    if check_packed(packed, {"seqlens_q": seqlens_q, "seqlens_k": seqlens_k}):
        longest = longest_of(max_seqlen_q, max_seqlen_k, needed=bias is not None or visible is not None)
        lengths = packed_lengths(q, k, (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), (max_seqlen_q, max_seqlen_k))
        q, k, v = as_batches(q, k, v)
        band, lengths = with_lengths(band, lengths, _PACKED_NAMES)
    elif seqlens_q is not None or seqlens_k is not None:
        band, lengths = with_lengths(band, (None, None, seqlens_q, seqlens_k), _PADDED_NAMES)
    q, k, v = _autocast(q, k, v)
    functions = NO_FUNCTIONS
    if score_function is not None or mask_function is not None:
        functions = call_functions(score_function, mask_function)
    seed = seed_of(q, dropout_p, 0 if dropout_seed is None else dropout_seed)  # none is drawn, for a generator moves
    operands = operands_of(bias, alibi_slopes, visible, sinks, seed, lengths, lists, functions)
    options = _options(scale, band, softcap, dropout_p, return_aux, functions, longest, deterministic, backend)
    problem = AttentionProblem.from_call(q, k, v, operands, options)
    # Inside a transform of torch.func tensors have no address.
    problem = replace(problem, aligned=torch._C._are_functorch_transforms_active() or are_aligned(q, k, v))
    why_not_twice = _double_backward().why_not_twice if double_backward else None
    return explain_problem(problem, backend or settings.default_backend(), why_not_twice)


def _packed_rows(out: torch.Tensor) -> torch.Tensor:
    """View (1, h, total, d) as (total, h, d): one view, for two cost the host as much as a launch."""
    (_, h, total, d), (_, of_h, of_total, of_d) = out.shape, out.stride()
    return out.as_strided((total, h, d), (of_total, of_h, of_d))


def _options(scale: float | None, band: Mask, softcap: float | None, dropout_p: float, return_aux: tuple[str, ...],
             functions: CallFunctions, longest: Longest, deterministic: bool | None,
             backend: str | None) -> OperatorOptions:
    """Flatten what is not a tensor into an operator's arguments."""
    if scale is not None or deterministic is not None or backend is not None:
        check_choices(scale, deterministic, backend)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    corner, offset = (None, band.alignment) if isinstance(band.alignment, int) else (band.alignment, None)
    return OperatorOptions(scale, band.left, band.right, corner, band.prefix, band.sink_tokens, band.chunk, softcap,
                           dropout_p, "max_logit" in return_aux, functions.score, functions.mask, *longest, offset,
                           deterministic=deterministic, backend=backend)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Operands, options: OperatorOptions,
            double_backward: bool, with_lse: bool) -> Sequence[torch.Tensor]:
    check_switch("double_backward", double_backward)
    if double_backward:
        return cast(Sequence[torch.Tensor], _double_backward().run_twice_differentiable(q, k, v, operands, options))
    results = attend_with(q, k, v, operands, options)
    return run(q, k, v, operands, options, with_lse) if results is None else results


def _double_backward() -> Any:
    # Loads torch's compiler, in order to be left alone by it: 0.8 s, not to be paid by an import of tilewise.
    from tilewise.autograd import double_backward

    return double_backward


def _named(results: Sequence[torch.Tensor], return_aux: tuple[str, ...]) -> AttentionOutput | AttentionOutputWithMax:
    return AttentionOutputWithMax(*results) if "max_logit" in return_aux else AttentionOutput(*results)


def _autocast(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_inputs(q, k, v)
    kind = "cuda" if q.is_cuda else q.device.type  # a device makes the string anew, which costs as much as all else
    dtype = autocast_dtype(kind)
    if dtype is None:
        return q, k, v
    q, k, v = (t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in (q, k, v))
    return q, k, v
