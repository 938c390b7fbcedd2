"""Problem and device to config, where no table has a row. Pure functions of the two.

The Hopper tiles and, to head dim 128, the float32 tiles were the fastest of 4 to 16 candidates a kernel on an H200
(16384 tokens, length 4096 or 2048, Triton 3.6). The others were chosen by compiling alone, for few spills
(tests/kernels/test_compile.py holds the bounds); no device has timed them, nor any tile of 512.
"""

import math
from dataclasses import replace
from itertools import product

from tilewise.errors import UnsupportedProblem
from tilewise.kernels.gluon.backward_config import (
    D64Variant,
    D128AugmentedKVariant,
    D128Variant,
    HopperBackwardConfig,
    HopperD64Config,
    HopperD128AugmentedKConfig,
    HopperD128Config,
    HopperD192Config,
    HopperD256Config,
    HopperDbiasConfig,
    augmented_k_fits,
    dk_dv_fit,
)
from tilewise.kernels.gluon.forward_config import HopperForwardConfig, pieces_of
from tilewise.kernels.triton.config import (
    MIN_BLOCK,
    DbiasConfig,
    DeltaConfig,
    DkdvConfig,
    DqEntriesConfig,
    TileConfig,
)
from tilewise.problem import WIDEST, AttentionProblem, padded_dim
from tilewise.tuning.ctas_per_head import choose_ctas_per_head
from tilewise.tuning.device import DeviceSpec
from tilewise.tuning.kinds import KINDS, TritonConfig
from tilewise.tuning.wave_model import MANY_WAVES, NEARLY, grid_plan_of, num_tiles_of

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

NUM_SMS = 132  # of an H100 or an H200
# CTAs that keep every SM busy: two for each of an H200's 132, as many of dQ as fit at head dim 128.
FILLING = 256
# The Hopper kernel for a shared bias: tiles of 128 x 128 scores, one CTA on each SM, for at least half of the SMs.
LEAST_TILES = 66
LEAST_SHARING = 3  # entries from which it takes the place of dQ's way

# Below this many multiply-adds the kernel is over before the host has made its descriptors (about 15 µs).
LEAST_WORK_FOR_DESCRIPTORS = 10**10
# The Hopper kernels' launch takes the host no longer than a Triton kernel's (forward), and 8 to 13 µs more with tensors
# that it has not seen (beside an H200); in 20 µs a Triton kernel makes about this many of each product, at 300 TFLOP/s.
LEAST_WORK_FOR_GLUON = 15 * 10**8
# Their backward is worth a launch sooner: from here on 1.13 to 2 times as fast.
LEAST_WORK_FOR_GLUON_BACKWARD = LEAST_WORK_FOR_GLUON // 10
_LEAST_SPLIT = 8192  # keys from which few queries were timed, in tiles that are split


def tile_config(kernel: str, problem: AttentionProblem, device: DeviceSpec, *, descriptors: bool) -> TritonConfig:
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


