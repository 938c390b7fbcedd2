"""What each axis of the Hopper kernels is worth: calls without it beside those as they are, in one process.

Without a GPU, in a process for each axis (``none``: the kernels as they are):

    python benchmarks/ablation.py compile half_diagonal compiled/half_diagonal.xz

Then on a Hopper GPU:

    python benchmarks/ablation.py time compiled/*.xz --out ablation.csv

writes a row for each cell, pass and axis, where the axis changes a kernel or how it is launched: ``ratio`` is the time
without the axis by the time with it. ``table`` prints the Markdown table of such rows.
"""

import argparse
import csv
import lzma
import math
import pickle
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from triton_versions import PASSES, Bound, check, drawn_tensors, kernels_of_cells, timed, write_rows

from tilewise.backends import gluon
from tilewise.bench.grids import Cell, grid_cells
from tilewise.kernels.hopper.backward.config import (
    D64Variant,
    D128AugmentedKVariant,
    D128Variant,
    HopperBackwardConfig,
    HopperD64Config,
    HopperD128AugmentedKConfig,
    HopperD128Config,
)
from tilewise.problem import AttentionProblem
from tilewise.support.caches import clear_caches
from tilewise.tuning import schedules_hopper

GRIDS = ("paper", "gqa", "seeds")
NONE = "none"
_SECONDS = 0.1  # that a pass of a cell may take for each axis


def _forward_tiles(change: Callable[[Any], Any]) -> Any:
    """Patch the forward kernel's tiles."""
    made = gluon.hopper_forward_config
    return patch.object(gluon, "hopper_forward_config", lambda *given: change(made(*given)))


def _forward_schedule(change: Callable[[Any], Any]) -> Any:
    """Patch how the forward kernel goes through a call."""
    made = gluon.forward_schedule
    return patch.object(gluon, "forward_schedule", lambda *given: change(made(*given)))


def _backward_config(change: Callable[[Any], HopperBackwardConfig]) -> Any:
    """Patch the backward kernel's config."""
    made = gluon.hopper_backward_config
    return patch.object(gluon, "hopper_backward_config", lambda *given: change(made(*given)))


def _without_augmented_k(config: HopperBackwardConfig) -> HopperBackwardConfig:
    if isinstance(config, HopperD64Config):
        return HopperD128Config(s_ahead=True, variant=D128Variant.DQ_FROM_REGISTERS)
    return HopperD128Config() if isinstance(config, HopperD128AugmentedKConfig) else config


def _without_own_heads(config: HopperBackwardConfig) -> HopperBackwardConfig:
    if not config.head_persistent:
        return config
    if isinstance(config, HopperD64Config):
        return HopperD64Config(variant=D64Variant.DYNAMIC_TILES)
    return HopperD128AugmentedKConfig(variant=D128AugmentedKVariant.DYNAMIC_TILES)


def _without_shared_heads(config: HopperBackwardConfig) -> HopperBackwardConfig:
    if isinstance(config, HopperD64Config) and config.ctas_per_head > 1:
        return replace(config, ctas_per_head=1)
    return config


def _all_heads(problem: AttentionProblem, *_sizes: int) -> int:
    return 1 << (problem.b * problem.hq - 1).bit_length()


# Each axis: what it is, and how it is switched off.
AXES: dict[str, tuple[str, Callable[[], Any]]] = {
    "softmax_parts": ("the wait for P·V between the two halves of the exponentials",
                      lambda: _forward_schedule(lambda own: replace(own, softmax_parts=1))),
    "frozen_max": ("the row maximum stays as it is in blocks without a mask",
                   lambda: patch.object(schedules_hopper, "LEAST_FROZEN", math.inf)),
    "ping_pong": ("ping-pong scheduling", lambda: _forward_tiles(lambda own: replace(own, ping_pong=False))),
    "three_warpgroups": ("three consumer warpgroups", lambda: _forward_tiles(
        lambda own: replace(own, consumers=2, kv_stages=4) if own.consumers == 3 else own)),
    "four_kv_stages": ("four stages of K and V", lambda: _forward_tiles(lambda own: replace(own, kv_stages=2))),
    "split_kv": ("tiles of the last wave whose keys are split",
                 lambda: _forward_schedule(lambda own: replace(own, split_kv=None))),
    "forward_swizzle": ("heads whose keys and values stay in L2 are scheduled together",
                        lambda: patch.object(schedules_hopper, "heads_per_swizzle", _all_heads)),
    "augmented_k": ("the tensor cores subtract lse and delta", lambda: _backward_config(_without_augmented_k)),
    "head_persistent": ("persistent CTAs that have all keys of a head",
                        lambda: _backward_config(_without_own_heads)),
    "ctas_per_head": ("CTAs that share a head", lambda: _backward_config(_without_shared_heads)),
    "backward_swizzle": ("heads whose q, dout and dQ stay in L2 are scheduled together",
                         lambda: patch.object(schedules_hopper, "kv_heads_per_swizzle", _all_heads)),
}

# Axes of which there are rows, and which cannot be switched off any more, since the kernels have lost them.
REMOVED = {
    "q_in_registers": "columns of Q that stay in registers",
    "max_chains": "independent chains of comparisons in a row's maximum",
    "half_diagonal": "the first warpgroup computes half of a diagonal block",
    "skip_masked": "warpgroups skip a first block that is hidden from them",
    "lead": "a longer first split",
    "code_padding": "padding in front of each warpgroup's code",
}
# What stays, and has no other way beside it any more.
ALWAYS = {"persistent": "persistent CTAs with a dynamic tile scheduler, backward"}


