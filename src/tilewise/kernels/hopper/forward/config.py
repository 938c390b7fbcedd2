"""What of the Hopper forward kernel is chosen for a call: its tile, and its schedule; none can be illegal."""

from dataclasses import dataclass
from typing import NamedTuple

from tilewise.errors import InvalidInput
from tilewise.kernels.hopper import SHARED_MEMORY
from tilewise.problem import AttentionProblem, has_legal_bias_strides


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
        """Columns of out in each buffer of a warpgroup, and the number of buffers; of float32 each has half of them."""
        chunks = self.head_dim_chunks(problem)[1]
        columns = chunks[-1] if self.epilogue_passes == 1 else min(64, chunks[-1])
        buffers = max(1, sum(chunks) // columns // self.epilogue_passes)
        return columns * problem.dtype.itemsize // problem.out_dtype.itemsize, buffers

    def bias_stages(self, problem: AttentionProblem) -> int:
        """Blocks of the bias in flight for each warpgroup, which TMA brings: two, or one where two do not fit.

        0 without a bias, and where threads load it: three warpgroups, of which one may have no queries to load it for,
        and where no block fits.
        """
        if self.consumers == 3 or not is_movable_bias(problem):
            return 0
        return next((stages for stages in (2, 1) if self._bytes_with(problem, stages) <= SHARED_MEMORY), 0)

    def shared_bytes(self, problem: AttentionProblem) -> int:
        """Shared memory: q, k, v, out, the bias; barriers, the tile queue and overflow flags take 3 KiB at most."""
        return self._bytes_with(problem, self.bias_stages(problem))

    def _bytes_with(self, problem: AttentionProblem, bias_stages: int) -> int:
        d, dv = map(sum, self.head_dim_chunks(problem))
        columns, buffers = self.out_buffers(problem)
        rows = 64 * self.consumers
        elements = rows * self.q_stages * d + self.kv_stages * self.block_n * (d + dv)
        out = rows * buffers * columns
        bias = problem.scores.bias
        bytes_of_bias = rows * bias_stages * self.block_n * (0 if bias is None else bias.dtype.itemsize)
        return problem.dtype.itemsize * elements + problem.out_dtype.itemsize * out + bytes_of_bias + 3072


def is_movable_bias(problem: AttentionProblem) -> bool:
    """Whether there is a bias that TMA can move, of 16 bits, in which each query and each key has its own number.

    Not where lengths are data: a warpgroup may skip blocks there, for which TMA would bring the bias all the same.
    """
    bias = problem.scores.bias
    if bias is None or bias.dtype.itemsize != 2 or problem.sequences.are_data or 1 in bias.shape[2:]:
        return False
    return has_legal_bias_strides(bias)


class SplitPlan(NamedTuple):
    """Which tiles have their keys split.

    Attributes:
        whole: how many tiles do not: the first ones.
        num_splits: of each of the others; in a tile with fewer blocks than splits some splits are empty.
    """

    whole: int
    num_splits: int


@dataclass(frozen=True, slots=True)
class HopperForwardSchedule:
    """How the kernel goes through a call: in which order, with which rows in a tile, and by which softmax.

    Attributes:
        heads_per_swizzle: heads whose tiles are scheduled together, so that their keys and values stay in L2; with
            ``pack_gqa`` above 1 kv heads, else query heads.
        pack_gqa: how many of a tile's rows are heads of one group at the same query, a power of two; 1: all rows are
            queries of one head.
        split_kv: the tiles whose keys are split, if there are any.
        tiles_from_end: whether tiles are counted from the last query back: under an upper bound alone, where lengths
            are not data.
        skip_padding: whether a warpgroup looks if a tile has a query for it, and leaves the tensor cores to the others
            if not.
        softmax_parts: 2: O += P·V is awaited between the exponentials of a block's first half and those of its second;
            1: behind all of them.
        frozen_max: whether blocks that need no mask keep the row maximum of the blocks before them: without a lower
            bound.
        sink_block_first: whether the block of the first keys comes before the maximum is frozen: attention sinks lie
            there, far above other keys for float16.
    """

    heads_per_swizzle: int
    pack_gqa: int = 1
    split_kv: SplitPlan | None = None
    tiles_from_end: bool = False
    skip_padding: bool = False
    softmax_parts: int = 1
    frozen_max: bool = False
    sink_block_first: bool = False

    def __post_init__(self) -> None:
        if self.heads_per_swizzle < 1:
            raise InvalidInput(f"heads_per_swizzle={self.heads_per_swizzle}; allowed is 1 or more.")
        for name, allowed in (("pack_gqa", (1, 2, 4, 8, 16, 32, 64)), ("softmax_parts", (1, 2))):
            if getattr(self, name) not in allowed:
                raise InvalidInput(f"{name}={getattr(self, name)}; allowed are {', '.join(map(str, allowed))}.")
        if self.tiles_from_end and (self.skip_padding or self.pack_gqa > 1):
            raise InvalidInput(f"tiles_from_end=True with skip_padding={self.skip_padding} and pack_gqa="
                               f"{self.pack_gqa}; allowed are skip_padding=False and pack_gqa=1.")
        if self.sink_block_first and not self.frozen_max:
            raise InvalidInput("sink_block_first=True with frozen_max=False; allowed is frozen_max=True.")


def pieces_of(dim: int) -> tuple[int, ...]:
    """The narrowest of 64, 64 + 32, 128, 128 + 64 and 256 that holds a head dim."""
    return next(pieces for pieces in ((64,), (64, 32), (128,), (128, 64), (256,)) if dim <= sum(pieces))
