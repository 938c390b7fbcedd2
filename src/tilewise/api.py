"""The public calls: names, defaults, docstrings. Checks live in problem.py, choices in dispatch.py."""

from collections.abc import Iterable
from typing import Literal, NamedTuple, cast, overload

import torch

from tilewise import settings
from tilewise.autograd.attention_op import Options, run
from tilewise.dispatch import Explanation, explain_problem
from tilewise.errors import InvalidInput
from tilewise.masks import Mask
from tilewise.problem import AttentionProblem

AUX_OUTPUTS = ("lse",)
_NO_MASK = Mask()


class AttentionOutput(NamedTuple):
    """What :func:`attention` returns when ``return_aux`` asks for more than out.

    Attributes:
        out: (b, hq, sq, dv).
        lse: (b, hq, sq), float32: natural logarithm of the softmax denominator; -inf where a query sees no key.
    """

    out: torch.Tensor
    lse: torch.Tensor


@overload
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: Mask | None = None,
              scale: float | None = None, return_aux: tuple[()] = (), deterministic: bool | None = None,
              backend: str | None = None) -> torch.Tensor: ...
@overload
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: Mask | None = None,
              scale: float | None = None, return_aux: tuple[Literal["lse"]], deterministic: bool | None = None,
              backend: str | None = None) -> AttentionOutput: ...


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: Mask | None = None,
              scale: float | None = None, return_aux: tuple[str, ...] = (), deterministic: bool | None = None,
              backend: str | None = None) -> torch.Tensor | AttentionOutput:
    """Compute exact attention, ``softmax(scale · q kᵀ + mask) v``, in O(s) memory, with gradients for q, k, v.

    The formula is equation 1 of docs/maths.md (scaled dot-product attention, Vaswani et al., 2017).

    Args:
        q: (b, hq, sq, d); float16, bfloat16, float32 or float64 (which Triton's kernels do not take). Any
            strides: (b, s, h, d) storage comes as a transposed view, packed qkv as slices, without a copy.
        k: (b, hk, sk, d), same dtype and device. ``hq`` is a multiple of ``hk``: each key/value head serves
            ``hq // hk`` consecutive query heads (GQA, MQA), without being expanded.
        v: (b, hk, sk, dv). Head dims d and dv are 1 to 256 and may differ; lengths sq and sk are 0 or more.
        mask: which pairs take part: :func:`causal`, :func:`window`, or both with ``&``; None = all.
        scale: factor of the scores, > 0; None = 1/sqrt(d).
        return_aux: names of further outputs; ``("lse",)`` is the log-sum-exp, which has a gradient too.
        deterministic: True demands bit-equal results on every run; None follows
            :func:`torch.are_deterministic_algorithms_enabled`.
        backend: "triton", "torch" or "reference"; None chooses (see :func:`explain`, :func:`use_backend`).

    Returns:
        out, (b, hq, sq, dv) in the dtype of q; or an :class:`AttentionOutput` when ``return_aux`` names something.
        A query that sees no key gives out 0, lse -inf and zero gradients. A key that no query sees is not read:
        NaN there reaches nothing.

    Raises:
        InvalidInput: an argument that has no meaning; the message names it.
        UnsupportedProblem: the backend asked for (or every one) refuses; the message holds each reason.

    Under autocast, q, k and v are cast to the autocast dtype, as torch's own attention does. The gradient is not
    differentiable again: a second derivative raises.

    >>> import torch, tilewise as tw
    >>> q, k, v = (torch.randn(1, 8, 128, 64) for _ in range(3))
    >>> tw.attention(q, k, v, mask=tw.causal()).shape
    torch.Size([1, 8, 128, 64])
    >>> out, lse = tw.attention(q, k, v, return_aux=("lse",))
    """
    _check_return_aux(return_aux)
    mask = _checked_mask(mask)
    q, k, v = _autocast(q, k, v)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if backend is None and not torch.compiler.is_compiling():
        backend = settings.default_backend()
    out, lse = run(q, k, v, Options(scale, mask.left, mask.right, mask.alignment, deterministic, backend))
    return AttentionOutput(out, lse) if return_aux else out


def explain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: Mask | None = None,
            scale: float | None = None, deterministic: bool | None = None,
            backend: str | None = None) -> Explanation:
    """Tell which backend each pass of this call would use, and every other backend's reason.

    Arguments and errors are those of :func:`attention`; nothing is computed, and a refusal is an answer.

    >>> import torch, tilewise as tw
    >>> q = torch.randn(1, 2, 16, 8)
    >>> tw.explain(q, q, q, mask=tw.window(3, 3)).forward
    'reference'
    """
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    problem = AttentionProblem.from_tensors(*_autocast(q, k, v), mask=_checked_mask(mask), scale=scale,
                                            deterministic=deterministic)
    return explain_problem(problem, backend or settings.default_backend())


def _checked_mask(mask: object) -> Mask:
    if mask is None:
        return _NO_MASK
    if isinstance(mask, Mask):
        return mask
    what = f"a tensor on {mask.device}" if isinstance(mask, torch.Tensor) else f"a {type(mask).__name__}"
    raise InvalidInput(f"mask is {what}; allowed is None, causal(), window(left, right), or these joined by '&'.")


def _check_return_aux(return_aux: object) -> None:
    named = isinstance(return_aux, Iterable) and not isinstance(return_aux, str)
    if not named or any(name not in AUX_OUTPUTS for name in cast("Iterable[object]", return_aux)):
        raise InvalidInput(f"return_aux is {return_aux!r}; allowed is a tuple of names out of {AUX_OUTPUTS}.")


def _autocast(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # A non-tensor is left for the problem's check, which names the argument.
    if not isinstance(q, torch.Tensor) or not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    q, k, v = (t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() and t.dtype != torch.float64
               else t for t in (q, k, v))
    return q, k, v
