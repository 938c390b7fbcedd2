"""The commands: read flags, call the library, hand the outcome to render.py.

What needs torch is imported when a command runs, so that help and misspelt flags are answered at once.
"""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tilewise.cli import options as flags
from tilewise.errors import InvalidInput
from tilewise.support.names import BACKENDS

if TYPE_CHECKING:
    import torch

    from tilewise.bench.provenance import Provenance
    from tilewise.cli.inputs import Implementations

app = typer.Typer(name="tilewise", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Exact fused attention: what is here, what serves a call, how right, how fast.")
_CHECKED_DTYPES = "float32,bfloat16,float16"
_WRONG = 1
_OF_GRIDS = ("grid", "seqs", "dims", "family")
_CPU_GRID_BUDGET = 240.0  # seconds: the first command a newcomer runs must end
Folder = Annotated[Path, typer.Option("--out", help="Folder for what is written.")]


@app.command()
def info(*, as_json: flags.AsJson = False) -> None:
    """Tell versions, devices, and which backends are usable on each, and why not."""
    from tilewise.bench.environment import environment
    from tilewise.cli import render

    facts = environment()
    render.as_json(facts) if as_json else render.environment(facts)


@app.command()
def explain(  # noqa: PLR0913 - one parameter a flag
    context: typer.Context,
    *, b: flags.Batch = 1, hq: flags.QueryHeads = 8, hk: flags.KeyHeads = None,
    sq: Annotated[int, typer.Option("--sq", min=0, help="Query length.")] = 1024, sk: flags.KeyLength = None,
    d: flags.HeadDim = 64, dv: flags.ValueDim = None,
    dtype: flags.DtypeName = "float32", mask: flags.MaskText = "none", bias: flags.Bias = "",
    alibi: flags.Alibi = False, sinks: flags.Sinks = False, softcap: flags.Softcap = None, dropout: flags.Dropout = 0.0,
    deterministic: flags.Deterministic = False, device: flags.DeviceName = None,
    backend: flags.BackendName = None, as_json: flags.AsJson = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page of which backend serves which dtype, head "
                                                             "dim, mask and option instead.")] = None,
    arch: Annotated[str | None, typer.Option("--arch", help="On a GPU of this architecture, which need not be "
                                                            "here: sm_80, sm_90, sm_100, ...")] = None,
) -> None:
    """Tell which backend serves a problem, forward and backward, and each other one's reason.

    Nothing is allocated or computed. Exit status 1 when a pass is refused by every backend.
    """
    if html is not None:
        flags.forbid(context, ("sq", *flags.SHAPE_FLAGS, *flags.OPTION_FLAGS, "dtype", "backend"), "--html",
                     "which asks about every call")
        if as_json:
            raise InvalidInput("--json is given beside --html, which writes a page; allowed is one of them.")
    if arch is not None:
        flags.forbid(context, ("device",), "--arch", "which is of a device that need not be here")
    if html is not None:
        _explain_all(html, device, arch)
        return
    from tilewise.bench.grids import parse_dtype
    from tilewise.cli import inputs, render

    options = {"bias": bias, "alibi": "h" if alibi else "", "sinks": sinks, "softcap": softcap, "dropout_p": dropout}
    cell = inputs.flags_cell((hq, hk), (sq, sk), (d, dv), b=b, dtype=parse_dtype(dtype), mask=mask, options=options)
    answer = inputs.explanation(cell, device, arch, backend, deterministic=deterministic)
    render.as_json(render.explanation_facts(answer)) if as_json else render.explanation(answer)
    if answer.forward is None or answer.backward is None:
        raise typer.Exit(_WRONG)


