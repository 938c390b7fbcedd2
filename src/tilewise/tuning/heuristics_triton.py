"""Problem and device to config of the Triton kernels, where no table has a row. Pure functions of the two.

The Hopper tiles and, to head dim 128, the float32 tiles were the fastest of 4 to 16 candidates a kernel on an H200
(16384 tokens, length 4096 or 2048, Triton 3.6). The others were chosen by compiling alone, for few spills
(tests/compiled/test_compile.py holds the bounds); no device has timed them, nor any tile of 512.
"""

from dataclasses import replace

from tilewise.errors import UnsupportedProblem
from tilewise.kernels.triton.config import (
    MIN_BLOCK,
    DbiasConfig,
    DeltaConfig,
    DkdvConfig,
    DqEntriesConfig,
    TileConfig,
)
from tilewise.problem import WIDEST, AttentionProblem, padded_dim
from tilewise.tuning.device import DeviceSpec
from tilewise.tuning.kinds import KINDS, TritonConfig
from tilewise.tuning.problem_traits import has_pairs, kernel_width, lengths_may_decide

Tile = tuple[int, int, int, int]  # block_m, block_n, num_warps, num_stages
# Kernel -> padded head dim (at most) -> tile. Through pointers; a second table where descriptors win by 2 % or more.
_HOPPER: dict[str, dict[int, Tile]] = {
    "forward": {64: (64, 64, 4, 3), 128: (128, 64, 8, 3), 256: (128, 64, 8, 2), 512: (64, 16, 8, 3)},
    "dkdv": {64: (128, 64, 4, 2), 128: (64, 64, 4, 2), 256: (32, 64, 8, 2), 512: (16, 64, 8, 2)},
    "dk": {64: (128, 64, 4, 2), 128: (32, 128, 4, 3), 256: (32, 128, 8, 3), 512: (16, 64, 8, 2)},
    "dv": {64: (128, 64, 4, 2), 128: (64, 64, 4, 3), 256: (32, 128, 8, 3), 512: (16, 64, 8, 2)},
    "dq": {64: (64, 64, 4, 3), 128: (128, 64, 8, 3), 256: (128, 32, 8, 3), 512: (64, 16, 8, 2)},
}
_HOPPER_DESCRIPTORS: dict[str, dict[int, Tile]] = {
    "forward": {128: (64, 64, 4, 3), 256: (128, 64, 8, 2)},
    "dkdv": {64: (128, 64, 4, 2), 128: (64, 64, 4, 2), 256: (64, 64, 8, 2)},
    "dk": {256: (64, 64, 4, 2)},
    "dv": {256: (32, 128, 8, 3)},
    "dq": {64: (64, 64, 4, 3)},
}
# What loads or draws something for each pair wants other tiles; all but dbias through descriptors, where that may be,
# and of dbias those in _DBIAS_REGISTERS.
# The fastest of 5 to 48 candidates on an H200 (b 4, length 4096, causal, bfloat16): 1.0 to 1.3 times the plain ones.
_HOPPER_PAIRS: dict[str, dict[int, Tile]] = {
    "forward": {64: (64, 64, 4, 3), 128: (128, 64, 8, 3), 256: (128, 64, 8, 2)},
    "dkdv": {64: (128, 64, 4, 2), 128: (64, 64, 4, 2)},
    "dk": {256: (32, 128, 8, 2)},
    "dv": {256: (64, 128, 8, 2)},
    "dq": {64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (64, 64, 4, 2)},
    "dbias": {64: (64, 64, 4, 1), 128: (64, 64, 4, 1), 256: (64, 128, 8, 1)},
}
_HOPPER_MASK: dict[str, dict[int, Tile]] = _HOPPER_PAIRS | {
    "forward": {64: (64, 64, 4, 3), 128: (64, 32, 4, 3), 256: (128, 64, 8, 2)},
    "dkdv": {64: (128, 64, 4, 2), 128: (32, 64, 4, 2)},
}
_HOPPER_DROPOUT: dict[str, dict[int, Tile]] = _HOPPER_PAIRS | {
    "forward": {64: (64, 64, 4, 3), 128: (64, 64, 4, 3), 256: (128, 64, 8, 2)},
    "dkdv": {64: (64, 64, 4, 2), 128: (32, 64, 4, 2)},
    "dv": {256: (32, 64, 4, 2)},
}
# Padded head dim -> registers of dbias's kernel through descriptors: with 168 three CTAs of 128 threads share an
# SM. It takes 0.70 to 0.75 of the time of two that have 255 and read through pointers (H200, 16 heads, a bias that 4
# batch elements of length 4096 or 2 of 8192 share). No other width was timed, and where lengths are on the device
# Triton 3.9.0 spills 700 to 900 bytes.
_DBIAS_REGISTERS = {128: 168}
# Padded head dim -> tile of dQ for two batch entries at once. On an H200, head dim 128, the whole backward takes 0.85
# to 0.96 of the time of one entry a launch (b 4, length 4096 and b 2, 8192), and through pointers 0.95 to 0.99 of that
# through descriptors, which take more registers and instructions here. The tile of 64 was chosen by compiling alone.
_HOPPER_ENTRIES: dict[int, Tile] = {64: (64, 64, 4, 2), 128: (128, 32, 8, 2)}
_AMPERE: dict[str, dict[int, Tile]] = {
    "forward": {64: (128, 64, 4, 3), 128: (64, 64, 4, 3), 256: (64, 32, 4, 2), 512: (64, 16, 8, 2)},
    "dkdv": {64: (32, 64, 4, 2), 128: (32, 64, 8, 2), 256: (16, 64, 8, 1), 512: (16, 32, 8, 2)},
    "dk": {64: (32, 64, 4, 2), 128: (32, 64, 8, 2), 256: (16, 64, 8, 1), 512: (16, 32, 8, 2)},
    "dv": {64: (32, 64, 4, 2), 128: (32, 64, 8, 2), 256: (32, 64, 8, 1), 512: (16, 32, 8, 2)},
    "dq": {64: (64, 64, 4, 2), 128: (64, 32, 4, 2), 256: (64, 32, 8, 1), 512: (32, 16, 8, 2)},
}
_BLACKWELL: dict[str, dict[int, Tile]] = {
    "forward": {64: (128, 64, 4, 3), 128: (128, 64, 8, 3), 256: (128, 64, 8, 2), 512: (64, 32, 8, 2)},
    "dkdv": {64: (64, 64, 8, 2), 128: (32, 64, 8, 2), 256: (64, 64, 8, 1), 512: (16, 32, 8, 2)},
    "dk": {64: (64, 64, 8, 2), 128: (32, 64, 8, 2), 256: (64, 64, 8, 1), 512: (16, 32, 8, 2)},
    "dv": {64: (64, 128, 8, 2), 128: (64, 128, 8, 2), 256: (32, 128, 8, 2), 512: (32, 64, 8, 1)},
    "dq": {64: (128, 64, 8, 2), 128: (128, 64, 8, 2), 256: (128, 32, 8, 2), 512: (64, 32, 8, 1)},
}
_AMD: dict[str, dict[int, Tile]] = {
    "forward": {64: (128, 64, 4, 1), 128: (128, 32, 4, 1), 256: (64, 32, 4, 1), 512: (32, 32, 4, 1)},
    "dkdv": {64: (32, 64, 4, 1), 128: (32, 64, 4, 1), 256: (16, 32, 4, 1), 512: (16, 32, 4, 1)},
    "dk": {64: (32, 64, 4, 1), 128: (32, 64, 4, 1), 256: (16, 32, 4, 1), 512: (16, 32, 4, 1)},
    "dv": {64: (32, 64, 4, 1), 128: (32, 64, 4, 1), 256: (16, 32, 4, 1), 512: (16, 32, 4, 1)},
    "dq": {64: (64, 32, 4, 1), 128: (64, 32, 4, 1), 256: (32, 16, 4, 1), 512: (32, 16, 4, 1)},
}
# float32 products do not use the tensor cores at full precision: small tiles, whose operands fit the registers.
_FLOAT32: dict[str, dict[int, Tile]] = {
    "forward": {64: (32, 64, 4, 2), 128: (32, 64, 8, 1), 256: (32, 32, 8, 1), 512: (16, 16, 8, 1)},
    "dkdv": {64: (32, 32, 4, 3), 128: (32, 32, 4, 2), 256: (16, 32, 8, 1), 512: (16, 16, 8, 1)},
    "dk": {64: (32, 32, 4, 3), 128: (32, 32, 4, 2), 256: (16, 32, 8, 1), 512: (16, 16, 8, 1)},
    "dv": {64: (32, 32, 4, 3), 128: (32, 32, 4, 2), 256: (16, 32, 8, 1), 512: (16, 16, 8, 1)},
    "dq": {64: (32, 32, 4, 3), 128: (32, 32, 4, 2), 256: (32, 16, 8, 1), 512: (16, 16, 8, 1)},
}
# CTAs that keep every SM busy: two for each of an H200's 132, as many of dQ as fit at head dim 128.
FILLING = 256
# Blocks of queries that a CTA takes where it makes all three gradients of a call with one tile of keys.
SINGLE_TILE_STEPS = 4
# Below this many multiply-adds the kernel is over before the host has made its descriptors (about 15 µs).
LEAST_WORK_FOR_DESCRIPTORS = 10**10


