"""Tile configurations: one frozen dataclass a kernel; an illegal one cannot be constructed."""

from dataclasses import dataclass

from tilewise.errors import InvalidInput
from tilewise.problem import AttentionProblem

MIN_BLOCK = 16  # the least M, N and K of a tile product
MAX_BLOCK = 256
LEAST_SCALE = 2.0**-40  # of scores whose lse comes as a tail: lse / scale is a number, and far from the largest


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Shape of one program.

    Attributes:
        block_m: queries a tile.
        block_n: keys a tile.
        num_warps: warps of 32 threads (64 on AMD) that share the tile.
        num_stages: depth of the software pipeline over the inner loop; 1 = none.
        descriptors: whether tiles come through tensor descriptors, moved by Hopper's copy engine (TMA); fewer
            registers and address instructions than through pointers, about 15 µs more on the host.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    descriptors: bool = False

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n"):
            value = getattr(self, name)
            if value & (value - 1) or not MIN_BLOCK <= value <= MAX_BLOCK:
                raise InvalidInput(f"{name}={value}; allowed are the powers of two from {MIN_BLOCK} to {MAX_BLOCK}.")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise InvalidInput(f"num_warps={self.num_warps}; allowed are 1, 2, 4, 8 and 16.")
        if not 1 <= self.num_stages <= 8:
            raise InvalidInput(f"num_stages={self.num_stages}; allowed are 1 to 8.")

    @property
    def limits(self) -> dict[str, int]:
        """Options of a launch that bound what the compiler may take."""
        return {}

    def operand_bytes(self, problem: AttentionProblem) -> int:
        """Shared memory for tiles of operands, bias and boolean mask in flight.

        Of a function's tensors each may be read once for every pair: nobody but its author knows.
        """
        bias, mask, functions = problem.scores.bias, problem.scores.mask, problem.scores.functions
        in_flight = max(1, self.num_stages - 1) * (
            (bias.dtype.itemsize if bias else 0) + (1 if mask else 0)
            + sum(dtype.itemsize for facts in functions for dtype in facts.dtypes))
        return self.block_m * self.block_n * in_flight


@dataclass(frozen=True, slots=True)
class ForwardConfig(TileConfig):
    """The forward kernel: queries stay, keys stream."""

    def shared_bytes(self, problem: AttentionProblem) -> int:
        """Shared memory: q, and ``num_stages`` tiles of k and v in flight."""
        rows = self.block_m + 2 * self.num_stages * self.block_n
        tail = (self.block_m + self.num_stages * self.block_n) * problem.tail_width
        return problem.dtype.itemsize * (rows * problem.width + tail) + self.operand_bytes(problem)


@dataclass(frozen=True, slots=True)
class DkdvConfig(TileConfig):
    """The dK/dV kernel, for both gradients or one of them: keys stay, queries stream."""

    def shared_bytes(self, problem: AttentionProblem) -> int:
        """Shared memory: k and v, and ``num_stages`` tiles of q and dout in flight; P and dS stay in registers."""
        rows = self.block_n + self.num_stages * self.block_m
        return problem.dtype.itemsize * rows * (2 * problem.width + problem.tail_width) + self.operand_bytes(problem)


@dataclass(frozen=True, slots=True)
class DqConfig(TileConfig):
    """The dQ kernel: queries stay, keys stream."""

    def shared_bytes(self, problem: AttentionProblem) -> int:
        """Shared memory: q and dout, and ``num_stages`` tiles of k and v in flight; dS stays in registers."""
        rows = self.block_m + self.num_stages * self.block_n
        return problem.dtype.itemsize * rows * (2 * problem.width + problem.tail_width) + self.operand_bytes(problem)


@dataclass(frozen=True, slots=True)
class DqEntriesConfig(DqConfig):
    """The dQ kernel with a tile of queries of each of ``entries`` batch entries, which share a bias."""

    entries: int = 2

    def shared_bytes(self, problem: AttentionProblem) -> int:
        """Shared memory: the tiles of every entry, one of the bias, and half a step's dS in float32 on its way out."""
        bias = problem.scores.bias
        common = self.block_m * self.block_n * max(1, self.num_stages - 1) * (bias.dtype.itemsize if bias else 0)
        own = DqConfig.shared_bytes(self, problem) - common
        return self.entries * own + common + 2 * self.block_m * self.block_n