def _explain_all(path: Path, device: str | None, arch: str | None) -> None:
    """Write the page of which backend serves which call."""
    import contextlib

    from tilewise.bench.provenance import device_name
    from tilewise.bench.support import as_if_on
    from tilewise.cli import inputs, session
    from tilewise.cli.support_page import support_page

    where = inputs.usable_device(device) if arch is None else None
    said = (f"On {device_name(where)}, with what is installed here." if where is not None else
            f"On a GPU of architecture {arch}, as if every optional package were installed, each in the oldest version "
            "that is taken.")
    with contextlib.nullcontext() if arch is None else as_if_on(arch):
        found = session.support_session("cuda" if where is None else str(where))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(support_page(said, found), encoding="utf-8")
    print(f"wrote {path}")


@app.command()
def check(  # noqa: PLR0913 - one parameter a flag
    context: typer.Context,
    *, case: Annotated[list[str] | None, typer.Option(help="A named case; may be repeated. Default: all.")] = None,
    backend: flags.BackendNames = None, dtype: flags.DtypeNames = _CHECKED_DTYPES,
    sq: flags.OwnLength = None, b: flags.Batch = 1, hq: flags.QueryHeads = 8, hk: flags.KeyHeads = None,
    sk: flags.KeyLength = None, d: flags.HeadDim = 64, dv: flags.ValueDim = None, mask: flags.MaskText = "none",
    device: flags.DeviceName = None, seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    verbose: Annotated[bool, typer.Option("--verbose", help="A line for every check, not only a summary.")] = False,
    torture: Annotated[bool, typer.Option("--torture", help="Run the torture suite instead, in bfloat16 unless --dtype "
                                                            "says otherwise.")] = False,
    implementation: flags.ImplementationNames = None, only: flags.CheckNames = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="File for the raw rows.")] = None,
    commit: flags.CommitHash = None, as_json: flags.AsJson = False,
) -> None:
    """Hold every usable backend against dense float64 attention: errors, budgets, the worst coordinate.

    With --torture, run the torture suite on tilewise or on other implementations: numbers, edges, layouts, sizes,
    determinism, graphs, streams. Exit status 1 when a result is outside its budget, or a backend breaks; of the torture
    suite, when tilewise or an implementation of your own fails a check.
    """
    import torch

    from tilewise.bench.grids import Cell
    from tilewise.bench.provenance import provenance
    from tilewise.cli import inputs, render, session
    from tilewise.testing.cases import CASES, case_named

    where = inputs.usable_device(device)
    if torture:
        flags.forbid(context, ("case", "backend", "sq", *flags.SHAPE_FLAGS, "seed", "verbose"), "--torture",
                     "which has problems of its own")
        dtypes = inputs.parse_dtypes(dtype) if flags.given(context, ["dtype"]) else [torch.bfloat16]
        _torture(inputs.chosen_implementations(implementation or ["tilewise"], where), where, dtypes,
                 inputs.chosen_checks(only), (csv, provenance(where, session.command_line(), commit)), as_json=as_json)
        return
    flags.demand(context, ("implementation", "only", "csv", "commit"), "--torture, the suite that it belongs to")
    if sq is not None and case:
        raise InvalidInput("--sq and --case are both given; allowed is a shape or named cases.")
    names = backend or BACKENDS
    dtypes = inputs.parse_dtypes(dtype)
    if sq is not None:
        cells = [inputs.flags_cell((hq, hk), (sq, sk), (d, dv), b=b, dtype=one, mask=mask) for one in dtypes]
    else:
        flags.demand(context, flags.SHAPE_FLAGS, "--sq, which makes a shape of its own in place of the named cases")
        chosen = [case_named(name) for name in case] if case else CASES
        cells = [Cell("cases", one, which) for which in dtypes for one in chosen]
    results = session.check_session(cells, names, where, seed)
    if as_json:
        render.as_json([render.check_facts(result) for result in results])
    else:
        render.checks(results, verbose=verbose)
    if not all(result.ok for result in results):
        raise typer.Exit(_WRONG)


