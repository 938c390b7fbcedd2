"""The benchmark of first calls: what its table tells, and that its script runs where nothing is launched."""

import csv
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def first_call():
    spec = importlib.util.spec_from_file_location("first_call", ROOT / "benchmarks/first_call.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written(first_call, path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, first_call.FIELDS, restval="")
        writer.writeheader()
        for dtype, caches, forward, backward in rows:
            writer.writerow({"dtype": dtype, "caches": caches, "forward_s": forward, "backward_s": backward,
                             "forward_backend": "gluon", "backward_backend": "gluon"})
    return first_call.table(path)


def test_the_table_has_medians_and_the_sums_of_passes_that_were_timed_apart(first_call, tmp_path):
    rows = [("bfloat16", "apart", 6, 7), ("bfloat16", "apart", 5, 1), ("bfloat16", "apart", 9, 9),
            ("bfloat16", "empty", 6.5, 0.25), ("bfloat16", "ahead", 1, 0.5), ("float32", "empty", 2, 5),
            ("float32", "ahead", 0.1, 3)]
    assert written(first_call, tmp_path / "rows.csv", rows).splitlines()[2:] == [
        "| forward, bfloat16, 4096 tokens, by `gluon` | 6.0 | 6.5 | 1.0 |",
        "| backward, bfloat16, 4096 tokens, by `gluon` | 7.0 | 0.2 | 0.5 |",
        "| both, bfloat16, 4096 tokens | 13.0 | 6.8 | 1.5 |",
        "| forward, float32, 2048 tokens, by `gluon` |  | 2.0 | 0.1 |",
        "| backward, float32, 2048 tokens, by `gluon` |  | 5.0 | 3.0 |"]


def test_rows_without_passes_apart_have_the_table_that_the_docs_have(first_call):
    text = (ROOT / "docs/compile-ahead.md").read_text("utf-8")
    assert first_call.table(ROOT / "benchmarks/results/nvidia-h200/first-call.csv") in text


def test_what_a_process_said_is_told_where_it_failed(first_call):
    with pytest.raises(SystemExit, match="ended with 3: the reason"):
        first_call.run(["-c", "import sys; sys.stderr.write('the reason'); sys.exit(3)"], dict(os.environ))


# The script of a row, as if a GPU were here, with the threads that compile beside it.
ON_FAKE_GPU = """
import importlib.util, sys, threading
import torch
from tilewise.compile_ahead.gpu import GPUS, Settings, _Facts, _HostCode, prepare
from tilewise.kernels import driver
spec = importlib.util.spec_from_file_location("first_call", sys.argv.pop())
first_call = importlib.util.module_from_spec(spec)
spec.loader.exec_module(first_call)
prepare(GPUS["h200"], Settings.here())
driver.bind = lambda *given: lambda addresses: None
torch.cuda.synchronize = lambda: None
started, start = [], threading.Thread.start
threading.Thread.start = lambda thread: started.append(thread) or start(thread)
facts = _Facts()
with facts, _HostCode(facts):
    exec(first_call._CALL)
print(len(started))
"""


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("state", ["empty", "apart"])
def test_a_rows_script_compiles_beside_unless_passes_are_apart(state, tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path),
                                "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])}
    done = subprocess.run([sys.executable, "-c", ON_FAKE_GPU, "bfloat16", "4096", state,
                           str(ROOT / "benchmarks/first_call.py")],
                          capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    row, started = map(json.loads, done.stdout.splitlines())
    assert row[2:] == ["gluon", "gluon"]
    assert min(row[:2]) > 0
    assert started == {"empty": 4, "apart": 0}[state]  # what finds the kernels, and three of them
