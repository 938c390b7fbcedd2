"""What compute-sanitizer and Triton's concurrency sanitizer say of small calls of every kernel.

On a GPU, where compute-sanitizer of CUDA's toolkit is on the PATH:

    python benchmarks/sanitizer.py run --out sanitizer.csv
    python benchmarks/sanitizer.py run --tools memcheck,racecheck --calls forward,decode
    python benchmarks/sanitizer.py table sanitizer.csv

Each call is a process of its own under each tool, several at a time; first all are made without a tool, which compiles
their kernels. A report is of a class: its kind, and the functions that it names. The classes in KNOWN are reported for
a reason that stands there, and are no faults. ``run`` writes a row for each tool and call, whenever a tool's calls have
ended, and its exit status is 1 if anything else was reported or a call did not end, and 2 if a tool is not there or
refuses this machine. Memory comes from the driver, not from torch's cache, whose blocks lie side by side: behind the
end of one would be another. Two of compute-sanitizer's tools are left out, which see no such kernels as these
(benchmarks/journal/races.md).
"""

import argparse
import ast
import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path

import tilewise
from tilewise.masks import Mask, causal, window
from tilewise.testing.cases import Case, case_named

KERNELS = Path(tilewise.__file__).parent / "kernels"
CONSAN = "consan"
TOOLS = ("memcheck", "racecheck", CONSAN)
PLAIN = ""  # in the place of a tool
CLEAN, REPORTED, FOUND, FAILED, LATE = "clean", "known", "found", "failed", "timed out"
REFUSED = ("Device not supported", "Unable to find injection library")
DONE = "the call has ended"
_BOTTOM, _WINDOW = causal("bottom_right"), window(40, 10, "top_left")

# Reports that are no faults: the tool, what both accesses are in, and why.
_ARRIVAL = ("a group of threads meets, and one of them arrives at an mbarrier for all: racecheck orders the arriving "
            "thread alone (benchmarks/journal/races.md)")
# A tile's numbers, P of the wide backward kernel, and overflow flags of the forward kernel.
_HANDED = ({"publish_tile", "read_tile"}, {"accumulate_dv", "accumulate_dk"}, {"accumulate_dv", "load_fragments"},
           {"publish_overflow", "overflow_of"}, {"publish_overflow", "retake_tile"})
KNOWN = {("racecheck", frozenset(pair)): _ARRIVAL for pair in _HANDED}
_WARPS = "Triton hands what its other warps need through shared memory, and starts them by one arrival"
KNOWN |= {("racecheck", frozenset({name})): _WARPS for name in (
    "hopper_forward_kernel", "hopper_backward_kernel", "hopper_backward_d64_kernel", "hopper_backward_d192_kernel",
    "hopper_backward_d256_kernel", "hopper_dq_d256_kernel", "hopper_dbias_kernel")}
KNOWN["racecheck", frozenset({"_clear_piece"})] = ("each warpgroup zeroes the rows of V behind a sequence's end for "
                                                   "itself, and writes the others as it read them: the same bits")
KNOWN[CONSAN, frozenset({"issue_dq"})] = ("the warpgroups meet at a named barrier in between, which is PTX that the "
                                         "sanitizer does not see (benchmarks/journal/races.md)")


@dataclass(frozen=True)
class Call:
    """A small call: the case, the backend, whether the gradients too, and the dtype's name."""

    case: Case
    backend: str = "gluon"
    backward: bool = True
    deterministic: bool = False
    dtype: str = "bfloat16"


def _case(heads: int, length: int, d: int, mask: Mask | None = None, **others: object) -> Case:
    sizes = {"b": 1, "hq": heads, "hk": heads, "sq": length, "sk": length, "d": d, "dv": d}
    return Case("small", mask=Mask() if mask is None else mask, **(sizes | others))  # type: ignore[arg-type]


