"""Measured configs: flat JSON rows with their provenance, in tables/<device>/<kernel>.<16 or 32>bit.json.

A row says: for this padded head dim, element size, masked or not, and this length, this tile was the fastest. A
problem takes the row that agrees in the first three and is nearest in length (on a logarithmic scale). A row made
with descriptors serves only where the tensors can come through them. Further fields of a row are for its reader.
Tables of the Gluon kernels are alike, with the fields of their own configs, and with the heuristic's config of the
problem that was measured. Rows of the backward pass name their kernel, whose config has its own
fields.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from tilewise.errors import InvalidInput
from tilewise.kernels.hopper.backward.config import BACKWARD_CONFIGS, LEAST_SCALE, BackwardKernel, HopperBackwardConfig
from tilewise.kernels.hopper.forward.config import HopperForwardConfig, pieces_of
from tilewise.masks.tile_lists import TILE
from tilewise.problem import AttentionProblem
from tilewise.tuning.device import DeviceSpec
from tilewise.tuning.kinds import ALL_KINDS, HOPPER_KINDS, KINDS, AnyConfig, HopperConfig, TritonConfig
from tilewise.tuning.problem_traits import has_pairs, kernel_width, lengths_may_decide

Row = dict[str, Any]
C = TypeVar("C", bound=AnyConfig)
_LENGTH_OF_ANY = 2048  # the middle of the lengths that are measured


@dataclass(frozen=True, slots=True)
class Bucket:
    """What of a problem a tile depends on."""

    width: int
    itemsize: int
    masked: bool
    length: int

    @classmethod
    def of(cls, problem: AttentionProblem) -> "Bucket":
        """The bucket of a problem; its length is the longer of the two, where neighbours may have a say in the tile."""
        length = max(problem.sq, problem.sk) if lengths_may_decide(problem) else _LENGTH_OF_ANY
        return cls(kernel_width(problem), problem.dtype.itemsize, problem.mask.is_bounded, length)


def triton_row(kernel: str, problem: AttentionProblem, device: DeviceSpec, *, descriptors: bool) -> Row | None:
    """Return the table's row for the problem, None where it has none.

    Tables are measured without bias, boolean mask and dropout, which want tiles of their own, and without lists of
    tiles, which no tile may be longer than one of.
    """
    if has_pairs(problem):
        return None
    rows = load_rows(device.name, table_file(kernel, problem.dtype.itemsize), kernel)
    if problem.scores.tiles_q is not None:
        rows = tuple(row for row in rows if max(row["block_m"], row["block_n"]) <= TILE)
    return nearest_row(rows, Bucket.of(problem), descriptors=descriptors)


def hopper_row(kernel: str, problem: AttentionProblem, device: DeviceSpec, own: HopperConfig) -> Row | None:
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
    queries as keys, all seen or the causal ones. Softcap, functions, sinks and dropout take registers, lengths that are
    data, mask plans and sums in a fixed order take other ways.
    """
    scores, mask = problem.scores, problem.mask
    return (problem.d == problem.dv and pieces_of(problem.d) == (kernel_width(problem),)
            and problem.sq == problem.sk and mask.left is None and mask.right in (None, 0)
            and scores.softcap is None and scores.score_function is None and scores.sinks is None
            and not scores.dropout_p
            and not problem.sequences.are_data and problem.is_banded
            and (kernel == "hopper_forward" or (not problem.deterministic and problem.scale >= LEAST_SCALE)))


def nearest_row(rows: tuple[Row, ...], bucket: Bucket, *, descriptors: bool) -> Row | None:
    """Return the row nearest in length among those of the same kind; None without one.

    Of two rows at one length, the one with descriptors was recorded because it is faster, and wins if it may serve.
    """
    alike = [row for row in rows
             if (row["width"], row["itemsize"], row["masked"]) == (bucket.width, bucket.itemsize, bucket.masked)
             and (descriptors or not row.get("descriptors", False))]
    wanted = math.log2(max(bucket.length, 1))
    return min(alike, key=lambda row: (abs(math.log2(row["length"]) - wanted), not row.get("descriptors", False)),
               default=None)


def fields_of(config: AnyConfig) -> Row:
    """Return the fields of a row that are its config's."""
    named = {"kernel": str(config.kernel)} if isinstance(config, HopperBackwardConfig) else {}
    return named | asdict(config)


def triton_config_of(kernel: str, row: Row) -> TritonConfig:
    """Return the config of a row of a Triton kernel."""
    return _make(KINDS[kernel], row)


def forward_config_of(row: Row) -> HopperForwardConfig:
    """Return the config of a row of the Gluon forward kernel."""
    return _make(HopperForwardConfig, row)


