"""Tiles of the CUDA float32 kernels: what one is, and which one a problem gets. Pure functions of the two.

First ones at head dims up to 128 were timed on an H200 at 64 and 128, at lengths of 1024 and 4096, most at 8192 too
(docs/float32.md). Lengths do not choose, though another tile is ahead at some: most have bits of their own.

Products of halves: those of forward and dqkv were the fastest of three to nine in whole calls, full and causal, those
of dkdv and dq the fastest of four to six as kernels alone. Forward's at 64, which needs no memory, is up to 6 % behind
(2, 4, 32, 2, True) from 4096 on, and as far ahead at 1024, by kernels that copied split rows as others; by those of now
it is 2 to 20 % behind tiles of split rows. Forward's at 128 is 10 % and more ahead of (1, 8, 64, 1). dqkv's at 64 is 1
to 10 % ahead of (1, 4, 32, 2, True).

FMA pipes: those of forward were the fastest in whole calls, causal, and full at 4096, all of them asked without K and V
written before, with which the first is 1 to 8 % faster. At 64 (4, 4, 64, 3, False, 32) was 4 % ahead at 1024 and 2 to
7 % behind in longer calls, (4, 4, 128, 2, False, 32) 7 to 9 % behind everywhere; at 128 (4, 8, 64, 1, False, 64) was 1
to 4 % behind, and 3 % ahead at 1024 of kernels that left out no half of a step, (4, 8, 128, 1, False, 32) up to 2 %
behind, (4, 4, 128, 2, False, 16) 7 to 9 %. Those of dkdv and dq were the fastest of three to nine as kernels alone,
with products that have changed since; dqkv's are dkdv's.

All others were chosen by compiling alone, for few spills (tests/compiled/test_compile_cuda.py holds the bounds).
"""

from dataclasses import dataclass

from tilewise.errors import InvalidInput
from tilewise.problem import AttentionProblem
from tilewise.tuning.device import DeviceSpec

WIDEST = 256
PAD = 4  # floats behind a row in shared memory, and of a split one everywhere; the first holds the row's factor
LANDINGS = 32  # bytes: of where tiles of both steps land, and counts of warps that are done with them
# blocks, warps, others, resident, split, chunk
Tile = tuple[int, int, int, int] | tuple[int, int, int, int, bool] | tuple[int, int, int, int, bool, int]


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


SUMS_OVER_QUERIES = ("dqkv", "dkdv", "dk", "dv")

# Kernel -> padded head dim (at most) -> tiles; the first that a device has the shared memory for is taken.
_HALVES: dict[str, dict[int, tuple[Tile, ...]]] = {
    "forward": {64: ((2, 8, 32, 1), (2, 4, 32, 2)), 128: ((1, 8, 64, 1, True), (1, 8, 32, 1), (1, 4, 32, 1)),
                256: ((1, 8, 16, 1), (1, 4, 16, 1), (1, 2, 16, 1))},
    "dqkv": {64: ((1, 8, 64, 1, True), (1, 4, 32, 2, True)), 128: ((1, 8, 32, 1, True), (1, 4, 32, 1), (1, 2, 16, 1))},
    "dkdv": {64: ((1, 8, 32, 1), (1, 4, 32, 2)), 128: ((1, 8, 32, 1), (1, 4, 32, 1), (1, 2, 16, 1))},
    "dk": {256: ((1, 4, 16, 1), (1, 2, 16, 1), (1, 1, 16, 1))},
    "dv": {256: ((1, 4, 16, 1), (1, 2, 16, 1), (1, 1, 16, 1))},
    "dq": {64: ((1, 8, 32, 2), (1, 4, 32, 2)), 128: ((1, 4, 16, 2),),
           256: ((1, 4, 16, 1), (1, 2, 16, 1), (1, 1, 16, 1))},
}
_TF32: dict[str, dict[int, tuple[Tile, ...]]] = {
    "forward": {64: ((2, 4, 32, 2), (1, 4, 32, 1)), 128: ((1, 8, 32, 1), (1, 4, 32, 1), (1, 4, 16, 1)),
                256: ((1, 8, 16, 1), (1, 4, 16, 1), (1, 2, 16, 1))},
    "dkdv": {64: ((1, 4, 32, 2),), 128: ((1, 8, 32, 1), (1, 4, 32, 1), (1, 2, 16, 1))},
    "dk": {256: ((1, 4, 16, 1), (1, 2, 8, 1), (1, 1, 8, 1))},
    "dv": {256: ((1, 4, 16, 1), (1, 2, 8, 1), (1, 1, 8, 1))},
    "dq": {64: ((1, 4, 32, 2),), 128: ((1, 8, 16, 1), (1, 4, 16, 1), (1, 2, 16, 1)),
           256: ((1, 4, 16, 1), (1, 2, 8, 1), (1, 1, 8, 1))},
}
_FMA_PIPES: dict[str, dict[int, tuple[Tile, ...]]] = {
    "forward": {64: ((4, 8, 128, 1, True, 64), (4, 8, 128, 1, False, 64), (4, 4, 128, 2, False, 32),
                     (4, 4, 64, 1, False, 32)),
                128: ((4, 8, 128, 1, True, 64), (4, 8, 128, 1, False, 64), (4, 8, 64, 1, False, 32),
                      (4, 4, 64, 1, False, 32), (4, 2, 64, 1, False, 32)),
                256: ((4, 8, 64, 1, False, 16), (4, 4, 64, 1, False, 32), (4, 2, 64, 1, False, 16),
                      (4, 1, 64, 1, False, 16))},
    "dqkv": {64: ((4, 4, 64, 2), (4, 4, 32, 1)), 128: ((4, 4, 32, 2), (4, 4, 16, 1), (4, 2, 16, 1))},
    "dkdv": {64: ((4, 4, 64, 2), (4, 4, 32, 1)), 128: ((4, 4, 32, 2), (4, 4, 16, 1), (4, 2, 16, 1))},
    "dk": {256: ((4, 4, 32, 1), (4, 2, 16, 1), (4, 1, 8, 1))},
    "dv": {256: ((4, 4, 32, 1), (4, 2, 16, 1), (4, 1, 8, 1))},
    "dq": {64: ((4, 4, 64, 2), (4, 4, 32, 1)), 128: ((4, 4, 32, 2), (4, 4, 16, 1), (4, 2, 16, 1)),
           256: ((4, 4, 32, 1), (4, 2, 16, 1), (4, 1, 8, 1))},
}
_TILES = {0: _FMA_PIPES, 1: _TF32, 3: _HALVES}  # by products
DELTA = CudaConfig(products=0, blocks=1, warps=8, others=8)
SPLIT = {3: CudaConfig(products=3, blocks=1, warps=8, others=32),  # by products
         0: CudaConfig(products=0, blocks=1, warps=8, others=64)}
