"""A cost model of the Hopper forward kernel's last wave: whether query heads share tiles, and which tiles are split.

One CTA runs on each SM. As many tiles as there are SMs are a wave, and the last wave takes as long as a full one,
however few tiles it has. So what counts is how many waves there are, and how long each is. The functions are pure, of
the problem and the number of SMs; their times were measured on an H200 (benchmarks/journal/hopper-forward.md).
"""

import math
from typing import NamedTuple

from tilewise.kernels.hopper.forward.config import HopperForwardConfig, SplitPlan, pieces_of
from tilewise.masks import Span
from tilewise.problem import AttentionProblem
from tilewise.tuning.problem_traits import lengths_may_decide
from tilewise.tuning.window_model import has_window, tile_time

# Microseconds that two warpgroups take for a block of 128 keys: the softmax's, or those of each column of d and of dv.
_SOFTMAX, _COLUMN = 1.15, 0.0057
# The time of a block with one warpgroup or three, in that of two.
_WARPGROUPS = {1: 0.7, 2: 1.0, 3: 1.3}
_PROLOGUE = 2.0  # microseconds until a tile's first keys have arrived
# Microseconds of the kernel that combines splits, and megabytes of partial results that are written and read in one.
_COMBINE, _MEGABYTES = 5.0, 2.2
# After so many waves the CTAs have drifted apart, and a last wave costs little: over the paper's grid splitting its
# tiles gained 0.03 % (benchmarks/journal/hopper-forward.md).
MANY_WAVES = 4
_MOST_SPLITS, _MOST_LAST_SPLITS = 32, 8
NEARLY = 0.97  # a plan must take less than this of the time without it
_WORTH = 1.5  # and splitting a last wave must save this many times what it costs


class GridPlan(NamedTuple):
    """How a call is laid out on the grid, and the microseconds that the model estimates for it.

    Attributes:
        pack_gqa: how many of a tile's rows are heads of one group at the same query, a power of two; 1: all rows are
            queries of one head.
        split_kv: the tiles that are split, if there are any.
    """

    time: float
    pack_gqa: int
    split_kv: SplitPlan | None


def grid_plan_of(problem: AttentionProblem, config: HopperForwardConfig, num_sms: int) -> GridPlan:
    """Choose how many of a tile's rows are heads of one group, and which tiles are split.

    Few queries leave most rows of their tiles empty, and the heads of a group read the same keys: they share tiles
    where this makes fewer waves, or where all tiles are one wave, which can be split the better the fewer they are; and
    where more tiles have a window, into which they fit better with few queries (window_model.py). Of packed sequences
    each ends in a tile of its own, and heads that share tiles share that one.
    Tiles of variable-length sequences are not split. A deterministic call must give a batch element the same bits
    whatever the others are, and so counts one batch element: blocks are counted from a tile's first query, and its
    tiles are whole.
    """
    unpacked, pack_gqa = _plan_with(problem, config, 1, num_sms), packs_of(problem)[-1]
    if pack_gqa == 1:
        return unpacked
    packed = _plan_with(problem, config, pack_gqa, num_sms)
    waves, fewer = (math.ceil(num_tiles_of(problem, config, rows) / num_sms) for rows in (1, pack_gqa))
    if problem.sequences.packed is not None:
        shares = _has_fewer_ends(problem, config, pack_gqa)
    else:
        shares = fewer < waves or (waves == 1 and packed.time < NEARLY * unpacked.time)
    fits_better = (waves > 1 and has_window(problem) and config.consumers > 1
                   and window_time(problem, config, pack_gqa, num_sms) < window_time(problem, config, 1, num_sms))
    return packed if shares or fits_better else unpacked


def packs_of(problem: AttentionProblem) -> tuple[int, ...]:
    """Return how many heads of a group a tile may have at the same query: 1, and the power of two that holds them.

    Padded sequences were not timed with more than one; of packed ones the mean length decides, where it may.
    """
    pack_gqa = 1 << (problem.group - 1).bit_length()
    is_padded = problem.sequences.are_data and problem.sequences.packed is None
    if (is_padded or not lengths_may_decide(problem) or not problem.is_banded or problem.scores.reads_positions
            or not 1 < pack_gqa <= 64):
        return (1,)
    return 1, pack_gqa


def _has_fewer_ends(problem: AttentionProblem, config: HopperForwardConfig, pack_gqa: int) -> bool:
    """Whether packed sequences have fewer tiles where heads of a group share them, each with half of one at its end.

    With a group of a power of two, up to 128 columns, this is always so: 16384 tokens in sequences of 64, 256, 1024 and
    4096 tokens on average were 1.30 to 1.74, 1.09 to 1.23, 1.03 to 1.09 and 1.00 to 1.03 times as fast on an H200, in
    groups of 2, 4 and 8, at head dims 64 and 128. At 256 columns sequences of 128 and 512 tokens were 1.48 and 1.13
    times as fast, of 4096 0.97 times: there tiles must be fewer by some percent.
    """
    assert problem.sequences.packed is not None
    most = NEARLY if max(problem.d, problem.dv) > 128 else 1.0
    rows, ends = problem.sq / (64 * config.consumers), problem.sequences.packed / 2
    return problem.hk * (rows * pack_gqa + ends) < most * problem.hq * (rows + ends)


