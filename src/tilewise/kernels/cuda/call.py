"""The kernels' one argument: ``struct Call`` of call.cuh, field by field."""

import ctypes

import torch

from tilewise.problem import AttentionProblem

# Stands for a bound that is not there. Twice it fits 32 bits, so that a bound and a position, each below it, add up.
UNBOUNDED = 2**29
_TENSORS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv", "dlse")
_POINTERS = ("lse", "delta", "lengths_q", "lengths_k")
_INTEGERS = ("wide_q", "wide_k", "hq", "group", "sq", "sk", "width", "width_v", "lower", "upper", "shifted", "tiles")


class Tensor(ctypes.Structure):
    """(b, h, s, d) by strides."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_longlong) for name in "bhsd"))

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Tensor":
        """Describe a tensor of 3 or 4 dims."""
        return cls(tensor.data_ptr(), *tensor.stride(), *(() if tensor.dim() == 4 else (1,)))

    def from_row(self, row: int) -> "Tensor":
        """Describe the rows from one on of a float32 tensor."""
        return type(self)((self.data or 0) + 4 * row * self.s, self.b, self.h, self.s, self.d)


class Call(ctypes.Structure):
    """What a kernel works on; a field that it does not read may be null."""

    _fields_ = (*((name, Tensor) for name in _TENSORS), *((name, ctypes.c_void_p) for name in _POINTERS),
                *((name, ctypes.c_int) for name in _INTEGERS), ("scale", ctypes.c_float))

    @classmethod
    def of(cls, problem: AttentionProblem, **tensors: torch.Tensor | None) -> "Call":
        """Describe a problem and its tensors; lengths go by the names seqlens_q and seqlens_k."""
        call = cls(hq=problem.hq, group=problem.group, sq=problem.sq, sk=problem.sk, width=problem.d,
                   width_v=problem.dv, scale=problem.scale)
        call.lower, call.upper, call.shifted = _band(problem)
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if name.startswith("seqlens"):
                side = name[-1]
                setattr(call, f"lengths_{side}", tensor.data_ptr())
                setattr(call, f"wide_{side}", tensor.dtype is torch.int64)
            else:
                setattr(call, name, tensor.data_ptr() if name in _POINTERS else Tensor.of(tensor))
        return call


def _band(problem: AttentionProblem) -> tuple[int, int, bool]:
    """Return the bounds of j - i, and whether the kernel adds what each sequence's lengths differ by."""
    if problem.sequences.are_data:
        mask = problem.mask
        lower, upper = None if mask.left is None else -mask.left, mask.right
    else:
        lower, upper = problem.band.lower, problem.band.upper
    return (-UNBOUNDED if lower is None else max(lower, -UNBOUNDED),
            UNBOUNDED if upper is None else min(upper, UNBOUNDED),
            problem.sequences.are_data and problem.mask.alignment == "bottom_right")