def hopper_forward_config(problem: AttentionProblem, num_sms: int = NUM_SMS) -> HopperForwardConfig:
    """Choose the tiles of the Gluon forward kernel, timed on an H200 at lengths 512 to 16384 (Triton 3.6).

    At a width of 64 the softmax takes as long as the products: three warpgroups with ping-pong scheduling (+5 % over
    three without). In short sequences too many pairs of their 192 queries are hidden, or past the end: two, with four
    KV stages where there are many waves (without a mask, length 640: +5 %; 768: -11 %; causal, 1280: +2 %; 1536: the
    same; 2000: -2 %; windows and a softcap were not timed). At 128 two fill the tensor cores by themselves, and
    registers allow no third. The length of packed sequences is their mean; a deterministic call, whose bits must not
    depend on other batch elements, has none. Where the cost model (wave_model.py) estimates less time for shorter
    tiles, there are fewer warpgroups, as where tiles are few: one at 512 keys and 64 tiles takes 0.82 of the time of
    two. Two have ping-pong scheduling where that was timed and faster.

    Wider heads take the largest key block whose scores fit the registers beside O (128 of them to 128 columns; beside
    192 Triton 3.9's ptxas spills and serializes the products) and that shared memory allows, at the cost of the second
    tile of Q or of half the buffers of out. Of these, head dims 256, and 192 with 128 for v, were timed
    (docs/hopper.md): at the latter blocks of 128 keys gain 11 to 13 % over those of 64. They were not timed with one
    warpgroup.
    """
    length = problem.sk // (problem.sequences.packed or 1) if lengths_may_decide(problem) else 0
    room = DeviceSpec.of_arch("sm_90").shared_memory
    configs = (HopperForwardConfig(block_n, 2, q_stages=q_stages, epilogue_passes=passes)
               for block_n, q_stages, passes in product((128, 64) if problem.dv <= 128 else (64,), (2, 1), (1, 2)))
    two = next(config for config in configs if config.shared_bytes(problem) <= room)
    width, ping_pong = max(problem.d, problem.dv), _two_ping_pong(problem, length)
    is_long = width <= 64 and ping_pong and num_tiles_of(problem, two) > MANY_WAVES * num_sms
    by_preference = [replace(two, ping_pong=ping_pong, kv_stages=4 if is_long else 2)]
    if width <= 128:
        by_preference.append(replace(two, consumers=1))
    least = 2048
    if _were_timed(problem):
        least = 768 if problem.mask.right is None else 1792
    if width <= 64 and length >= least:
        by_preference.insert(0, HopperForwardConfig(block_n=128, consumers=3, ping_pong=True))
    if problem.sequences.are_data:
        return by_preference[0]
    times = [grid_plan_of(problem, config, num_sms).time for config in by_preference]
    nearly = min(times) / NEARLY
    return next(config for config, time in zip(by_preference, times, strict=True) if time <= nearly)


def _were_timed(problem: AttentionProblem) -> bool:
    """Whether the number of warpgroups and ping-pong were timed for such a call: without a window or a softcap."""
    return problem.mask.left is None and problem.scores.softcap is None


def _two_ping_pong(problem: AttentionProblem, length: int) -> bool:
    """Whether two warpgroups have ping-pong scheduling, by the columns of q and k, and of v, inside the tiles.

    At 64, with four stages, causal +0.7 % at 512 and +0.6 % at 1024; at 96 without a mask +8 to 14 %, causal +4 to
    10 %; at 128 without a mask +2 to 3.4 %, causal 0 to +1 %; at 256 +0.4 to 1.2 % to a length of 1024, and nothing or
    little beyond. Of packed sequences -2 to +1 % at 64 and -1 to +2 % at 128. At 192 they lost 0.8 %, causal. Shorter
    lengths, windows and a softcap were not timed.
    """
    widths = sum(pieces_of(problem.d)), sum(pieces_of(problem.dv))
    if not _were_timed(problem):
        return False
    return length >= {(64, 64): 512, (96, 96): 1024, (128, 128): 512, (256, 256): 512}.get(widths, math.inf)


def hopper_backward_config(problem: AttentionProblem, num_sms: int = NUM_SMS) -> HopperBackwardConfig:
    """Choose the Gluon backward kernel and its variant, timed on an H200 at lengths 512 to 16384 (Triton 3.6).

    Augmented K gains 5 to 7 % at a width of 128, and persistent CTAs 6 to 8 % more at a length of 512, 3 to 5 % at
    1024, and between -0.5 and 2 % from 4096 on. At 64 a third warpgroup comes with it, which gains 1 to 8 % more than
    augmented K with blocks of 128 queries did, and takes four tiles each of q and dout; persistent CTAs gain 14 to 26 %
    more there at a length of 512, 10 to 22 % at 1024, 6 to 12 % at 2048, 1 to 2 % at 16384, and lose 2 % where no CTA
    has a second tile. Without augmented K registers hold the next block's S there (+0 to 7 %), and dQ is accumulated
    from registers (+7 to 16 %). Wider heads leave no choice: where registers hold all columns of dK and dV of 64 keys
    each warpgroup has keys of its own (at 192 and 128 1.2 to 1.4 times as fast as sharing them), else two share them.
    """
    widest = max(problem.d, problem.dv)
    if widest > 128:
        return HopperD192Config() if dk_dv_fit(problem) and not problem.deterministic else HopperD256Config()
    if widest <= 64 and augmented_k_fits(problem):
        return _d64_config(problem, num_sms)
    if problem.deterministic:
        return HopperD128Config(s_ahead=widest <= 64, variant=D128Variant.DETERMINISTIC)
    if augmented_k_fits(problem):
        owns_heads = choose_ctas_per_head(problem, num_sms) > 0
        return HopperD128AugmentedKConfig(variant=D128AugmentedKVariant.HEAD_PERSISTENT if owns_heads
                                          else D128AugmentedKVariant.DYNAMIC_TILES)
    if widest <= 64:
        return HopperD128Config(s_ahead=True, variant=D128Variant.DQ_FROM_REGISTERS)
    return HopperD128Config()


