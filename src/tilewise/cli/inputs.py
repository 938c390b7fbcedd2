"""What flags mean: the problems, devices and calls that they describe."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from tilewise.bench.grids import Cell, filtered, grid_cells, parse_dtype
from tilewise.bench.mask_text import parse_mask
from tilewise.bench.providers import AUTOMATIC
from tilewise.bench.roofline import Direction
from tilewise.bench.shapes import shape_case
from tilewise.bench.support import as_if_on
from tilewise.bench.torture_peers import implementation_named, missing, peer_names
from tilewise.bench.torture_runs import ALL
from tilewise.cli.options import comma_integers, comma_list
from tilewise.compile_ahead import CallShape, calls_of_model
from tilewise.dispatch import Explanation, explain_problem
from tilewise.errors import InvalidInput
from tilewise.support.names import DTYPES
from tilewise.validate.choices import check_choice

_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


def parse_dtypes(text: str) -> list[torch.dtype]:
    """Read 'float32,bfloat16'. Raises :class:`InvalidInput` for an unknown one, and for none."""
    if not (names := comma_list(text)):
        raise InvalidInput(f"dtype is {text!r}; allowed are {', '.join(DTYPES)}, with commas between them.")
    return [parse_dtype(name) for name in names]


def chosen_device(name: str | None) -> torch.device:
    """Return the device of a name that the flag has checked, or choose one: a GPU if there is one."""
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def usable_device(name: str | None) -> torch.device:
    """Return the device as :func:`chosen_device` does, of which "cuda" is the current GPU, as tensors name it.

    Raises:
        InvalidInput: there is no such GPU here.
    """
    device = chosen_device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidInput(f"device is {name!r}, and torch sees {torch.cuda.device_count()} GPUs here; use cpu.")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


class Implementations(NamedTuple):
    """Names of those that run here, and why each other one of "all" does not."""

    present: list[str]
    absent: dict[str, str]


def explanation(cell: Cell, device: str | None, arch: str | None, backend: str | None, *,
                deterministic: bool = False) -> Explanation:
    """Say which backend serves a cell: on a device of this machine, or on a GPU of an architecture, whatever is here.

    Raises:
        InvalidInput: the device is not there, or the architecture is not known.
    """
    where = torch.device("cuda", 0) if arch is not None else usable_device(device)
    problem = replace(cell.problem(where), deterministic=deterministic)
    if arch is None:
        return explain_problem(problem, backend)
    with as_if_on(arch):
        return explain_problem(problem, backend)


def chosen_implementations(names: Sequence[str], device: torch.device) -> Implementations:
    """Read the names of implementations of the torture suite; "all" are tilewise and all peers that are here.

    Raises:
        InvalidInput: a name is unknown, or what it names cannot run here.
    """
    absent = {name: reason for name in peer_names() if (reason := missing(name, device))}
    chosen: dict[str, None] = {}
    for name in names:
        if name == "all":
            chosen |= dict.fromkeys([AUTOMATIC, *(peer for peer in peer_names() if peer not in absent)])
            continue
        if name in absent:
            raise InvalidInput(f"implementation is {name!r}, which cannot run on {device}: {absent[name]}.")
        implementation_named(name)
        chosen[name] = None
    return Implementations(list(chosen), absent if "all" in names else {})


def chosen_checks(names: Sequence[str] | None) -> Sequence[str]:
    """Read the names of checks of the torture suite; None are all.

    Raises:
        InvalidInput: a name is unknown.
    """
    for name in names or ():
        check_choice("only", name, ALL)
    return tuple(dict.fromkeys(names)) if names else ALL


def flags_cell(heads: tuple[int, int | None], lengths: tuple[int, int | None], dims: tuple[int, int | None], *,
               b: int, dtype: torch.dtype, mask: str, options: Mapping[str, Any] = _NO_OPTIONS) -> Cell:
    """Return the problem that flags describe; the second of each pair defaults to the first.

    ``options``: fields of a :class:`tilewise.testing.cases.Case`.

    Raises:
        InvalidInput: an option is none that a case can have.
    """
    first = [(given, given if other is None else other) for given, other in (heads, lengths, dims)]
    case = shape_case(b, first[0], first[1], first[2], parse_mask(mask))
    return Cell("flags", replace(case, name="flags", **options) if options else case, dtype)


def grid_choice(names: Sequence[str], seqs: str | None, dims: str | None, family: str | None,
                directions: Sequence[Direction]) -> list[Cell]:
    """Return the cells of grids that flags keep.

    Raises:
        InvalidInput: a flag is no list of integers, families are named and not their grid, or no cell is left.
    """
    if family is not None and "families" not in names:
        raise InvalidInput(f"--family is {family!r} without --grid families, which has them; allowed are both, or "
                           "neither.")
    cells = filtered(grid_cells(names), comma_integers("seqs", seqs), comma_integers("dims", dims), comma_list(family),
                     directions)
    if not cells:
        raise InvalidInput("no case of the grid is left by --seqs, --dims, --family and --direction.")
    return cells


def shape_calls(lengths: list[int], shape: dict[str, Any], mask: str | None) -> list[CallShape]:
    """Return a call for each query length, of the flags that are given."""
    fields = {name: value for name, value in shape.items() if value is not None}
    band = None if mask is None else parse_mask(mask)
    return [CallShape(sq=length, mask=band, **fields) for length in lengths]


def model_calls(name: str, lengths: list[int], shape: dict[str, Any], mask: str | None) -> list[CallShape]:
    """Return the calls of a model's layers.

    Raises:
        InvalidInput: a flag is given that the model answers, or the model cannot be read.
    """
    allowed = ("b", "dtype", "backward")
    for flag, value in (*shape.items(), ("mask", mask)):
        if value is not None and value is not False and flag not in allowed:
            raise InvalidInput(f"--model and --{flag} are both given; allowed beside a model are --sq, --b, --dtype "
                               "and --forward-only.")
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise InvalidInput("--model is given and Transformers is not installed; install 'tilewise[transformers]', or "
                           "give the shape.") from error
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise InvalidInput(f"--model is {name!r}, and Transformers cannot read its configuration; allowed is a folder "
                           f"with a config.json, or a name on the hub: {str(error).partition(chr(10))[0]}") from error
    return list(calls_of_model(config, lengths, **{flag: shape[flag] for flag in allowed if shape[flag] is not None}))
