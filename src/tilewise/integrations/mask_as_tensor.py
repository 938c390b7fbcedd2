"""What makes an object a tensor where someone computes with it, and leaves it alone where nobody does.

Some models of Transformers compute with the mask that their mask function made: they slice it, add it to scores, join
it to another. To them it is what Transformers' eager attention gets: 0 where a pair takes part, and the least number of
the model's dtype where it does not. Operators that floating-point tensors do not have (``&``, ``|``, ``^``, ``~``)
find it boolean, True where a pair takes part, as Transformers' SDPA gets it. Each of the two is made once.
"""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["AsTensor"]

_ON_NUMBERS = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg", "abs", "pow", "eq", "ne",
               "lt", "le", "gt", "ge", "iter")
_ON_BITS = ("and", "rand", "or", "ror", "xor", "rxor", "invert")
# As torch calls the same, for `tensor & mask` and `torch.bitwise_and(mask, tensor)`.
_TORCHS_ON_BITS = frozenset(f"{before}{name}{after}" for name in ("and", "or", "xor", "not")
                            for before, after in (("bitwise_", ""), ("bitwise_", "_"))) | frozenset(
    f"__{name}__" for name in _ON_BITS)


class AsTensor:
    """A mask of four dims that becomes a tensor by being computed with.

    Attributes:
        shape: (b, 1, queries, keys).
        dtype: of the numbers that are added to scores.
        device: of the mask.
        made: the tensors that were asked for, by what they hold; empty as long as nobody computed with the mask.
    """

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    device: torch.device
    made: dict[str, torch.Tensor]
    __hash__ = object.__hash__

    def pairs(self) -> torch.Tensor:
        """Return which pairs take part: (b, 1, queries, keys), bool. It is made at each call."""
        raise NotImplementedError

    @property
    def visible_pairs(self) -> torch.Tensor:
        """The boolean form."""
        if "bits" not in self.made:
            self.made["bits"] = self.pairs()
        return self.made["bits"]

    @property
    def added(self) -> torch.Tensor:
        """The form that is added to scores: 0 and the least number of ``dtype``."""
        if "numbers" not in self.made:
            visible = self.visible_pairs
            self.made["numbers"] = torch.zeros(visible.shape, dtype=self.dtype, device=visible.device).masked_fill(
                ~visible, torch.finfo(self.dtype).min)
        return self.made["numbers"]

    @property
    def ndim(self) -> int:
        """4: what tells a model that this is no padding mask any more."""
        return len(self.shape)

    def dim(self) -> int:
        """4."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """Return the sizes, or that of one dim."""
        return torch.Size(self.shape) if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    def contiguous(self) -> "AsTensor":
        """Return the mask itself; generation asks for it."""
        return self

    def __getitem__(self, index: Any) -> Any:
        """Slice the form that is added; the mask itself, where slices leave all of it, as ``[:, :, :, :keys]`` does."""
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) == len(self.shape) and all(
                isinstance(part, slice) and _takes_all(part, size)
                for part, size in zip(parts, self.shape, strict=True)):
            return self
        return self.added[index]

    def __getattr__(self, name: str) -> Any:
        """Answer what else a tensor has by the form that is added."""
        if name.startswith("_") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.added, name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: Any = None) -> Any:
        """Call a function of torch's with the tensor that it can compute with."""
        form = "visible_pairs" if getattr(function, "__name__", "") in _TORCHS_ON_BITS else "added"
        return function(*_tensors(arguments, form), **_tensors(named or {}, form))


def _takes_all(part: slice, size: int) -> bool:
    return part.start in (None, 0) and part.step in (None, 1) and (
        part.stop is None or (isinstance(part.stop, int) and part.stop >= size))


def _tensors(value: Any, form: str) -> Any:
    """Put tensors into the place of masks, in lists and tuples too, as torch.cat takes them."""
    if isinstance(value, AsTensor):
        return getattr(value, form)
    if isinstance(value, dict):
        return {name: _tensors(part, form) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_tensors(part, form) for part in value)
    return value


def _operator(name: str, form: str) -> Callable[..., Any]:
    def computed(self: AsTensor, *others: Any) -> Any:
        return getattr(getattr(self, form), name)(*_tensors(others, form))

    computed.__name__ = name
    return computed


for _names, _form in ((_ON_NUMBERS, "added"), (_ON_BITS, "visible_pairs")):
    for _name in _names:  # operators are looked up on the class: __getattr__ is not asked
        setattr(AsTensor, f"__{_name}__", _operator(f"__{_name}__", _form))
