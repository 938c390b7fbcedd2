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


def test_the_table_has_medians_or_the_few_runs_themselves_and_the_sums_of_both_passes(first_call, tmp_path):
    rows = [("bfloat16", "empty", 6, 7), ("bfloat16", "empty", 5, 1), ("bfloat16", "empty", 9, 9),
            ("bfloat16", "ahead", 1, 0.5), ("float32", "empty", 2, 5), ("float32", "empty", 3, 6)]
    assert written(first_call, tmp_path / "rows.csv", rows).splitlines() == [
        "| first call in a new process, seconds | caches empty | compiled ahead |", "|---|---:|---:|",
        "| forward, bfloat16, 4096 tokens, by `gluon` | 6.0 | 1.0 |",
        "| backward, bfloat16, 4096 tokens, by `gluon` | 7.0 | 0.5 |",
        "| both, bfloat16, 4096 tokens | 13.0 | 1.5 |",
        "| forward, float32, 2048 tokens, by `gluon` | 2.0, 3.0 |  |",
        "| backward, float32, 2048 tokens, by `gluon` | 5.0, 6.0 |  |",
        "| both, float32, 2048 tokens | 7.0, 9.0 |  |"]


def test_rows_of_when_both_passes_were_compiled_at_once_are_told_from_those_of_now(first_call, tmp_path):
    rows = [("bfloat16", "apart", 6, 7), ("bfloat16", "empty", 6.5, 0.25), ("float32", "empty", 2, 5)]
    assert written(first_call, tmp_path / "rows.csv", rows).splitlines() == [
        "| first call in a new process, seconds | caches empty | caches empty, both passes' kernels at once |",
        "|---|---:|---:|",
        "| forward, bfloat16, 4096 tokens, by `gluon` | 6.0 | 6.5 |",
        "| backward, bfloat16, 4096 tokens, by `gluon` | 7.0 | 0.2 |",
        "| both, bfloat16, 4096 tokens | 13.0 | 6.8 |",
        "| forward, float32, 2048 tokens, by `gluon` | 2.0 |  |",
        "| backward, float32, 2048 tokens, by `gluon` | 5.0 |  |",
        "| both, float32, 2048 tokens | 7.0 |  |"]


def test_a_row_has_caches_of_its_own_that_of_nvrtc_too(first_call, monkeypatch):
    """Its second run found what the first had left in ~/.nv, and took a tenth of the time with "empty" caches."""
    seen = []
    monkeypatch.setattr(first_call, "run", lambda command, environment: seen.append(environment) or "[1, 2, 3, 4]")
    for _ in range(2):
        first_call.seconds_of("float32", 2048, "empty")
    for name in ("TRITON_CACHE_DIR", "TILEWISE_CACHE", "CUDA_CACHE_PATH"):
        assert len({environment[name] for environment in seen} - {os.environ.get(name)}) == 2


def test_what_a_process_said_is_told_where_it_failed(first_call):
    with pytest.raises(SystemExit, match="ended with 3: the reason"):
        first_call.run(["-c", "import sys; sys.stderr.write('the reason'); sys.exit(3)"], dict(os.environ))


# The script of a row, as if a GPU were here.
ON_FAKE_GPU = """
import importlib.util, sys
import torch
from tilewise.compile_ahead.gpu import GPUS, Settings, _Facts, _HostCode, prepare
from tilewise.kernels import driver
spec = importlib.util.spec_from_file_location("first_call", sys.argv.pop())
first_call = importlib.util.module_from_spec(spec)
spec.loader.exec_module(first_call)
prepare(GPUS["h200"], Settings.here())
driver.bind = lambda *given: lambda addresses: None
torch.cuda.synchronize = lambda: None
facts = _Facts()
with facts, _HostCode(facts):
    exec(first_call._CALL)
"""


@pytest.mark.aot
@pytest.mark.slow
def test_a_rows_script_times_both_passes(tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path),
                                "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])}
    done = subprocess.run([sys.executable, "-c", ON_FAKE_GPU, "bfloat16", "4096",
                           str(ROOT / "benchmarks/first_call.py")],
                          capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    row = json.loads(done.stdout)
    assert row[2:] == ["gluon", "gluon"]
    assert min(row[:2]) > 0
