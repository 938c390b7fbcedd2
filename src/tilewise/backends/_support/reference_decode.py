"""Decoding in plain PyTorch: takes every problem, on any device, with memory for every score."""

import torch

from tilewise.backends._support.current import without_autocast
from tilewise.kernels.reference.decode import attend_cached
from tilewise.problem.decode import CacheOperands, DecodeProblem


def why_not(problem: DecodeProblem) -> str | None:
    """Return None: there is no reason against."""
    del problem
    return None


def decode(problem: DecodeProblem, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
           operands: CacheOperands) -> tuple[torch.Tensor, torch.Tensor]:
    """Append k and v; return out (b, hq, sq, dv), strides ``problem.out_strides``, and lse (b, hq, sq)."""
    with without_autocast(problem.device.type):
        return attend_cached(problem, q, k_cache, v_cache, operands)