_DATA = {"b": 3, "hk": 2, "lengths_q": (150, 1, 70), "lengths_k": (120, 40, 150)}
CALLS = {
    "forward_one_consumer": Call(_case(2, 200, 128), backward=False),
    "forward_two_consumers_causal": Call(_case(140, 130, 64, _BOTTOM), backward=False),
    "forward_three_consumers": Call(_case(20, 1100, 64), backward=False),
    "forward_window": Call(_case(2, 200, 64, _WINDOW), backward=False),
    "forward_comes_again": Call(_case(33, 600, 128, _BOTTOM, scale=8.0), backward=False),
    "forward_cut_256": Call(_case(2, 600, 256), backward=False),
    "forward_packed_heads": Call(_case(8, 7, 128, hk=2, sk=2500), backward=False),
    "narrow_in_order_causal": Call(_case(2, 200, 64, _BOTTOM), deterministic=True),
    "narrow_drawn": Call(_case(66, 300, 64)),
    "narrow_heads_alone": Call(_case(132, 140, 64, _BOTTOM)),
    "narrow_heads_shared": Call(_case(66, 600, 64, _BOTTOM)),
    "backward_128_in_order": Call(_case(2, 200, 128), deterministic=True),
    "backward_128_window": Call(_case(2, 200, 128, _WINDOW)),
    "backward_128_heads_alone": Call(_case(132, 140, 128)),
    "narrow_biased": Call(_case(66, 304, 64, bias="1hqk")),
    "backward_128_biased": Call(_case(2, 200, 128, _BOTTOM, bias="1hqk")),
    "backward_softcap": Call(_case(2, 200, 64, _BOTTOM, softcap=5.0)),
    "backward_lengths": Call(_case(4, 150, 64, _BOTTOM, **_DATA)),
    "backward_packed": Call(_case(4, 150, 128, **_DATA, packed="tight")),
    "backward_192": Call(_case(2, 200, 192, _BOTTOM, dv=128)),
    "backward_256": Call(_case(2, 200, 256)),
    "dbias": Call(_case(16, 1120, 128, _BOTTOM, b=4, bias="1hqk"), "triton"),
    "triton_everything": Call(case_named("everything"), "triton"),
    "triton_packed_everything": Call(case_named("packed_everything"), "triton"),
    "float32": Call(_case(2, 200, 64, _BOTTOM), "cuda", dtype="float32"),
    "float32_lengths": Call(_case(4, 150, 64, **_DATA), "cuda", dtype="float32"),
    "decode": Call(_case(8, 1, 128, hk=2, sk=3000), "triton", backward=False),
}


def make_call(name: str) -> None:
    """Make a call, and raise if a result is not finite where it must be."""
    import torch

    from tilewise.testing.inputs import call, make_inputs, make_operands

    if os.environ.get("TRITON_INSTRUMENTATION_MODE") == CONSAN:
        give_scratch_memory()
    own = CALLS[name]
    dtype = getattr(torch, own.dtype)
    inputs = make_inputs(own.case, dtype, "cuda", requires_grad=own.backward)
    operands = make_operands(own.case, dtype, "cuda", requires_grad=own.backward)
    if name.startswith("decode"):
        results = [tilewise.attention_decode(*inputs[:3], backend=own.backend)]
    else:
        results = [call(own.case, inputs[:3], operands, backend=own.backend, deterministic=own.deterministic)]
        if own.backward:
            trained = [tensor for tensor in (*inputs[:3], *operands.present) if tensor.requires_grad]
            results += torch.autograd.grad(results[0], trained, inputs.dout)
    torch.cuda.synchronize()
    if not all(bool(result.isfinite().all()) for result in results):
        raise SystemExit(f"{name}: a result is not finite")
    print(DONE, flush=True)


def give_scratch_memory() -> None:
    """Have Triton take from torch the memory in which the concurrency sanitizer's kernels note what they see.

    Triton knows the allocator in the thread alone that set it, so autograd shall run the backward pass in this one too.
    """
    import torch
    import triton

    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    torch.autograd.set_multithreading_enabled(False)


@dataclass(frozen=True)
class Report:
    """One report of a tool: its kind in words, without numbers, and the functions in which its accesses are."""

    kind: str
    places: frozenset[str]

    def __str__(self) -> str:
        return f"{self.kind} in {' and '.join(sorted(self.places)) or 'an unknown place'}"


