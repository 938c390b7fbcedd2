"""A provider of torch's flash attention: ``scaled_dot_product_attention`` and ``varlen_attn``, unmodified, come here.

:func:`register` enters the provider; ``torch.nn.attention.activate_flash_attention_impl("tilewise")`` lets it take the
place of the operators that those functions call, on CUDA devices, until ``restore_flash_attention_impl()``. torch still
chooses among its backends first: what its flash backend does not take (float32, masks) does not come here. Meanwhile
the backend ``torch`` refuses calls on CUDA devices: the operators that it calls are tilewise's own.

Diagonals run through the bottom right corner, as in those operators; of ``is_causal`` torch sends equal lengths alone.
"""

from collections.abc import Callable
from typing import Any

import torch

from tilewise.api import attention, attention_varlen
from tilewise.autograd.op import backward_op
from tilewise.backends.torch import replace_flash_attention
from tilewise.errors import UnsupportedProblem
from tilewise.masks import Mask, window
from tilewise.problem.options import Operands, OperatorOptions
from tilewise.support.caches import clear_caches

__all__ = ["register"]

_NO_GRADIENT_OF_OPERANDS = [True, True, False, False, False]  # which gradients: dq; dk and dv; those of operands
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class ActiveProvider:
    """Keeps the operators replaced as long as it lives; what torch's registry holds."""

    def __init__(self, dispatch_key: str) -> None:
        library: Any = torch.library.Library("aten", "IMPL", dispatch_key)  # type: ignore[no-untyped-call]
        for name, operator in _OPERATORS.items():
            if hasattr(torch.ops.aten, name):  # one of them is newer than torch 2.11
                library.impl(name, operator, dispatch_key)
        self.library, self._dispatch_key = library, dispatch_key
        self._note(is_ours=True)

    def remove(self) -> None:
        """Put torch's own operators back."""
        self.library = None
        self._note(is_ours=False)

    def _note(self, *, is_ours: bool) -> None:
        # The backend that calls these operators would come back here, without an end.
        replace_flash_attention(self._dispatch_key, is_ours)
        clear_caches()


def register(name: str = "tilewise") -> None:
    """Make tilewise known to torch as an implementation of flash attention, by this name; nothing changes yet.

    Args:
        name: for ``torch.nn.attention.activate_flash_attention_impl``.

    >>> register()
    >>> "tilewise" in torch.nn.attention.list_flash_attention_impls()
    True
    """
    torch.nn.attention.register_flash_attention_impl(name, register_fn=lambda: ActiveProvider("CUDA"))


def _dense_forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0,
                   is_causal: bool = False, return_debug_mask: bool = False, *,
                   scale: float | None = None) -> tuple[Any, ...]:
    """Stand for ``aten::_scaled_dot_product_flash_attention``: (b, h, s, d) tensors."""
    _refuse(return_debug_mask=return_debug_mask)
    out, lse, state = _attend(query, key, value, None, _band(is_causal, None, None), scale, dropout_p)
    # What a compiled graph was told to expect.
    strides = torch.empty_like(query, device="meta").stride()
    if out.stride() != strides:
        out = out.new_empty_strided(out.shape, strides).copy_(out)
    return (out, lse, None, None, query.shape[2], key.shape[2], *_rest(state, query))


def _dense_backward(grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                    out: torch.Tensor, logsumexp: torch.Tensor, cum_seq_q: torch.Tensor | None,
                    cum_seq_k: torch.Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
                    philox_seed: torch.Tensor, philox_offset: torch.Tensor, *,
                    scale: float | None = None) -> list[torch.Tensor]:
    """Stand for ``aten::_scaled_dot_product_flash_attention_backward``."""
    band = _band(is_causal, None, None)
    return _gradients((query, key, value, out, grad_out), logsumexp, None, band, scale, dropout_p, philox_seed)


def _forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cum_seq_q: torch.Tensor | None,
             cum_seq_k: torch.Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
             return_debug_mask: bool, *, scale: float | None = None, window_size_left: int | None = None,
             window_size_right: int | None = None, seqused_k: torch.Tensor | None = None,
             alibi_slopes: torch.Tensor | None = None, block_table: torch.Tensor | None = None,
             num_splits: int | None = None) -> Results:
    """Stand for ``aten::_flash_attention_forward``: (b, s, h, d) tensors, or (total, h, d) with ``cum_seq``."""
    _refuse(return_debug_mask=return_debug_mask, alibi_slopes=alibi_slopes, block_table=block_table)
    band = _band(is_causal, window_size_left, window_size_right)
    lengths = None if cum_seq_q is None else (cum_seq_q, cum_seq_k)
    tensors = query, key, value
    if lengths is None:
        tensors = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    out, lse, state = _attend(*tensors, lengths, band, scale, dropout_p, seqused_k, num_splits == 1)
    return (out if lengths is not None else out.transpose(1, 2), lse, *_rest(state, query))


