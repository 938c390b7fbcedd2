"""What a tile leaves behind in the Hopper backward by way of shared memory: dK and dV, or dQ of wide heads."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from tilewise.kernels.hopper.backward.dq_accum import split_columns
from tilewise.kernels.hopper.compat import reinterpret, tma_store, tma_store_wait
from tilewise.kernels.hopper.varlen import store_some


@gluon.jit
def write_gradient(desc, ptr, staged, gradient, place, left, C: gl.constexpr, FIRST: gl.constexpr = 0):
    """Write 64 rows of dK or dV by way of a tile of shared memory. place: batch, head, row, first column.

    ``left``: rows to the end of a packed sequence; TMA would write past it. FIRST: where ``ptr`` is used, the first
    column. A tile of the inputs' dtype holds half of
    the columns in float32, which then go one half behind the other.
    """
    if desc.dtype == gl.float32:
        batch, head, row, column = place
        halves = split_columns(gradient)
        tile = reinterpret(staged, gl.float32, desc.block_type.shape, desc.layout)
        COLUMNS: gl.constexpr = desc.block_type.shape[3]
        for i in gl.static_range(2):
            if i == 1:
                tma_store_wait(0)
            half = (batch, head, row, column + i * COLUMNS)
            write_columns(desc, ptr, tile, halves[i], half, left, FIRST + i * COLUMNS, C)
    else:
        write_columns(desc, ptr, staged, gradient, place, left, FIRST, C)


@gluon.jit
def write_columns(desc, ptr, staged, gradient, place, left, FIRST: gl.constexpr, C: gl.constexpr):
    """Write what a tile of shared memory holds of 64 rows of dK or dV. FIRST: where ``ptr`` is used, first column."""
    batch, head, row, column = place
    staged.reshape(gradient.shape).store(gradient.to(desc.dtype))
    fence_async_shared()
    if C.HAS_CU_SEQLENS:
        if left >= 64:
            tma_store(desc, [batch, head, row, column], staged)
        else:
            store_some(staged, ptr, desc, (batch, head, row), left, FIRST, gradient.shape[1])
    else:
        tma_store(desc, [batch, head, row, column], staged)
