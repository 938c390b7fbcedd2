"""Problem to config of the Hopper kernels, where no table has a row, and whether they are worth their launch.

Pure functions of the problem and the number of SMs.
"""

import math
from dataclasses import replace
from itertools import product

from tilewise.kernels.hopper.backward.config import (
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
    owns_keys,
)
from tilewise.kernels.hopper.forward.config import HopperForwardConfig, pieces_of
from tilewise.problem import AttentionProblem
from tilewise.tuning.ctas_per_head import choose_ctas_per_head
from tilewise.tuning.device import DeviceSpec
from tilewise.tuning.problem_traits import deciding_length, kernel_width, lengths_may_decide
from tilewise.tuning.wave_model import MANY_WAVES, NEARLY, grid_plan_of, num_tiles_of, packs_of, window_time
from tilewise.tuning.window_model import has_window

NUM_SMS = 132  # of an H100 or an H200
# The Hopper kernel for a shared bias: tiles of 128 x 128 scores, one CTA on each SM, for at least half of the SMs.
LEAST_TILES = 66
LEAST_SHARING = 3  # members from which it takes the place of dQ's way, where dQ has to be made anyway

# The Hopper kernels' launch takes the host no longer than a Triton kernel's (forward), and 8 to 13 µs more with tensors
# that it has not seen (beside an H200); in 20 µs a Triton kernel makes about this many of each product, at 300 TFLOP/s.
LEAST_WORK_FOR_GLUON = 15 * 10**8
# Their backward is worth a launch sooner: from here on 1.13 to 2 times as fast.
LEAST_WORK_FOR_GLUON_BACKWARD = LEAST_WORK_FOR_GLUON // 10
# A mask plan that is kept costs the host some 20 µs a pass to look up, and one that is built in every call 100 µs: the
# forward of a boolean tensor, 8 x 16 heads of 1024 queries at 64 columns, was level with triton's, and of a quarter of
# that work 0.4 to 0.6 times as fast (beside an H200).
LEAST_WORK_FOR_A_PLAN = 10**10
LEAST_WORK_FOR_A_PLAN_A_CALL = 25 * 10**9
_LEAST_SPLIT = 8192  # keys from which few queries were timed, in tiles that are split


def forward_heuristic(problem: AttentionProblem, num_sms: int = NUM_SMS) -> HopperForwardConfig:
    """Choose the tiles of the Gluon forward kernel, timed on an H200 at lengths 512 to 16384 (Triton 3.6).

    At a width of 64 the softmax takes as long as the products: three warpgroups with ping-pong scheduling (+5 % over
    three without). In short sequences too many pairs of their 192 queries are hidden, or past the end: two, with four
    KV stages where there are many waves (without a mask, length 640: +5 %; 768: -11 %; causal, 1280: +2 %; 1536: the
    same; 2000: -2 %; windows were not timed). Two, too, where a score costs more than its exponential: with a softcap
    they are 1.25 times as fast as three, with dropout 1.27, with ALiBi 1.09, with a bias 1.3 times. At 128 two fill the
    tensor cores by themselves, and registers allow no third. The length of packed sequences is their mean; a
    deterministic call, whose bits must not depend on other batch elements, has none. Where the cost model
    (wave_model.py) estimates less time for shorter tiles, there are fewer warpgroups, as where tiles are few: one at
    512 keys and 64 tiles takes 0.82 of the time of two. Two have ping-pong scheduling where that was timed and faster.

    Wider heads take the largest key block whose scores fit the registers beside O (128 of them to 128 columns; beside
    192 Triton 3.9's ptxas spills and serializes the products) and that shared memory allows, at the cost of the second
    tile of Q or of half the buffers of out. Of these, head dims 256, and 192 with 128 for v, were timed: at the latter
    blocks of 128 keys gain 11 to 13 % over those of 64 (benchmarks/journal/hopper-forward.md). They were not timed with
    one warpgroup.

    A bias is brought by TMA where a block of it fits beside as many keys, at 128 columns at the cost of the second tile
    of Q: 1.23 and 1.31 times as fast at 128 and 64 as when threads load it, under a causal mask.

    Under a window more pairs are hidden, the longer a tile and the wider its blocks: where there are more tiles than a
    wave, a model of its own chooses (window_model.py), among blocks of 64 keys too.

    With a score function blocks have 64 keys, and with two warpgroups four KV stages where they fit. Beside 128 keys,
    the maximum frozen in both, they were 1.03 to 1.49 times as fast with three functions at 64 and 128 columns, but for
    one that reads a table, at 64: 0.97 times. There alone, and in blocks of one part, were three warpgroups faster; and
    ping-pong scheduling at 128, by 1 % (benchmarks/journal/hopper-forward.md).
    """
    length = deciding_length(problem, problem.sk)
    room, has_function = DeviceSpec.of_arch("sm_90").shared_memory, problem.scores.score_function is not None
    configs = (HopperForwardConfig(block_n, 2, q_stages=q_stages, epilogue_passes=passes)
               for block_n, q_stages, passes in product((64,) if has_function or problem.dv > 128 else (128, 64),
                                                        (2, 1), (1, 2)))
    fitting = [config for config in configs if config.shared_bytes(problem) <= room]
    two = next((config for config in fitting if config.bias_stages(problem) and config.block_n == fitting[0].block_n),
               fitting[0])
    width, ping_pong = max(problem.d, problem.dv), _two_ping_pong(problem, length)
    has_stages = width <= 64 and (ping_pong or problem.scores.bias is not None)
    has_four = has_stages and (num_tiles_of(problem, two) > MANY_WAVES * num_sms or not problem.is_banded)
    if has_function:
        has_four = replace(two, kv_stages=4).shared_bytes(problem) <= room
    by_preference = [replace(two, ping_pong=ping_pong, kv_stages=4 if has_four else 2)]
    if width <= 128:
        by_preference.append(replace(two, consumers=1))
    least = 2048
    if _were_timed(problem):
        least = 768 if problem.mask.right is None else 1792
    scores = problem.scores
    costs_more = scores.changes_scores or scores.dropout_p > 0.0
    if width <= 64 and length >= least and not costs_more and not _cuts_tiles(problem):
        by_preference.insert(0, HopperForwardConfig(block_n=128, consumers=3, ping_pong=True))
    # Where neighbours may change no bit, neither may how many tiles all of them have.
    if has_window(problem) and not has_function and (not lengths_may_decide(problem)
                                                     or num_tiles_of(problem, two) > num_sms):
        return _window_config(problem, by_preference, num_sms)
    if problem.sequences.are_data:
        return by_preference[0]
    times = [grid_plan_of(problem, config, num_sms).time for config in by_preference]
    nearly = min(times) / NEARLY
    return next(config for config, time in zip(by_preference, times, strict=True) if time <= nearly)


