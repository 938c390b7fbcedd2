"""The tiles of the Hopper kernels that are legal for a problem: what a search tries."""

from collections.abc import Iterable
from itertools import islice, product

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
    augmented_k_fits,
    owns_keys,
)
from tilewise.kernels.hopper.forward.config import HopperForwardConfig
from tilewise.problem import AttentionProblem
from tilewise.tuning.device import DeviceSpec
from tilewise.tuning.heuristics_hopper import backward_heuristic, forward_heuristic
from tilewise.tuning.kinds import HopperConfig
from tilewise.tuning.search import MOST_CANDIDATES, Proposals


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
        own, legal = forward_heuristic(problem), _forward_configs(problem, device)
    else:
        own, legal = backward_heuristic(problem), _backward_configs(problem, device)
    return Proposals(tuple(dict.fromkeys((own, *legal)))[:most], own, None)


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
        configs += [HopperD192Config()] if owns_keys(problem) else []
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