def tile_heuristic(kernel: str, problem: AttentionProblem, device: DeviceSpec, *, descriptors: bool) -> TritonConfig:
    """Choose the tile of a kernel.

    Args:
        kernel: "forward", "dkdv" (both gradients at once), "dk", "dv", "dq" or "dbias".
        problem, device: what it is for.
        descriptors: whether the tensors could come through tensor descriptors.
    """
    kind = KINDS[kernel]
    if device.arch == "interpreter":
        return kind(64, 64, 4, 1)
    width = min(kernel_width(problem), WIDEST)  # a tail beside the widest tile changes none of them
    like = "dq" if kernel == "dbias" else kernel
    if problem.dtype.itemsize == 4:
        return fitting(kind(*_FLOAT32[like][width]), problem, device)
    if device.arch == "sm_90" and has_pairs(problem):
        tiles = _HOPPER_DROPOUT if problem.scores.dropout_p else _HOPPER_MASK if problem.scores.mask else _HOPPER_PAIRS
        if width in tiles[kernel] and kernel == "dbias":
            described = descriptors and not problem.sequences.are_data
            registers = _DBIAS_REGISTERS.get(width, 0) if described else 0
            return fitting(DbiasConfig(*tiles[kernel][width], registers > 0, registers), problem, device)
        if width in tiles[kernel]:
            return fitting(kind(*tiles[kernel][width], descriptors=descriptors), problem, device)
    if descriptors and device.arch == "sm_90" and width in _HOPPER_DESCRIPTORS.get(kernel, {}):
        return fitting(kind(*_HOPPER_DESCRIPTORS[kernel][width], descriptors=True), problem, device)
    return fitting(kind(*_tiles(device)[like][width]), problem, device)


