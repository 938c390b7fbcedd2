"""What backends ask about the Gluon kernels: whether this Triton runs them, and what they make of others' passes."""

from functools import cache

import torch

from tilewise.backends._support import self_check
from tilewise.backends._support.self_check_calls import Family
from tilewise.problem import AttentionProblem
from tilewise.problem.options import NO_OPTIONS
from tilewise.support.packages import package_version, version_text
from tilewise.tuning.device import device_spec

# The versions of Triton that the tests ran the kernels with on a GPU, and passed: docs/backends.md, "Versions of
# Triton". An assembler's work is not to be trusted unseen (pipeline.py tells of a fault that was found by running), so
# with any later version a family of kernels is checked at its first use.
RUN_ON_GPU = frozenset({(3, 6), (3, 7), (3, 8), (3, 9)})
OLDEST = min(RUN_ON_GPU)
_TELLS_NONE = (0, 0)  # what package_version says of a Triton without a version; it may be a new one


@cache
def triton_version() -> tuple[int, int] | None:
    """The installed Triton's, without importing it."""
    return package_version("triton", "triton")


def wrong_triton() -> str | None:
    """Return why the installed Triton has not what the kernels are written in, None if it has."""
    version = triton_version()
    if version is None or _TELLS_NONE < version < OLDEST:
        return f"needs Triton {version_text(OLDEST)} or newer, got {version_text(version)}"
    return None


def untrusted(family: Family, device: torch.device) -> str | None:
    """Return why a family of kernels is not used with the installed Triton, which is not too old; None if it is."""
    return None if triton_version() in RUN_ON_GPU else self_check.why_not(family, device)


def sums_dbias(problem: AttentionProblem) -> bool:
    """Whether the Hopper kernel can sum the gradient of this backward pass's bias: plain scores and a band.

    Beside scale, bias and sinks, which are in lse, nothing may change a score, and lengths may not be data. Heads of
    more than 128 columns have no tile there. That TMA can move q, k, v and dout is for the caller to know,
    and whether the kernel is trusted :func:`untrusted` says.
    """
    options = problem.scores
    return (device_spec(problem.device).arch == "sm_90" and wrong_triton() is None
            and problem.dtype in (torch.float16, torch.bfloat16) and max(problem.d, problem.dv) <= 128
            and not problem.mask.has_exceptions and not problem.sequences.are_data
            and options.bias is not None and 1 not in options.bias.shape[2:]
            and options._replace(bias=None, sinks=None, max_logit=False) == NO_OPTIONS)


def awaits_dbias_check(problem: AttentionProblem) -> bool:
    """Whether that kernel could be trusted at a later call: no check runs while a CUDA graph is captured."""
    return (triton_version() not in RUN_ON_GPU and torch.cuda.is_current_stream_capturing() and sums_dbias(problem)
            and self_check.is_pending("dbias", problem.device))
