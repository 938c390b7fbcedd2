"""The Gluon kernels' tiles: those that are legal, and which one a problem gets: of a table, else the heuristic's."""

from collections.abc import Iterable
from itertools import islice, product

from tilewise.kernels.gluon.backward_config import (
    LEAST_SCALE,
    D64Variant,
    D128AugmentedKVariant,
    D128Variant,
    HopperBackwardConfig,
    HopperD64Config,
    HopperD128AugmentedKConfig,
    HopperD128Config,
    HopperD192Config,
    HopperD256Config,
    augmented_k_fits,
    dk_dv_fit,
)
from tilewise.kernels.gluon.forward_config import HopperForwardConfig, pieces_of
from tilewise.problem import AttentionProblem
from tilewise.tuning.device import DeviceSpec
from tilewise.tuning.heuristics import NUM_SMS, hopper_backward_config, hopper_forward_config, kernel_width
from tilewise.tuning.kinds import HopperConfig
from tilewise.tuning.search import MOST_CANDIDATES, Proposals
from tilewise.tuning.table import (
    Bucket,
    Row,
    backward_config_of,
    fields_of,
    forward_config_of,
    load_rows,
    nearest_row,
    table_file,
)


def forward_config(problem: AttentionProblem, device: DeviceSpec,
                   num_sms: int = NUM_SMS) -> HopperForwardConfig:
    """Return the table's config for the problem, else the heuristic one."""
    own = hopper_forward_config(problem, num_sms)
    row = _row_of("hopper_forward", problem, device, own)
    return own if row is None else forward_config_of(row)


def backward_config(problem: AttentionProblem, device: DeviceSpec,
                    num_sms: int = NUM_SMS) -> HopperBackwardConfig:
    """Return the table's config for the problem, else the heuristic one."""
    own = hopper_backward_config(problem, num_sms)
    row = _row_of("hopper_backward", problem, device, own)
    return own if row is None else backward_config_of(row)


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


def _row_of(kernel: str, problem: AttentionProblem, device: DeviceSpec, own: HopperConfig) -> Row | None:
    """Return the table's row for the problem, None where it has none.

    A bucket knows nothing of how many heads there are, by which the heuristic tells grids that fill the SMs from
    those that do not. So a row speaks for the problems that the heuristic would have given ``own``
    like the one that was measured, whatever their number of heads, and for lengths from half to twice its own.
    """
    if not _is_measured(kernel, problem):
        return None
    bucket = Bucket.of(problem)
    rows = tuple(row for row in load_rows(device.name, table_file(kernel, problem.dtype.itemsize), kernel)
                 if row["heuristic"] == fields_of(own) and row["length"] <= 2 * bucket.length <= 4 * row["length"])
    return nearest_row(rows, bucket, descriptors=False)


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
    """All variants that the kernels of these head dims have, but those that are there for their fixed order alone.

    Left out at a width of 128 are one tile of dout, or the next S with four of q: of these ptxas (of Triton 3.6) makes
    products whose descriptors are not the same on every path, which the compile tests forbid; and the next S with two,
    which were timed and gained nothing. Where q and k come in two chunks, one tile of dout was slower.
    """
    widest = max(problem.d, problem.dv)
    configs: list[HopperBackwardConfig] = []
    if widest > 128:
        configs += [HopperD256Config(dout_stages=dout_stages) for dout_stages in (2, 1)]
        configs += [HopperD192Config()] if dk_dv_fit(problem) else []
    else:
        ways = product(((2, 2), (4, 2), (4, 4)), (False, True) if widest <= 64 else (False,),
                       (D128Variant.DQ_STAGED, D128Variant.DQ_FROM_REGISTERS))
        configs += [HopperD128Config(*stages, s_ahead, variant) for stages, s_ahead, variant in ways]
        if augmented_k_fits(problem) and widest <= 64:
            configs += [HopperD64Config(variant=D64Variant.DYNAMIC_TILES)]
            configs += [HopperD64Config(variant=D64Variant.HEAD_PERSISTENT, ctas_per_head=ctas) for ctas in (1, 2, 4)]
        elif augmented_k_fits(problem):
            configs += [HopperD128AugmentedKConfig(variant=variant) for variant in D128AugmentedKVariant]
    return [config for config in configs if config.shared_bytes(problem) <= device.shared_memory]
