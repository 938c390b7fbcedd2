"""The op boundary of decoding: one opaque node of a compiled graph, which changes its caches. It has no gradient."""

from functools import lru_cache
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from tilewise import settings
from tilewise.autograd.transforms import refuse_tangents
from tilewise.decode_problem import (
    CacheOperands,
    DecodeOptions,
    DecodeProblem,
    decode_problem,
    facts_of_inputs,
    facts_of_present,
)
from tilewise.dispatch import Decoder, choose_decoder
from tilewise.length_checks import check_cache
from tilewise.masks import Mask
from tilewise.problem import Facts

_OPERANDS = ", ".join(f"Tensor? {name}" for name in CacheOperands._fields)
torch.library.define("tilewise::attention_decode",
                     f"(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, {_OPERANDS}, int? left, int? right, "
                     "str? alignment, float? scale, float? softcap, bool rotary_interleaved, int? num_splits, "
                     "bool deterministic, str? backend) -> (Tensor, Tensor)")
_N_OPERANDS = len(CacheOperands._fields)


def run_decode(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, operands: CacheOperands,
               options: DecodeOptions, backend: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse; k and v are appended to the caches.

    Raises:
        UnsupportedProblem: forward mode.
    """
    if forward_ad._current_level >= 0:
        refuse_tangents((q, k_cache, v_cache, *operands), "Decoding has no derivative.")
    mask = options.mask
    out, lse = torch.ops.tilewise.attention_decode(q, k_cache, v_cache, *operands, mask.left, mask.right,
                                                   mask.alignment, *options[1:], backend)
    return out, lse


def _options(numbers: tuple[Any, ...]) -> DecodeOptions:
    left, right, alignment, *rest = numbers
    return DecodeOptions(Mask(left, right, alignment), *rest)


@lru_cache(maxsize=4096)
def _resolve(facts: tuple[Facts, Facts, Facts], more: tuple[Facts, ...], numbers: tuple[Any, ...],
             backend: str | None) -> tuple[DecodeProblem, Decoder]:
    """Problem and decoder of a call: one look-up on the way to a kernel."""
    problem = decode_problem(facts, more, _options(numbers))
    return problem, choose_decoder(problem, backend)


def _decode(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
            *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    operands = CacheOperands(*rest[:_N_OPERANDS])
    problem, decoder = _resolve(facts_of_inputs(q, k_cache, v_cache), facts_of_present(operands),
                                rest[_N_OPERANDS:-1], rest[-1] or settings.default_backend())
    check_cache(problem, len(k_cache), operands)
    made = decoder.decode(problem, q, k_cache, v_cache, operands)
    if problem.new:  # written by kernels that autograd does not see: a graph that has saved the caches must raise
        for cache in (k_cache, v_cache):
            if not cache.is_inference():
                increment_version(cache)
    return made


def _fake(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
          *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    # Symbolic sizes of a traced call cannot be hashed; there the checks alone matter.
    problem = decode_problem(facts_of_inputs(q, k_cache, v_cache), facts_of_present(CacheOperands(*rest[:_N_OPERANDS])),
                             _options(rest[_N_OPERANDS:-1]))
    rows = (problem.b, problem.hq, problem.sq)
    return (q.new_empty_strided((*rows, problem.dv), problem.out_strides),
            q.new_empty(rows, dtype=problem.lse_dtype))


torch.library.impl("tilewise::attention_decode", "CompositeExplicitAutograd")(_decode)
torch.library.register_fake("tilewise::attention_decode")(_fake)
