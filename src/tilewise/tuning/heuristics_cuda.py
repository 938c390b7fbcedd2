"""Which tile of the CUDA float32 kernels a problem gets. Pure functions of problem and device.

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

from tilewise.kernels.cuda.config import CudaConfig, padded_dims
from tilewise.problem import AttentionProblem
from tilewise.tuning.device import DeviceSpec

# blocks, warps, others, resident, split, chunk
Tile = tuple[int, int, int, int] | tuple[int, int, int, int, bool] | tuple[int, int, int, int, bool, int]

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
CUDA_DELTA = CudaConfig(products=0, blocks=1, warps=8, others=8)
CUDA_SPLIT = {3: CudaConfig(products=3, blocks=1, warps=8, others=32),  # by products
              0: CudaConfig(products=0, blocks=1, warps=8, others=64)}


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