def _forward_into(out: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
    """Stand for ``aten::_flash_attention_forward_no_dropout_inplace``."""
    made, lse, *_ = _forward(*given, **options)
    out.copy_(made)
    return lse


def _backward(grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
              logsumexp: torch.Tensor, cum_seq_q: torch.Tensor | None, cum_seq_k: torch.Tensor | None, max_q: int,
              max_k: int, dropout_p: float, is_causal: bool, rng_state: torch.Tensor, unused: torch.Tensor, *,
              scale: float | None = None, window_size_left: int | None = None,
              window_size_right: int | None = None) -> list[torch.Tensor]:
    """Stand for ``aten::_flash_attention_backward``."""
    band = _band(is_causal, window_size_left, window_size_right)
    tensors = query, key, value, out, grad_out
    if cum_seq_q is None:
        made = _gradients(tuple(t.transpose(1, 2) for t in tensors), logsumexp, None, band, scale, dropout_p, rng_state)
        return [gradient.transpose(1, 2) for gradient in made]
    lengths = (cum_seq_q, cum_seq_q if cum_seq_k is None else cum_seq_k)
    made = _gradients(tuple(t.transpose(0, 1).unsqueeze(0) for t in tensors), logsumexp.unsqueeze(0), lengths, band,
                      scale, dropout_p, rng_state)
    return [gradient.squeeze(0).transpose(0, 1) for gradient in made]


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
            lengths: tuple[torch.Tensor, torch.Tensor | None] | None, band: Mask, scale: float | None,
            dropout_p: float, seqused_k: torch.Tensor | None = None,
            batch_invariant: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return out, lse and the state of dropout's generator."""
    state = torch.empty(2, dtype=torch.int64, device=query.device)
    if dropout_p:
        state.random_(2**62)
    options: dict[str, Any] = {"mask": band, "scale": scale, "dropout_p": dropout_p, "return_aux": ("lse",),
                               "dropout_seed": state[:1], "deterministic": batch_invariant or None}
    with torch.no_grad():  # torch's formulas for these operators are what a graph holds
        if lengths is None:
            out, lse = attention(query, key, value, seqlens_k=seqused_k, **options)
        else:
            out, lse = attention_varlen(query, key, value, cu_seqlens_q=lengths[0], cu_seqlens_k=lengths[1],
                                        seqused_k=seqused_k, **options)
    return out, lse, state


def _gradients(tensors: tuple[torch.Tensor, ...], lse: torch.Tensor,
               lengths: tuple[torch.Tensor, torch.Tensor] | None, band: Mask, scale: float | None, dropout_p: float,
               state: torch.Tensor) -> list[torch.Tensor]:
    """Return dq, dk and dv of (b, h, s, d) tensors q, k, v, out and dout."""
    seed = state.view(torch.int64)[:1] if dropout_p else None
    cu_seqlens_q, cu_seqlens_k = (None, None) if lengths is None else lengths
    operands = Operands(seed=seed, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    settings = OperatorOptions.of_mask(scale, band, dropout_p=dropout_p,
                                       deterministic=torch.are_deterministic_algorithms_enabled())
    q, k, v, out, dout = tensors
    gradients: list[torch.Tensor] = backward_op(q, k, v, out, lse, dout, None, *operands, *settings,
                                                _NO_GRADIENT_OF_OPERANDS)
    return gradients


def _band(is_causal: bool, left: int | None, right: int | None) -> Mask:
    """Translate a window, -1 or None for no bound."""
    before, after = (None if side is None or side < 0 else side for side in (left, right))
    return window(before, 0 if is_causal else after, "bottom_right")


def _rest(state: torch.Tensor, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what torch keeps for the backward pass, in its dtypes, and the matrix that nobody asked for."""
    unused = torch.empty((), dtype=torch.uint64, device=query.device)
    return state.view(torch.uint64), unused, query.new_empty(0)


def _refuse(**given: object) -> None:
    for name, value in given.items():
        if value is not None and value is not False:
            raise UnsupportedProblem(f"{name} is given; allowed is None or False: as a provider of torch's flash "
                                     "attention, tilewise has neither probabilities, nor slopes, nor paged caches. "
                                     "Call torch.nn.attention.restore_flash_attention_impl() for torch's own.", {})


_OPERATORS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": _dense_forward,
    "_scaled_dot_product_flash_attention_backward": _dense_backward,
    "_flash_attention_forward": _forward,
    "_flash_attention_forward_no_dropout_inplace": _forward_into,
    "_flash_attention_backward": _backward,
}