def backward_config_of(row: Row) -> HopperBackwardConfig:
    """Return the config of a row of the Gluon backward kernels."""
    return _make(BACKWARD_CONFIGS[BackwardKernel(row["kernel"])], row)


def _make(kind: type[C], row: Row) -> C:
    return kind(**{name: own(row[name]) for name, own in _types_of(kind).items()})


def _types_of(kind: type[Any]) -> dict[str, type[Any]]:
    """Return the types of a dataclass's fields."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def table_file(kernel: str, itemsize: int) -> str:
    """Name the file of a kernel's table: one for each element size, as they are measured apart."""
    return f"{kernel}.{8 * itemsize}bit.json"


@cache
def load_rows(device_name: str, file_name: str, kernel: str) -> tuple[Row, ...]:
    """Read the rows of a device; one without tables has none."""
    path = resources.files(__package__).joinpath("tables", device_name, file_name)
    return read_table(path, kernel) if path.is_file() else ()


def read_table(path: Traversable, kernel: str) -> tuple[Row, ...]:
    """Read and check one table.

    Raises:
        InvalidInput: not a table, or a row that lacks a field or holds an illegal config; names the file and the row.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise InvalidInput(f"{path} is not JSON ({error}); allowed is a table that `tilewise tune` wrote.") from error
    parts = {"provenance": dict, "rows": list}
    if not isinstance(table, dict) or any(not isinstance(table.get(name), kind) for name, kind in parts.items()):
        raise InvalidInput(f'{path} is no table; allowed is {{"provenance": {{...}}, "rows": [...]}}.')
    for index, row in enumerate(table["rows"]):
        try:
            _check_row(row, kernel)
        except InvalidInput as error:
            raise InvalidInput(f"{path}, row {index}: {error}") from error
    return tuple(table["rows"])


def make_row(bucket: Bucket, config: AnyConfig, heuristic: AnyConfig | None = None, **measured: float | None) -> Row:
    """Return the row that says: for this bucket, this config; with what was measured, for its reader.

    Args:
        bucket, config: which problems, and their config.
        heuristic: what the heuristic had chosen, a field of the Gluon kernels' rows.
        measured: times and their like.
    """
    origin = {} if heuristic is None else {"heuristic": fields_of(heuristic)}
    return asdict(bucket) | fields_of(config) | origin | measured


def write_table(path: Path, provenance: Mapping[str, str], rows: Sequence[Row], faults: Sequence[Row] = ()) -> None:
    """Write one table, a row a line; ``faults`` are rows of configs that could not be used, each with its reason."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = {"provenance": json.dumps(provenance, indent=1, ensure_ascii=False), "rows": _lines(rows),
             "faults": _lines(faults)}
    path.write_text("{" + ",\n".join(f'"{name}": {text}' for name, text in parts.items()) + "}\n", encoding="utf-8")


def _lines(rows: Sequence[Row]) -> str:
    return "[" + ",".join(f"\n {json.dumps(row, ensure_ascii=False)}" for row in rows) + "\n]"


def _check_row(row: object, kernel: str) -> None:
    checked = _checked_fields("it", row, _types_of(Bucket))
    if checked["length"] < 1:
        raise InvalidInput(f"length is {checked['length']}; allowed is 1 or more.")
    _make(_checked_kind("it", checked, kernel), checked)
    if kernel in HOPPER_KINDS:
        _checked_kind("heuristic", checked.get("heuristic"), kernel)


def _checked_kind(what: str, given: object, kernel: str) -> type[AnyConfig]:
    """Check that ``given`` has the fields of a config of the kernel, and return the config's class."""
    kind = ALL_KINDS[kernel]
    if kind is HopperBackwardConfig:
        named = _checked_fields(what, given, {"kernel": BackwardKernel})
        kind = BACKWARD_CONFIGS[BackwardKernel(named["kernel"])]
    _checked_fields(what, given, _types_of(kind))
    return kind


def _checked_fields(what: str, given: object, allowed: Mapping[str, type]) -> Row:
    if not isinstance(given, dict):
        raise InvalidInput(f"{what} is {given!r}; allowed is an object with {', '.join(allowed)}.")
    for name, kind in allowed.items():
        value = given.get(name)
        if issubclass(kind, StrEnum) and value not in tuple(kind):
            raise InvalidInput(f"{name} is {value!r}; allowed are {', '.join(kind)}.")
        if not issubclass(kind, StrEnum) and type(value) is not kind:
            raise InvalidInput(f"{name} is {value!r}; allowed is {kind.__name__}.")
    return given