def _torture(chosen: "Implementations", where: "torch.device", dtypes: "Sequence[torch.dtype]",
             checks: "Sequence[str]", kept: "tuple[Path | None, Provenance]", *, as_json: bool) -> None:
    """Run checks of the torture suite and tell; ``kept`` is the file for rows, and their provenance."""
    from tilewise.bench.torture_peers import is_own
    from tilewise.cli import render, session

    path, origin = kept
    rows = session.torture_session(chosen.present, where, dtypes, origin, path, checks)
    if as_json:
        render.as_json({"rows": [asdict(row) for row in rows], "absent": chosen.absent})
    else:
        render.torture(rows, chosen.absent)
        if path is not None:
            print(f"wrote {path}")
    if any(row.status == "fail" and is_own(row.implementation) for row in rows):
        raise typer.Exit(_WRONG)


@app.command()
def fuzz(
    *, seed: Annotated[int, typer.Option(min=0, help="First seed; a seed is one configuration.")] = 0,
    count: Annotated[int, typer.Option(min=1, help="Seeds to try, one after another.")] = 100,
    variation: Annotated[int, typer.Option(min=0, help="First variation of each seed; 0 is its own call.")] = 0,
    variations: Annotated[int, typer.Option(
        min=1, help="Variations of each seed: other sizes of the same options, with few kernels more.")] = 1,
    size: Annotated[Literal["tiny", "small", "large"] | None, typer.Option(
        help="Lengths to 40; to 150; or to 2048, with offsets past 2^31. Default: large on a GPU, else small.")] = None,
    backend: flags.BackendNames = None, device: flags.DeviceName = None, as_json: flags.AsJson = False,
) -> None:
    """Check random calls, all options mixed, odd strides, NaN in what is hidden, against dense float64 attention.

    A failure is printed when it is found, with the command that reproduces it. Exit status 1 when there was one.
    """
    from tilewise.cli import inputs, render, session
    from tilewise.testing.configurations import Size, draw

    where = inputs.usable_device(device)
    names = backend or BACKENDS
    level: Size = size or ("large" if where.type == "cuda" else "small")
    configurations = [draw(one, level, other) for one in range(seed, seed + count)
                      for other in range(variation, variation + variations)]
    findings = session.fuzz_session(configurations, names, where, partial(render.fuzz_failure, as_json=as_json))
    render.as_json([render.fuzz_facts(finding) for finding in findings]) if as_json else render.fuzz(findings)
    if not all(finding.check.ok for finding in findings):
        raise typer.Exit(_WRONG)


