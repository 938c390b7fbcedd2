"""Config of the Hopper forward kernel; an illegal one cannot be constructed."""

from dataclasses import dataclass

from tilewise.errors import InvalidInput
from tilewise.problem import AttentionProblem


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


def pieces_of(dim: int) -> tuple[int, ...]:
    """The narrowest of 64, 64 + 32, 128, 128 + 64 and 256 that holds a head dim."""
    return next(pieces for pieces in ((64,), (64, 32), (128,), (128, 64), (256,)) if dim <= sum(pieces))