@contextmanager
def switched_off(axis: str) -> Iterator[None]:
    """Make calls without an axis; NONE: as they are."""
    if axis == NONE:
        yield
        return
    with AXES[axis][1]():
        yield


@dataclass(frozen=True)
class Row:
    """A pass of a cell without an axis, or as it is."""

    grid: str
    case: str
    direction: str
    dtype: str
    axis: str
    ms_p50: float
    ratio: float
    spilled_bytes: int
    device_name: str
    driver: str
    torch: str
    triton: str
    commit: str
    date: str


def compile_without(axis: str, path: Path) -> None:
    """Compile the kernels of every cell without the axis."""
    with switched_off(axis):
        kernels = kernels_of_cells(GRIDS)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(pickle.dumps((axis, kernels)), preset=1))


def time_all(paths: list[Path], out: Path, commit: str | None) -> None:
    """Time every cell as it is, and without each axis that changes it."""
    from tilewise.bench.provenance import provenance

    given = dict(pickle.loads(lzma.decompress(path.read_bytes())) for path in paths)
    given = {NONE: given.pop(NONE), **given}
    origin = provenance(torch.device("cuda", 0), "", commit)
    rows: list[Row] = []
    for cell in grid_cells(GRIDS):
        tensors = drawn_tensors(cell)
        changed = {name: [NONE, *[axis for axis in AXES if changes(cell, name, axis, given)]] for name in PASSES}
        bound = {}
        for axis in dict.fromkeys(axis for axes in changed.values() for axis in axes):
            with switched_off(axis):
                bound[axis] = Bound(cell, given[axis], tensors)
        for name in PASSES:
            check(cell, name, {axis: bound[axis].results[name] for axis in changed[name]})
            times = timed({axis: bound[axis].graphs[name] for axis in changed[name]},
                          _SECONDS * len(changed[name]))
            rows += [Row(cell.grid, cell.case.name, name, str(cell.dtype).removeprefix("torch."), axis,
                         round(times[axis], 6), round(times[axis] / times[NONE], 5), bound[axis].spilled[name],
                         origin.device_name, origin.driver, origin.torch, origin.triton, origin.commit, origin.date)
                     for axis in changed[name]]
        print(cell, {row.axis: row.ratio for row in rows if row.case == cell.case.name}, flush=True)
        write_rows(out, rows)
    print(table(out))


def changes(cell: Cell, name: str, axis: str, given: dict[str, Any]) -> bool:
    """Whether a pass of a cell has other kernels without an axis, or other arguments."""
    if axis not in given:
        return False
    own, other = ([image.cubin for image, _ in given[one][str(cell), name]] for one in (NONE, axis))
    return own != other or arguments_of(cell, name, NONE) != arguments_of(cell, name, axis)


def arguments_of(cell: Cell, name: str, axis: str) -> tuple[Any, ...]:
    """Return the grid of a pass's main kernel, and its numbers, but for what is fixed when it is compiled."""
    problem = cell.problem(torch.device("cuda", 0))
    clear_caches()
    with switched_off(axis):
        if name == "forward":
            own: Any = gluon._plan(problem).launch
        else:
            strides = tuple(tensor.stride() for tensor in drawn_tensors(cell)[::3])
            own = gluon._backward_plan(problem.backward(lse_grad=False), (*strides, None), (True, True)).launch
            own = getattr(own, "dkdv", own)
    return own.grid, tuple(own.scalars)[:-1]


def table(path: Path) -> str:
    """Return rows as Markdown: of each axis and pass how many cells it changes, and the ratios of their times.

    The mean over the grid counts cells that an axis leaves as they are with 1.
    """
    with path.open() as file:
        rows = list(csv.DictReader(file))
    cells = len({(row["grid"], row["case"]) for row in rows})
    lines = ["| without | pass | cells | mean of these | least | most | mean of the grid | |",
             "|---|---|" + "---:|" * 5 + "---|"]
    described = {axis: what for axis, (what, _) in AXES.items()} | ALWAYS | REMOVED
    if unknown := {row["axis"] for row in rows} - {NONE, *described}:
        raise ValueError(f"{path.name} has rows without {', '.join(sorted(unknown))}, which nothing here describes")
    for axis, what in described.items():
        for name in PASSES:
            ratios = [float(row["ratio"]) for row in rows if (row["axis"], row["direction"]) == (axis, name)]
            if not ratios:
                continue
            of_grid = statistics.geometric_mean([*ratios, *[1.0] * (cells - len(ratios))])
            note = "removed" if axis in REMOVED else ""
            lines.append(f"| {what} | {name} | {len(ratios)} | {statistics.geometric_mean(ratios):.3f} | "
                         f"{min(ratios):.3f} | {max(ratios):.3f} | {of_grid:.4f} | {note} |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    compiling = commands.add_parser("compile")
    compiling.add_argument("axis", choices=(NONE, *AXES))
    compiling.add_argument("path", type=Path)
    timing = commands.add_parser("time")
    timing.add_argument("paths", type=Path, nargs="+")
    timing.add_argument("--out", type=Path, default=Path("ablation.csv"))
    timing.add_argument("--commit")
    commands.add_parser("table").add_argument("path", type=Path)
    given = parser.parse_args()
    if given.command == "compile":
        compile_without(given.axis, given.path)
    elif given.command == "time":
        time_all(given.paths, given.out, given.commit)
    else:
        print(table(given.path))


if __name__ == "__main__":
    main()
