"""Seconds that the first call of a process takes, with empty caches and after ``tilewise compile``.

    python benchmarks/first_call.py measure --out first-call.csv
    python benchmarks/first_call.py table first-call.csv

Each row is a process of its own. All of them run at once: with a core for each they do not wait for one another. What
is timed begins when torch and tilewise are imported and CUDA has started.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CASES = {"bfloat16": 4096, "float32": 2048}  # dtype -> length; one batch entry, 16 heads of 128, causal
STATES = ("empty", "ahead")
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


def measure(out: Path, commit: str | None) -> None:
    """Run every case with both states of the caches, and write a row for each."""
    import torch

    from tilewise.bench.provenance import provenance

    origin = provenance(torch.device("cuda", 0), "", commit)
    jobs = [(dtype, s, state) for state in reversed(STATES) for dtype, s in CASES.items()]
    with ThreadPoolExecutor(len(jobs)) as pool:
        found = list(pool.map(lambda job: seconds_of(*job), jobs))
    with out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(FIELDS)
        for job, (forward, backward, compiling, *backends) in zip(jobs, found, strict=True):
            writer.writerow([*job, round(forward, 3), round(backward, 3), compiling, *backends, origin.device_name,
                             origin.torch, origin.triton, origin.commit, origin.date])
    print(table(out))


def seconds_of(dtype: str, s: int, state: str) -> tuple[float, float, float | str, str, str]:
    """Return seconds of the forward and the backward pass and of compiling ahead, and the backends."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TRITON_CACHE_DIR": f"{folder}/triton", "TILEWISE_CACHE": f"{folder}/tilewise"}
        compiling: float | str = ""
        if state == "ahead":
            command = ["-m", "tilewise", "compile", "--sq", str(s), "--hq", "16", "--d", "128", "--mask", "causal",
                       "--dtype", dtype, "--json"]
            compiled = json.loads(run(command, environment))
            compiling = round(sum(kernel["seconds"] for kernel in compiled["kernels"]), 1)
        forward, backward, *backends = json.loads(run(["-c", _CALL, dtype, str(s)], environment))
    return forward, backward, compiling, *backends


def run(command: list[str], environment: dict[str, str]) -> str:
    """Return what a Python process printed."""
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True,
                          check=True).stdout


def table(path: Path) -> str:
    """Return rows as Markdown."""
    with path.open() as file:
        rows = {(row["dtype"], row["caches"]): row for row in csv.DictReader(file)}
    lines = ["| first call in a new process, seconds | caches empty | compiled ahead |", "|---|---:|---:|"]
    for dtype, s in CASES.items():
        for name in ("forward", "backward"):
            empty, ahead = (float(rows[dtype, state][f"{name}_s"]) for state in STATES)
            backend = rows[dtype, "empty"][f"{name}_backend"]
            lines.append(f"| {name}, {dtype}, {s} tokens, by `{backend}` | {empty:.1f} | {ahead:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--out", type=Path, default=Path("first-call.csv"))
    measuring.add_argument("--commit")
    commands.add_parser("table").add_argument("path", type=Path)
    given = parser.parse_args()
    if given.command == "measure":
        measure(given.out, given.commit)
    else:
        print(table(given.path))


if __name__ == "__main__":
    main()
