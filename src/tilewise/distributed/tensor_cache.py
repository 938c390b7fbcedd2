"""What was worked out from the values of tensors, kept for as long as these are the same."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch

Made = TypeVar("Made")


def stream_of(device: torch.device) -> int | None:
    """Return the stream that work of a device goes to now, None of a CPU.

    It belongs into the key of tensors that are made there: another stream would read what is not written yet.
    """
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured: what it makes or reads must not be shared with other calls."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class _Kept(NamedTuple):
    """What was made, of which tensors, and what they were then: version counters and addresses, on the host values."""

    tensors: tuple["ref[torch.Tensor] | None", ...]
    state: tuple[tuple[int, int] | None, ...]
    values: tuple[torch.Tensor | None, ...]
    made: Any

    def serves(self, tensors: Sequence[torch.Tensor | None], state: tuple[tuple[int, int] | None, ...]) -> bool:
        """Whether these tensors are the same, and have not changed."""
        return self.state == state and all(
            (kept is None or kept() is own) and (value is None or own is None or torch.equal(value, own))
            for kept, value, own in zip(self.tensors, self.values, tensors, strict=True))


class TensorCache:
    """A cache by the identity of tensors; no value on a GPU is read to look something up.

    An entry serves while its tensors are the same objects, at the same address and of the same version, which a change
    in place raises, and on the host hold the same values; it goes with the first of them that is freed. What is written
    past autograd (through ``.data``, or by a collective such as ``broadcast``) raises no version, and is seen on the
    host alone.

    Args:
        size: entries; the one that was not used for the longest time goes first.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: dict[Hashable, _Kept] = {}

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._entries)

    def get(self, tensors: Sequence[torch.Tensor | None], key: Hashable, make: Callable[[], Made], *,
            compares: bool = True) -> Made:
        """Return what was made of these tensors under this key, or make and keep it.

        Without ``compares`` no values are, on the host neither: of tensors that no user writes to.
        Tensors of inference mode have no version: what is made of them is not kept, nor what is made in that mode,
        which no gradient may be kept beside. What is made must hold none of the tensors, nor a view of one, or its
        entry would stay when they are no longer used.
        """
        is_inference = (tensor.is_inference() for tensor in tensors if tensor is not None)
        if torch.is_inference_mode_enabled() or any(is_inference):
            return make()
        name = (tuple([None if tensor is None else id(tensor) for tensor in tensors]), key)
        state = tuple([None if tensor is None else (tensor._version, tensor.data_ptr()) for tensor in tensors])
        kept = self._entries.pop(name, None)
        if kept is None or not kept.serves(tensors, state):
            made = make()
            values = tuple([own.clone() if compares and own is not None and own.device.type == "cpu" else None
                            for own in tensors])
            kept = _Kept(tuple([None if tensor is None else ref(tensor, lambda _: self._forget(name))
                                for tensor in tensors]), state, values, made)
        self._entries[name] = kept
        if len(self._entries) > self._size:
            self._forget(next(iter(self._entries)))
        found: Made = kept.made
        return found

    def clear(self) -> None:
        """Drop every entry."""
        self._entries.clear()

    def _forget(self, name: Hashable) -> None:
        self._entries.pop(name, None)
