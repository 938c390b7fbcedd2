"""Config of the CUDA float32 kernels; an illegal one cannot be constructed."""

from dataclasses import dataclass

from tilewise.errors import InvalidInput
from tilewise.problem import AttentionProblem

WIDEST = 256  # head dims
PAD = 4  # floats behind a row in shared memory, and of a split one everywhere; the first holds the row's factor
LANDINGS = 32  # bytes: of where tiles of both steps land, and counts of warps that are done with them
KEY_TILE = 128  # keys of a tile of K that was written transposed
SUMS_OVER_QUERIES = ("dqkv", "dkdv", "dk", "dv")  # kernels


@dataclass(frozen=True, slots=True)
class CudaConfig:
    """Shape of one program of a tile kernel; its fields are macros of attention_fp32.cu.

    Attributes:
        products: how many on tensor cores make a product: 3 of halves, or 1 of TF32; 0 = FMA pipes.
        blocks: rows that a warp owns, in units of 16 on tensor cores, of 4 on FMA pipes.
        warps: warps a program, each with rows of its own.
        others: rows of the other side a step; on tensor cores two steps of them are in shared memory, else one.
        resident: programs that shall fit a multiprocessor, for the compiler to count registers by.
        split: whether rows of the other side were written before, once a call, not in every program, into as much
            memory as they are, and a little: split into halves (products=3), or (forward on FMA pipes, steps of 128)
            K transposed in tiles and V without gaps.
        chunk: forward on FMA pipes: dims of K, then rows of V, that are in shared memory at once.
    """

    products: int
    blocks: int
    warps: int
    others: int
    resident: int = 1
    split: bool = False
    chunk: int = 32

    def __post_init__(self) -> None:
        for name, allowed in (("products", (0, 1, 3)), ("blocks", (1, 2, 4)), ("warps", (1, 2, 4, 8)),
                              ("others", (8, 16, 32, 64, 128)), ("resident", (1, 2, 3, 4)), ("chunk", (8, 16, 32, 64))):
            if getattr(self, name) not in allowed:
                raise InvalidInput(f"{name}={getattr(self, name)}; allowed are {', '.join(map(str, allowed))}.")
        if self.split and self.products == 1:
            raise InvalidInput(f"split=True with products={self.products}; allowed are products=0, 3.")
        if self.products == 3 and self.others % 16:
            raise InvalidInput(f"others={self.others}; halves (products=3) allow multiples of 16.")

    @property
    def rows(self) -> int:
        """Rows a program."""
        return self.warps * self.blocks * (16 if self.products else 4)

    @property
    def threads(self) -> int:
        """Threads a program."""
        return 32 * self.warps

    def shared_bytes(self, kernel: str, d: int, dv: int) -> int:
        """Shared memory of a kernel for padded head dims: its rows, and one or two steps of the other side's."""
        pad = 8 if self.products == 1 else PAD
        landings = LANDINGS if kernel == "forward" and self.split else 0
        if not self.products and kernel == "forward":  # q and k lie transposed, chunks are as wide as the wider of two
            chunks = 2 * self.chunk * (max(self.others, dv) + (0 if self.split else PAD))
            return 4 * (d * (self.rows + PAD) + chunks + self._passed_on) + landings
        if not self.products and kernel == "split":
            return 4 * (d * (self.others + PAD) + self.others * dv)
        d, dv = d + pad, dv + pad
        if kernel == "split":
            return 4 * self.others * (d + dv)
        own = self.rows * (d if kernel == "forward" else d + dv)
        step = self.others * (d + dv + (2 if kernel in SUMS_OVER_QUERIES else 0))  # 2: lse and delta
        if not self.products:
            return 4 * (own + step + self._passed_on)
        dscores = self.others * (self.rows + pad) if kernel == "dqkv" else 0  # of all rows
        return 4 * (own + 2 * step + dscores) + landings

    @property
    def _passed_on(self) -> int:
        """Floats that tiles of scores take on FMA pipes, each on its warp's way from one product to the next."""
        return self.warps * self.others * (4 * self.blocks + PAD)


def padded_dims(kernel: str, problem: AttentionProblem) -> tuple[int, int]:
    """Head dims of q and k and of v inside the tiles: sums have 32 columns a group, scores 16 dims a step."""
    return _padded(problem.d, 16 if kernel == "forward" else 32), _padded(problem.dv, 32)


def _padded(dim: int, unit: int) -> int:
    return -(-dim // unit) * unit