@app.command()
def bench(  # noqa: PLR0913 - one parameter a flag
    context: typer.Context,
    *, grid: flags.GridNames = None,
    sq: flags.OwnLength = None, b: flags.Batch = 1, hq: flags.QueryHeads = 8, hk: flags.KeyHeads = None,
    sk: flags.KeyLength = None, d: flags.HeadDim = 64, dv: flags.ValueDim = None, mask: flags.MaskText = "none",
    dtype: flags.DtypeName = "float32", providers: flags.ProviderNames = None,
    seqs: Annotated[str | None, typer.Option(help="Keep these query lengths of the grid; of decode, these "
                                                      "lengths of the cache.")] = None,
    dims: Annotated[str | None, typer.Option(help="Keep these head dims of the grid.")] = None,
    family: flags.FamilyNames = None,
    direction: Annotated[Literal["both", "forward", "backward"], typer.Option(help="Passes to time.")] = "both",
    regime: flags.RegimeName = None,
    graph: Annotated[bool, typer.Option("--graph", help="Time CUDA-graph replays of short calls: s <= 1024, or forward "
                                                        "passes of 50 GFLOP at most.")] = False,
    host: Annotated[bool, typer.Option("--host", help="Measure the host's cost of a call instead.")] = False,
    budget: Annotated[float | None, typer.Option(min=0, help="Seconds; a case that would not end in time is left out. "
                                                             "Default: 240 for the cpu grid, else no limit.")] = None,
    device: flags.DeviceName = None, out: Folder = Path("bench-out"),
    commit: flags.CommitHash = None,
    plots: Annotated[bool, typer.Option(help="Draw the figures too.")] = True, as_json: flags.AsJson = False,
) -> None:
    """Check, then time: this package beside dense attention, torch's kernels and other packages.

    Writes CSV rows, a Markdown table and figures. A wrong result is not timed. Exit status 1 when one of tilewise's
    own results is wrong or broke.
    """
    from tilewise.bench.grids import parse_dtype
    from tilewise.bench.host import host_cell
    from tilewise.bench.plan import Plan, available_providers, takers
    from tilewise.bench.provenance import provenance
    from tilewise.bench.providers import is_ours
    from tilewise.bench.roofline import DIRECTIONS
    from tilewise.bench.timing import regime_named
    from tilewise.cli import inputs, render, session

    where, shape_dtype = inputs.usable_device(device), parse_dtype(dtype)
    directions = DIRECTIONS if direction == "both" else (direction,)
    if host:
        flags.forbid(context, ("sq", *flags.SHAPE_FLAGS, "dtype", *_OF_GRIDS, "direction", "regime", "graph", "budget"),
                     "--host", "which times every call of one tiny shape")
    if graph and where.type != "cuda":
        raise InvalidInput(f"--graph is given on {where}; allowed is a GPU, which has graphs.")
    if sq is not None:
        if grid is not None:
            raise InvalidInput("--sq and --grid are both given; allowed is a shape or grids.")
        flags.forbid(context, _OF_GRIDS[1:], "--sq", "which is one shape and no grid to choose from")
        cells = [inputs.flags_cell((hq, hk), (sq, sk), (d, dv), b=b, dtype=shape_dtype, mask=mask)]
    else:
        flags.demand(context, (*flags.SHAPE_FLAGS, "dtype"), "--sq, which makes a shape of its own in place of a grid")
        names = flags.comma_list(grid) or ["paper" if where.type == "cuda" else "cpu"]
        budget = _CPU_GRID_BUDGET if budget is None and names == ["cpu"] else budget
        cells = inputs.grid_choice(names, seqs, dims, family, directions)
    present, absent = available_providers(flags.comma_list(providers), where)
    if not providers:
        present, idle = takers(present, [host_cell(where)] if host else cells, where)
        absent |= idle
    plan = Plan(where, present, regime_named(regime, where), provenance(where, session.command_line(), commit),
                directions, budget, graph)
    outcome = session.host_session(plan, out) if host else session.bench_session(cells, plan, out)
    if plots and not host:
        session.draw(outcome, out)
    render.bench_json(outcome, absent) if as_json else render.bench(outcome, absent)
    if any(row.status in ("wrong", "failed") and is_ours(row.provider) for row in outcome.rows):
        raise typer.Exit(_WRONG)


@app.command()
def tune(  # noqa: PLR0913 - one parameter a flag
    *, backend: Annotated[Literal["triton", "gluon"], typer.Option(
        help="Whose kernels; gluon's are Hopper's.")] = "triton",
    kernels: Annotated[str, typer.Option(help="forward, dkdv, dk, dv, dq, with commas; of gluon hopper_forward, "
                                              "hopper_backward. Default: those that calls launch.")] = "",
    widths: Annotated[str, typer.Option(help="Head dims, padded: 64, 128, 256.")] = "64,128,256",
    dtypes: flags.TunedDtypes = "bfloat16",
    masks: Annotated[str, typer.Option(help="none, causal.")] = "none,causal",
    lengths: Annotated[str, typer.Option(help="Query and key lengths.")] = "512,2048,8192",
    candidates: Annotated[int | None, typer.Option(min=1, help="Tiles to try for a row, at most. Default: 40.")] = None,
    budget: Annotated[float | None, typer.Option(min=0, help="Seconds after which no search starts.")] = None,
    device: flags.DeviceName = None, out: Folder = Path("tune-out"), commit: flags.CommitHash = None,
    as_json: flags.AsJson = False,
) -> None:
    """Time the tiles of the Triton or the Gluon kernels on this GPU, and write tables of the fastest.

    A tile whose result is wrong is never timed. Nothing else calls this: a table counts once it lies in the package.
    """
    from tilewise.bench.grids import parse_dtype
    from tilewise.bench.provenance import provenance
    from tilewise.bench.tuning_runs import TuningPlan, Wanted, demand_gpu, tasks
    from tilewise.cli import inputs, render, session
    from tilewise.tuning.search import MOST_CANDIDATES

    where = inputs.usable_device(device)
    demand_gpu(where)
    wanted = Wanted(flags.comma_list(kernels), flags.comma_integers("widths", widths),
                    [parse_dtype(name) for name in flags.comma_list(dtypes)], flags.comma_list(masks),
                    flags.comma_integers("lengths", lengths), backend=backend)
    plan = TuningPlan(where, tasks(wanted, where), candidates or MOST_CANDIDATES, budget)
    outcome = session.tune_session(plan, out, provenance(where, session.command_line(), commit))
    render.tuning_json(outcome) if as_json else render.tuning(outcome)


