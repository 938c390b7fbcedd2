"""Search the tiles of the Triton or Gluon kernels on a device: which problems, and the kernels behind tuning/search.py.

A problem holds 16384 tokens of 2048 elements however long its sequences are, as the grid "paper" does. Every tile's
result is held against dense float64 attention on the first and the last head before it is timed.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

import torch

from tilewise.bench.accuracy import References, check_plan
from tilewise.bench.checking import one_line
from tilewise.bench.clocks import ClockSampler
from tilewise.bench.compile_ahead import Task, Tile, tile_compiler
from tilewise.bench.grids import Cell, dtype_name
from tilewise.bench.provenance import Provenance
from tilewise.bench.shapes import CAUSAL, FULL, shape_case
from tilewise.bench.tile_launches import PER_ROW, RESULTS, TENSORS, tile_launch
from tilewise.bench.timing import Call, Regime, measure
from tilewise.compile_ahead.pool import AheadCompiler
from tilewise.dispatch import get_backend
from tilewise.errors import InvalidInput
from tilewise.problem import AttentionProblem
from tilewise.testing.inputs import make_inputs
from tilewise.tuning.candidates_hopper import propose_hopper
from tilewise.tuning.device import DeviceSpec, device_spec
from tilewise.tuning.kinds import HOPPER_KINDS, AnyConfig
from tilewise.tuning.search import MOST_CANDIDATES, Finding, Proposals, propose, search
from tilewise.tuning.select import split_dkdv, wants_descriptors
from tilewise.tuning.table import Bucket, Row, make_row

WIDTHS = (64, 128, 256)
MASKS = {"none": FULL, "causal": CAUSAL}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KERNELS = {"triton": tuple(kernel for kernel in TENSORS if kernel not in HOPPER_KINDS), "gluon": tuple(HOPPER_KINDS)}
# Shorter bursts than a benchmark's: a search has many tiles, and its rounds repeat them.
REGIME = Regime("tuning", turns=1, warmup=1.0, burst=6.0, idle_factor=2.0)


@dataclass(frozen=True)
class Wanted:
    """The problems to tune for; without kernels, those that the backend launches.

    Attributes:
        backend: whose kernels, "triton" or "gluon".
        tokens, hidden: batch times length (one sequence at least), and heads times head dim.
    """

    kernels: Sequence[str] = ()
    widths: Sequence[int] = WIDTHS
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,)
    masks: Sequence[str] = tuple(MASKS)
    lengths: Sequence[int] = (512, 2048, 8192)
    tokens: int = 16384
    hidden: int = 2048
    backend: str = "triton"


@dataclass(frozen=True)
class TuningPlan:
    """The choices of a run.

    Attributes:
        most: tiles a task at most.
        budget: seconds, after which no task starts; None = no limit.
        on_step: told in words what happens next.
    """

    device: torch.device
    tasks: Sequence[Task]
    most: int = MOST_CANDIDATES
    budget: float | None = None
    regime: Regime = REGIME
    on_step: Callable[[str], None] = field(default=lambda text: None)


def demand_gpu(device: torch.device) -> None:
    """Raise :class:`InvalidInput` where the time of a kernel would say nothing."""
    if device.type != "cuda":
        raise InvalidInput(f"device is {str(device)!r}: tiles are timed where they will run; allowed is a GPU (cuda).")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise InvalidInput("TRITON_INTERPRET is 1: interpreted kernels have no tiles to time; unset it.")


def tasks(wanted: Wanted, device: torch.device) -> list[Task]:
    """Return a task for every kernel and problem; those of one problem stand together.

    Raises:
        InvalidInput: a kernel, width, dtype, mask or length that tables have no row for, or cannot be checked.
    """
    if wanted.backend not in KERNELS:
        raise InvalidInput(f"backend is {wanted.backend!r}; allowed are {', '.join(KERNELS)}, which have tables.")
    for name, given, allowed in (("kernels", wanted.kernels, KERNELS[wanted.backend]),
                                 ("widths", wanted.widths, WIDTHS),
                                 ("dtypes", wanted.dtypes, DTYPES), ("masks", wanted.masks, tuple(MASKS))):
        for value in given:
            if value not in allowed:
                raise InvalidInput(f"{name} has {_name(value)}; allowed are {', '.join(map(_name, allowed))}.")
    if {torch.float16, torch.bfloat16} <= set(wanted.dtypes):
        raise InvalidInput("dtypes has float16 and bfloat16, whose problems share their rows; allowed is one of them.")
    found = []
    for width, dtype, mask, length in product(wanted.widths, wanted.dtypes, wanted.masks, wanted.lengths):
        if length < 1:
            raise InvalidInput(f"lengths has {length}; allowed are 1 and more.")
        heads = wanted.hidden // width
        case = shape_case(max(1, wanted.tokens // length), (heads, heads), (length, length), (width, width),
                          MASKS[mask], "bshd")
        cell = Cell("tune", case, dtype)
        if not check_plan(cell, device).is_full_shape:
            raise InvalidInput(f"lengths has {length}, too long to be checked against dense attention on {device}; "
                               "rows of shorter lengths serve it.")
        launched = _launched(cell.problem(device), device, wanted.backend)
        found += [Task(kernel, cell) for kernel in wanted.kernels or launched]
    if not found:
        raise InvalidInput("nothing to tune: widths, dtypes, masks and lengths need one value each at least.")
    return found


def tune(plan: TuningPlan) -> Iterator[tuple[Task, Finding]]:
    """Yield each task with what was found, as they come; stops early when the budget is spent."""
    start, spec, on_gpu = time.monotonic(), device_spec(plan.device), plan.device.type == "cuda"
    proposals = {}
    for task in plan.tasks:
        problem = task.problem(plan.device)
        proposals[task] = _proposed(task.kernel, problem, spec, plan.most)
    tiles = [(task, config) for task in plan.tasks for config in proposals[task].tiles if on_gpu]
    stage = None
    with contextlib.ExitStack() as stack:
        if on_gpu:
            stack.enter_context(torch.cuda.device(plan.device))
        clocks = stack.enter_context(ClockSampler(plan.device))
        workers = max(1, (os.cpu_count() or 1) - 1)  # one core is left to the timing
        ahead = stack.enter_context(AheadCompiler(tiles, tile_compiler(_target() if on_gpu else None), workers))
        for task in plan.tasks:
            if plan.budget is not None and time.monotonic() - start > plan.budget:
                return
            plan.on_step(str(task))
            if stage is None or stage.cell != task.cell:
                stage = Stage(task.cell, plan.device)
            yield task, search(KernelTrial(task, stage, plan, ahead, clocks), proposals[task])


def _launched(problem: AttentionProblem, device: torch.device, backend: str) -> tuple[str, ...]:
    """Return the kernels that a backend launches for a problem's two passes.

    Raises:
        InvalidInput: the backend does not take the problem; its own kernels could not be run.
    """
    if backend == "triton":
        split = split_dkdv(problem, device_spec(device))
        return ("forward", *(("dk", "dv") if split else ("dkdv",)), "dq")
    reason = get_backend(backend).why_not(problem)
    if reason is not None:
        raise InvalidInput(f"backend is {backend!r}, which {reason}.")
    return KERNELS[backend]


def _proposed(kernel: str, problem: AttentionProblem, spec: DeviceSpec, most: int) -> Proposals:
    if kernel in HOPPER_KINDS:
        return propose_hopper(kernel, problem, spec, most)
    return propose(kernel, problem, spec, descriptors=wants_descriptors(problem, spec), most=most)


class Stage:
    """The tensors of one cell on the device, and the exact results of its first and last head."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        self.cell = cell
        inputs = make_inputs(cell.case, cell.dtype, device)
        check = check_plan(cell, device)
        self.references = References.of(replace(check, groups=(check.groups[0], check.groups[-1])), inputs,
                                        lse_grad=False)
        out, lse = get_backend("triton").forward(cell.problem(device), inputs.q, inputs.k, inputs.v)[:2]
        delta = (out.float() * inputs.dout.float()).sum(-1).contiguous()
        self.tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "dout": inputs.dout, "lse": lse, "delta": delta}


