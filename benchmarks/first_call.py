"""Seconds that the first call of a process takes, with empty caches and after ``tilewise compile``.

    python benchmarks/first_call.py measure --out first-call.csv
    python benchmarks/first_call.py table first-call.csv

Each row is a process of its own, one after another, since a process compiles on several cores. What is timed begins
when torch and tilewise are imported and CUDA has started. ``--runs``: rows of each; the table has their medians, or the
times themselves where they are fewer than three.

Rows whose ``caches`` is "apart" are of a commit where tilewise began to compile the kernels of the backward pass, in
threads, when it compiled those of the forward pass. Its rows "empty" are of both at once, and those "apart" of each
pass's compiled where it is called, as it is now.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CASES = {"bfloat16": 4096, "float32": 2048}  # dtype -> length; one batch entry, 16 heads of 128, causal
AT_ONCE = "at once"
STATES = {"empty": "caches empty", AT_ONCE: "caches empty, both passes' kernels at once", "ahead": "compiled ahead"}
MEASURED = ("empty", "ahead")
FIELDS = ("dtype", "s", "caches", "forward_s", "backward_s", "compile_s", "forward_backend", "backward_backend",
          "device_name", "torch", "triton", "commit", "date")
_CALL = """
import json, sys, time
import torch
import tilewise as tw
dtype, s = getattr(torch, sys.argv[1]), int(sys.argv[2])
q, k, v = (torch.randn(1, 16, s, 128, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
dout = torch.randn_like(q)
torch.cuda.synchronize()
times = [time.perf_counter()]
out = tw.attention(q, k, v, mask=tw.causal())
torch.cuda.synchronize()
times.append(time.perf_counter())
out.backward(dout)
torch.cuda.synchronize()
times.append(time.perf_counter())
chosen = tw.explain(q, k, v, mask=tw.causal())
print(json.dumps([times[1] - times[0], times[2] - times[1], chosen.forward, chosen.backward]))
"""


def measure(out: Path, runs: int, commit: str | None) -> None:
    """Run every case with each state of the caches, some times, and write a row for each."""
    import torch

    from tilewise.bench.provenance import provenance

    origin = provenance(torch.device("cuda", 0), "", commit)
    jobs = [(dtype, s, state) for dtype, s in CASES.items() for state in MEASURED]
    with out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(FIELDS)
        for run in range(runs):
            for job in jobs:
                forward, backward, compiling, *backends = seconds_of(*job)
                print(f"run {run}: {job}: forward {forward:.1f}, backward {backward:.1f} s", flush=True)
                writer.writerow([*job, round(forward, 3), round(backward, 3), compiling, *backends, origin.device_name,
                                 origin.torch, origin.triton, origin.commit, origin.date])
                file.flush()
    print(table(out))


def seconds_of(dtype: str, s: int, state: str) -> tuple[float, float, float | str, str, str]:
    """Return seconds of the forward and the backward pass and of compiling ahead, and the backends."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TRITON_CACHE_DIR": f"{folder}/triton", "TILEWISE_CACHE": f"{folder}/tilewise",
                                    "CUDA_CACHE_PATH": f"{folder}/cuda"}  # NVRTC's own, from CUDA 12.9 on
        compiling: float | str = ""
        if state == "ahead":
            command = ["-m", "tilewise", "compile", "--sq", str(s), "--hq", "16", "--d", "128", "--mask", "causal",
                       "--dtype", dtype, "--json"]
            compiled = json.loads(run(command, environment))
            compiling = round(sum(kernel["seconds"] for kernel in compiled["kernels"]), 1)
        forward, backward, *backends = json.loads(run(["-c", _CALL, dtype, str(s)], environment))
    return forward, backward, compiling, *backends


def run(command: list[str], environment: dict[str, str]) -> str:
    """Return what a Python process printed; end with what it said, if it failed."""
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command} ended with {done.returncode}: {done.stderr[-4000:]}")
    return done.stdout


def table(path: Path) -> str:
    """Return rows as Markdown: medians of three runs and more, else every run; of each pass, and of both together."""
    rows: dict[tuple[str, str], list[dict[str, str]]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            rows.setdefault((row["dtype"], row["caches"]), []).append(row)
    for dtype in CASES:
        if (dtype, "apart") in rows:
            rows[dtype, AT_ONCE], rows[dtype, "empty"] = rows[dtype, "empty"], rows.pop((dtype, "apart"))
    states = [state for state in STATES if any(known == state for _, known in rows)]
    lines = [f"| first call in a new process, seconds | {' | '.join(STATES[state] for state in states)} |",
             "|---|" + "---:|" * len(states)]
    for dtype, s in CASES.items():
        given = rows[dtype, "empty"][0]
        passes = {f"{name}, {dtype}, {s} tokens, by `{given[f'{name}_backend']}`": (name,)
                  for name in ("forward", "backward")}
        passes[f"both, {dtype}, {s} tokens"] = ("forward", "backward")
        for text, names in passes.items():
            cells = []
            for state in states:
                seconds = [sum(float(row[f"{name}_s"]) for name in names) for row in rows.get((dtype, state), [])]
                shown = [statistics.median(seconds)] if len(seconds) > 2 else seconds
                cells.append(", ".join(f"{time:.1f}" for time in shown))
            lines.append(f"| {text} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--out", type=Path, default=Path("first-call.csv"))
    measuring.add_argument("--runs", type=int, default=3)
    measuring.add_argument("--commit")
    commands.add_parser("table").add_argument("path", type=Path)
    given = parser.parse_args()
    if given.command == "measure":
        measure(given.out, given.runs, given.commit)
    else:
        print(table(given.path))


if __name__ == "__main__":
    main()
