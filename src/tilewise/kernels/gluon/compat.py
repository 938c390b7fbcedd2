"""What differs between Triton versions; nothing else here may look at the version."""

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin, shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.hopper import tma

from tilewise.errors import TilewiseError

# Renamed in 3.8; the old names are gone in 3.9.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait
# Public from 3.9 on.
reinterpret = getattr(shared_memory_descriptor, "reinterpret", None) or shared_memory_descriptor._reinterpret


@builtin
def _tma_add_by_builder(desc, coord, src, _semantic=None):
    """Add a tile to global memory: 3.6 and 3.7 can, but have no name for it."""
    place = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, place, src.handle)


tma_add = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else _tma_add_by_builder


def bare_launcher(compiled: Any,
                  descriptors: list[Any]) -> tuple[Any, tuple[Any, ...], list[Callable[[int], list[Any]]]]:
    """Return what launches a compiled kernel when it is handed its descriptors in parts, and what makes the parts.

    What Triton compiles in C takes, in place of a descriptor, an encoded tensor map, the shape and the strides. Around
    it is a Python function that makes them of the descriptors at every launch; here it is taken off, so that parts can
    be kept. Around that is another, which adds how the grid is launched, and scratch memory: where a kernel wants none,
    what it adds is the same at every launch, and it is taken off too.

    Args:
        compiled: with its handles loaded, as after a launch.
        descriptors: those it was launched with, in the kernel's order. Their tensors are not kept.

    Returns:
        The launcher, what it takes between the function's handle and the kernel's metadata, and for each descriptor a
        function: the address of a tensor of this form -> its parts.

    Raises:
        TilewiseError: where Triton (3.6 is known here, the one that backends/gluon.py takes) keeps them otherwise.
    """
    from triton.backends.nvidia import driver

    run, encoders = compiled.run, []
    if descriptors:
        wrapper = getattr(run, "launch", None)
        inside = inspect.getclosurevars(wrapper).nonlocals if inspect.isfunction(wrapper) else {}
        layouts = inside.get("tensordesc_meta") or []
        make = getattr(driver, "make_tensordesc_arg", None)
        if make is None or "launcher" not in inside or len(layouts) != len(descriptors) or None in layouts:
            raise TilewiseError(f"Triton's launcher of {len(descriptors)} descriptors holds {sorted(inside)} with "
                                f"{len(layouts)} layouts; a launcher and a layout each is what Triton 3.6 has. Install "
                                "that, or call with backend='triton'.")
        run = copy.copy(run)
        run.launch = inside["launcher"]
        encoders = [partial(_parts, make, layout, _Described(descriptor, 0))
                    for layout, descriptor in zip(layouts, descriptors, strict=True)]
    if run.global_scratch_size or run.profile_scratch_size:
        return run, (), encoders
    return run.launch, (run.launch_cooperative_grid, run.launch_pdl, None, None), encoders


class _Described:
    """What is read of a descriptor to encode it, of memory at an address; made in less time than a copy of one."""

    __slots__ = ("address", "padding", "shape", "strides")

    def __init__(self, descriptor: Any, address: int) -> None:
        self.shape, self.strides, self.padding = descriptor.shape, descriptor.strides, descriptor.padding
        self.address = address

    @property
    def base(self) -> "_Described":
        """The tensor, of which nothing is read but where it lies."""
        return self

    def data_ptr(self) -> int:
        """Return where it lies."""
        return self.address


def _parts(make: Any, layout: Any, form: _Described, address: int) -> list[Any]:
    return make(_Described(form, address), layout)