def _window_config(problem: AttentionProblem, configs: list[HopperForwardConfig], num_sms: int) -> HopperForwardConfig:
    """Choose the tile of a window, of more tiles than a wave: of those with two warpgroups and more, or narrower ones.

    A bias, and heads wider than 128, have blocks as wide as fit, since others were not timed. With a softcap, ALiBi and
    dropout the model's choice was the fastest of those timed at 64 and 128 columns, windows of 128 and 512 keys, or
    within 6 % of it.
    """
    configs = [config for config in configs if config.consumers > 1]
    two, room = configs[-1], DeviceSpec.of_arch("sm_90").shared_memory
    if two.block_n == 128 and problem.scores.bias is None and max(problem.d, problem.dv) <= 128:
        narrow = [replace(two, block_n=64, kv_stages=stages) for stages in (4, 2)]
        configs.append(next(config for config in narrow if config.shared_bytes(problem) <= room))

    return min(configs, key=lambda config: min(window_time(problem, config, rows, num_sms)
                                               for rows in packs_of(problem)))


def _cuts_tiles(problem: AttentionProblem) -> bool:
    """Whether the mask begins anew along the sequence, where shorter tiles have fewer pairs that are hidden.

    With three warpgroups documents of 512, 2048 and 4096 tokens, chunks of 4096 and random blocks of 128 pairs were
    0.48 to 0.95 times as fast as with two at 64 columns; a prefix, and a window with sink tokens, 1.06 to 1.12 times.
    """
    scores = problem.scores
    return (problem.mask.chunk is not None or scores.mask is not None or scores.documents_q is not None
            or scores.mask_function is not None)


def _were_timed(problem: AttentionProblem) -> bool:
    """Whether the number of warpgroups and ping-pong were timed for such a call: without a window."""
    return problem.mask.left is None


def _two_ping_pong(problem: AttentionProblem, length: int) -> bool:
    """Whether two warpgroups have ping-pong scheduling, by the columns of q and k, and of v, inside the tiles.

    At 64, with four stages, causal +0.7 % at 512 and +0.6 % at 1024; at 96 without a mask +8 to 14 %, causal +4 to
    10 %; at 128 without a mask +2 to 3.4 %, causal 0 to +1 %; at 256 +0.4 to 1.2 % to a length of 1024, and nothing or
    little beyond. Of packed sequences -2 to +1 % at 64 and -1 to +2 % at 128. At 192 they lost 0.8 %, causal. With a
    softcap +1 % at 64 and 128, with dropout +3 and -5 %; a bias lost 3 % at 128, and score functions 4 to 12 %
    in all of six cases but one, which gained 1 %. Shorter lengths and windows were not timed.
    """
    widths = sum(pieces_of(problem.d)), sum(pieces_of(problem.dv))
    scores = problem.scores
    if (not _were_timed(problem) or scores.bias is not None or scores.score_function is not None
            or (scores.dropout_p and widths != (64, 64))):
        return False
    return length >= {(64, 64): 512, (96, 96): 1024, (128, 128): 512, (256, 256): 512}.get(widths, math.inf)