def reports_of(tool: str, text: str) -> list[Report]:
    """Read what a tool has printed.

    A report of compute-sanitizer is a line behind ``=========`` that is not indented, and those behind it that are;
    one of racecheck names an access and those that it races with, each pair of which is a report here.
    """
    if tool == CONSAN:
        found = re.findall(r"(?m)^(\S+?\.py):(\d+):.*Assertion `(.*?)' failed", text)
        return [Report(_kind(words), frozenset({function_at(file, int(line))}))
                for file, line, words in dict.fromkeys(found)]
    reports: list[Report] = []
    block: list[str] = []
    for line in [*re.findall(r"(?m)^=========(.*)$", text), " end"]:
        if line.startswith("     "):
            block.append(line)
            continue
        reports += _of_block(block)
        block = [line]
    return reports


_NO_REPORTS = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "LEAK SUMMARY", "Target application",
               "Warning: Maximum number of hazards", "Saved host backtrace")


def _of_block(block: list[str]) -> list[Report]:
    """The reports of a line that is not indented with those behind it."""
    if not block or not (first := block[0].strip()) or first.startswith(_NO_REPORTS):
        return []
    race = re.match(r"(Error|Warning): Race reported between (Read|Write) access at (.*)", first)
    if race is None:
        places = {place for line in block if (place := _place_of(line)) is not None}
        return [Report(_kind(first), frozenset(places))]
    found = []
    for line in block[1:]:
        other = re.match(r"\s*and (Read|Write) access at (.*)", line)
        if other is not None:
            places = {_place_of(" at " + access) or "?" for access in (race[3], other[2])}
            found.append(Report(f"race of {race[2].lower()} and {other[1].lower()}", frozenset(places)))
    return found or [Report("race", frozenset())]


def _place_of(line: str) -> str | None:
    """The function that a line says it is at: that of its source line, else the kernel's; None where it says none."""
    found = re.search(r"\bat (?:(?P<kernel>\S[^+]*)\+)?0x[0-9a-f]+"
                      r"(?: in (?P<file>[^:\s]+):(?P<line>\d+)(?::(?P<own>\S+))?| in (?P<alone>\S+))?", line)
    if found is None or not any(found.group("kernel", "file", "alone")):
        return None
    if found["file"] is not None:
        named = function_at(found["file"], int(found["line"]))
        if named != "?":
            return named
    return str(found["kernel"] or found["own"] or found["alone"]).split("(")[0]


def _kind(words: str) -> str:
    """Words of a report without what differs from one to the next."""
    words = re.sub(r"0x[0-9a-f]+|\(\d+,\s?\d+,\s?\d+\)", "#", words)
    return re.sub(r"^(Error|Warning): ", "", words).strip(" :.")


@cache
def function_at(file: str, line: int) -> str:
    """Return the function of our kernels, or of Triton's library, that a line is in; "?" of a file that is neither."""
    name = Path(file).name
    places = [Path(file)] if Path(file).is_file() else sorted(KERNELS.rglob(name))
    if len(places) > 1:  # of one name the Gluon kernels' own, which alone have roles
        places = [place for place in places if "hopper" in place.relative_to(KERNELS).parts]
    if len(places) != 1 or places[0].suffix != ".py":
        return "?"
    inside = [(node.lineno, node.name) for node in ast.walk(ast.parse(places[0].read_text()))
              if isinstance(node, ast.FunctionDef) and min([node.lineno, *(
                  decorator.lineno for decorator in node.decorator_list)]) <= line <= (node.end_lineno or 0)]
    return max(inside)[1] if inside else "?"


def is_known(tool: str, report: Report) -> bool:
    """Whether a report is of a class that is no fault."""
    return (tool, report.places) in KNOWN


@dataclass(frozen=True)
class Row:
    """What a tool says of a call."""

    tool: str
    call: str
    outcome: str
    known: int
    other: int
    classes: str
    seconds: float
    sanitizer: str
    device_name: str
    driver: str
    torch: str
    triton: str
    commit: str
    date: str


