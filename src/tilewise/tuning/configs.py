"""Tile configurations: one frozen dataclass a kernel; an illegal one cannot be constructed."""

from dataclasses import dataclass

from tilewise.errors import InvalidInput
from tilewise.problem import AttentionProblem
from tilewise.tuning.backward_configs import HopperBackwardConfig

MIN_BLOCK = 16  # the least M, N and K of a tile product
MAX_BLOCK = 256


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Shape of one CTA.

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
        registers: the most that a thread may take, so that more CTAs share an SM; 0: any number.
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
