"""FLOP formulas of the operators, for torch's counter: what the mathematics asks for, whatever a kernel does."""

from typing import Any, cast

import torch
from torch.utils.flop_counter import register_flop_formula

from tilewise.autograd.op import N_OPERANDS
from tilewise.problem.options import NO_OPERANDS, Operands, OperatorOptions


def _visible_pairs(q_shape: torch.Size, k_shape: torch.Size, rest: tuple[Any, ...]) -> int:
    """Count the pairs of all heads as far as shapes tell: what a tensor hides is data, and counted as if it did not.

    Packed sequences are counted as if they were of one length.
    """
    operands, options = Operands(*rest[:N_OPERANDS]), OperatorOptions(*rest[N_OPERANDS:])
    (b, heads, sq, _), sk = q_shape, k_shape[2]
    if operands.cu_seqlens_q is not None:  # its shape, in a formula
        b = max(1, cast(Any, operands.cu_seqlens_q)[0] - 1)
        sq, sk = sq // b, sk // b
    return int(b * heads) * options.mask.band(sq, sk).visible_pairs(sq, sk)


@register_flop_formula(torch.ops.tilewise.attention_forward)
def _forward_flops(q_shape: torch.Size, k_shape: torch.Size, v_shape: torch.Size, *rest: Any,
                   **_: object) -> int:
    """Two matrix products, each 2 operations per visible pair and head-dim element."""
    return 2 * _visible_pairs(q_shape, k_shape, rest) * (q_shape[3] + v_shape[3])


@register_flop_formula(torch.ops.tilewise.attention_forward_plain)
def _forward_plain_flops(q_shape: torch.Size, k_shape: torch.Size, v_shape: torch.Size, *plain: Any,
                         **_: object) -> int:
    return _forward_flops(q_shape, k_shape, v_shape, *NO_OPERANDS, *OperatorOptions.of_plain(plain))


@register_flop_formula(torch.ops.tilewise.attention_backward)
def _backward_flops(q_shape: torch.Size, k_shape: torch.Size, v_shape: torch.Size, *rest: Any, **_: object) -> int:
    """The mathematics' five products (scores, dP; dQ, dK, dV), not what a kernel recomputes beyond them."""
    of_call = rest[4:-1]  # behind the shapes of out, lse, dout and dlse
    return 2 * _visible_pairs(q_shape, k_shape, of_call) * (3 * q_shape[3] + 2 * v_shape[3])


@register_flop_formula(torch.ops.tilewise.attention_backward_plain)
def _backward_plain_flops(q_shape: torch.Size, k_shape: torch.Size, v_shape: torch.Size, *rest: Any,
                          **_: object) -> int:
    return _backward_flops(q_shape, k_shape, v_shape, *rest[:4], *NO_OPERANDS, *OperatorOptions.of_plain(rest[4:-1]),
                           rest[-1])
