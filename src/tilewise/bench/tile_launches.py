"""One Triton or Gluon kernel with one tile: how to launch it, which tensors it takes, which of them it computes.

For problems with one length, one head dim and as many key/value heads as query heads, where every (b, h, s, d) tensor
lies in memory as q does.
"""

from typing import Any

import torch

from tilewise.problem import AttentionProblem
from tilewise.tuning.schedules_hopper import schedule_on_grid
from tilewise.tuning.select import backward_schedule

_OF_BACKWARD = ("q", "k", "v", "dout", "lse", "delta")
TENSORS = {
    "forward": ("q", "k", "v", "out", "lse"), "dkdv": (*_OF_BACKWARD, "dk", "dv"), "dk": (*_OF_BACKWARD, "dk", "dv"),
    "dv": (*_OF_BACKWARD, "dk", "dv"), "dq": (*_OF_BACKWARD, "dq"),
    "hopper_forward": ("q", "k", "v", "out", "lse"), "hopper_backward": (*_OF_BACKWARD, "dq", "dk", "dv"),
}
RESULTS = {"forward": ("out", "lse"), "dkdv": ("dk", "dv"), "dk": ("dk",), "dv": ("dv",), "dq": ("dq",),
           "hopper_forward": ("out", "lse"), "hopper_backward": ("dq", "dk", "dv")}
PER_ROW = ("lse", "delta")  # (b, h, s), float32, dense; every other tensor is shaped as q


def tile_launch(kernel: str, problem: AttentionProblem, config: Any) -> Any:
    """Bind a kernel to a problem (seen from its backward pass for all but the forward ones) and a tile."""
    if kernel.startswith("hopper"):
        return HopperLaunch(kernel, problem, config)
    from tilewise.kernels.triton.backward import dkdv_launch
    from tilewise.kernels.triton.dq import dq_launch
    from tilewise.kernels.triton.forward import forward_launch

    strides = problem.q_strides
    if kernel == "forward":
        return forward_launch(problem, config, "ieee")
    if kernel == "dq":
        return dq_launch(problem, config, "ieee", strides, strides)
    return dkdv_launch(problem, config, "ieee", strides, (strides, strides), (kernel != "dv", kernel != "dk"))


class HopperLaunch:
    """A Gluon kernel bound to a problem and a tile, as :func:`tile_launch` gives Triton's; the backward one with dq's.

    That of dq is compiled when it first runs; most tiles share it.
    """

    def __init__(self, kernel: str, problem: AttentionProblem, config: Any) -> None:
        from tilewise.kernels.hopper.backward.launch_d256 import HopperBackwardApart, backward_launch
        from tilewise.kernels.hopper.forward.launch import HopperForward

        self._is_forward = kernel == "hopper_forward"
        if self._is_forward:
            self._launch: Any = HopperForward(problem, config, schedule_on_grid(problem, config),
                                              _num_sms(problem.device))
        else:
            self._launch = backward_launch(problem, config, backward_schedule(problem, config), problem.q_strides,
                                           _num_sms(problem.device))
        self._compiled: Any = self._launch.dkdv if isinstance(self._launch, HopperBackwardApart) else self._launch

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Enqueue on the current stream."""
        if self._is_forward:
            q, k, v, out, lse = tensors
            self._launch(lambda: (q, k, v), (q.data_ptr(), k.data_ptr(), v.data_ptr()), out, lse)
        else:
            self._launch(*tensors)

    def compile(self, arguments: tuple[Any, ...]) -> Any:
        """Compile the kernel for arguments such as :meth:`arguments` returns."""
        return self._compiled.enqueue.compile(arguments)

    def arguments(self, tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        """Return what the compiler sees before the scalars."""
        make = tensors[0].new_empty
        if self._is_forward:
            return tuple(self._launch.arguments(tensors, make(1, dtype=torch.int32)))
        if self._compiled is not self._launch:
            return tuple(self._compiled.arguments((*tensors[:4], *tensors[7:]), *tensors[4:6]))  # without dq
        lse = make(self._launch.columns_shape, dtype=torch.bfloat16) if self._launch.config.augmented_k else tensors[4]
        return tuple(self._launch.arguments(self._launch.taken(tensors, lse),
                                            make(self._launch.accum_shape, dtype=torch.float32),
                                            counter=make(1, dtype=torch.int32)))


def _num_sms(device: torch.device) -> int:
    """Return the device's number of SMs; without a device an H200's: nothing but the grid depends on it."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
