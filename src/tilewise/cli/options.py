"""What flags mean: their types, and the problems and devices they describe."""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import torch
import typer

from tilewise.bench.grids import DTYPE_NAMES, Cell, parse_dtype, shape_case
from tilewise.bench.mask_text import FORMS, parse_mask
from tilewise.bench.providers import AUTOMATIC
from tilewise.bench.torture_peers import implementation_named, missing, peer_names
from tilewise.compile_ahead import GPUS, CallShape, calls_of_model
from tilewise.errors import InvalidInput

Batch = Annotated[int, typer.Option("--b", min=1, help="Batch size.")]
QueryHeads = Annotated[int, typer.Option("--hq", min=1, help="Query heads.")]
KeyHeads = Annotated[int | None, typer.Option("--hk", min=1, help="Key/value heads; default: as many as query heads.")]
OwnLength = Annotated[int | None, typer.Option("--sq", min=1, help="Query length: take the shape that flags give.")]
KeyLength = Annotated[int | None, typer.Option("--sk", min=0, help="Key length; default: the query length.")]
HeadDim = Annotated[int, typer.Option("--d", min=1, help="Head dim of q and k.")]
ValueDim = Annotated[int | None, typer.Option("--dv", min=1, help="Head dim of v; default: as q and k.")]
MaskText = Annotated[str, typer.Option("--mask", help=f"{FORMS}; RIGHT and LEFT may be inf.")]
DeviceName = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1, ...; default: a GPU if there is "
                                                                  "one.")]
GpuName = Annotated[str | None, typer.Option("--device", help=f"A GPU, which need not be here: {', '.join(GPUS)}, or "
                                              "ARCH:MULTIPROCESSORS:NAME as in 'sm_90:132:NVIDIA H200'; default: the "
                                              "one that is here.")]
CommitHash = Annotated[str | None, typer.Option("--commit", help="Hash of the code, for what is written. Default: what "
                                                                 "git says of the source tree.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write one JSON value to standard output, and nothing else.")]


# What describes a shape of one's own, together with --sq.
SHAPE_FLAGS = ("b", "hq", "hk", "sk", "d", "dv", "mask")


def given(context: typer.Context, names: Sequence[str]) -> list[str]:
    """Return those of these flags that were typed, as they are written."""
    # By its name: typer has a copy of click's, and so a source of its own, from 0.16 on.
    return [f"--{name}" for name in names if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]


def demand(context: typer.Context, names: Sequence[str], needed: str) -> None:
    """Raise :class:`InvalidInput` if one of these flags was typed: they have no effect without what is needed."""
    if typed := given(context, names):
        raise InvalidInput(f"{_listed(typed)} given without {needed}; allowed are both, or neither.")


def forbid(context: typer.Context, names: Sequence[str], other: str, why: str) -> None:
    """Raise :class:`InvalidInput` if one of these flags was typed: beside the other they have no effect."""
    if typed := given(context, names):
        raise InvalidInput(f"{_listed(typed)} given beside {other}, {why}; allowed is one of them.")


def _listed(flags: Sequence[str]) -> str:
    return f"{flags[0]} is" if len(flags) == 1 else f"{', '.join(flags[:-1])} and {flags[-1]} are"


def parse_dtypes(text: str) -> list[torch.dtype]:
    """Read 'float32,bfloat16'. Raises :class:`InvalidInput` for an unknown one, and for none."""
    if not (names := comma_list(text)):
        raise InvalidInput(f"dtype is {text!r}; allowed are {', '.join(DTYPE_NAMES)}, with commas between them.")
    return [parse_dtype(name) for name in names]


def chosen_device(name: str | None) -> torch.device:
    """Read a device's name, or choose. Raises :class:`InvalidInput` for one that is not here."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidInput(f"device is {name!r}; allowed are cpu, cuda, or cuda:INDEX.") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidInput(f"device is {name!r}; allowed are cpu, cuda, or cuda:INDEX.")
    return device


def usable_device(name: str | None) -> torch.device:
    """As :func:`chosen_device`, and demand that work can run there; "cuda" is the current GPU, as tensors name it."""
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


def flags_cell(heads: tuple[int, int | None], lengths: tuple[int, int | None], dims: tuple[int, int | None], *,
               b: int, dtype: torch.dtype, mask: str) -> Cell:
    """Return the problem that flags describe; the second of each pair defaults to the first."""
    first = [(given, given if other is None else other) for given, other in (heads, lengths, dims)]
    return Cell("flags", shape_case(b, first[0], first[1], first[2], parse_mask(mask)), dtype)


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


def comma_list(text: str | None) -> list[str]:
    """Split 'a,b' into its parts; nothing given is an empty list."""
    return [part.strip() for part in text.split(",") if part.strip()] if text else []


def comma_integers(name: str, text: str | None) -> list[int]:
    """Split '512,1024' into integers. Raises :class:`InvalidInput` naming the flag."""
    parts = comma_list(text)
    if not all(part.isdecimal() for part in parts):
        raise InvalidInput(f"--{name} is {text!r}; allowed are integers with commas between them.")
    return [int(part) for part in parts]