class KernelTrial:
    """One kernel on one cell's tensors; see :class:`tilewise.tuning.search.Trial`."""

    def __init__(self, task: Task, stage: Stage, plan: TuningPlan, ahead: AheadCompiler[Tile],
                 clocks: ClockSampler) -> None:
        self._task, self._stage, self._plan, self._ahead, self._clocks = task, stage, plan, ahead, clocks
        self._problem = task.problem(plan.device)
        q, lse = stage.tensors["q"], stage.tensors["lse"]
        # Results of its own: a wrong tile must not spoil what the next kernel reads.
        made = {name: torch.empty_like(lse) if name in PER_ROW else torch.empty_strided(q.shape, q.stride(),
                                                                                        dtype=q.dtype, device=q.device)
                for name in TENSORS[task.kernel] if name not in stage.tensors or name in RESULTS[task.kernel]}
        self._results = {name: made[name] for name in RESULTS[task.kernel]}
        self._tensors = [(stage.tensors | made)[name] for name in TENSORS[task.kernel]]
        self._calls: dict[str, Call] = {}

    def fault(self, config: AnyConfig) -> str | None:
        """Compile and run once, and compare; the results are NaN before, so that none can be left over."""
        self._plan.on_step(f"{self._task}: checking {config}")
        died = self._ahead.fault((self._task, config))
        if died is not None:
            return died
        for tensor in self._results.values():
            tensor.fill_(float("nan"))
        call = partial(tile_launch(self._task.kernel, self._problem, config), *self._tensors)
        try:
            call()
            if self._plan.device.type == "cuda":
                torch.cuda.synchronize(self._plan.device)
        except Exception as error:  # Triton, the assembler and the driver refuse a tile each by an exception of its own
            return one_line(error)
        self._calls[str(config)] = call
        over = [report for report in self._stage.references.reports(self._results) if not report.ok]
        return "; ".join(map(str, over)) or None

    def time(self, configs: Sequence[AnyConfig]) -> list[float]:
        """Give every tile a turn."""
        self._plan.on_step(f"{self._task}: timing {len(configs)} tiles")
        times = measure({str(config): self._calls[str(config)] for config in configs}, self._plan.regime,
                        self._plan.device, self._clocks)
        return [times[str(config)].p50 for config in configs]