def backward_heuristic(problem: AttentionProblem, num_sms: int = NUM_SMS) -> HopperBackwardConfig:
    """Choose the Gluon backward kernel and its variant, timed on an H200 at lengths 512 to 16384 (Triton 3.6).

    Augmented K gains 5 to 7 % at a width of 128, and persistent CTAs 6 to 8 % more at a length of 512, 3 to 5 % at
    1024, and between -0.5 and 2 % from 4096 on. At 64 a third warpgroup comes with it, which gains 1 to 8 % more than
    augmented K with blocks of 128 queries did, and takes four tiles each of q and dout; persistent CTAs gain 14 to 26 %
    more there at a length of 512, 10 to 22 % at 1024, 6 to 12 % at 2048, 1 to 2 % at 16384, and lose 2 % where no CTA
    has a second tile. Without augmented K registers hold the next block's S there (+0 to 7 %), and dQ is accumulated
    from registers (+7 to 16 %). Wider heads leave no choice: where registers hold all columns of dK and dV of 64 keys
    each warpgroup has keys of its own (at 192 and 128 1.2 to 1.4 times as fast as sharing them), unless dq is wanted in
    a fixed order or there is a softcap, dropout, a mask plan or lengths that are data; else two share them.
    The ring of a bias takes shared memory: a variant beside which it does not fit is not chosen. With a score function
    other variants were not timed: these are the ones of which Triton 3.6 to 3.9 leave the fewest descriptors of
    products that are not alike on every path of the code.
    """
    widest = max(problem.d, problem.dv)
    if widest > 128:
        return HopperD192Config() if owns_keys(problem) and not problem.deterministic else HopperD256Config()
    if widest <= 64 and augmented_k_fits(problem):
        return _d64_config(problem, num_sms)
    has_function = problem.scores.score_function is not None
    if problem.deterministic:
        return HopperD128Config(s_ahead=widest <= 64 and not has_function, variant=D128Variant.DETERMINISTIC)
    if augmented_k_fits(problem):
        owns_heads = choose_ctas_per_head(problem, num_sms) > 0
        own = HopperD128AugmentedKConfig(variant=D128AugmentedKVariant.HEAD_PERSISTENT if owns_heads
                                         else D128AugmentedKVariant.DYNAMIC_TILES)
        if own.fits(problem):  # not beside a bias in float32
            return own
    if widest <= 64:
        return HopperD128Config(s_ahead=True, variant=D128Variant.DQ_FROM_REGISTERS)
    return HopperD128Config(variant=D128Variant.DQ_FROM_REGISTERS if has_function else D128Variant.DQ_STAGED)


def _d64_config(problem: AttentionProblem, num_sms: int) -> HopperD64Config:
    """Choose the variant at head dims up to 64 with augmented K."""
    ctas_per_head = choose_ctas_per_head(problem, num_sms)
    if ctas_per_head > 0:
        own = HopperD64Config(variant=D64Variant.HEAD_PERSISTENT, ctas_per_head=ctas_per_head)
        if own.fits(problem):  # beside a bias one CTA a head does, if the bias is no float32
            return own
    return HopperD64Config(variant=D64Variant.DETERMINISTIC if problem.deterministic else D64Variant.DYNAMIC_TILES)


