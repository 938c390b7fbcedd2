"""Enqueueing a kernel that Triton compiled: past Triton's front end and its launcher, from the second call on."""

from collections.abc import Callable
from typing import Any

import torch

from tilewise.kernels import driver
from tilewise.kernels.compiling import hash_callees_first
from tilewise.kernels.driver import Addresses
from tilewise.kernels.hooks import take_of_kernels, watching

Arguments = tuple[Any, ...]


class Enqueue:
    """A kernel with its grid, its scalar arguments and its options; call it with its tensors' addresses.

    Triton's front end inspects every argument of every call, and its launcher encodes every descriptor anew. An
    Enqueue belongs to one device and to tensors of one set of shapes, strides and dtypes: from call to call nothing
    but addresses changes. A kernel is compiled for those that are multiples of 16, so that of a first call is the right
    one at every later call where the same ones are. An encoded tensor holds address, shape and strides, so it is right
    for whatever memory is at its address later. Threads may share an Enqueue.

    A kernel that :mod:`tilewise.kernels.driver` does not know is launched by Triton; so is every kernel while a
    profiler has hooked itself into Triton's launches.

    Args:
        kernel: a jit function whose arguments are the tensors, then the scalars.
        grid: its CTAs along one to three dims.
        scalars: the arguments after the tensors, in the kernel's order, constexprs included.
        options: num_warps and its kin.
        specialized: how many arguments come before those for which the kernel is compiled as :func:`unspecialized` has
            it; None: all.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], scalars: Arguments, options: dict[str, Any],
                 specialized: int | None = None) -> None:
        self.kernel, self.grid, self.scalars, self.options = kernel, grid, scalars, options
        self._specialized = specialized
        self._watched = watching()
        self._bound: dict[Any, Callable[[Addresses], None]] = {}
        self._compiled: dict[Any, Any] = {}

    def __call__(self, addresses: Addresses, arguments: Callable[[], Arguments], alike: bool = False) -> None:
        """Enqueue the kernel on the current stream of the current device, which is that of the tensors.

        Args:
            addresses: of the kernel's tensors, in order; of a tensor that is not there None. A number among the
                arguments before the scalars stands for itself; of a tuple, the addresses of its tensors.
            arguments: makes the same as the front end wants them: tensors, descriptors of tensors, numbers, tuples.
                It is called where Triton launches, and at the first call.
            alike: the caller knows that in all of its calls that say so the same addresses are there, and the same
                ones are multiples of 16.
        """
        alignment = alike or tuple([address and address & 15 == 0 for address in addresses])
        launch, take = self._bound.get(alignment), take_of_kernels()
        if launch is not None and take is None and not self._watched():
            launch(addresses)
            return
        made = arguments()
        if take is not None:
            _compare(addresses, made)
            take(self.kernel.__name__, lambda: self.compile(made))
            return
        compiled = self._compiled.get(alignment)
        if compiled is None:
            _compare(addresses, made)
            compiled = self._compile(alignment, made)
            launch = self._bound.get(alignment)
            if launch is not None and not self._watched():
                launch(addresses)
                return
        if compiled is None:  # interpreted: there is nothing to keep
            self.kernel[self.grid](*made, *self.scalars, **self.options)
        else:
            compiled[(*self.grid, 1, 1)[:3]](*made, *self.scalars)

    def compile(self, made: Arguments) -> Any:
        """Compile the kernel for arguments like these; return what Triton made of it, None under its interpreter."""
        hash_callees_first(self.kernel)
        seen = (*made, *self.scalars)
        if self._specialized is not None:
            seen = (*seen[:self._specialized], *unspecialized(seen[self._specialized:]))
        return self.kernel.warmup(*seen, grid=self.grid, **self.options)

    def _compile(self, alignment: Any, made: Arguments) -> Any:
        compiled = self.compile(made)
        if compiled is None:
            return None
        device = torch.cuda.current_device()
        try:
            image = driver.image_of(compiled)
            fields = driver.fields_of(image.types, (*made, *self.scalars), len(made))
            self._bound[alignment] = driver.bind(image, self.grid, fields, device)
        except driver.UnknownKernel:
            pass  # compiled[grid] launches the same kernel
        self._compiled[alignment] = compiled
        return compiled


def unspecialized(arguments: Arguments) -> Arguments:
    """Return arguments like these for which Triton compiles a kernel that is right for any numbers and addresses.

    Triton specialises each integer in a tuple, for 1 and for multiples of 16, and each address, for multiples of 16;
    ``do_not_specialize`` reaches none. So other integers of the same width, and addresses that are multiples of
    nothing, stand in their place while the kernel is compiled. Constants, the last argument, are left alone.
    """
    *others, constants = arguments

    def stand_in(own: Any) -> Any:
        if isinstance(own, tuple):
            inner = [stand_in(one) for one in own]
            return own._make(inner) if hasattr(own, "_make") else tuple(inner)
        if isinstance(own, torch.Tensor):
            return _Anywhere(own.dtype)
        return (7 if -2**31 <= own < 2**31 else 2**31 + 7) if type(own) is int else own

    return (*(stand_in(own) if isinstance(own, tuple) else own for own in others), constants)


class _Anywhere:
    """Stands for a tensor of a dtype, wherever it lies; this is what Triton asks a tensor for."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def data_ptr(self) -> int:
        """Return an odd address."""
        return 1


def addresses_in(arguments: Arguments) -> list[Any]:
    """Return what :class:`Enqueue` takes in the place of these arguments."""
    found: list[Any] = []
    for argument in arguments:
        if isinstance(argument, tuple):
            found += [tensor.data_ptr() for tensor in driver.tensors_in(argument)]
        else:
            tensor = getattr(argument, "base", argument)  # a descriptor's
            found.append(tensor.data_ptr() if isinstance(tensor, torch.Tensor) else tensor)
    return found


def _compare(addresses: Addresses, arguments: Arguments) -> None:
    """Hold the addresses against the arguments: later calls pass addresses alone, and nothing would tell them apart."""
    for i, (address, own) in enumerate(zip(addresses, addresses_in(arguments), strict=True)):
        if own != address:
            raise ValueError(f"addresses[{i}] is {address}, and its argument is {own}: give the same in both")
