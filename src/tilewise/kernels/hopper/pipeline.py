"""What the warps of a CTA share: rings of stages with their mbarriers, named barriers, and what holds back compilers.

A ring has STAGES stages, each with two mbarriers: ``full`` completes a phase when the producer's bytes have landed,
``empty`` when every consumer has released the stage. Both sides count the iterations they have made: iteration
``count`` uses stage ``count % STAGES``, and its phase is the parity of ``count // STAGES``.

In all kernels WG is the number of a consumer warpgroup in its CTA: each is compiled by itself.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
ONE_WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))  # one number a thread
FOUR_WARPS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
CONTIGUOUS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))  # shared memory without a swizzle
# How many tiles a tile's overflow flags may lag behind the tile that is published (forward/producer.py), and how
# many tiles have flags and numbers in shared memory: a power of two.
OVERFLOW_LAG = gl.constexpr(4)
OVERFLOW_SLOTS = gl.constexpr(8)
# Numbers of named barriers; Gluon has no API for these, and uses 0 to 7 itself. Ping-pong scheduling in the forward
# kernel takes one a warpgroup. No kernel has both these and a barrier of all its warpgroups. WARPGROUP_BARRIER is for
# the threads of one warpgroup, in backward/d64.py, beside SYNC_BARRIER.
ORDER_BARRIER = gl.constexpr(10)  # to 12
SYNC_BARRIER = gl.constexpr(10)
WARPGROUP_BARRIER = gl.constexpr(11)


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate mbarriers that complete a phase after ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], BARRIER)
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def allocate_stages(descs, NUMBER: gl.constexpr):
    """Allocate NUMBER stages of shared memory for each descriptor's block; returns a tuple."""
    tiles = ()
    for i in gl.static_range(len(descs)):
        desc = descs[i]
        tiles = tiles + (gl.allocate_shared_memory(desc.dtype, [NUMBER] + desc.block_shape, desc.layout),)
    return tiles


@gluon.jit
def as_tuple(desc, rest):
    """Return the descriptors of a tensor's one or two head-dim chunks; a launcher takes none from inside a tuple."""
    if rest is None:
        return (desc,)
    else:
        return (desc, rest)


@gluon.jit
def consumer_wait(full, count, STAGES: gl.constexpr):
    """Wait until the stage of iteration ``count`` has been filled."""
    mbarrier.wait(full.index(count % STAGES), (count // STAGES) & 1)


@gluon.jit
def producer_acquire(empty, count, STAGES: gl.constexpr):
    """Wait until every consumer has released the stage of iteration ``count``; at first all stages are free."""
    mbarrier.wait(empty.index(count % STAGES), ((count // STAGES) & 1) ^ 1)


@gluon.jit
def consumer_release(empty, count, STAGES: gl.constexpr):
    """Release the stage of iteration ``count``.

    Triton puts a barrier of the warpgroup's threads in front of the arrival, and one behind it.
    """
    mbarrier.arrive(empty.index(count % STAGES), count=1)


@gluon.jit
def consumer_release_after_mma(empty, count, STAGES: gl.constexpr):
    """Release a stage that MMAs alone have read since the threads last synchronized; the caller has waited for them.

    An MMA is one operation of the whole warpgroup: the thread that sees it completed may arrive, and the threads need
    no barrier. CUTLASS's consumers release their stages so, too. To expect 0 bytes more is to arrive once, and Triton
    adds no barrier of the warpgroup to it, as it does to an arrival.
    """
    mbarrier.expect(empty.index(count % STAGES), 0)


@gluon.jit
def per_thread_asm(CODE: gl.constexpr):
    """Emit code once for each thread of a warpgroup; it ends by setting $0 to $1."""
    none = gl.full([128], 0, gl.int32, layout=FOUR_WARPS)
    gl.inline_asm_elementwise(CODE, "=r,r", [none], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _named_barrier(VERB: gl.constexpr, NUMBER: gl.constexpr, THREADS: gl.constexpr):
    """Emit bar.sync or bar.arrive of a named barrier."""
    CODE: gl.constexpr = f"bar.{VERB} {NUMBER}, {THREADS}; mov.b32 $0, $1;"
    per_thread_asm(CODE)


@gluon.jit
def order_barrier_wait(WG: gl.constexpr, ON: gl.constexpr):
    """Ping-pong: wait until the warpgroup before this one has issued its MMAs."""
    if ON:
        _named_barrier("sync", ORDER_BARRIER + WG, 256)


@gluon.jit
def order_barrier_arrive(WG: gl.constexpr, WARPGROUPS: gl.constexpr, ON: gl.constexpr):
    """Ping-pong: let the next warpgroup issue its MMAs."""
    if ON:
        _named_barrier("arrive", ORDER_BARRIER + (WG + 1) % WARPGROUPS, 256)


@gluon.jit
def named_barrier_sync(WARPGROUPS: gl.constexpr):
    """Synchronize the threads of so many warpgroups; in no kernel with ping-pong, which uses the same barrier."""
    _named_barrier("sync", SYNC_BARRIER, 128 * WARPGROUPS)


@gluon.jit
def optimization_barrier(number):
    """Return the number, with its origin hidden from the compiler.

    ptxas 12.8 hoists what two loops have in common (the MMA descriptors in uniform registers) in front of the first
    loop, which may be skipped. With this each loop computes its own.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def scheduling_fence(number):
    """Return a sum of exponentials, and keep what computes it above a wait that follows in the source.

    ptxas moves a wait for MMAs up, past all instructions of its basic block that do not depend on it. A branch ends
    the block: this one sleeps 20 ns where the sum is one certain NaN, which no sum is.
    """
    return gl.inline_asm_elementwise("""{
        .reg .pred never;
        mov.b32 $0, $2;
        mov.b32 $1, $3;
        setp.eq.b32 never, $2, 0x7FC12345;
        @never nanosleep.u32 20;
    }""", "=r,=r,r,r", [number], dtype=gl.float32, is_pure=False, pack=2)


@gluon.jit
def scheduling_fence_of(values, count):
    """Return both, and keep what computes the values above a wait that follows in the source.

    The values pass an instruction that the compiler cannot look into, and a branch then ends the basic block (as in
    ``scheduling_fence``): no count is -1. The compiler knows that the count is the same in all threads, so that the
    branch does not need them to reconverge.
    """
    values = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [values], dtype=gl.float32, is_pure=False, pack=1)
    count = gl.inline_asm_elementwise("""{
        .reg .pred never;
        mov.b32 $0, $1;
        setp.eq.s32 never, $1, -1;
        @never nanosleep.u32 20;
    }""", "=r,r", [count], dtype=gl.int32, is_pure=False, pack=1)
    return values, count
