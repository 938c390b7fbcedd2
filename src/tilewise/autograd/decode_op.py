"""The op boundary of decoding: one opaque node of a compiled graph, which changes its caches. It has no gradient."""

from typing import Any

import torch

from tilewise import settings
from tilewise.decode_problem import CacheOperands, DecodeOptions, DecodeProblem
from tilewise.dispatch import choose_decoder
from tilewise.masks import Mask

_OPERANDS = ", ".join(f"Tensor? {name}" for name in CacheOperands._fields)
torch.library.define("tilewise::attention_decode",
                     f"(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, {_OPERANDS}, int? left, int? right, "
                     "str? alignment, float? scale, float? softcap, bool rotary_interleaved, int? num_splits, "
                     "bool deterministic, str? backend) -> (Tensor, Tensor)")
_N_OPERANDS = len(CacheOperands._fields)


def run_decode(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, operands: CacheOperands,
               options: DecodeOptions, backend: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse; k and v are appended to the caches."""
    mask = options.mask
    out, lse = torch.ops.tilewise.attention_decode(q, k_cache, v_cache, *operands, mask.left, mask.right,
                                                   mask.alignment, *options[1:], backend)
    return out, lse


def _problem(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
             rest: tuple[Any, ...]) -> tuple[DecodeProblem, CacheOperands]:
    operands, (left, right, alignment, *numbers) = CacheOperands(*rest[:_N_OPERANDS]), rest[_N_OPERANDS:-1]
    options = DecodeOptions(Mask(left, right, alignment), *numbers)
    return DecodeProblem.from_tensors(q, k_cache, v_cache, operands, options), operands


def _decode(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
            *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    problem, operands = _problem(q, k_cache, v_cache, rest)
    decoder = choose_decoder(problem, rest[-1] or settings.default_backend())
    return decoder.decode(problem, q, k_cache, v_cache, operands)


def _fake(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
          *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    problem, _ = _problem(q, k_cache, v_cache, rest)
    rows = (problem.b, problem.hq, problem.sq)
    return (q.new_empty_strided((*rows, problem.dv), problem.out_strides),
            q.new_empty(rows, dtype=problem.lse_dtype))


torch.library.impl("tilewise::attention_decode", "CompositeExplicitAutograd")(_decode)
torch.library.register_fake("tilewise::attention_decode")(_fake)
