"""What warps of one program share: rings of tiles with their barriers, the next tile, turns of the tensor cores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
ONE_WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))  # a number a thread
FOUR_WARPS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
IN_ORDER = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))  # of shared memory: one number behind the other
# When a tile is handed out, how many before it may have no verdict yet (hopper_forward_load.py); and of how many
# verdicts and numbers are kept, a power of two.
OPEN = gl.constexpr(4)
JUDGED = gl.constexpr(8)
END = gl.constexpr(-1)  # in place of the first number that says where a tile is: no more tiles
# Named barriers. Gluon has none, and keeps 0 to 7 for itself. A kernel's warpgroups take turns or meet, none does both:
# turns are the forward kernel's, a number for each of three warpgroups. Of a warpgroup that waits for its own threads
# there is one, in the narrow backward kernel, where others meet.
TURNS = gl.constexpr(10)  # to 12
MEETING = gl.constexpr(10)
OWN_THREADS = gl.constexpr(11)


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate barriers that complete a phase after ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], BARRIER)
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def slots_for(descs, SLOTS: gl.constexpr):
    """Allocate a ring of slots for each piece."""
    tiles = ()
    for i in gl.static_range(len(descs)):
        desc = descs[i]
        tiles = tiles + (gl.allocate_shared_memory(desc.dtype, [SLOTS] + desc.block_shape, desc.layout),)
    return tiles


@gluon.jit
def joined(desc, rest):
    """The descriptors of a tensor's pieces. A launcher takes none from inside a tuple, so they come one by one."""
    if rest is None:
        return (desc,)
    else:
        return (desc, rest)


