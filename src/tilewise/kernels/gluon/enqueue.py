"""Enqueueing a kernel that takes tensor descriptors: the short way past Triton's front end and its encoder."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from tilewise.kernels.hooks import watching

# One a tensor of the kernel. In place of a tensor stands its address; what is no tensor stands for itself.
Addresses = tuple[Any, ...]
# Encoded tensors kept of an argument that comes through a descriptor, 128 bytes each and the objects around them: a
# training step of as many layers finds each layer's again in the next step.
KEPT = 128


class Enqueue:
    """A kernel with its grid, its scalar arguments and its options; call it with its tensors' addresses.

    Triton's front end inspects every argument of every call, and its launcher encodes every descriptor anew. An
    Enqueue belongs to one device and to tensors of one set of shapes, strides and dtypes: from call to call nothing
    but addresses changes. A kernel is compiled for those that are multiples of 16, so that of a first call is the right
    one at every later call where the same ones are. An encoded tensor holds address, shape and strides, so it is right
    for whatever memory is at its address later. Threads may share an Enqueue.

    Args:
        kernel: a jit function whose arguments are the tensors, then the scalars.
        grid: its programs along one to three dims.
        scalars: the arguments after the tensors, in the kernel's order, constexprs included.
        options: num_warps and its kin.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], scalars: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.kernel, self.grid, self.scalars, self.options = kernel, grid, scalars, options
        self._watched = watching()
        self._again: dict[Any, Callable[[Addresses], None]] = {}

    def __call__(self, addresses: Addresses, arguments: Callable[[], tuple[Any, ...]], alike: bool = False) -> None:
        """Enqueue the kernel on the current stream of the current device, which is that of the tensors.

        Args:
            addresses: of the kernel's tensors, in order.
            arguments: makes the same as the front end wants them: tensors, or descriptors of tensors, at these
                addresses. It is called where the front end is.
            alike: the caller knows that in all of its calls that say so the same addresses are there, and the same
                ones are multiples of 16.
        """
        alignment = alike or tuple([address and address & 15 == 0 for address in addresses])
        again = self._again.get(alignment)
        if again is not None and not self._watched():
            again(addresses)
            return
        made = arguments()
        _compare(addresses, made)
        compiled = self.kernel[self.grid](*made, *self.scalars, **self.options)
        if again is None:
            self._again[alignment] = _relaunching(compiled, self.grid, made, self.scalars)


def _compare(addresses: Addresses, arguments: tuple[Any, ...]) -> None:
    """Hold the addresses against the arguments: later calls pass addresses alone, and nothing would tell them apart."""
    for i, (address, argument) in enumerate(zip(addresses, arguments, strict=True)):
        tensor = argument.base if _is_descriptor(argument) else argument
        own = tensor.data_ptr() if isinstance(tensor, torch.Tensor) else tensor
        if own != address:
            raise ValueError(f"addresses[{i}] is {address}, and its argument is {own}: give the same in both")


def _is_descriptor(argument: Any) -> bool:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return isinstance(argument, TensorDescriptor)


def _relaunching(compiled: Any, grid: tuple[int, ...], arguments: tuple[Any, ...],
                 scalars: tuple[Any, ...]) -> Callable[[Addresses], None]:
    """Return what launches a compiled kernel again, given its tensors' addresses, on the device current now."""
    from triton.runtime import driver

    from tilewise.kernels.gluon.compat import bare_launcher

    run, constants, encoders = bare_launcher(compiled, [argument for argument in arguments if _is_descriptor(argument)])
    left = iter(encoders)
    parts = [lru_cache(KEPT)(next(left)) if _is_descriptor(argument) else None for argument in arguments]
    (x, y, z), begin = (*grid, 1, 1)[:3], (compiled.function, *constants, compiled.packed_metadata, None, None, None)
    device, stream_of = driver.active.get_current_device(), driver.active.get_current_stream

    @lru_cache(KEPT)
    def handed(addresses: Addresses) -> tuple[Any, ...]:
        """All that follows the stream; a loop of equal steps meets the same addresses together again."""
        made = list(begin)
        for address, parts_at in zip(addresses, parts, strict=True):
            if parts_at is None:
                made.append(address)
            else:
                made += parts_at(address)
        return (*made, *scalars)

    def launch(addresses: Addresses) -> None:
        run(x, y, z, stream_of(device), *handed(addresses))

    return launch