@dataclass(frozen=True, slots=True)
class DbiasConfig(TileConfig):
    """The dbias kernel: a tile of pairs stays, the heads that share it come one after another, with no pipeline.

    Attributes:
        registers: the most that a thread may take, so that more programs share a multiprocessor; 0: any number.
    """

    registers: int = 0

    @property
    def limits(self) -> dict[str, int]:
        """The bound on registers, if there is one."""
        return {"maxnreg": self.registers} if self.registers else {}

    def shared_bytes(self, problem: AttentionProblem) -> int:
        """Shared memory: a tile of q, of k, of v and of dout, however many stages the launch leaves out."""
        rows = self.block_m + self.block_n
        return problem.dtype.itemsize * rows * (2 * problem.width + problem.tail_width) + self.operand_bytes(problem)


@dataclass(frozen=True, slots=True)
class DecodeConfig(TileConfig):
    """The decode kernel: ``block_m`` rows, a query of a head each, stay; keys stream.

    Attributes:
        overlapped: whether the kernel that combines is launched while this one still runs, and waits by itself; CUDA
            devices of compute capability 9.0 and later can.
    """

    overlapped: bool = False

    def shared_bytes(self, width: int, itemsize: int) -> int:
        """Shared memory: q, P, and tiles of k and v in flight: one a stage, the product of few rows frees one sooner.

        64 rows and more are wgmma's on Hopper: it reads k and v where they arrived, and P from registers. A KiB is for
        the reductions between warps.
        """
        many = self.block_m >= 64
        tiles = self.num_stages if many else max(1, self.num_stages - 1)
        row = width if many else width + self.block_n
        return itemsize * (2 * tiles * self.block_n * width + self.block_m * row) + 1024


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """The delta kernel: a row sum, bound by memory; the tile only has to fill the loads."""

    block_m: int = 32
    num_warps: int = 4