def hopper_dbias_config(problem: AttentionProblem, entries: int, *,
                        dq_is_made: bool = False) -> HopperDbiasConfig | None:
    """Choose the tile of the Gluon kernel that sums a bias's gradient; None where another way is as good.

    Timed on an H200 with 16 heads at d 128, the sum alone takes 0.54 to 0.60 of the time of the Triton kernel of its
    own; that half the SMs should have a tile is counted, not timed. Beside dQ's way a backward pass with
    tiles twice as wide, which were slower, took 0.81 (3 entries of length 4096, causal), 0.84 and 0.92 (4 of them,
    causal and full), 0.73 and 0.82 (8 of 2048), but 1.11 and 1.24 (2 of 8192) of the time; 1.01 at d 64 (4 of 4096).
    Where the Hopper kernels have made dQ, the Triton kernel would make it once more. There a causal pass took 0.70 and
    0.74 (2 entries of 4096 and 8192), 0.85 (1 of 4096) and 0.91 of the time (4 of 4096, a bias each), and at d 64 a
    full one 1.21 (1 of 4096). Other widths above 64, masks and lengths were not timed.

    Of entries first, then of blocks of keys, as many are in flight as shared memory allows: with one and four of d 128
    the sum took 0.99 to 1.08 as long under a causal mask, 0.96 to 1.03 without.

    Args:
        problem: its bias has a query and a key dim.
        entries: what :func:`dbias_launches` has found.
        dq_is_made: whether other kernels have made dQ.
    """
    bias = problem.scores.bias
    if bias is None or 1 in bias.shape[2:]:
        return None
    lines = bias.shape[0] * bias.shape[1]
    tiles = lines * -(-problem.sq // 128) * -(-problem.sk // 128)
    is_worth_it = (entries == 0 or (dq_is_made and kernel_width(problem) > 64)
                   or (entries > 1 and problem.b * problem.hq >= LEAST_SHARING * lines))
    if tiles < LEAST_TILES or not is_worth_it:
        return None
    room = DeviceSpec.of_arch("sm_90").shared_memory
    configs = (HopperDbiasConfig(*stages) for stages in ((2, 4), (2, 2), (1, 3)))
    return next(config for config in configs if config.shared_bytes(problem) <= room)


def prefers_gluon(problem: AttentionProblem) -> bool:
    """Whether the Hopper kernels, where they take the problem, save more time than their launch costs.

    A tile has 64 rows at least. Where there are fewer queries, the Triton kernels, with smaller tiles, take 0.4 to 0.8
    of the time (H200, forward), unless the heads of a group share a tile: 1.6 to 10 times it. They do, in the forward,
    where each head by itself would take a second wave of tiles; or tiles are cut along their keys, which takes 0.1 to
    0.2 of Triton's time at 8192 keys and more. Of packed sequences the mean length counts. No length may where they are
    data and the call is deterministic: sequences of 128 to 8192 tokens were then 1.03 to 2.05 times as fast backward,
    and forward 0.83 and 0.88 (128 tokens) to 1.37 times at head dim 64, 1.17 to 1.76 at 128 and 256; of 32 tokens 0.62
    and 0.73 at 64.

    From 72 to 512 queries of 8 heads and 1 to 128 entries, full and causal, gluon was 1.04 to 2.5 times as fast as
    triton at head dims of 192 and 256 in both passes, however short. At 64 and 128 its forward was 1.14 to 1.41 times
    as fast above the least work, and below it 0.71 to 1.16 and 0.73 to 1.55; its backward 1.13 to 2 times above a tenth
    of that work, and 0.93 to 1.4 below. Of packed sequences those of 512 to 5000 tokens were timed, backward at 256
    columns: 2 to 2.15 times as fast. How many entries make up the work of a deterministic call must not be asked:
    gluon's is what many gain by, its backward 1.07 to 2.1 times as fast (at head dim 64 and one entry 0.86 to 1.22),
    and at 128 its forward (0.85 to 1.55); at 64 that was at 0.74 to 0.99, and one entry's work decides.

    With a softcap at 256 columns the backward was 2.1 to 3 times as fast as triton's (causal, 1024 to 8192 tokens).
    """
    if not lengths_may_decide(problem):
        return True
    batch, keys = 1 if problem.deterministic else problem.b, problem.sk // (problem.sequences.packed or 1)
    packs = (problem.direction == "forward" and not problem.sequences.are_data and problem.is_banded
             and problem.group > 1 and batch * problem.hq > NUM_SMS)
    if problem.sq <= 64 and not packs:
        return _splits_kv(problem)
    work = batch * problem.hq * max(problem.sq, 64) * keys * (problem.d + problem.dv)
    return work >= 2 * _least_work_for_gluon(problem)


def _least_work_for_gluon(problem: AttentionProblem) -> int:
    """Multiply-adds of a product from which a pass is gluon's."""
    width, is_backward = kernel_width(problem), problem.direction == "backward"
    if not problem.is_banded:
        scores, function = problem.scores, problem.scores.mask_function
        may_change = ((scores.mask is not None and scores.tiles_q is None)
                      or (function is not None and function.may_change))
        return LEAST_WORK_FOR_A_PLAN_A_CALL if may_change else LEAST_WORK_FOR_A_PLAN
    queries = problem.sq // (problem.sequences.packed or 1)
    if queries > 64 and (width > 128 or (problem.deterministic and (is_backward or width > 64))):
        return 0
    return LEAST_WORK_FOR_GLUON_BACKWARD if is_backward else LEAST_WORK_FOR_GLUON


def _splits_kv(problem: AttentionProblem) -> bool:
    """Whether the Hopper forward kernel would split many keys."""
    if problem.direction != "forward" or problem.sk < _LEAST_SPLIT or max(problem.d, problem.dv) > 256:
        return False
    return grid_plan_of(problem, forward_heuristic(problem), NUM_SMS).split_kv is not None
