"""What a Gluon kernel computes with on the CPU: tiles, which are torch's tensors, and single whole numbers."""

from functools import wraps
from types import SimpleNamespace

import torch


class Tensor(torch.Tensor):
    """torch's, with what Gluon's has beside it."""

    type = SimpleNamespace(layout=None)
    factors = None  # of a product in float32

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        """torch's own, without what it looks up for subclasses of which only some functions return one."""
        with torch._C.DisableTorchFunctionSubclass():
            found = function(*args, **(kwargs or {}))
        if type(found) is torch.Tensor:
            return found.as_subclass(Tensor)
        return tuple(part.as_subclass(Tensor) for part in found) if type(found) is tuple else found

    def __mul__(self, other):
        product = torch.Tensor.__mul__(self, other)
        if isinstance(product, Tensor) and product.dtype is torch.float32:
            product.factors = self, other
        return product

    def __add__(self, other):
        return self._fused(torch.Tensor.__add__, other)

    def __sub__(self, other):
        return self._fused(torch.Tensor.__sub__, other)

    def _fused(self, combine, other):
        """A product that something is added to, or taken off, is not rounded before: as launch.OPTIONS ask for."""
        if self.factors is None:
            return combine(self, other)
        with torch._C.DisableTorchFunctionSubclass():
            left, right = (torch.as_tensor(factor, dtype=torch.float32).double() for factor in self.factors)
            return combine(left * right, torch.as_tensor(other).double()).float().as_subclass(Tensor)

    def to(self, dtype, bitcast=False):
        dtype = getattr(dtype, "torch", dtype)
        return self.view(dtype) if bitcast else torch.Tensor.to(self, dtype)

    def split(self):
        return self.unbind(-1)

    def __iadd__(self, other):
        return self + other  # values have names, not places

    def __isub__(self, other):
        return self - other


class Whole(int):
    """A single whole number: half of what a kernel computes is of these, in torch at twenty times the cost."""

    def to(self, dtype):
        return whole(torch.tensor(self).to(dtype).as_subclass(Tensor))


def whole(number):
    """A whole number of no dims as a Whole; anything else as it is."""
    is_whole = isinstance(number, torch.Tensor) and not number.ndim and not (
        number.is_floating_point() or number.dtype is torch.bool)
    return Whole(number) if is_whole or type(number) is int else number


def _of_whole(compute):
    @wraps(compute)
    def of_whole(*numbers):
        found = compute(*numbers)
        return found if found is NotImplemented else Whole(found)

    return of_whole


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"):
    for _side in ("", "r"):
        setattr(Whole, f"__{_side}{_name}__", _of_whole(getattr(int, f"__{_side}{_name}__")))
Whole.__neg__ = _of_whole(int.__neg__)


class Dtype:
    """A number's type, as a kernel asks for it."""

    def __init__(self, dtype):
        self.torch, self.primitive_bitwidth = dtype, 8 * dtype.itemsize
