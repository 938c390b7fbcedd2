"""Tensors on their way between the ranks of a group: point-to-point messages, all of a step at once.

A message is the bytes of some tensors one behind the other; of one or two it is the tensors themselves. On CUDA devices
the messages of a group travel on a stream of NCCL's own: what is enqueued between :func:`start` and
:meth:`Transfer.wait` runs beside them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from tilewise.distributed.rows import write_rows
from tilewise.support.caches import registered

Said = TypeVar("Said")
Message = tuple[torch.Tensor, ...]
_APART = 2  # a message of at most so many tensors is those tensors themselves, where they are dense
_ALIGNMENT = 128  # bytes: each tensor of a message begins at a multiple, as Hopper's TMA asks of an address


class TensorForm(NamedTuple):
    """Shape and dtype of a tensor in a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes that it takes in a message."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT


class _Place(NamedTuple):
    """Where a tensor lies in a message; ``start`` and ``strides`` in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


@registered
@lru_cache(maxsize=1024)
def _places_of(forms: tuple[TensorForm, ...]) -> tuple[tuple[_Place, ...], int]:
    """Return where tensors lie in a message, and its bytes."""
    found, start = [], 0
    for form in forms:
        *strides, _ = accumulate(reversed(form.shape), mul, initial=1)
        found.append(_Place(form.dtype, form.shape, tuple(reversed(strides)), start // form.dtype.itemsize))
        start += form.size
    return tuple(found), start


def pack(tensors: Iterable[torch.Tensor], dtype: torch.dtype | None = None) -> Message:
    """Return a message of the tensors' elements in the order of their dims, in this dtype if any."""
    tensors = tuple(tensors)
    if len(tensors) <= _APART and all(
            own.is_contiguous() and not own.is_neg() and dtype in (None, own.dtype) for own in tensors):
        return tensors
    forms = [TensorForm(tuple(tensor.shape), dtype or tensor.dtype) for tensor in tensors]
    message = empty_message(forms, tensors[0].device)
    for view, tensor in zip(unpack(message, forms), tensors, strict=True):
        write_rows(view, tensor)
    return message


def unpack(message: Message, forms: Sequence[TensorForm]) -> Sequence[torch.Tensor]:
    """Return the tensors of a message, or views of it."""
    if len(forms) <= _APART:
        return message
    (whole,), found, typed = message, [], {}
    for dtype, shape, strides, start in _places_of(tuple(forms))[0]:
        if dtype not in typed:
            typed[dtype] = whole.view(dtype)
        found.append(typed[dtype].as_strided(shape, strides, start))
    return found


def tensors_of(forms: Sequence[TensorForm]) -> int:
    """Return how many tensors a message of these is."""
    return len(forms) if len(forms) <= _APART else 1


def empty_message(forms: Sequence[TensorForm], device: torch.device) -> Message:
    """Return room for a message of such tensors."""
    if len(forms) <= _APART:
        return tuple([torch.empty(form.shape, dtype=form.dtype, device=device) for form in forms])
    return (torch.empty(_places_of(tuple(forms))[1], dtype=torch.uint8, device=device),)


class Transfer:
    """Messages under way, which :meth:`wait` waits for; the tensors are kept until then."""

    def __init__(self, works: Sequence[Any], kept: Sequence[torch.Tensor],
                 staged: Mapping[torch.Tensor, torch.Tensor]) -> None:
        self._works, self._kept, self._staged = works, kept, staged

    def wait(self) -> None:
        """Make the current stream, or on a CPU the host, wait until every message has been sent and received."""
        for work in self._works:
            work.wait()
        for message, arrived in self._staged.items():
            message.copy_(arrived)
        self._works, self._kept, self._staged = (), (), {}


def start(group: dist.ProcessGroup, sends: Mapping[int, Message], receives: Mapping[int, Message]) -> Transfer:
    """Send and receive messages; both ends name each other in the same call, and in no other order.

    Args:
        group: the process group.
        sends, receives: by the other's rank in the group, which is not the own one: a message to send, and room for
            the one that it sends. What has no bytes is neither sent nor received, at either end.
    """
    if not (sends or receives):
        return Transfer((), (), {})
    # Gloo moves no memory of a GPU from one rank to another: such messages go by way of the host.
    by_host = dist.get_backend(group) == "gloo" and any(
        message[0].device.type != "cpu" for message in (*sends.values(), *receives.values()))
    staged: dict[torch.Tensor, torch.Tensor] = {}
    operations = []
    for call, messages in ((dist.isend, sends), (dist.irecv, receives)):
        for peer, message in sorted(messages.items()):
            for part in message:
                if not part.numel():
                    continue
                moved = part
                if by_host and call is dist.isend:
                    moved = part.cpu()
                elif by_host:
                    moved = staged[part] = torch.empty_like(part, device="cpu")
                operations.append(dist.P2POp(call, moved, group=group, group_peer=peer))
    works = dist.batch_isend_irecv(operations) if operations else []
    return Transfer(works, [operation.tensor for operation in operations], staged)


def agree(group: dist.ProcessGroup, own: Said) -> list[Said]:
    """Return what every rank of a group says, in their order; waits for all of them."""
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, own, group=group)
    return said