def window_time(problem: AttentionProblem, config: HopperForwardConfig, pack_gqa: int, num_sms: int) -> float:
    """Estimate the microseconds of a call under a window, in whole waves where they are few."""
    waves = num_tiles_of(problem, config, pack_gqa) / num_sms
    return tile_time(problem, config, pack_gqa) * (waves if waves > MANY_WAVES else math.ceil(waves))


def _plan_with(problem: AttentionProblem, config: HopperForwardConfig, pack_gqa: int, num_sms: int) -> GridPlan:
    """Choose which tiles are split."""
    tiles = num_tiles_of(problem, config, pack_gqa)
    blocks = _blocks_of_tiles(problem, config, pack_gqa)
    whole = GridPlan(_time(problem, config, tiles, blocks, num_sms), pack_gqa, None)
    scores = problem.scores
    if (problem.deterministic or problem.sequences.are_data or not problem.is_banded or scores.reads_positions
            or scores.max_logit):  # which partial results do not hold
        return whole
    if tiles > num_sms:
        saved, plan = _split_last_wave(problem, config, tiles, blocks, num_sms)
        if pack_gqa > 1 or problem.mask.is_bounded or scores.sinks is not None or saved <= 0.0:
            return whole
        return GridPlan(whole.time - saved, pack_gqa, plan)
    rows = problem.b * problem.hq * problem.sq
    time, num_splits = min((_time(problem, config, tiles, blocks, num_sms, splits) + _COMBINE
                            + _transfer_time(problem, rows, splits), splits) for splits in range(2, _MOST_SPLITS + 1))
    if num_splits <= max(blocks) and time < NEARLY * whole.time:
        return GridPlan(time, pack_gqa, SplitPlan(0, num_splits))
    return whole


def num_tiles_of(problem: AttentionProblem, config: HopperForwardConfig, pack_gqa: int = 1) -> int:
    """Return the number of tiles, of one batch element in a deterministic call."""
    heads = problem.hq if pack_gqa == 1 else problem.hk
    batch = 1 if problem.deterministic else problem.b
    return problem.sequences.slots(problem.sq * pack_gqa, 64 * config.consumers) * heads * batch


def _blocks_of_tiles(problem: AttentionProblem, config: HopperForwardConfig, pack_gqa: int) -> list[int]:
    """Return the number of key blocks of each tile of a head under a band, else of one tile that stands for all."""
    queries = 64 * config.consumers // pack_gqa
    if problem.sequences.are_data or not problem.mask.is_bounded:
        return [max(1, math.ceil(problem.sk / config.block_n))]
    spans = (problem.band.keys_of(Span(first, min(first + queries, problem.sq)), problem.sk)
             for first in range(0, problem.sq, queries))
    return [max(1, math.ceil(len(span) / config.block_n)) for span in spans]


def _time(problem: AttentionProblem, config: HopperForwardConfig, tiles: int, blocks: list[int], num_sms: int,
          num_splits: int = 1) -> float:
    """Return the microseconds of all tiles, each split so often, without the kernel that combines the splits."""
    share, waves = math.ceil(max(blocks) / num_splits), math.ceil(tiles * num_splits / num_sms)
    busy: float = share * waves
    if len(blocks) > 1 and waves > 1:  # long tiles come first, and short ones fill the gaps
        busy = max(share, tiles * sum(blocks) / len(blocks) / num_sms + share / 2)
    return busy * _block_time(problem, config) + waves * _PROLOGUE


def _split_last_wave(problem: AttentionProblem, config: HopperForwardConfig, tiles: int, blocks: list[int],
                     num_sms: int) -> tuple[float, SplitPlan]:
    """Return the most time saved by splitting the tiles of a last wave that is not full, 0 if none is, and how."""
    waves, rest = divmod(tiles, num_sms)
    length = max(blocks) * _block_time(problem, config)

    def saved(num_splits: int) -> float:
        gain = (1.0 - math.ceil(rest * num_splits / num_sms) / num_splits) * length
        cost = _COMBINE + _transfer_time(problem, rest * 64 * config.consumers, num_splits)
        return gain - cost if gain > _WORTH * cost else 0.0

    most = min(_MOST_LAST_SPLITS, max(blocks))
    if not rest or waves >= MANY_WAVES or most == 1:
        return 0.0, SplitPlan(tiles, 1)
    return max((saved(splits), SplitPlan(tiles - rest, splits)) for splits in range(2, most + 1))


def _block_time(problem: AttentionProblem, config: HopperForwardConfig) -> float:
    """Return the microseconds of one key block of a tile while every SM computes a tile."""
    columns = sum(map(sum, config.head_dim_chunks(problem)))
    return config.block_n / 128 * max(_SOFTMAX, _COLUMN * columns) * _WARPGROUPS[config.consumers]


def _transfer_time(problem: AttentionProblem, rows: int, num_splits: int) -> float:
    """Return the microseconds that it takes to write the partial results of some rows, and to read them."""
    return rows * num_splits * (sum(pieces_of(problem.dv)) + 8) * 4e-6 / _MEGABYTES
