"""What backends ask about the Gluon kernels: whether this Triton runs them, and what they make of others' passes."""

from functools import cache

import torch

from tilewise.packages import package_version
from tilewise.problem import AttentionProblem
from tilewise.scores import NO_OPTIONS
from tilewise.tuning.device import device_spec

# The Triton that the kernels ran with on a GPU, and passed. Newer ones, to 3.9, compile them too (tests/kernels), but
# an assembler's work is not to be trusted unseen: pipeline.py tells of a fault that was found by running.
CHECKED = (3, 6)


@cache
def triton_version() -> tuple[int, int] | None:
    """The installed Triton's, without importing it."""
    return package_version("triton", "triton")


def sums_dbias(problem: AttentionProblem) -> bool:
    """Whether the Hopper kernel can sum the gradient of this backward pass's bias: plain scores and a band.

    Beside scale, bias and sinks, which are in lse, nothing may change a score, and lengths may not be data. Heads of
    more than 128 columns have no tile there. That the copy engine can move q, k, v and dout is for the caller to know.
    """
    options = problem.scores
    return (device_spec(problem.device).arch == "sm_90" and triton_version() == CHECKED
            and problem.dtype in (torch.float16, torch.bfloat16) and max(problem.d, problem.dv) <= 128
            and not problem.mask.has_exceptions and not problem.sequences.are_data
            and options.bias is not None and 1 not in options.bias.shape[2:]
            and options._replace(bias=None, sinks=None, max_logit=False) == NO_OPTIONS)
