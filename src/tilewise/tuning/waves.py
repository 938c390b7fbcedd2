"""Where tiles of the Hopper forward kernel do not fill the multiprocessors: who shares a tile, and which are cut.

One program runs on each multiprocessor. As many tiles as there are of them are a wave, and the last wave takes as long
as a full one, however few it has. So what counts is how many waves there are, of what length. Pure functions of problem
and multiprocessors, with times that were measured on an H200 (docs/hopper.md).
"""

import math
from typing import NamedTuple

from tilewise.masks import Span
from tilewise.problem import AttentionProblem
from tilewise.tuning.configs import HopperForwardConfig, pieces_of

# Microseconds of a step of 128 keys with two warpgroups: the softmax's, or that of each column of d and of dv.
_SOFTMAX, _COLUMN = 1.15, 0.0057
# Of a step with one warpgroup or three, to that with two.
_WARPGROUPS = {1: 0.7, 2: 1.0, 3: 1.3}
_BEGINNING = 2.0  # microseconds until a tile's first keys are there
# Microseconds of the kernel that combines parts, and megabytes of parts that are written and read in one.
_COMBINING, _MEGABYTES = 5.0, 2.2
# From so many waves on programs have drifted apart: the last one leaves idle about this much of its tiles' length,
# however many they are, and cut in n parts an n-th of that. Above 128 columns it was not so, and parts that fill more
# than so much of their time were little gain. Three warpgroups are sure of no more than that.
MANY_WAVES, _DRIFT, _FULLEST = 4, 0.37, 0.92
_MOST_PARTS, _MOST_LAST_PARTS = 32, 8
# A last wave's tiles may have a first part so many times as long as each other, with parts so few.
_MOST_LEAD, _MOST_PARTS_WITH_LEAD = 8, 4
NEARLY = 0.97  # what is to be done must take less than this of the time without it
_WORTH = 1.5  # and the parts of a last wave must save this many times what they cost
# Of all the time, what the steps of three warpgroups take longer where tiles may be parts.
_SLOWER_IN_PARTS = 0.01
# With 256 columns and so many keys parts cost little more than to write and read them, and were worth it from so many
# times that on.
_LEAST_WIDE, _WORTH_OF_WIDE = 4096, 1.1


class Cut(NamedTuple):
    """Which tiles are cut along their keys.

    Attributes:
        whole: tiles that are not, the first ones.
        parts: of each of the others; of a tile with fewer steps than parts some are empty.
        lead: how many times as long as each other the first part is, where some are whole.
    """

    whole: int
    parts: int
    lead: int = 1


class Layout(NamedTuple):
    """How a call is laid out, and the microseconds that this takes by reckoning.

    Attributes:
        pack: rows of a tile that are heads of one group at one query, a power of two; 1: rows are queries of one head.
        cut: the tiles that are cut, if there are any.
    """

    time: float
    pack: int
    cut: Cut | None


def layout_of(problem: AttentionProblem, config: HopperForwardConfig, multiprocessors: int) -> Layout:
    """Choose how many rows of a tile are heads of one group, and which tiles are cut.

    Queries that are few leave most rows of their tiles empty, and the heads of a group read the same keys: they share
    tiles where fewer waves come of it, or where all tiles are one wave, and can be cut the better the fewer they are.
    Tiles that a length of their own ends have rows of one head, and are not cut. A deterministic call, whose bits are
    no neighbour's affair, counts one batch entry: steps are counted from a tile's first query, and its tiles are whole.
    """
    apart = _laid_out(problem, config, 1, multiprocessors)
    pack = 1 << (problem.group - 1).bit_length()
    if problem.sequences.are_data or not 1 < pack <= 64:
        return apart
    together = _laid_out(problem, config, pack, multiprocessors)
    waves, fewer = (math.ceil(tiles_of(problem, config, rows) / multiprocessors) for rows in (1, pack))
    return together if fewer < waves or (waves == 1 and together.time < NEARLY * apart.time) else apart


def _laid_out(problem: AttentionProblem, config: HopperForwardConfig, pack: int, multiprocessors: int) -> Layout:
    """Choose which tiles are cut."""
    tiles = tiles_of(problem, config, pack)
    steps = _steps(problem, config, pack)
    whole = Layout(_time(problem, config, tiles, steps, multiprocessors), pack, None)
    if problem.deterministic or problem.sequences.are_data:
        return whole
    if tiles > multiprocessors:
        saved, cut = _last_wave(problem, config, tiles, steps, multiprocessors)
        if pack > 1 or problem.mask.is_bounded or problem.scores.sinks is not None or saved <= 0.0:
            return whole
        return Layout(whole.time - saved, pack, cut)
    time, parts = min((_time(problem, config, tiles, steps, multiprocessors, parts)
                       + _COMBINING + _moving(problem, problem.b * problem.hq * problem.sq, parts), parts)
                      for parts in range(2, _MOST_PARTS + 1))
    return Layout(time, pack, Cut(0, parts)) if parts <= max(steps) and time < NEARLY * whole.time else whole