@gluon.jit
def wait_full(full, turn, SLOTS: gl.constexpr):
    """Wait until the slot of a ring that serves this turn has been filled."""
    mbarrier.wait(full.index(turn % SLOTS), (turn // SLOTS) & 1)


@gluon.jit
def wait_empty(empty, turn, SLOTS: gl.constexpr):
    """Wait until the slot of a ring that serves this turn has been left by its last user; at first it is free."""
    mbarrier.wait(empty.index(turn % SLOTS), ((turn // SLOTS) & 1) ^ 1)


@gluon.jit
def leave(empty, turn, SLOTS: gl.constexpr):
    """Give a slot of a ring back; Triton has all threads of the warpgroup meet in front of an arrival, and behind."""
    mbarrier.arrive(empty.index(turn % SLOTS), count=1)


@gluon.jit
def leave_products(empty, turn, SLOTS: gl.constexpr):
    """Give a slot of a ring back that products alone have read since the threads last met; the caller has awaited them.

    A product is one operation of the whole warpgroup: the thread that sees it done may say so, and nobody has to meet.
    CUTLASS's consumers release their slots so, too. To expect no bytes is an arrival that Triton does not take for one.
    """
    mbarrier.expect(empty.index(turn % SLOTS), 0)


@gluon.jit
def draw_number(counter, total):
    """Producer: take the next tile's number.

    The first is the program's own. So no tile may wait for another: a program may not have started that had its number.
    """
    drawn = gl.atomic_add(counter, 1, sem="relaxed")
    if drawn == total - 1:
        gl.store(counter, 0)  # the launch's last draw leaves the counter as it was found
    return drawn + gl.num_programs(0)


@gluon.jit
def hand_out(next_tile, turn, tile, SIZE: gl.constexpr):
    """Producer: tell the consumers their next tile: SIZE numbers, or of an end the first of them."""
    values, full, empty = next_tile
    wait_empty(empty, turn, 2)
    slot = turn % 2
    none = gl.full([1], 0, gl.int32, layout=ONE_WARP)
    for i in gl.static_range(len(tile)):
        values.index(slot * SIZE + i).store(none + tile[i])
    mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def read_tile(next_tile, turn, SIZE: gl.constexpr):
    """Consumer: read the tile of a turn, which has been waited for and is not given back."""
    values, _full, _empty = next_tile
    slot = turn % 2
    tile = ()
    for i in gl.static_range(SIZE):
        tile = tile + (gl.sum(values.index(slot * SIZE + i).load(FOUR_WARPS), 0),)
    return tile


@gluon.jit
def take_tile(next_tile, turn, SIZE: gl.constexpr, KEPT: gl.constexpr = False):
    """Consumer: receive the next tile; if it is KEPT, the caller gives it back (``leave_tile``)."""
    _values, full, _empty = next_tile
    wait_full(full, turn, 2)
    tile = read_tile(next_tile, turn, SIZE)
    if not KEPT:
        leave_tile(next_tile, turn)
    return tile


@gluon.jit
def leave_tile(next_tile, turn):
    """Consumer: give back the place where the tile of a turn stands."""
    _values, _full, empty = next_tile
    leave(empty, turn, 2)


@gluon.jit
def each_thread(CODE: gl.constexpr):
    """Emit code once for each thread of a warpgroup; it ends by setting $0 to $1."""
    none = gl.full([128], 0, gl.int32, layout=FOUR_WARPS)
    gl.inline_asm_elementwise(CODE, "=r,r", [none], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _named_barrier(VERB: gl.constexpr, NUMBER: gl.constexpr, THREADS: gl.constexpr):
    """Emit bar.sync or bar.arrive of a named barrier."""
    CODE: gl.constexpr = f"bar.{VERB} {NUMBER}, {THREADS}; mov.b32 $0, $1;"
    each_thread(CODE)


@gluon.jit
def take_turn(OWN: gl.constexpr, ON: gl.constexpr):
    """Wait until it is this warpgroup's turn to issue products (ping-pong)."""
    if ON:
        _named_barrier("sync", TURNS + OWN, 256)


@gluon.jit
def pass_turn(OWN: gl.constexpr, WARPGROUPS: gl.constexpr, ON: gl.constexpr):
    """Let the next warpgroup issue products."""
    if ON:
        _named_barrier("arrive", TURNS + (OWN + 1) % WARPGROUPS, 256)


@gluon.jit
def meet(WARPGROUPS: gl.constexpr):
    """Wait until so many warpgroups are here; in no kernel that takes turns, whose barrier this is."""
    _named_barrier("sync", MEETING, 128 * WARPGROUPS)


@gluon.jit
def space(COUNT: gl.constexpr):
    """Put COUNT instructions that never run, and four that skip them, in front of a warpgroup's code.

    Code lies in lines of 128 bytes, eight instructions, and where in one its loops begin is worth up to 1.5 %
    (docs/hopper.md, Where code lies). No launch has 54321 programs along the third dim.
    """
    if COUNT > 0:
        SLEEPS: gl.constexpr = "nanosleep.u32 20; " * COUNT
        CODE: gl.constexpr = ("{ .reg .pred skips; .reg .b32 depth; mov.u32 depth, %nctaid.z; "
                              "setp.ne.u32 skips, depth, 54321; @skips bra behind; " + SLEEPS +
                              "behind: mov.b32 $0, $1; }")
        each_thread(CODE)


@gluon.jit
def opaque(number):
    """Return a number whose origin the compiler cannot see.

    ptxas 12.8 computes what two loops share in front of the first of them alone, though that one may be skipped
    (descriptors of products, in uniform registers): each loop gets numbers of its own.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def stay(number):
    """Return a sum of exponentials; a wait that follows in the source stays below what makes it.

    ptxas moves a wait for products up, past all that does not need them, as far as its block of instructions goes. A
    branch ends the block: this one sleeps 20 ns where the sum is one certain NaN, which no sum is. The tests count the
    exponentials above the wait in the machine code.
    """
    return gl.inline_asm_elementwise("""{
        .reg .pred never;
        mov.b32 $0, $2;
        mov.b32 $1, $3;
        setp.eq.b32 never, $2, 0x7FC12345;
        @never nanosleep.u32 20;
    }""", "=r,=r,r,r", [number], dtype=gl.float32, is_pure=False, pack=2)


@gluon.jit
def settle(values, turn):
    """Return both; a wait that follows in the source stays below what makes the values.

    They pass an instruction that the compiler cannot see into, and then a branch ends the block (see stay): no turn is
    -1. It knows the turn to be the same in all threads, so that nothing has to bring them together again.
    """
    values = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [values], dtype=gl.float32, is_pure=False, pack=1)
    turn = gl.inline_asm_elementwise("""{
        .reg .pred never;
        mov.b32 $0, $1;
        setp.eq.s32 never, $1, -1;
        @never nanosleep.u32 20;
    }""", "=r,r", [turn], dtype=gl.int32, is_pure=False, pack=1)
    return values, turn
