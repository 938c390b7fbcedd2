"""flash-attn 2's passes by themselves, ``_flash_attn_forward`` and kin, which parallel schedules such as rings call."""

from typing import Any

import torch

from tilewise.autograd.op import backward_op
from tilewise.integrations.callers_terms import in_terms
from tilewise.integrations.flash_attn_calls import (
    Slopes,
    attend_fully,
    attend_varlen_fully,
    lengths_of,
    options_of,
    refuse_pages,
)
from tilewise.integrations.flash_family import WORDS, heads_first
from tilewise.masks import Mask
from tilewise.problem.options import Operands, OperatorOptions
from tilewise.validate.tensors import with_batch_dim

_backward_op = in_terms(backward_op, WORDS, heads_third=True)
_NO_GRADIENT_OF_OPERANDS = [True, True, False, False, False]  # which gradients: dq; dk and dv; those of operands


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float,
            softmax_scale: float | None, causal: bool, window_size_left: int, window_size_right: int,
            softcap: float, alibi_slopes: Slopes, return_softmax: bool,
            ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the forward pass alone, without a graph.

    Returns:
        out, lse and S_dmask as :func:`tilewise.integrations.flash_attn.flash_attn_func`, and rng_state, (2,), int64:
        dropout's seed and a 0, for the backward pass.
    """
    options = options_of(dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    with torch.no_grad():
        return *attend_fully(q, k, v, options, return_softmax), _state(options, q)


def varlen_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
                   cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
                   softmax_scale: float | None, causal: bool, window_size_left: int = -1,
                   window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Slopes = None,
                   return_softmax: bool = False, block_table: torch.Tensor | None = None,
                   leftpad_k: torch.Tensor | None = None, seqused_k: torch.Tensor | None = None,
                   zero_tensors: bool = False, num_splits: int = 0,
                   ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the forward pass over packed sequences alone, without a graph; see :func:`forward`.

    ``seqused_k``, (sequences,): keys of each sequence that take part. ``zero_tensors`` and ``num_splits`` change
    nothing: what is not computed is 0 anyway, and keys are not split.
    """
    refuse_pages(block_table=block_table, leftpad_k=leftpad_k)
    options = options_of(dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    options |= lengths_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) | {"seqused_k": seqused_k}
    with torch.no_grad():
        return *attend_varlen_fully(q, k, v, options, return_softmax), _state(options, q)


def backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
             softmax_lse: torch.Tensor, dq: torch.Tensor | None, dk: torch.Tensor | None,
             dv: torch.Tensor | None, dropout_p: float, softmax_scale: float | None, causal: bool,
             window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Slopes,
             deterministic: bool, rng_state: torch.Tensor | None = None) -> None:
    """Run the backward pass alone: write dq, dk and dv where they are not None.

    out and lse may be those of more keys than k has, as in a ring. The sums of ``dout · out`` that flash-attn returns
    are not.
    """
    options = options_of(dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes,
                         deterministic)
    given = {"q": q, "k": k, "v": v, "out": out, "dout": dout}
    made = _backward([heads_first(name, tensor) for name, tensor in given.items()], softmax_lse, options, rng_state)
    _write([gradient.transpose(1, 2) for gradient in made], (dq, dk, dv))


def varlen_backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                    out: torch.Tensor, softmax_lse: torch.Tensor, dq: torch.Tensor | None,
                    dk: torch.Tensor | None, dv: torch.Tensor | None, cu_seqlens_q: torch.Tensor,
                    cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
                    softmax_scale: float | None, causal: bool, window_size_left: int,
                    window_size_right: int, softcap: float, alibi_slopes: Slopes, deterministic: bool,
                    rng_state: torch.Tensor | None = None, zero_tensors: bool = False) -> None:
    """Run the backward pass over packed sequences alone; see :func:`backward`.

    ``zero_tensors`` changes nothing: what is not computed is 0 anyway.
    """
    options = options_of(dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes,
                         deterministic)
    options |= lengths_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    made = _backward([tensor.transpose(0, 1)[None] for tensor in (q, k, v, out, dout)], softmax_lse[None], options,
                     rng_state)
    _write([gradient[0].transpose(0, 1) for gradient in made], (dq, dk, dv))


def _state(options: dict[str, Any], q: torch.Tensor) -> torch.Tensor:
    state = torch.zeros(2, dtype=torch.int64, device=q.device)
    if options["dropout_p"]:
        state[:1] = options["dropout_seed"]
    return state


def _backward(tensors: list[torch.Tensor], lse: torch.Tensor, options: dict[str, Any],
              rng_state: torch.Tensor | None) -> list[torch.Tensor]:
    """Return dq, dk and dv of (b, h, s, d) tensors q, k, v, out and dout; lse is +inf where a query sees no key."""
    q, k, v, out, dout = tensors
    lse = lse.masked_fill(lse == float("inf"), float("-inf"))  # contiguous, as backends expect it, whatever lse was
    slopes, cu_seqlens_q, cu_seqlens_k = (options.get(n) for n in ("alibi_slopes", "cu_seqlens_q", "cu_seqlens_k"))
    operands = Operands(alibi_slopes=None if slopes is None else with_batch_dim(slopes),
                        seed=rng_state[:1] if rng_state is not None and options["dropout_p"] else None,
                        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    mask: Mask = options["mask"]
    deterministic = bool(options["deterministic"] or torch.are_deterministic_algorithms_enabled())
    settings = OperatorOptions.of_mask(options["scale"], mask, softcap=options["softcap"],
                                       dropout_p=options["dropout_p"], deterministic=deterministic)
    gradients: list[torch.Tensor] = _backward_op(q, k, v, out, lse, dout, None, *operands, *settings,
                                                 _NO_GRADIENT_OF_OPERANDS)
    return gradients


def _write(made: list[torch.Tensor], wanted: tuple[torch.Tensor | None, ...]) -> None:
    for gradient, target in zip(made, wanted, strict=True):
        if target is not None:
            target.copy_(gradient)