def delta_config(problem: AttentionProblem) -> DeltaConfig:
    """Choose the tile of the delta kernel: 4096 elements of out and of dout for each CTA, which fill its loads."""
    return DeltaConfig(block_m=max(16, 4096 // padded_dim(problem.dv)), num_warps=4)


def split_dkdv(problem: AttentionProblem, device: DeviceSpec) -> bool:
    """Whether dK and dV take a launch each: 5 products instead of 4, but half the accumulators.

    At a padded head dim of 256 both together spill on Hopper (H200: 2.7 ms in two launches, 3.7 ms in one).
    """
    return kernel_width(problem) > 128 and device.arch != "interpreter"


def single_tile_config(problem: AttentionProblem, device: DeviceSpec) -> DkdvConfig | None:
    """Choose the tile of dK/dV's kernel where one tile holds all keys, so that it makes delta and dQ, too; None: not.

    Beside launches it saves two of seven products, but only as many CTAs as there are heads of k and v share the work:
    taken where each of them has no more than SINGLE_TILE_STEPS blocks of queries. Every query has to see a key, or
    nobody stores its dQ; and lists of tiles, documents and sink tokens lead the loop past blocks.
    """
    scores, width = problem.scores, kernel_width(problem)
    if (problem.dtype.itemsize != 2 or width > 128 or problem.sk > 64 or problem.sequences.are_data
            or device.arch.startswith("gfx")  # compiled for gfx942 it spills
            or scores.documents_q is not None or scores.tiles_q is not None
            or problem.mask.sink_tokens is not None or len(problem.seeing_queries) != problem.sq):
        return None
    config = DkdvConfig(64 if width == 64 else 32, max(MIN_BLOCK, 1 << (problem.sk - 1).bit_length()), 8, 1)
    if problem.group * -(-problem.sq // config.block_m) > SINGLE_TILE_STEPS:
        return None
    return config if shared_bytes(config, problem, device) <= device.shared_memory else None


def dbias_launches(problem: AttentionProblem, config: TileConfig, device: DeviceSpec) -> int:
    """In how many launches dQ's kernel makes the gradient of a bias on its way; 0 where a kernel of its own does.

    1 where no number of the bias stands for two pairs: dS is stored as it is. b where the batch alone shares it, an
    entry a launch, or two (entries_config): adding up moves 8 bytes a pair and launch, the kernel of its own makes two
    products more for each entry. With that one a backward took 0.95 (4 entries of length 4096, causal), 1.10 (the same,
    full) and 1.3 to 1.4 (2 entries of 8192) times as long as with two entries a launch (H200, 16 heads, head dim 128).
    But each launch has to fill the device, and packed sequences are no entries.
    """
    bias = problem.scores.bias
    if bias is None or 1 in bias.shape[2:] or bias.shape[1] != problem.hq:
        return 0
    if bias.shape[0] == problem.pairs[0]:
        return 1
    ctas = problem.hq * -(-problem.sq // config.block_m)
    fills = ctas >= FILLING or device.arch == "interpreter"
    return problem.b if problem.sequences.packed is None and fills else 0


def entries_config(problem: AttentionProblem, device: DeviceSpec) -> DqEntriesConfig | None:
    """Choose the tile of dQ's kernel where it adds up the dS of several batch entries in registers; None: of one.

    Not for a deterministic call, whose dQ must have the same order of sums whether the entry has a neighbour or not.
    """
    if problem.deterministic:
        return None
    if device.arch == "interpreter":
        return DqEntriesConfig(64, 64, 4, 1)
    tile = _HOPPER_ENTRIES.get(kernel_width(problem))
    # Triton copies 16 bytes at once, and ahead, only where it knows strides to be multiples of 16.
    rows = (*problem.q_strides[:3], *problem.k_strides[:3], *problem.v_strides[:3])
    is_copied_ahead = problem.dtype.itemsize == 2 and not any(stride % 16 for stride in rows)
    if device.arch != "sm_90" or problem.b == 1 or tile is None or not is_copied_ahead:
        return None
    config = DqEntriesConfig(*tile)
    return config if shared_bytes(config, problem, device) <= device.shared_memory else None


def wants_descriptors(problem: AttentionProblem, device: DeviceSpec) -> bool:
    """Whether tensor descriptors can pay: the GPU has TMA, and the kernel runs longer than the host makes them.

    No kernel of wider heads was timed through descriptors, and a tail does not come through them.
    """
    return device.arch == "sm_90" and outlasts_descriptors(problem) and kernel_width(problem) <= 256


def outlasts_descriptors(problem: AttentionProblem) -> bool:
    """Whether the work takes longer than the host needs to make descriptors.

    What counts is the mean of the two products, whose widths may differ. With descriptors come other tiles, or another
    kernel. A deterministic call, whose bits are no neighbour's affair, counts one batch entry's work; where its lengths
    are data, too, the answer is no.
    """
    if not lengths_may_decide(problem):
        return False
    batch = 1 if problem.deterministic else problem.b
    return batch * problem.hq * problem.sq * problem.sk * (problem.d + problem.dv) >= 2 * LEAST_WORK_FOR_DESCRIPTORS


def shared_bytes(config: TritonConfig, problem: AttentionProblem, device: DeviceSpec) -> int:
    """Shared memory that a config takes on a device.

    On CDNA, without a pipeline, tiles stay in registers and pass through shared memory one after another (compiled for
    gfx942 at widths of 512 and 576; the narrower tiles were chosen before that was seen).
    """
    if device.arch.startswith("gfx9") and config.num_stages == 1 and problem.width > 256:
        widest = problem.dtype.itemsize * max(config.block_m, config.block_n) * problem.width
        return widest + config.operand_bytes(problem)
    return config.shared_bytes(problem)


def least_bytes(problem: AttentionProblem, device: DeviceSpec) -> int:
    """Shared memory of the hungriest kernel of a pass with its least tile."""
    kernels = ("forward",) if problem.direction == "forward" else ("dkdv", "dq")
    return max(shared_bytes(KINDS[kernel](MIN_BLOCK, MIN_BLOCK, 4, 1), problem, device) for kernel in kernels)


def _tiles(device: DeviceSpec) -> dict[str, dict[int, Tile]]:
    if device.arch == "sm_90":
        return _HOPPER
    if device.arch.startswith("gfx"):
        return _AMD
    if device.arch in ("sm_100", "sm_103"):
        return _BLACKWELL
    return _AMPERE


def fitting(config: TritonConfig, problem: AttentionProblem, device: DeviceSpec) -> TritonConfig:
    """Shrink a config until it fits the device's shared memory: pipeline depth first, then the streamed side.

    Raises:
        UnsupportedProblem: not even the least tile fits.
    """
    streamed, resident = ("block_m", "block_n") if isinstance(config, DkdvConfig) else ("block_n", "block_m")
    while shared_bytes(config, problem, device) > device.shared_memory:
        if config.num_stages > 1:
            config = replace(config, num_stages=config.num_stages - 1)
        elif config.block_m == config.block_n == MIN_BLOCK:
            raise UnsupportedProblem(
                f"no tile fits the {device.shared_memory} bytes of shared memory of {device.arch}, the least takes "
                f"{shared_bytes(config, problem, device)}: {problem}", {})
        else:
            side = streamed if getattr(config, streamed) > MIN_BLOCK else resident
            config = replace(config, **{side: getattr(config, side) // 2})
    return config
