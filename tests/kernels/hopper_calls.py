"""Calls of the Hopper kernels, and what their forward kernel gets."""

import torch

from tilewise.kernels.gluon import launch
from tilewise.masks import Mask
from tilewise.problem import AttentionProblem


def problem_of(sq=4096, sk=4096, mask=None, d=128, b=1, heads=(1, 1), dv=None):
    (hq, hk), dv = heads, dv or d
    return AttentionProblem(b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=d, dv=dv, dtype=torch.bfloat16,
                            device=torch.device("cuda", 0), scale=1.0, mask=Mask() if mask is None else mask,
                            k_strides=(hk * sk * d, sk * d, d, 1), v_strides=(hk * sk * dv, sk * dv, dv, 1))


def scalars_of(problem, config, pack_gqa=1):
    """Return the arguments that the kernel gets: grid, bounds and what is fixed when it is compiled."""
    numbers, constants = launch.HopperForward(problem, config, 132, pack_gqa).scalars
    return numbers.grid, numbers.bounds, constants