KEY_TILE = 128  # keys of a tile of K that was written transposed


def padded_dims(kernel: str, problem: AttentionProblem) -> tuple[int, int]:
    """Head dims of q and k and of v inside the tiles: sums have 32 columns a group, scores 16 dims a step."""
    return _padded(problem.d, 16 if kernel == "forward" else 32), _padded(problem.dv, 32)


def sum_kernels(problem: AttentionProblem) -> tuple[str, ...]:
    """Which kernels make dk and dv: one, or for wide heads, whose sums fill the registers each alone, two."""
    return ("dkdv",) if max(problem.d, problem.dv) <= 128 else ("dk", "dv")


def backward_kernels(problem: AttentionProblem, products: int, *, dq: bool = True, dkv: bool = True) -> tuple[str, ...]:
    """Which kernels, after that of delta, make the gradients that are needed.

    One makes all three where dq may be summed in no fixed order, and its sums fit the registers; else dq has its own.
    """
    sums = sum_kernels(problem)
    if dq and dkv and products != 1 and sums == ("dkdv",) and not problem.deterministic:
        return ("dqkv",)
    return (*(sums if dkv else ()), *(("dq",) if dq else ()))


def cuda_config(kernel: str, problem: AttentionProblem, device: DeviceSpec, products: int) -> CudaConfig | None:
    """Choose the tile of a kernel; None where the device has not the shared memory for the least.

    Head dims decide, and lengths do not: a deterministic call's bits are no neighbour's affair. A mask does where the
    bits are the same: tiles of K that was written transposed begin at the first key, as not all windows do.

    Args:
        kernel: "forward", "dqkv", "dkdv", "dk", "dv" or "dq".
        problem, device: what it is for.
        products: as in :class:`CudaConfig`.
    """
    tiles = _TILES[products][kernel]
    dims = padded_dims(kernel, problem)
    width = next(width for width in tiles if max(dims) <= width)
    configs = (CudaConfig(products, *tile) for tile in tiles[width])
    lands = problem.mask.left is None and _copies_tiles(device.arch)
    return next((config for config in configs if config.shared_bytes(kernel, *dims) <= device.shared_memory
                 and (lands or config.products or not config.split)), None)


def _copies_tiles(arch: str) -> bool:
    """Whether the hardware copies a tile by one instruction."""
    return arch.startswith("sm_") and int(arch[3:]) >= 90


def _padded(dim: int, unit: int) -> int:
    return -(-dim // unit) * unit
