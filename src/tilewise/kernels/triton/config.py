"""Configs of the Triton kernels: one frozen dataclass a kernel; an illegal one cannot be constructed."""

from dataclasses import dataclass

from tilewise.errors import InvalidInput
from tilewise.problem import AttentionProblem
from tilewise.problem.decode import DecodeProblem

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
        descriptors: whether tiles come through tensor descriptors, moved by TMA; fewer
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

    def row_tiles(self, problem: DecodeProblem) -> int:
        """Tiles of rows that a kv head has."""
        return -(-problem.sq * problem.group // self.block_m)

    def shared_bytes(self, width: int, itemsize: int) -> int:
        """Shared memory: q, P, and tiles of k and v in flight: one a stage, the product of few rows frees one sooner.

        64 rows and more are wgmma's on Hopper: it reads k and v where they arrived, and P from registers. A KiB is for
        the reductions between warps.
        """
        many = self.block_m >= 64
        tiles = self.num_stages if many else max(1, self.num_stages - 1)
        row = width if many else width + self.block_n
        return itemsize * (2 * tiles * self.block_n * width + self.block_m * row) + 1024


@dataclass(frozen=True)
class Splits:
    """How the keys of a decode call are split.

    Attributes:
        count: CTAs that share the keys of a tile of rows.
        length: keys of each; None = an even share of those there are.
    """

    count: int
    length: int | None = None


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """The delta kernel: a row sum, bound by memory; the tile only has to fill the loads."""

    block_m: int = 32
    num_warps: int = 4
