"""An additive bias in the Hopper backward: TMA loads it block by block, and a score takes one more fused multiply-add.

A stage of the ring holds the bias of 64 queries and of each consumer's 64 keys, with queries as rows, as it lies in
memory. Scores are transposed, and a thread has two neighbouring queries of one key side by side. Of a 16-bit bias
ldmatrix hands out just that (``.trans``, by Triton's own load of the transposed tile): four instructions a block, and
16 registers until the scores are there. A float32 bias, for which there is no such instruction, is read number by
number.

TMA writes a stage again that threads have read. PTX orders a read of threads and a later write of TMA's by a
proxy fence alone, which an mbarrier is not: one must stand between ldmatrix and the release. That of dS, which comes
later, is one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.kernels.hopper.backward.types import Pipe
from tilewise.kernels.hopper.compat import tma_load
from tilewise.kernels.hopper.mask_ranges import QUERIES
from tilewise.kernels.hopper.pipeline import (
    consumer_release,
    consumer_wait,
    make_barriers,
    producer_acquire,
)
from tilewise.kernels.hopper.softmax import LOG2E, in_float32


@gluon.jit
def make_bias_pipe(bias_desc, C: gl.constexpr):
    """Allocate the ring of C.BIAS_STAGES stages, a tile for each consumer in each; () without a bias."""
    if C.BIAS_STAGES > 0:
        NC: gl.constexpr = C.CONSUMERS
        tiles = gl.allocate_shared_memory(bias_desc.dtype, [C.BIAS_STAGES * NC, 1, 1, QUERIES, 64], bias_desc.layout)
        return Pipe(tiles, make_barriers(C.BIAS_STAGES, 1), make_barriers(C.BIAS_STAGES, NC))
    else:
        return ()


@gluon.jit
def load_bias(bias, pipe, count, place, first_key, C: gl.constexpr):
    """Producer: load the bias of one iteration's queries and of the tile's keys, which begin at ``first_key``.

    bias: a types.Bias. place: batch, head and first query, as of ``load_queries``. TMA fills in zeros behind the last
    query and the last key.
    """
    if C.BIAS_STAGES > 0:
        NC: gl.constexpr = C.CONSUMERS
        batch, head, first, _row = place
        producer_acquire(pipe.empty, count, C.BIAS_STAGES)
        stage = count % C.BIAS_STAGES
        mbarrier.expect(pipe.full.index(stage), NC * bias.desc.block_type.nbytes)
        for i in gl.static_range(NC):
            at = [batch * bias.own_batch, head * bias.own_head, first, bias.first_key + first_key + i * 64]
            tma_load(bias.desc, at, pipe.full.index(stage), pipe.tiles.index(stage * NC + i))


@gluon.jit
def await_bias(pipe, count, C: gl.constexpr):
    """Consumer: wait for the bias of iteration ``count``, before an MMA is issued that the wait would follow."""
    if C.BIAS_STAGES > 0:
        consumer_wait(pipe.full, count, C.BIAS_STAGES)


@gluon.jit
def read_bias(pipe, count, WG: gl.constexpr, C: gl.constexpr):
    """Consumer: read the bias of its own 64 keys, by 64 queries, in the layout of transposed scores; () without one."""
    if C.BIAS_STAGES > 0:
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
        tile = pipe.tiles.index(count % C.BIAS_STAGES * C.CONSUMERS + WG)
        return tile.reshape([QUERIES, 64]).permute((1, 0)).load(LAYOUT)
    else:
        return ()


@gluon.jit
def add_bias(exponents, bias, C: gl.constexpr):
    """Add a bias to exponents to base 2, one fused multiply-add each; without a bias return them as they are."""
    if C.BIAS_STAGES > 0:
        exponents = exponents + in_float32(bias) * LOG2E
    return exponents


@gluon.jit
def release_bias(pipe, count, C: gl.constexpr):
    """Consumer: release the stage of iteration ``count``, when dS was made of its numbers.

    TMA writes there again, and threads have read: the caller has fenced the one from the other, as it does for dS
    (``fence_async_shared``).
    """
    if C.BIAS_STAGES > 0:
        consumer_release(pipe.empty, count, C.BIAS_STAGES)
