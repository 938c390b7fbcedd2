"""Combine attention over two disjoint sets of keys."""

import torch

from tilewise.errors import InvalidInput


def merge(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor,
          lse_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine attention over two disjoint sets of keys (maths.md, eq. 11).

    lse = log(exp(lse_a) + exp(lse_b));  out = exp(lse_a − lse)·out_a + exp(lse_b − lse)·out_b

    Args:
        out_a, out_b: (b, h, s, dv), one float dtype. Partial outputs, each normalised by its own softmax.
        lse_a, lse_b: (b, h, s), float32 or float64. Natural-log sum of exponentials; -inf where a part saw no key, or
            +inf, as flash-attn 2 has it.

    Returns:
        ``(out, lse)`` as if both sets had been attended to at once; out has the dtype of out_a. A row empty in both
        parts gives 0 and -inf. Differentiable in all four.

    Raises:
        InvalidInput: something else than a tensor; other dtypes; devices, or shapes, that do not belong together.

    >>> import torch, tilewise as tw
    >>> q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    >>> a, b = (tw.attention(q, k[:, :, part], v[:, :, part], return_aux=("lse",))
    ...         for part in (slice(0, 2), slice(2, 6)))
    >>> out, lse = tw.merge(*a, *b)
    >>> torch.testing.assert_close(out, tw.attention(q, k, v))
    """
    _check(out_a, lse_a, out_b, lse_b)
    for name, got, expected in (("out_b", out_b, out_a.shape), ("lse_a", lse_a, out_a.shape[:-1]),
                                ("lse_b", lse_b, out_a.shape[:-1])):
        if got.shape != expected:
            raise InvalidInput(f"merge: {name} has shape {tuple(got.shape)}; out_a asks for {tuple(expected)}.")
    # Of weight 0 either way: where +inf came of a score of +inf, its out is NaN, and NaN times 0 is too.
    lse_a, lse_b = (lse.masked_fill(lse == float("inf"), float("-inf")) for lse in (lse_a, lse_b))
    greater = torch.maximum(lse_a, lse_b).detach()
    empty = greater == float("-inf")
    # A row empty in both parts is shifted by 0 and divided by 1, since −inf − (−inf) and 0 / 0 are NaN, and so would
    # be the gradient of torch.logaddexp there.
    shift = greater.masked_fill(empty, 0.0)
    weight_a, weight_b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
    total = (weight_a + weight_b).masked_fill(empty, 1.0)
    lse = (shift + total.log()).masked_fill(empty, float("-inf"))
    out = out_a * (weight_a / total).unsqueeze(-1) + out_b * (weight_b / total).unsqueeze(-1)
    return out.to(out_a.dtype), lse


def _check(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> None:
    """Check everything but the shapes."""
    for name, got in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        if not isinstance(got, torch.Tensor):
            raise InvalidInput(f"merge: {name} is a {type(got).__name__}; allowed is a tensor.")
        if got.device != out_a.device:
            raise InvalidInput(f"merge: {name} is on {got.device} and out_a is on {out_a.device}: move them to one "
                               "device.")
    for name, got in (("lse_a", lse_a), ("lse_b", lse_b)):
        if got.dtype not in (torch.float32, torch.float64):
            raise InvalidInput(f"merge: {name} has dtype {got.dtype}; allowed are torch.float32 and torch.float64.")
    if not out_a.is_floating_point() or out_b.dtype is not out_a.dtype:
        raise InvalidInput(f"merge: out_a has dtype {out_a.dtype} and out_b {out_b.dtype}; allowed is one float dtype.")