def outcome_of(tool: str, text: str, *, ended: bool, late: bool) -> tuple[str, int, int, str]:
    """Return the outcome, how many reports are of known classes and how many of others, and all classes, counted.

    Args:
        tool: the tool's name.
        text: what its process printed.
        ended: whether the call got to its end.
        late: whether the process was stopped, since it took too long.
    """
    counted = Counter((str(report), is_known(tool, report)) for report in reports_of(tool, text))
    known = sum(times for (_, is_one), times in counted.items() if is_one)
    other = counted.total() - known
    classes = "; ".join(f"{times} x {words}{'' if is_one else ' (!)'}" for (words, is_one), times in sorted(
        counted.items()))
    if other:
        return FOUND, known, other, classes
    if late:
        return LATE, known, other, classes
    if not ended and not (tool == CONSAN and known):  # an assertion ends the call
        lines = [line for line in text.splitlines() if line.strip()]
        return FAILED, known, other, lines[-1][:300] if lines else "nothing was printed"
    return (REPORTED if known else CLEAN), known, other, classes


def is_fault(row: Row) -> bool:
    """Whether a row has what must not be. That the concurrency sanitizer's build takes too long is no fault of ours."""
    return row.outcome in (FOUND, FAILED, LATE) and not (row.tool == CONSAN and row.outcome in (FAILED, LATE))


def command_of(tool: str, call: str, sanitizer: str) -> list[str]:
    """Return the command line of a call's process."""
    own = [sys.executable, str(Path(__file__).resolve()), "call", call]
    if tool in (PLAIN, CONSAN):
        return own
    # CUDA's functions are looked up, and a kernel's parameters counted, until the driver says that there are no more.
    quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
    return [sanitizer, "--tool", tool, *quiet, "--show-backtrace", "no", "--print-limit", "1000", *own]


def environment_of(tool: str, folder: str) -> dict[str, str]:
    """Return the environment of a call's process; the builds of the concurrency sanitizer have a cache of their own."""
    made = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TILEWISE_CACHE": f"{folder}/tilewise",
                         "TRITON_CACHE_DIR": f"{folder}/triton"}
    if tool == CONSAN:
        made |= {"TRITON_INSTRUMENTATION_MODE": CONSAN, "TRITON_CACHE_DIR": f"{folder}/{CONSAN}"}
    return made


def printed(command: list[str], environment: dict[str, str], timeout: float) -> tuple[str, bool, float]:
    """Return what a process printed, whether it was stopped since it took too long, and seconds."""
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT,
                                   start_new_session=True)
        try:
            process.wait(timeout)
            late = False
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # the tool's own processes too
            process.wait()
            late = True
        out.seek(0)
        return out.read(), late, time.perf_counter() - began


def found_sanitizer(named: str | None) -> str:
    """Return where compute-sanitizer is.

    Raises:
        FileNotFoundError: it is not there.
    """
    places = [named] if named else ["compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer"]
    for place in places:
        if (path := shutil.which(place)) is not None:
            return path
    raise FileNotFoundError(f"compute-sanitizer is not at {' or '.join(places)}. It comes with CUDA's toolkit; name it "
                            "with --sanitizer, or choose --tools consan, which needs Triton alone")


def version_of(sanitizer: str) -> str:
    """Return the version that compute-sanitizer says it is."""
    text = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"[Vv]ersion (\S+)", text)
    return found[1] if found else text.strip()[:40]