def tiles_of(problem: AttentionProblem, config: HopperForwardConfig, pack: int = 1) -> int:
    """Count the tiles of so packed rows, of one batch entry where the others are none of its affair."""
    heads = problem.hq if pack == 1 else problem.hk
    batch = 1 if problem.deterministic else problem.b
    return problem.sequences.slots(problem.sq * pack, 64 * config.consumers) * heads * batch


def _steps(problem: AttentionProblem, config: HopperForwardConfig, pack: int) -> list[int]:
    """Return the steps of each tile of a head under a band, else of one that stands for all."""
    queries = 64 * config.consumers // pack
    if problem.sequences.are_data or not problem.mask.is_bounded:
        return [max(1, math.ceil(problem.sk / config.keys))]
    spans = (problem.band.keys_of(Span(first, min(first + queries, problem.sq)), problem.sk)
             for first in range(0, problem.sq, queries))
    return [max(1, math.ceil(len(span) / config.keys)) for span in spans]


def _time(problem: AttentionProblem, config: HopperForwardConfig, tiles: int, steps: list[int], multiprocessors: int,
          parts: int = 1) -> float:
    """Return the microseconds of all tiles, each in so many parts, without what combines these."""
    share, waves = math.ceil(max(steps) / parts), math.ceil(tiles * parts / multiprocessors)
    busy: float = share * waves
    if len(steps) > 1 and waves > 1:  # the long ones begin, and short ones fill the gaps
        busy = max(share, tiles * sum(steps) / len(steps) / multiprocessors + share / 2)
    return busy * _step_time(problem, config) + waves * _BEGINNING


def _last_wave(problem: AttentionProblem, config: HopperForwardConfig, tiles: int, steps: list[int],
               multiprocessors: int) -> tuple[float, Cut]:
    """Return the most that it saves to cut the tiles of a last wave that is not full, if it is worth it, and how.

    Each multiprocessor that has a tile left works on its first part; the others, and who is done with that, take what
    is left. A first part that is longer makes fewer parts of tiles that nearly fill the wave: 5/6 and 1/6 of a tile
    take nearly as little time as five parts of 1/5, and are written and read in 2 records a line in place of 5.
    """
    waves, rest = divmod(tiles, multiprocessors)
    length = max(steps) * _step_time(problem, config)
    lines = rest * 64 * config.consumers
    is_wide = max(problem.d, problem.dv) > 128
    was_timed = config.pieces(problem) == ((256,), (256,)) and problem.sk >= _LEAST_WIDE
    worth, launch = (_WORTH_OF_WIDE, 0.0) if was_timed else (_WORTH, _COMBINING)
    slower = _SLOWER_IN_PARTS * length * (waves + 1) if config.consumers == 3 else 0.0

    def saved(parts: int, lead: int) -> float:
        units = parts + lead - 1
        busy = rest * units / multiprocessors
        share = 1.0 - max(lead, math.ceil(busy / _FULLEST if is_wide else busy)) / units
        if waves >= MANY_WAVES and not is_wide and lead == 1:
            share = max(share, _DRIFT * (1.0 - 1.0 / parts))
        sure = min(share, _DRIFT) if waves >= MANY_WAVES and config.consumers == 3 else share
        cost = launch + _moving(problem, lines, parts) + slower
        return share * length - cost if sure * length > worth * cost else 0.0

    if not rest or max(steps) == 1:
        return 0.0, Cut(tiles, 1)
    ways = [(parts, lead) for parts in range(2, _MOST_LAST_PARTS + 1) for lead in range(1, _MOST_LEAD + 1)
            if parts + lead - 1 <= max(steps) and (lead == 1 or parts <= _MOST_PARTS_WITH_LEAD)]
    return max((saved(parts, lead), Cut(tiles - rest, parts, lead)) for parts, lead in ways)


def _step_time(problem: AttentionProblem, config: HopperForwardConfig) -> float:
    """Return the microseconds of a step of a tile, with a tile on every multiprocessor."""
    columns = sum(map(sum, config.pieces(problem)))
    return config.keys / 128 * max(_SOFTMAX, _COLUMN * columns) * _WARPGROUPS[config.consumers]


def _moving(problem: AttentionProblem, lines: int, parts: int) -> float:
    """Return the microseconds that it takes to write so many parts of some lines, and to read them."""
    return lines * parts * (sum(pieces_of(problem.dv)) + 8) * 4e-6 / _MEGABYTES