@app.command(name="compile")
def compile_kernels(  # noqa: PLR0913 - one parameter a flag
    *, sq: Annotated[str, typer.Option("--sq", help="Query lengths, with commas; a call of each is compiled.")],
    model: Annotated[str | None, typer.Option(help="Take the heads, head dims and masks of a model of Transformers: a "
                                                   "folder with its config.json, or its name.")] = None,
    b: flags.Batch = 1, hq: Annotated[int | None, typer.Option(min=1, help="Query heads; default: 8.")] = None,
    hk: flags.KeyHeads = None,
    sk: Annotated[int | None, typer.Option(min=1, help="Key length; default: the query length.")] = None,
    d: Annotated[int | None, typer.Option(min=1, help="Head dim of q and k; default: 128.")] = None,
    dv: flags.ValueDim = None,
    dtype: flags.CompiledDtype = None,
    mask: Annotated[str | None, typer.Option(help=f"{flags.MASK_FORMS}; default: none.")] = None,
    softcap: Annotated[float | None, typer.Option(help="Bound of the scores.")] = None,
    sinks: Annotated[bool, typer.Option("--sinks", help="Each head has a sink.")] = False,
    packed: Annotated[int | None, typer.Option(min=1, help="So many packed sequences; --sq is their total.")] = None,
    layout: Annotated[Literal["bhsd", "bshd"] | None, typer.Option(
        help="How q, k and v lie in memory; default: bhsd, and a model's bshd.")] = None,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Calls with deterministic=True.")] = False,
    forward_only: Annotated[bool, typer.Option("--forward-only", help="Calls without a backward pass.")] = False,
    backend: flags.BackendName = None,
    device: flags.GpuName = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that compile; default: one a core.")] = None,
    as_json: flags.AsJson = False,
) -> None:
    """Compile what calls launch into the caches on disk, ahead of the job that makes them; no GPU is needed.

    Kernels of Triton go to TRITON_CACHE_DIR, those of CUDA to TILEWISE_CACHE. Exit status 1 when a kernel cannot be
    compiled.
    """
    from tilewise.bench.grids import parse_dtype
    from tilewise.cli import inputs, render, session

    lengths = flags.comma_integers("sq", sq)
    shape = {"b": b, "hq": hq, "hk": hk, "sk": sk, "d": d, "dv": dv, "dtype": parse_dtype(dtype) if dtype else None,
             "softcap": softcap, "sinks": sinks, "packed": packed, "layout": layout,
             "deterministic": deterministic or None, "backend": backend, "backward": not forward_only}
    calls = (inputs.shape_calls(lengths, shape, mask) if model is None else
             inputs.model_calls(model, lengths, shape, mask))
    outcome = session.compile_session(calls, device, workers)
    render.as_json(render.compilation_facts(outcome)) if as_json else render.compilation(outcome)
    if not outcome.ok:
        raise typer.Exit(_WRONG)