def _d64_config(problem: AttentionProblem, num_sms: int) -> HopperD64Config:
    """Choose the variant at head dims up to 64 with augmented K."""
    ctas_per_head = choose_ctas_per_head(problem, num_sms)
    if ctas_per_head > 0:
        return HopperD64Config(variant=D64Variant.HEAD_PERSISTENT, ctas_per_head=ctas_per_head)
    return HopperD64Config(variant=D64Variant.DETERMINISTIC if problem.deterministic else D64Variant.DYNAMIC_TILES)


def delta_config(problem: AttentionProblem) -> DeltaConfig:
    """Choose the tile of the delta kernel: 4096 elements of out and of dout for each CTA, which fill its loads."""
    return DeltaConfig(block_m=max(16, 4096 // padded_dim(problem.dv)), num_warps=4)


def split_dkdv(problem: AttentionProblem, device: DeviceSpec) -> bool:
    """Whether dK and dV take a launch each: 5 products instead of 4, but half the accumulators.

    At a padded head dim of 256 both together spill on Hopper (H200: 2.7 ms in two launches, 3.7 ms in one).
    """
    return kernel_width(problem) > 128 and device.arch != "interpreter"


def pair_entries(problem: AttentionProblem, config: TileConfig, device: DeviceSpec) -> int:
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


def hopper_dbias_config(problem: AttentionProblem, entries: int) -> HopperDbiasConfig | None:
    """Choose the tile of the Gluon kernel that sums a bias's gradient; None where another way is as good.

    Timed on an H200 with 16 heads at d 128, the sum alone takes 0.54 to 0.60 of the time of the Triton kernel of its
    own; that half the SMs should have a tile is counted, not timed. Beside dQ's way a backward pass with
    tiles twice as wide, which were slower, took 0.81 (3 entries of length 4096, causal), 0.84 and 0.92 (4 of them,
    causal and full), 0.73 and 0.82 (8 of 2048), but 1.11 and 1.24 (2 of 8192) of the time; 1.01 at d 64 (4 of 4096).

    Of entries first, then of blocks of keys, as many are in flight as shared memory allows: with one and four of d 128
    the sum took 0.99 to 1.08 as long under a causal mask, 0.96 to 1.03 without.

    Args:
        problem: its bias has a query and a key dim.
        entries: what :func:`pair_entries` has found.
    """
    bias = problem.scores.bias
    if bias is None or 1 in bias.shape[2:] or entries == 1:
        return None
    lines = bias.shape[0] * bias.shape[1]
    tiles = lines * -(-problem.sq // 128) * -(-problem.sk // 128)
    if tiles < LEAST_TILES or (entries > 1 and problem.b * problem.hq < LEAST_SHARING * lines):
        return None
    room = DeviceSpec.of_arch("sm_90").shared_memory
    configs = (HopperDbiasConfig(*stages) for stages in ((2, 4), (2, 2), (1, 3)))
    return next(config for config in configs if config.shared_bytes(problem) <= room)


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
    """Whether tensor descriptors can pay: Hopper's copy engine is there, and the kernel outlasts their making.

    No kernel of wider heads was timed through descriptors, and a tail does not come through them.
    """
    return device.arch == "sm_90" and outlasts_descriptors(problem) and kernel_width(problem) <= 256


def outlasts_descriptors(problem: AttentionProblem) -> bool:
    """Whether the work takes longer than the host needs to make descriptors.

    What counts is the mean of the two products, whose widths may differ. With descriptors come other tiles, or another
    kernel. A deterministic call, whose bits are no neighbour's affair, counts one batch entry's work; where lengths are
    data, the answer is no.
    """
    if not lengths_may_decide(problem):
        return False
    batch = 1 if problem.deterministic else problem.b
    return batch * problem.hq * problem.sq * problem.sk * (problem.d + problem.dv) >= 2 * LEAST_WORK_FOR_DESCRIPTORS


def prefers_gluon(problem: AttentionProblem) -> bool:
    """Whether the Hopper kernels, where they take the problem, save more time than their launch costs.

    A tile has 64 rows at least. Where there are fewer queries, the Triton kernels, with smaller tiles, take 0.4 to 0.8
    of the time (H200, forward), unless the heads of a group share a tile: 1.6 to 10 times it. They do, in the forward,
    where each head by itself would take a second wave of tiles; or tiles are cut along their keys, which takes 0.1 to
    0.2 of Triton's time at 8192 keys and more. Of packed sequences the mean length counts; where lengths are data, a
    deterministic call is triton's.

    From 72 to 512 queries of 8 heads and 1 to 128 entries, full and causal, gluon was 1.04 to 2.5 times as fast as
    triton at head dims of 192 and 256 in both passes, however short. At 64 and 128 its forward was 1.14 to 1.41 times
    as fast above the least work, and below it 0.71 to 1.16 and 0.73 to 1.55; its backward 1.13 to 2 times above a tenth
    of that work, and 0.93 to 1.4 below. No packed sequences were timed. How many entries make up the work of a
    deterministic call must not be asked: gluon's is what many gain by, its backward 1.07 to 2.1 times as fast (at head
    dim 64 and one entry 0.86 to 1.22), and at 128 its forward (0.85 to 1.55); at 64 that was at 0.74 to 0.99, and one
    entry's work decides.
    """
    if not lengths_may_decide(problem):
        return False
    batch, keys = 1 if problem.deterministic else problem.b, problem.sk // (problem.sequences.packed or 1)
    packs = (problem.direction == "forward" and not problem.sequences.are_data and problem.group > 1
             and batch * problem.hq > NUM_SMS)
    if problem.sq <= 64 and not packs:
        return _splits_kv(problem)
    work = batch * problem.hq * max(problem.sq, 64) * keys * (problem.d + problem.dv)
    return work >= 2 * _least_work_for_gluon(problem)


def _least_work_for_gluon(problem: AttentionProblem) -> int:
    """Multiply-adds of a product from which a pass is gluon's."""
    width, is_backward = kernel_width(problem), problem.direction == "backward"
    queries = problem.sq // (problem.sequences.packed or 1)
    if queries > 64 and (width > 128 or (problem.deterministic and (is_backward or width > 64))):
        return 0
    return LEAST_WORK_FOR_GLUON_BACKWARD if is_backward else LEAST_WORK_FOR_GLUON


def _splits_kv(problem: AttentionProblem) -> bool:
    """Whether the Hopper forward kernel would split many keys."""
    if problem.direction != "forward" or problem.sk < _LEAST_SPLIT or max(problem.d, problem.dv) > 256:
        return False
    return grid_plan_of(problem, hopper_forward_config(problem), NUM_SMS).split_kv is not None


def lengths_may_decide(problem: AttentionProblem) -> bool:
    """Whether a tile may be chosen by sq and sk: not where these are a sequence's neighbours', and none may matter."""
    return not (problem.deterministic and problem.sequences.are_data)


def has_pairs(problem: AttentionProblem) -> bool:
    """Whether a kernel loads or draws something for each pair of a query and a key."""
    scores = problem.scores
    return (scores.bias is not None or scores.mask is not None or scores.dropout_p > 0.0
            or any(facts.dtypes for facts in scores.functions))


def kernel_width(problem: AttentionProblem) -> int:
    """Padded head dim that decides the tile: of q and k or of v, the wider, and 64 at least; a tail's width added."""
    return max(64, problem.width) + problem.tail_width


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
