"""What each version of Triton makes of the Hopper kernels, timed side by side in one process.

Without a GPU, once with each version first on PYTHONPATH:

    python benchmarks/triton_versions.py compile compiled/3.9.0.xz

writes the machine code of every kernel that the calls of the grids launch, as that version compiles them. Then on a
Hopper GPU, with any version installed:

    python benchmarks/triton_versions.py time compiled/*.xz --out triton-versions.csv

launches all of them on the same tensors, in turn, and writes a row for each cell, pass and version, with the ratio of
its time to that of the oldest version. A result that differs from the oldest version's by more than rounding is an
error. ``table`` prints the Markdown table of such rows.
"""

import argparse
import csv
import lzma
import pickle
import statistics
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tilewise.bench.grids import Cell, grid_cells
from tilewise.kernels import driver
from tilewise.kernels.driver import Image

GRIDS = ("paper", "gqa", "seeds")
PASSES = ("forward", "backward")
_CALLS = 3  # in a graph
_ROUNDS, _LEAST_ROUNDS = 21, 7
_SECONDS = 0.5  # that a pass of a cell may take, unless that is too short for the least rounds
_NEAR = {torch.bfloat16: 2e-2, torch.float16: 4e-3}  # of results of two versions, relative to the largest


@dataclass(frozen=True)
class Row:
    """A pass of a cell, by the kernels of one version."""

    grid: str
    case: str
    direction: str
    dtype: str
    triton: str
    ms_p50: float
    ratio: float
    spilled_bytes: int
    device_name: str
    driver: str
    torch: str
    commit: str
    date: str


def compile_all(path: Path) -> None:
    """Compile the kernels of every cell with the Triton that is installed; keep them by cell, pass and launch."""
    import triton

    kernels = kernels_of_cells(GRIDS)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(pickle.dumps((triton.__version__, kernels))))


def kernels_of_cells(grids: tuple[str, ...]) -> dict[tuple[str, str], list[tuple[Image, int]]]:
    """Return what the calls of grids launch, compiled for an H200: by cell and pass machine code and spilled bytes."""
    from tilewise import attention
    from tilewise.compile_ahead.gpu import GPUS, Settings, on_fake_gpu, prepare

    prepare(GPUS["h200"], Settings.here())
    kernels: dict[tuple[str, str], list[tuple[Image, int]]] = {}
    for cell in grid_cells(grids):
        made: list[tuple[Image, int]] = []

        def take(name: str, compile_kernel: Any, file: Path | None = None, made: list[Any] = made) -> None:
            compiled = compile_kernel()
            made.append((driver.image_of(compiled), spilled_bytes(compiled.asm["cubin"])))

        with on_fake_gpu(take):
            q, k, v = (torch.empty(shape, dtype=cell.dtype, device="cuda", requires_grad=True).transpose(1, 2)
                       for shape in shapes_of(cell))
            out = attention(q, k, v, mask=cell.case.mask)
            forward = len(made)
            torch.autograd.backward(out, torch.empty_like(out))
        kernels[str(cell), "forward"], kernels[str(cell), "backward"] = made[:forward], made[forward:]
        print(cell, [image.name for image, _ in made], flush=True)
    return kernels


def drawn_tensors(cell: Cell) -> tuple[torch.Tensor, ...]:
    """Return q, k, v and dout of a cell on the GPU."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape, dtype=cell.dtype, device="cuda").transpose(1, 2) for shape in shapes_of(cell))
    return q, k, v, torch.randn(*q.shape[:1], q.shape[2], q.shape[1], v.shape[3], dtype=cell.dtype,
                                device="cuda").transpose(1, 2)


def shapes_of(cell: Cell) -> list[tuple[int, ...]]:
    """Return those of q, k and v, as (b, s, h, d)."""
    case = cell.case
    return [(case.b, case.sq, case.hq, case.d), (case.b, case.sk, case.hk, case.d), (case.b, case.sk, case.hk, case.dv)]


def spilled_bytes(cubin: bytes) -> int:
    """Return the bytes of stack that a thread has, which are spilled registers."""
    import tempfile

    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True,
                              check=True).stdout
    return int(text.partition("STACK:")[2].split()[0])


class Bound:
    """A cell's passes by the kernels of one version; ``graphs``: of a few calls of each pass."""

    def __init__(self, cell: Cell, kernels: dict[tuple[str, str], list[tuple[Image, int]]],
                 tensors: tuple[torch.Tensor, ...]) -> None:
        from tilewise.backends.base import BindingBackend, Needs, Saved
        from tilewise.dispatch import choose
        from tilewise.problem.options import NO_OPERANDS
        from tilewise.support.caches import clear_caches

        q, k, v, dout = tensors
        clear_caches()
        problem = cell.problem(q.device)
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
        backend = choose(problem)
        assert isinstance(backend, BindingBackend)
        attend = backend.bind_forward(problem)
        with compiled_as(kernels[str(cell), "forward"]):
            out, lse = attend(lambda: (q, k, v), addresses, NO_OPERANDS)
        back = problem.backward(lse_grad=False)
        differentiate = choose(back).bind_backward(back, Saved(q, k, v, out, lse), dout, None, Needs())
        given = (q, k, v, out, lse, dout, None)
        at = tuple(tensor.data_ptr() for tensor in given[:-1])
        with compiled_as(kernels[str(cell), "backward"]):
            gradients = differentiate(given, at)
        torch.cuda.synchronize()
        self.results = {"forward": (out, lse), "backward": gradients}
        self.spilled = {name: max(spilled for _, spilled in kernels[str(cell), name]) for name in PASSES}
        calls = {"forward": lambda: attend(lambda: (q, k, v), addresses, NO_OPERANDS),
                 "backward": lambda: differentiate(given, at)}
        self.graphs = {name: captured(call) for name, call in calls.items()}


