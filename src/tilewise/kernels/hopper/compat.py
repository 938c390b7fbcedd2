"""What differs between Triton versions; nothing else here may look at the version."""

from triton._C.libtriton import ir
from triton.experimental.gluon import _runtime
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin, shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.hopper import tma

from tilewise.support.packages import package_version

# Renamed in 3.8; the old names are gone in 3.9.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait
# Public from 3.9 on.
reinterpret = getattr(shared_memory_descriptor, "reinterpret", None) or shared_memory_descriptor._reinterpret

# Public from 3.9 on: what a kernel is compiled from for a GPU that is not here.
GluonASTSource = _runtime.GluonASTSource

# From 3.8 on Triton copies a product's left operand, where it is in registers, ahead of the product. The assembler of
# 3.9, ptxas 13.4, leaves these copies in the machine code: of an operand that stays in registers from step to step
# always, and of one that is made anew where the wait for the product is held below exponentials.
COPIES_LEFT_OPERANDS = gl.constexpr((package_version("triton", "triton") or (0, 0)) >= (3, 9))


@builtin
def _tma_add_by_builder(desc, coord, src, _semantic=None):
    """Add a tile to global memory: 3.6 and 3.7 can, but have no name for it."""
    place = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, place, src.handle)


tma_add = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else _tma_add_by_builder