@dataclass(frozen=True, slots=True)
class HopperForwardConfig:
    """The warp-specialised forward kernel: 64 rows of queries a consumer warpgroup, over blocks of keys.

    Attributes:
        block_n: keys a block.
        consumers: warpgroups that compute, 64 rows each; one more warp loads.
        kv_stages: blocks of K and V in flight; a power of two, since every block divides by it (3 lost 8 % at d 64).
        q_stages: tiles of Q in flight; a power of two too.
        ping_pong: whether the warpgroups alternate between the tensor cores and the softmax.
        epilogue_passes: 2: out leaves through half as many buffers, each used more than once, to save shared memory.
    """

    block_n: int
    consumers: int
    kv_stages: int = 2
    q_stages: int = 2
    ping_pong: bool = False
    epilogue_passes: int = 1

    def __post_init__(self) -> None:
        for name, allowed in (("block_n", (64, 128)), ("consumers", (1, 2, 3)), ("kv_stages", (2, 4, 8)),
                              ("q_stages", (1, 2)), ("epilogue_passes", (1, 2))):
            if getattr(self, name) not in allowed:
                raise InvalidInput(f"{name}={getattr(self, name)}; allowed are {', '.join(map(str, allowed))}.")

    def head_dim_chunks(self, problem: AttentionProblem) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Columns of q and k inside the tiles, and of v and out, in chunks that are powers of two, the widest first."""
        return pieces_of(problem.d), pieces_of(problem.dv)

    def out_buffers(self, problem: AttentionProblem) -> tuple[int, int]:
        """Columns of out in each buffer of a warpgroup, and the number of buffers."""
        chunks = self.head_dim_chunks(problem)[1]
        columns = chunks[-1] if self.epilogue_passes == 1 else min(64, chunks[-1])
        return columns, max(1, sum(chunks) // columns // self.epilogue_passes)

    def shared_bytes(self, problem: AttentionProblem) -> int:
        """Shared memory: q, k, v and out; barriers, the tile queue and overflow flags take another 3 KiB at most."""
        d, dv = map(sum, self.head_dim_chunks(problem))
        columns, buffers = self.out_buffers(problem)
        rows = 64 * self.consumers
        elements = rows * (self.q_stages * d + buffers * columns) + self.kv_stages * self.block_n * (d + dv)
        return problem.dtype.itemsize * elements + 3072


@dataclass(frozen=True, slots=True)
class HopperBackwardConfig:
    """The warp-specialised backward kernels: 64 keys a warpgroup stay, or of two; queries stream, 64 a step.

    Attributes:
        stages, out_stages: tiles of q and of dout in flight; powers of two, since every step divides by them.
        ahead: whether a step computes the scores of the next one.
        direct: whether dQ goes to its sums from registers, else through shared memory.
        ordered: whether it is added in a fixed order, but for ``alone`` with one program by warps of their own, which
            take it from there, of two steps at a time; every bit is then the same on every run.
        wide: whether two warpgroups share 64 keys, one makes P and dV and the other dS and dK, and dQ has a kernel of
            its own, where 64 queries a warpgroup stay; nothing is added in memory, and every bit
            the same on every run.
        tails: whether the tensor cores take lse and delta off, which come as tails of the queries then. At head dims
            to 64 a third warpgroup makes dQ there.
        alone: whether a program goes over all keys of a head, keeps its dQ in L2 and writes it. At head dims to 64
            every bit is as with ``ordered``, which it comes with there; at wider ones it comes with ``stays``.
        programs: with ``alone`` at head dims to 64, how many programs share a head: they take its tiles of keys by
            turns, and add to a step of dQ in their order. As many running at once have fewer heads' sums in hand.
        stays: whether a program draws one tile of keys after another (with ``alone`` it has a head's), and loads the
            next one's keys and values while dK and dV of the last are written: to head dims of 64 into a second place,
            at wider ones into theirs, and dK and dV leave by way of what dS and dQ are staged in.
    """

    stages: int = 2
    out_stages: int = 2
    ahead: bool = False
    direct: bool = False
    ordered: bool = False
    wide: bool = False
    tails: bool = False
    alone: bool = False
    stays: bool = False
    programs: int = 1

    def __post_init__(self) -> None:
        for name, allowed in (("stages", (2, 4)), ("out_stages", (1, 2, 4)), ("programs", (1, 2, 4))):
            if getattr(self, name) not in allowed:
                raise InvalidInput(f"{name}={getattr(self, name)}; allowed are {', '.join(map(str, allowed))}.")
        if self.ordered and self.direct:
            raise InvalidInput("ordered=True with direct=True; dQ is added from registers or in order, not both.")
        if self.wide and (self.ahead or self.direct or self.ordered):
            raise InvalidInput(f"wide=True with ahead={self.ahead}, direct={self.direct}, ordered={self.ordered}; "
                               "allowed is none of them.")
        if self.tails and self.wide:
            raise InvalidInput("tails=True with wide=True; tails are for head dims up to 128.")
        if self.alone and not (self.tails and self.ordered != self.stays):
            raise InvalidInput(f"alone=True with tails={self.tails}, ordered={self.ordered}, stays={self.stays}; "
                               "allowed are tails=True and one of the others.")
        if self.programs > 1 and not (self.alone and self.ordered):
            raise InvalidInput(f"programs={self.programs} with alone={self.alone}, ordered={self.ordered}; allowed is "
                               "1, or both.")
        if self.stays and (self.ahead or self.direct or not self.tails):
            raise InvalidInput(f"stays=True with ahead={self.ahead}, direct={self.direct}, tails={self.tails}; allowed "
                               "is tails=True alone.")

    @property
    def keys(self) -> int:
        """Keys of a tile."""
        return 64 if self.wide else 128

    def narrow(self, problem: AttentionProblem) -> bool:
        """Whether a third warpgroup makes dQ."""
        return self.tails and max(problem.d, problem.dv) <= 64

    def columns(self, problem: AttentionProblem) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Columns of q and k inside the tiles, and of v and dout: a row of a tile is 128 bytes at least.

        They come in pieces that are powers of two. Where each warpgroup has keys of its own, q and k of more than 128
        columns come in two, in a kernel that knows one way.
        """
        if self.wide:
            return _wide_pieces_of(problem.d), _wide_pieces_of(problem.dv)
        if self.tails and not tails_fit(problem):
            raise InvalidInput(f"tails=True for {problem}; allowed are head dims up to 128, a scale of 2^-40 or "
                               "more, and no softcap, dropout or lengths that are data.")
        if self.ordered and problem.sequences.are_data:
            raise InvalidInput(f"ordered=True for {problem}; allowed are lengths that are no data.")
        narrow = self.narrow(problem)
        if narrow and self.stays and (self.alone or self.ordered):
            raise InvalidInput(f"stays=True with alone={self.alone}, ordered={self.ordered} at head dims {problem.d} "
                               f"and {problem.dv}; allowed is neither up to 64.")
        if narrow and self.out_stages == 1:
            raise InvalidInput(f"out_stages=1 with tails=True at head dims {problem.d} and {problem.dv}; allowed are 2 "
                               "and 4 up to 64: two steps are in hand.")
        if narrow and (self.ahead or self.direct):
            raise InvalidInput(f"tails=True with ahead={self.ahead}, direct={self.direct} at head dims {problem.d} and "
                               f"{problem.dv}; allowed is neither up to 64.")
        if self.tails and self.ordered and not narrow:
            raise InvalidInput(f"tails=True with ordered=True at head dims {problem.d} and {problem.dv}; allowed are "
                               "head dims up to 64: shared memory has no room for both.")
        if max(problem.d, problem.dv) <= 128:
            return ((max(64, problem.width),),) * 2
        if not sums_fit(problem) or self.ahead or not self.direct:
            raise InvalidInput(f"wide=False with ahead={self.ahead}, direct={self.direct} at head dims {problem.d} and "
                               f"{problem.dv}; allowed are wide=True, and direct=True up to 192 and 128.")
        return (128, 64), (128,)

    def shared_bytes(self, problem: AttentionProblem) -> int:
        """Shared memory: k, v, q, dout, lse and delta or tails, dQ of 0 to 2 steps; barriers take under a KiB.

        And dS twice, or, where two warpgroups share keys, the probabilities. The kernel that makes dQ apart takes 128
        rows of q and dout, two tiles of k and one of v. At head dims to 64 a program that goes on to another tile has
        its keys under way, and one with all keys of a head a step of dQ as it is written.
        """
        (d, dv), size = map(sum, self.columns(problem)), problem.dtype.itemsize
        apart = self.alone and not self.stays
        ahead = apart or (self.stays and self.narrow(problem))
        operands = size * (self.keys * (d + dv) * (2 if ahead else 1) + 64 * (
            self.stages * d + self.out_stages * dv))
        scores = 64 * 64 * size * (1 if self.wide else 4)
        rows = 64 * (64 + 32 * self.stages) if self.tails else 8 * 64 * self.stages
        steps = 0 if self.direct or self.wide else 2 if self.ordered and (self.programs > 1 or not self.alone) else 1
        written = size * 64 * d if apart else 0
        beside_queries = size * 64 * (4 * d + 3 * dv) if self.wide else 0
        return max(operands + scores + rows + steps * 4 * d * 64 + written, beside_queries) + 1024


@dataclass(frozen=True, slots=True)
class HopperDbiasConfig:
    """The kernel that sums dS of entries that share a bias: a tile of 128 x 128 pairs stays; entries stream.

    Attributes:
        q_stages: entries whose q and dout are in flight.
        stages: blocks of 64 keys in flight, k and v.
    """

    q_stages: int = 2
    stages: int = 2

    def __post_init__(self) -> None:
        for name, allowed in (("q_stages", (1, 2)), ("stages", (2, 3, 4))):
            if getattr(self, name) not in allowed:
                raise InvalidInput(f"{name}={getattr(self, name)}; allowed are {', '.join(map(str, allowed))}.")

    def columns(self, problem: AttentionProblem) -> int:
        """Columns of a head inside the tiles: a row of a tile is 128 bytes at least."""
        return max(64, problem.width)

    def shared_bytes(self, problem: AttentionProblem) -> int:
        """Shared memory: q and dout, k and v, the bias of the tile; barriers and its place take under a KiB."""
        bias = problem.scores.bias
        rows = 4 * self.q_stages + 2 * self.stages
        pairs = 256 * (bias.dtype.itemsize if bias else 0)
        return 64 * (problem.dtype.itemsize * rows * self.columns(problem) + pairs) + 1024


HopperConfig = HopperForwardConfig | HopperBackwardConfig
AnyConfig = TileConfig | HopperConfig


def pieces_of(dim: int) -> tuple[int, ...]:
    """The narrowest of 64, 64 + 32, 128, 128 + 64 and 256 that holds a head dim."""
    return next(pieces for pieces in ((64,), (64, 32), (128,), (128, 64), (256,)) if dim <= sum(pieces))


def sums_fit(problem: AttentionProblem) -> bool:
    """Whether a warpgroup's registers hold all columns of dK and dV of 64 keys."""
    return problem.d <= 192 and problem.dv <= 128


def tails_fit(problem: AttentionProblem) -> bool:
    """Whether lse and delta may be taken off by products: nothing else may come between these and P or dS.

    Tails hold lse / scale. Where lengths are data, tiles hold queries of other sequences.
    """
    scores = problem.scores
    return (max(problem.d, problem.dv) <= 128 and problem.scale >= LEAST_SCALE and scores.softcap is None
            and not scores.dropout_p and not problem.sequences.are_data)


def _wide_pieces_of(dim: int) -> tuple[int, ...]:
    return next(pieces for pieces in ((64,), (128,), (128, 64), (256,)) if dim <= sum(pieces))
