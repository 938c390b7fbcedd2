"""One Triton kernel with one tile: how to launch it, which tensors it takes, which of them it computes.

For problems with one length, one head dim and as many key/value heads as query heads, where every (b, h, s, d) tensor
lies in memory as q does.
"""

from typing import Any

from tilewise.problem import AttentionProblem
from tilewise.tuning.heuristics import Config

_OF_BACKWARD = ("q", "k", "v", "dout", "lse", "delta")
TENSORS = {
    "forward": ("q", "k", "v", "out", "lse"), "dkdv": (*_OF_BACKWARD, "dk", "dv"), "dk": (*_OF_BACKWARD, "dk", "dv"),
    "dv": (*_OF_BACKWARD, "dk", "dv"), "dq": (*_OF_BACKWARD, "dq"),
}
RESULTS = {"forward": ("out", "lse"), "dkdv": ("dk", "dv"), "dk": ("dk",), "dv": ("dv",), "dq": ("dq",)}
PER_ROW = ("lse", "delta")  # (b, h, s), float32, dense; every other tensor is shaped as q


def tile_launch(kernel: str, problem: AttentionProblem, config: Config) -> Any:
    """Bind a kernel to a problem (seen from its backward pass for all but "forward") and a tile."""
    from tilewise.kernels.triton.backward import dkdv_launch, dq_launch
    from tilewise.kernels.triton.forward import forward_launch

    strides = problem.q_strides
    if kernel == "forward":
        return forward_launch(problem, config, "ieee")
    if kernel == "dq":
        return dq_launch(problem, config, "ieee", strides, strides)
    return dkdv_launch(problem, config, "ieee", strides, (strides, strides), (kernel != "dv", kernel != "dk"))