def run(given: argparse.Namespace) -> int:
    """Make all calls under all tools, write the rows, and return the exit status."""
    import torch

    from tilewise.bench.provenance import provenance

    sanitizer = version = ""
    if set(given.tools) - {CONSAN}:
        try:
            sanitizer = found_sanitizer(given.sanitizer)
        except FileNotFoundError as error:
            print(error, file=sys.stderr)
            return 2
        version = version_of(sanitizer)
    origin = provenance(torch.device("cuda", 0), "", given.commit)
    calls = [name for name in CALLS if any(name.startswith(chosen) for chosen in given.calls)]
    rows: list[Row] = []
    refused: list[str] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:

        def made(job: tuple[str, str]) -> Row:
            tool, call = job
            text, late, seconds = printed(command_of(tool, call, sanitizer), environment_of(tool, folder),
                                          given.timeout)
            refused.extend(words for words in REFUSED if words in text and tool not in (PLAIN, CONSAN))
            row = Row(tool, call, *outcome_of(tool, text, ended=DONE in text, late=late), round(seconds, 1),
                      "" if tool == CONSAN else version, origin.device_name, origin.driver, origin.torch,
                      origin.triton, origin.commit, origin.date)
            if given.logs is not None:
                (given.logs / f"{call}.{tool or 'plain'}.txt").write_text(text)
            print(f"{tool or 'no tool':10} {call:32} {row.outcome:9} {seconds:6.1f} s  {row.classes}", flush=True)
            return row

        if given.logs is not None:
            given.logs.mkdir(parents=True, exist_ok=True)
        alone = list(pool.map(made, [(PLAIN, call) for call in calls]))
        if any(row.outcome != CLEAN for row in alone):
            print("calls fail without any tool", file=sys.stderr)
            return 1
        for tool in given.tools:
            rows += pool.map(made, [(tool, call) for call in calls])
            if refused:
                print(f"compute-sanitizer refuses this machine: {refused[0]}", file=sys.stderr)
                return 2
            write(given.out, rows)  # a run that is cut short leaves these
    print(table(given.out))
    return int(any(is_fault(row) for row in rows))


def write(path: Path, rows: list[Row]) -> None:
    """Write rows as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def table(path: Path) -> str:
    """Return, as Markdown, how many calls of each tool had which outcome, the classes, and where the rows come from."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    lines = ["| tool | calls | clean | known reports only | other reports | did not end | classes |",
             "|---|---:|---:|---:|---:|---:|---|"]
    for tool in dict.fromkeys(row["tool"] for row in rows):
        own = [row for row in rows if row["tool"] == tool]
        numbers = Counter(row["outcome"] for row in own)
        classes = sorted({re.sub(r"^\d+ x ", "", words) for row in own if row["outcome"] != FAILED
                          for words in row["classes"].split("; ") if words})
        lines.append(f"| {tool} | {len(own)} | {numbers[CLEAN]} | {numbers[REPORTED]} | {numbers[FOUND]} | "
                     f"{numbers[FAILED] + numbers[LATE]} | {'; '.join(classes)} |")
    origins = [("", "device_name"), ("driver ", "driver"), ("compute-sanitizer ", "sanitizer"), ("torch ", "torch"),
               ("Triton ", "triton"), ("commit ", "commit")]
    made_with = dict.fromkeys(title + row[name] for title, name in origins for row in rows if row[name])
    return "\n".join([*lines, "", f"{'; '.join(made_with)}."])


def _tools(text: str) -> list[str]:
    tools = text.split(",")
    if unknown := [tool for tool in tools if tool not in TOOLS]:
        raise argparse.ArgumentTypeError(f"got {', '.join(unknown)}; allowed are {', '.join(TOOLS)}")
    return tools


def _chosen(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := [own for own in chosen if not any(name.startswith(own) for name in CALLS)]:
        raise argparse.ArgumentTypeError(f"got {', '.join(unknown)}; allowed are beginnings of {', '.join(CALLS)}")
    return chosen


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="make calls under tools")
    running.add_argument("--out", type=Path, default=Path("sanitizer.csv"))
    running.add_argument("--tools", type=_tools, default=list(TOOLS), help=f"of {', '.join(TOOLS)} (default: all)")
    running.add_argument("--calls", type=_chosen, default=[""], help="beginnings of calls' names (default: all)")
    running.add_argument("--jobs", type=int, default=12, help="calls at once (default: 12)")
    running.add_argument("--timeout", type=float, default=150.0, help="seconds of one call (default: 150)")
    running.add_argument("--sanitizer", help="path of compute-sanitizer")
    running.add_argument("--logs", type=Path, help="folder for all that the tools print")
    running.add_argument("--commit", help="the commit, outside a checkout")
    commands.add_parser("call", help="make one call").add_argument("name", choices=CALLS)
    commands.add_parser("table", help="print the table of rows").add_argument("path", type=Path)
    return parser.parse_args(arguments)


def main() -> int:
    """Do what the command line says."""
    given = parsed()
    if given.command == "call":
        make_call(given.name)
    elif given.command == "table":
        print(table(given.path))
    else:
        return run(given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
