"""The Gluon kernels' tiles: those that are legal, and which one a problem gets: of a table, else the heuristic's."""

from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice, product
from typing import Any

from tilewise.problem import AttentionProblem
from tilewise.tuning.configs import (
    LEAST_SCALE,
    HopperBackwardConfig,
    HopperConfig,
    HopperForwardConfig,
    pieces_of,
    sums_fit,
    tails_fit,
)
from tilewise.tuning.device import DeviceSpec
from tilewise.tuning.heuristics import (
    MULTIPROCESSORS,
    hopper_backward_config,
    hopper_forward_config,
    kernel_width,
)
from tilewise.tuning.search import MOST_CANDIDATES, Proposals
from tilewise.tuning.table import Bucket, config_of, load_rows, nearest_row, table_file


def forward_config(problem: AttentionProblem, device: DeviceSpec,
                   multiprocessors: int = MULTIPROCESSORS) -> HopperForwardConfig:
    """Return the table's config for the problem, else the heuristic one."""
    own = hopper_forward_config(problem, multiprocessors)
    measured = _measured("hopper_forward", problem, device, own)
    return own if measured is None else HopperForwardConfig(**measured)


def backward_config(problem: AttentionProblem, device: DeviceSpec,
                    multiprocessors: int = MULTIPROCESSORS) -> HopperBackwardConfig:
    """Return the table's config for the problem, else the heuristic one."""
    own = hopper_backward_config(problem, multiprocessors)
    measured = _measured("hopper_backward", problem, device, own)
    return own if measured is None else HopperBackwardConfig(**measured)


def propose_hopper(kernel: str, problem: AttentionProblem, device: DeviceSpec,
                   most: int = MOST_CANDIDATES) -> Proposals:
    """Propose every legal tile, the heuristic's first.

    Args:
        kernel: "hopper_forward" or "hopper_backward".
        problem, device: what it is for.
        most: tiles at most.
    """
    own: HopperConfig
    legal: Iterable[HopperConfig]
    if kernel == "hopper_forward":
        own, legal = hopper_forward_config(problem), _forward_configs(problem, device)
    else:
        own, legal = hopper_backward_config(problem), _backward_configs(problem, device)
    return Proposals(tuple(dict.fromkeys((own, *legal)))[:most], own, None)


def _measured(kernel: str, problem: AttentionProblem, device: DeviceSpec, own: HopperConfig) -> dict[str, Any] | None:
    """Return the fields of the table's config for the problem, None where it has none.

    A bucket knows nothing of how many heads there are, by which the heuristic tells programs that fill the
    multiprocessors from those that do not. So a row speaks for the problems that the heuristic would have given ``own``
    like the one that was measured, whatever their number of heads, and for lengths from half to twice its own.
    """
    if not _is_measured(kernel, problem):
        return None
    bucket = Bucket.of(problem)
    rows = tuple(row for row in load_rows(device.name, table_file(kernel, problem.dtype.itemsize), kernel)
                 if row["heuristic"] == asdict(own) and row["length"] <= 2 * bucket.length <= 4 * row["length"])
    row = nearest_row(rows, bucket, descriptors=False)
    return None if row is None else config_of(row, kernel)


def _is_measured(kernel: str, problem: AttentionProblem) -> bool:
    """Whether a table could have measured such a call.

    Rows are of plain calls with one head dim, whose tiles have one piece of 64, 128 or 256 columns, and with as many
    queries as keys, all seen or the causal ones. Softcap, sinks and dropout take registers, lengths that are data and
    sums in a fixed order take other ways.
    """
    scores, mask = problem.scores, problem.mask
    return (problem.d == problem.dv and pieces_of(problem.d) == (kernel_width(problem),)
            and problem.sq == problem.sk and mask.left is None and mask.right in (None, 0)
            and scores.softcap is None and scores.sinks is None and not scores.dropout_p
            and not problem.sequences.are_data
            and (kernel == "hopper_forward" or (not problem.deterministic and problem.scale >= LEAST_SCALE)))


def _forward_configs(problem: AttentionProblem, device: DeviceSpec) -> list[HopperForwardConfig]:
    """Tiles whose scores and output fit the registers: three warpgroups at a width of 64, 128 keys to 128 columns.

    Three take 128 keys: the kernel skips one block that a diagonal hides from a warpgroup, and of 64 keys there would
    be two. Of tiles that differ only in the shared memory for Q and out, the one with the most that fits.
    """
    sides = [(128, 3)] if max(problem.d, problem.dv) <= 64 else []
    sides += [(block_n, 2) for block_n in ((128, 64) if problem.dv <= 128 else (64,))]
    found = []
    for (block_n, consumers), kv_stages, ping_pong in product(sides, (2, 4, 8), (False, True)):
        configs = (HopperForwardConfig(block_n, consumers, kv_stages, q_stages, ping_pong, passes)
                   for q_stages, passes in product((2, 1), (1, 2)))
        found += list(islice((config for config in configs if config.shared_bytes(problem) <= device.shared_memory), 1))
    return found


def _backward_configs(problem: AttentionProblem, device: DeviceSpec) -> list[HopperBackwardConfig]:
    """Steps in each way that the kernels of these head dims have; where dQ is added, in no fixed order.

    Left out at a width of 128 are one tile of dout, or the next scores with four of q: of these ptxas (of Triton 3.6)
    makes products whose descriptors are not the same on every path, which the compile tests forbid; and the next
    scores with two, which were timed and gained nothing. Where q and k come in pieces, one tile of dout was slower.
    """
    width = max(problem.d, problem.dv)
    if width > 128:
        configs = [HopperBackwardConfig(2, out_stages, wide=True) for out_stages in (2, 1)]
        configs += [HopperBackwardConfig(direct=True)] if sums_fit(problem) else []
    else:
        ways = product(((2, 2), (4, 2), (4, 4)), (False, True) if width <= 64 else (False,), (False, True))
        configs = [HopperBackwardConfig(*ring, ahead, direct) for ring, ahead, direct in ways]
        if tails_fit(problem) and width <= 64:
            configs += [HopperBackwardConfig(4, 4, tails=True, stays=stays) for stays in (True, False)]
            configs += [HopperBackwardConfig(4, 4, tails=True, ordered=True, alone=True, programs=programs)
                        for programs in (1, 2, 4)]
        elif tails_fit(problem):
            configs += [HopperBackwardConfig(direct=direct, tails=True) for direct in (True, False)]
            configs += [HopperBackwardConfig(tails=True, stays=True, alone=alone) for alone in (False, True)]
    return [config for config in configs if config.shared_bytes(problem) <= device.shared_memory]