def captured(call: Any) -> torch.cuda.CUDAGraph:
    """Return a graph of as many calls as :func:`timed` divides by."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            call()
    return graph


class compiled_as:  # noqa: N801 - used as a function
    """Hand out these kernels, in their order, in the place of what Triton would compile."""

    def __init__(self, kernels: list[tuple[Image, int]]) -> None:
        self.left = [image for image, _ in kernels]

    def __enter__(self) -> None:
        from tilewise.kernels.enqueue import Enqueue

        self.kept = Enqueue.compile, driver.image_of
        Enqueue.compile = lambda enqueue, made: self._next(enqueue)  # type: ignore[method-assign, assignment]
        driver.image_of = lambda image: image

    def _next(self, enqueue: Any) -> Image:
        image = self.left.pop(0)
        assert image.name == enqueue.kernel.__name__, (image.name, enqueue.kernel.__name__)
        return image

    def __exit__(self, *error: object) -> None:
        from tilewise.kernels.enqueue import Enqueue

        Enqueue.compile, driver.image_of = self.kept  # type: ignore[method-assign]
        assert error[0] is not None or not self.left, [image.name for image in self.left]


def time_all(paths: list[Path], out: Path, commit: str | None) -> None:
    """Time every cell by every version's kernels."""
    from tilewise.bench.provenance import provenance

    given = [pickle.loads(lzma.decompress(path.read_bytes())) for path in paths]
    versions = dict(sorted(given, key=lambda one: tuple(map(int, one[0].split(".")))))
    oldest = next(iter(versions))
    origin = provenance(torch.device("cuda", 0), "", commit)
    rows: list[Row] = []
    for cell in grid_cells(GRIDS):
        tensors = drawn_tensors(cell)
        bound = {version: Bound(cell, kernels, tensors) for version, kernels in versions.items()}
        for name in PASSES:
            check(cell, name, {version: one.results[name] for version, one in bound.items()})
            times = timed({version: one.graphs[name] for version, one in bound.items()})
            rows += [Row(cell.grid, cell.case.name, name, str(cell.dtype).removeprefix("torch."), version,
                         round(times[version], 6), round(times[version] / times[oldest], 5), one.spilled[name],
                         origin.device_name, origin.driver, origin.torch, origin.commit, origin.date)
                     for version, one in bound.items()]
        print(cell, [row.ratio for row in rows[-2 * len(versions):]], flush=True)
        write_rows(out, rows)
    print(table(out))


def write_rows(out: Path, rows: list[Any]) -> None:
    """Write rows, dataclasses of one kind; anew after each cell: a run that is cut short has left its rows."""
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(map(asdict, rows))


def check(cell: Cell, name: str, results: dict[str, tuple[torch.Tensor, ...]]) -> None:
    """Raise unless all versions' results agree."""
    first, *others = results.items()
    for version, made in others:
        for got, wanted in zip(made, first[1], strict=True):
            error = (got.float() - wanted.float()).abs().max() / wanted.float().abs().max()
            if not error <= _NEAR[cell.dtype]:
                raise RuntimeError(f"{cell}, {name}: with {version} a result is {error:.2g} from that with {first[0]}")


def timed(graphs: dict[str, torch.cuda.CUDAGraph], seconds: float = _SECONDS) -> dict[str, float]:
    """Return the median milliseconds of a call, for each; they run in turn, in another order each round.

    seconds: after which no round begins, unless there were too few.
    """
    times: dict[str, list[float]] = {version: [] for version in graphs}
    order = list(graphs)
    began = time.perf_counter()
    for done in range(_ROUNDS):
        if done >= _LEAST_ROUNDS and time.perf_counter() - began > seconds:
            break
        order = order[1:] + order[:1]
        events = []
        for version in order:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graphs[version].replay()
            begin.record()
            graphs[version].replay()
            end.record()
            events.append((version, begin, end))
        torch.cuda.synchronize()
        for version, begin, end in events:
            times[version].append(begin.elapsed_time(end) / _CALLS)
    return {version: statistics.median(samples) for version, samples in times.items()}


def table(path: Path) -> str:
    """Return rows as Markdown: of each version and pass, the ratios of its times to the oldest's, and its spills."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    lines = ["| Triton | forward: mean | worst | spilled bytes | backward: mean | worst | spilled bytes |",
             "|---|" + "---:|" * 6]
    for version in dict.fromkeys(row["triton"] for row in rows):
        texts = [version]
        for name in PASSES:
            own = [row for row in rows if (row["triton"], row["direction"]) == (version, name)]
            ratios = [float(row["ratio"]) for row in own]
            texts += [f"{statistics.geometric_mean(ratios):.3f}", f"{max(ratios):.3f}",
                      str(max(int(row["spilled_bytes"]) for row in own))]
        lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("compile").add_argument("path", type=Path)
    timing = commands.add_parser("time")
    timing.add_argument("paths", type=Path, nargs="+")
    timing.add_argument("--out", type=Path, default=Path("triton-versions.csv"))
    timing.add_argument("--commit")
    commands.add_parser("table").add_argument("path", type=Path)
    given = parser.parse_args()
    if given.command == "compile":
        compile_all(given.path)
    elif given.command == "time":
        time_all(given.paths, given.out, given.commit)
    else:
        print(table(given.path))


if __name__ == "__main__":
    main()