def rows_of(task: Task, finding: Finding, device: torch.device) -> tuple[list[Row], list[Row]]:
    """Return the table's rows and the faults' rows of one task."""
    problem = task.problem(device)
    bucket = Bucket.of(problem)
    is_hopper = task.kernel in HOPPER_KINDS
    own = _proposed(task.kernel, problem, device_spec(device), most=1).plain if is_hopper else None
    rows = [make_row(bucket, choice.config, own, ms=_rounded(choice.ms), heuristic_ms=_rounded(choice.heuristic_ms),
                     candidates=choice.candidates) for choice in finding.choices]
    return rows, [make_row(bucket, fault.config) | {"reason": fault.reason} for fault in finding.faults]


def table_provenance(origin: Provenance, device: torch.device) -> dict[str, str]:
    """Return what a table says of its making."""
    return {"device": origin.device_name, "arch": device_spec(device).arch, "driver": origin.driver,
            "torch": origin.torch, "triton": origin.triton, "tilewise": origin.tilewise, "commit": origin.commit,
            "date": origin.date, "command": origin.command}


def _target() -> object:
    """What Triton compiles for on the current device."""
    from triton.runtime import driver

    return driver.active.get_current_target()


def _rounded(ms: float | None) -> float | None:
    return None if ms is None else float(f"{ms:.6g}")


def _name(value: object) -> str:
    return dtype_name(value) if isinstance(value, torch.dtype) else str(value)
