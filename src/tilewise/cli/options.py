"""Flags: their types, and what needs no torch to be said of what was typed."""

import re
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any

import typer

from tilewise.errors import InvalidInput
from tilewise.support.names import (
    BACKENDS,
    DTYPES,
    FAMILIES,
    GPUS,
    GRIDS,
    IMPLEMENTATIONS,
    MASK_FORMS,
    PROVIDERS,
    REGIMES,
)
from tilewise.validate.choices import check_backend, check_choice, check_implementation

_Check = Callable[[str], object]


def _each(check: _Check, *, commas: bool = False) -> Callable[[Any], Any]:
    """Return what hands each name that was typed to a check, before anything of torch is imported."""
    def callback(value: Any) -> Any:
        names = [] if value is None else comma_list(value) if commas else [value] if isinstance(value, str) else value
        for name in names:
            check(name)
        return value

    return callback


def _one_of(said: str, allowed: Collection[str]) -> _Check:
    return lambda name: check_choice(said, name, allowed)


def _check_device(name: str) -> None:
    if re.fullmatch(r"cpu|cuda(:\d{1,2})?", name) is None:
        raise InvalidInput(f"device is {name!r}; allowed are cpu, cuda, or cuda:INDEX.")


def _check_backend(name: str) -> None:
    check_backend(name, BACKENDS)


def _check_implementation(name: str) -> None:
    if name != "all":
        check_implementation(name, IMPLEMENTATIONS)


Batch = Annotated[int, typer.Option("--b", min=1, help="Batch size.")]
QueryHeads = Annotated[int, typer.Option("--hq", min=1, help="Query heads.")]
KeyHeads = Annotated[int | None, typer.Option("--hk", min=1, help="Key/value heads; default: as many as query heads.")]
OwnLength = Annotated[int | None, typer.Option("--sq", min=1, help="Query length: take the shape that flags give.")]
KeyLength = Annotated[int | None, typer.Option("--sk", min=0, help="Key length; default: the query length.")]
HeadDim = Annotated[int, typer.Option("--d", min=1, help="Head dim of q and k.")]
ValueDim = Annotated[int | None, typer.Option("--dv", min=1, help="Head dim of v; default: as q and k.")]
MaskText = Annotated[str, typer.Option("--mask", help=f"{MASK_FORMS}; RIGHT and LEFT may be inf.")]
DeviceName = Annotated[str | None, typer.Option("--device", callback=_each(_check_device), help=(
    "cpu, cuda, cuda:1, ...; default: a GPU if there is one."))]
GpuName = Annotated[str | None, typer.Option("--device", help=f"A GPU, which need not be here: {', '.join(GPUS)}, or "
                                              "ARCH:MULTIPROCESSORS:NAME as in 'sm_90:132:NVIDIA H200'; default: the "
                                              "one that is here.")]
CommitHash = Annotated[str | None, typer.Option("--commit", help="Hash of the code, for what is written. Default: what "
                                                                 "git says of the source tree.")]
Bias = Annotated[str, typer.Option("--bias", help="An additive bias with these dims, 1 where it is shared: bhqk, 1hqk, "
                                                  "11qk, ...")]
Alibi = Annotated[bool, typer.Option("--alibi", help="ALiBi slopes, one a head.")]
Sinks = Annotated[bool, typer.Option("--sinks", help="An attention sink, one a head.")]
Softcap = Annotated[float | None, typer.Option("--softcap", help="A softcap of the scores.")]
Dropout = Annotated[float, typer.Option("--dropout", help="The probability of dropout.")]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="Demand the same bits on every run.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write one JSON value to standard output, and nothing else.")]
BackendName = Annotated[str | None, typer.Option("--backend", callback=_each(_check_backend),
                                                 help=f"As if the call named it: {', '.join(BACKENDS)}.")]
BackendNames = Annotated[list[str] | None, typer.Option(
    "--backend", callback=_each(_check_backend), help="A backend; may be repeated. Default: all.")]
DtypeName = Annotated[str, typer.Option("--dtype", callback=_each(_one_of("dtype", DTYPES)),
                                        help=f"{', '.join(DTYPES[:-1])} or {DTYPES[-1]}.")]
CompiledDtype = Annotated[str | None, typer.Option(
    "--dtype", callback=_each(_one_of("dtype", DTYPES)),
    help="float16, bfloat16 or float32; default: the model's, or bfloat16.")]
DtypeNames = Annotated[str, typer.Option("--dtype", callback=_each(_one_of("dtype", DTYPES), commas=True),
                                         help="Dtypes, with commas.")]
TunedDtypes = Annotated[str, typer.Option("--dtypes", callback=_each(_one_of("dtype", DTYPES), commas=True),
                                          help="Dtypes; bfloat16 and float16 share their rows.")]
ImplementationNames = Annotated[list[str] | None, typer.Option(
    "--implementation", callback=_each(_check_implementation),
    help=f"On whom; may be repeated: {', '.join(IMPLEMENTATIONS)}, all, or MODULE:NAME of an Implementation of your "
         "own. Default: tilewise.")]
CheckNames = Annotated[list[str] | None, typer.Option(
    "--only", help="With --torture, a check; may be repeated. Default: all.")]
GridNames = Annotated[str | None, typer.Option(
    "--grid", callback=_each(_one_of("grid", GRIDS), commas=True),
    help=f"Grids, with commas: {', '.join(GRIDS)}. Default: paper on a GPU, else cpu.")]
FamilyNames = Annotated[str | None, typer.Option(
    "--family", callback=_each(_one_of("family", FAMILIES), commas=True),
    help=f"Keep these families of the grid families, with commas: {', '.join(FAMILIES)}.")]
ProviderNames = Annotated[str | None, typer.Option(
    "--providers", callback=_each(_one_of("provider", PROVIDERS), commas=True),
    help="Providers, with commas. Default: all that are here and take a case.")]
RegimeName = Annotated[str | None, typer.Option(
    "--regime", callback=_each(_one_of("regime", REGIMES)),
    help=f"{', '.join(REGIMES[:-1])} or {REGIMES[-1]}. Default: duty on a GPU, else turns.")]


# What describes a shape of one's own, together with --sq.
SHAPE_FLAGS = ("b", "hq", "hk", "sk", "d", "dv", "mask")
OPTION_FLAGS = ("bias", "alibi", "sinks", "softcap", "dropout", "deterministic")


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


def comma_list(text: str | None) -> list[str]:
    """Split 'a,b' into its parts; nothing given is an empty list."""
    return [part.strip() for part in text.split(",") if part.strip()] if text else []


def comma_integers(name: str, text: str | None) -> list[int]:
    """Split '512,1024' into integers. Raises :class:`InvalidInput` naming the flag."""
    parts = comma_list(text)
    if not all(part.isdecimal() for part in parts):
        raise InvalidInput(f"--{name} is {text!r}; allowed are integers with commas between them.")
    return [int(part) for part in parts]
