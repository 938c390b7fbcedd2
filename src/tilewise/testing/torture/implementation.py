"""An attention function under test, and what it declares that it takes."""

from collections.abc import Callable, Collection, Container
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch

from tilewise.errors import InvalidInput
from tilewise.testing.cases import Case

Alignment = Literal["top_left", "bottom_right"]


@dataclass(frozen=True, slots=True)
class Takes:
    """What an attention function declares; what it does not take is not applicable and never a failure.

    Attributes:
        dtypes: of q, k and v.
        head_dims: of q, k and v.
        other_value_dim: v may have another head dim than q and k.
        causal: ``causal=True`` is taken.
        alignments: which causal mask it applies to unequal lengths: "top_left" (query i sees keys up to i),
            "bottom_right" (the last query sees the last key); () = it takes causal masks of equal lengths alone. A
            function that has both is given the keyword ``alignment`` where lengths are unequal.
        grouped_heads: k and v may have fewer heads than q.
        backward: its output has gradients.
        masks: it takes the keyword ``mask``, a boolean tensor that broadcasts to (b, hq, sq, sk), True = take part.
        lse: it takes the keyword ``return_lse=True`` and then returns (out, lse), with lse the natural logarithm of
            the softmax denominator, (b, hq, sq).
        strided_head_dim: the last dim's stride may be other than 1.
        nothing: a batch of none, no queries and no keys are taken.
        deterministic: every run has the same bits under :func:`torch.use_deterministic_algorithms`.
        batch_invariant: there, too, a batch entry has the same bits in any batch.
    """

    dtypes: Collection[torch.dtype] = (torch.float16, torch.bfloat16, torch.float32)
    head_dims: Container[int] = range(8, 257, 8)
    other_value_dim: bool = False
    causal: bool = True
    alignments: tuple[Alignment, ...] = ("bottom_right",)
    grouped_heads: bool = False
    backward: bool = True
    masks: bool = False
    lse: bool = False
    strided_head_dim: bool = True
    nothing: bool = True
    deterministic: bool = False
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        for alignment in self.alignments:
            if alignment not in get_args(Alignment):
                raise InvalidInput(f"alignments is {self.alignments!r}; allowed are {get_args(Alignment)}, one of "
                                   "them, or () for causal masks of equal lengths alone.")


class Call(NamedTuple):
    """One call, as a function is about to get it.

    Attributes:
        case: its sizes, mask, scale and layout.
        q, k, v: (b, h, s, d); of packed sequences (total, h, d). With ``requires_grad`` where gradients will be asked
            for.
        options: the keywords.
    """

    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Implementation:
    """An attention function under test.

    Attributes:
        name: what results call it.
        attention: ``attention(q, k, v, *, causal, scale) -> out``: q (b, hq, sq, d), k (b, hk, sk, d),
            v (b, hk, sk, dv), out (b, hq, sq, dv) in the dtype of q; causal a bool; scale the factor of the scores, a
            float. Differentiable by autograd. Further keywords come only where ``takes`` says so.
        takes: what it declares.
        attention_varlen: the same of packed sequences, q (total_q, hq, d) and so on, with the keywords
            ``cu_seqlens_q``, ``cu_seqlens_k`` (int32), ``max_seqlen_q`` and ``max_seqlen_k`` more; None = it has none.
        why_not: why it refuses a call that ``takes`` does not rule out, as a sentence, or None.
    """

    name: str
    attention: Callable[..., Any]
    takes: Takes = Takes()
    attention_varlen: Callable[..., Any] | None = None
    why_not: Callable[[Call], str | None] | None = None

    def lacking(self, case: Case, dtype: torch.dtype) -> str | None:
        """Return why the declaration rules the case out, as a sentence, or None."""
        takes, unequal = self.takes, case.sq != case.sk or case.lengths_q != case.lengths_k
        alignment = case.mask.alignment
        reasons = (
            (dtype not in takes.dtypes, f"takes no {str(dtype).removeprefix('torch.')}"),
            (case.d not in takes.head_dims, f"takes no head dim of {case.d}"),
            (case.dv not in takes.head_dims, f"takes no head dim of {case.dv}"),
            (case.d != case.dv and not takes.other_value_dim, "takes no head dim of v that differs"),
            (case.hq != case.hk and not takes.grouped_heads, "takes no grouped heads"),
            (case.mask.is_bounded and not takes.causal, "takes no causal mask"),
            (case.mask.is_bounded and unequal and alignment not in takes.alignments,
             f"takes no causal mask of unequal lengths aligned at the {str(alignment).replace('_', ' ')}"),
            (bool(case.mask_tensor) and not takes.masks, "takes no boolean mask"),
            (bool(case.packed) and self.attention_varlen is None, "takes no packed sequences"),
            (case.layout == "bhds" and not takes.strided_head_dim, "takes no head dim whose stride is not 1"),
            (not (case.b and case.sq and case.sk) and not takes.nothing, "takes no empty tensors"),
        )
        return next((reason for rules_out, reason in reasons if rules_out), None)
