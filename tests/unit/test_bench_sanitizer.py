"""What benchmarks/sanitizer.py reads of the tools' reports, and what it makes of them."""

import argparse
import contextvars
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from compiled.compile_process import ROOT

SCRIPT = ROOT / "benchmarks/sanitizer.py"
spec = importlib.util.spec_from_file_location("sanitizer", SCRIPT)
sanitizer = importlib.util.module_from_spec(spec)
sys.modules["sanitizer"] = sanitizer  # dataclasses look their module up
spec.loader.exec_module(sanitizer)


def line_of(file, words):
    """Where in a file of the Gluon kernels these words are."""
    text = next((sanitizer.KERNELS / "hopper").rglob(file)).read_text()
    assert text.count(words) == 1
    return text[:text.index(words)].count("\n") + 1


# As compute-sanitizer of CUDA 12.9 and 13 words its reports.
NOTHING = """========= COMPUTE-SANITIZER
the call has ended
========= ERROR SUMMARY: 0 errors
"""
NO_RACE = """========= COMPUTE-SANITIZER
the call has ended
========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)
"""
OUT_OF_BOUNDS = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at attention_forward_kernel+0x2b0 in forward.py:120
=========     by thread (96,0,0) in block (3,0,0)
=========     Access at 0x7f1c46a00200 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f1c46a00000 of size 512 bytes
=========
========= Invalid __global__ read of size 16 bytes
=========     at attention_forward_kernel+0x2b0 in forward.py:120
=========     by thread (97,0,0) in block (3,0,0)
=========     Access at 0x7f1c46a00210 is out of bounds
=========     and is 17 bytes after the nearest allocation at 0x7f1c46a00000 of size 512 bytes
=========
========= Program hit CUDA_ERROR_LAUNCH_FAILED (error 719) due to "unspecified launch failure" on CUDA API call.
=========
========= Target application returned an error
========= ERROR SUMMARY: 3 errors
"""
MISALIGNED = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at hopper_dq_kernel+0x3f0
=========     by thread (0,0,0) in block (1,0,0)
=========     Address 0x7f8e1fc00004 is misaligned
=========
========= ERROR SUMMARY: 1 error
"""
IN_CUDA = """========= COMPUTE-SANITIZER
========= Invalid __shared__ write of size 4 bytes
=========     at 0x270 in /somewhere/attention_fp32.cu:101:attention_forward
=========     by thread (32,0,0) in block (0,0,0)
=========     Address 0x400 is out of bounds
=========
========= ERROR SUMMARY: 1 error
"""


def race(write, read, further=""):
    return f"""========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at hopper_forward_kernel+0xa440 in {write}
=========     and Read access at hopper_forward_kernel+0x1b20 in {read} [384 hazards]
{further}=========
the call has ended
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


HANDED = (f"tile_scheduler.py:{line_of('tile_scheduler.py', '.store(zero + tile[i])')}",
          f"tile_scheduler.py:{line_of('tile_scheduler.py', '.load(FOUR_WARPS)')}")
READ_EARLY = f"producers.py:{line_of('producers.py', 'def put_row_stats(') + 3}"
CONSAN_SAYS = ("/a/place/tilewise/kernels/hopper/backward/mmas.py:{}: some_function: block: [0,0,0], thread: "
               "[{},0,0] Assertion `Buffer being accessed has outstanding writes' failed.\n")


@pytest.mark.parametrize("text", [NOTHING, NO_RACE])
def test_a_tool_that_says_nothing_says_nothing(text):
    assert sanitizer.reports_of("memcheck", text) == []
    assert sanitizer.outcome_of("memcheck", text, ended=True, late=False) == ("clean", 0, 0, "")


def test_reports_are_of_a_class_by_their_words_and_where_they_are():
    outcome, known, other, classes = sanitizer.outcome_of("memcheck", OUT_OF_BOUNDS, ended=False, late=False)
    inside = sanitizer.function_at(str(sanitizer.KERNELS / "triton/forward.py"), 120)
    assert (outcome, known, other) == ("found", 0, 3)
    assert f"2 x Invalid __global__ read of size 16 bytes in {inside} (!)" in classes.split("; ")
    assert 'Program hit CUDA_ERROR_LAUNCH_FAILED (error 719) due to "unspecified launch failure"' in classes


@pytest.mark.parametrize(("text", "words"), [
    (MISALIGNED, "Invalid __global__ read of size 16 bytes in hopper_dq_kernel"),
    (IN_CUDA, "Invalid __shared__ write of size 4 bytes in attention_forward")])
def test_a_report_without_a_line_of_ours_is_named_by_its_kernel(text, words):
    assert [str(report) for report in sanitizer.reports_of("memcheck", text)] == [words]
    assert sanitizer.outcome_of("memcheck", text, ended=True, late=False)[:3] == ("found", 0, 1)


def test_a_tile_that_is_handed_over_is_the_class_that_is_no_fault():
    outcome = sanitizer.outcome_of("racecheck", race(*HANDED), ended=True, late=False)
    assert outcome == ("known", 1, 0, "1 x race of write and read in publish_tile and read_tile")


def test_each_pair_of_accesses_is_a_report_and_one_of_another_class_is_found():
    further = f"=========     and Write access at hopper_forward_kernel+0x1c in {READ_EARLY} [2 hazards]\n"
    outcome, known, other, classes = sanitizer.outcome_of("racecheck", race(*HANDED, further), ended=True, late=False)
    assert (outcome, known, other) == ("found", 1, 1)
    assert "1 x race of write and write in publish_tile and put_row_stats (!)" in classes.split("; ")


@pytest.mark.parametrize(("write", "read"), [
    ("pipeline.py:1", HANDED[1]), ("elsewhere.py:12", HANDED[1]), (HANDED[0], HANDED[0]),
    (HANDED[0], READ_EARLY)], ids=["module", "unknown file", "both write", "another reader"])
def test_no_other_race_passes_for_the_class_that_is_no_fault(write, read):
    assert sanitizer.outcome_of("racecheck", race(write, read), ended=True, late=False)[:3] == ("found", 0, 1)
    assert sanitizer.outcome_of("memcheck", race(*HANDED), ended=True, late=False)[0] == "found"


def test_what_triton_hands_to_its_warps_is_in_the_kernel_itself_on_both_sides():
    line = f"kernel.py:{line_of('kernel.py', 'def hopper_forward_kernel(')}"
    assert sanitizer.outcome_of("racecheck", race(line, line), ended=True, late=False)[:3] == ("known", 1, 0)
    assert sanitizer.outcome_of("racecheck", race(line, HANDED[1]), ended=True, late=False)[0] == "found"


def test_each_function_of_a_known_class_is_one_of_the_kernels():
    defined = {words.split("(")[0].split()[-1] for path in (sanitizer.KERNELS / "hopper").rglob("*.py")
               for words in path.read_text().splitlines() if words.startswith("def ")}
    named = set().union(*(places for _, places in sanitizer.KNOWN))
    assert named <= defined
    assert all(sanitizer.KNOWN.values())


def test_the_concurrency_sanitizer_stops_at_an_assertion_which_every_thread_prints():
    at = line_of("mmas.py", "def issue_dq(") + 2
    text = "".join(CONSAN_SAYS.format(at, thread) for thread in range(64))
    assert sanitizer.outcome_of("consan", text, ended=False, late=False) == (
        "known", 1, 0, "1 x Buffer being accessed has outstanding writes in issue_dq")
    other = CONSAN_SAYS.format(line_of("mmas.py", "def issue_s_or_dp(") + 2, 0)
    assert sanitizer.outcome_of("consan", other, ended=False, late=False)[:3] == ("found", 0, 1)


@pytest.mark.parametrize(("text", "late", "outcome", "words"), [
    ("Traceback\n  File\nSomeError: why\n", False, "failed", "SomeError: why"),
    ("", False, "failed", "nothing was printed"), ("...", True, "timed out", "")])
def test_a_call_that_does_not_end_is_no_clean_one(text, late, outcome, words):
    for tool in ("memcheck", "consan"):
        found = sanitizer.outcome_of(tool, text, ended=False, late=late)
        assert found == (outcome, 0, 0, words)
        row = sanitizer.Row(tool, "x", *found, 1.0, *[""] * 7)
        assert sanitizer.is_fault(row) == (tool == "memcheck")  # a build that takes too long is none of ours


def test_known_reports_of_a_call_that_broke_off_are_no_result():
    assert sanitizer.outcome_of("racecheck", race(*HANDED), ended=False, late=False)[:3] == ("failed", 1, 0)


def test_faults_are_other_reports_of_any_tool():
    for tool in sanitizer.TOOLS:
        assert sanitizer.is_fault(sanitizer.Row(tool, "x", "found", 0, 1, "y", 1.0, *[""] * 7))
        for outcome in ("clean", "known"):
            assert not sanitizer.is_fault(sanitizer.Row(tool, "x", outcome, 0, 0, "", 1.0, *[""] * 7))


def test_rows_are_written_and_counted_for_each_tool(tmp_path):
    found = ("clean", 0, 0, ""), ("known", 2, 0, "2 x a in b"), ("found", 1, 1, "1 x a in b; 1 x c in d (!)")
    rows = [sanitizer.Row("racecheck", str(i), *one, 1.5, "2025.3", "GPU", *["v"] * 5) for i, one in enumerate(found)]
    rows.append(sanitizer.Row("consan", "0", "timed out", 0, 0, "", 150.0, "", "GPU", *["v"] * 5))
    sanitizer.write(tmp_path / "rows.csv", rows)
    assert sanitizer.table(tmp_path / "rows.csv").splitlines()[2:] == [
        "| racecheck | 3 | 1 | 1 | 1 | 0 | a in b; c in d (!) |", "| consan | 1 | 0 | 0 | 0 | 1 |  |", "",
        "GPU; driver v; compute-sanitizer 2025.3; torch v; Triton v; commit v."]
    assert (tmp_path / "rows.csv").read_text().splitlines()[1] == (
        "racecheck,0,clean,0,0,,1.5,2025.3,GPU,v,v,v,v,v")


@pytest.mark.parametrize(("arguments", "words"), [
    (["run", "--tools", "memcheck,lint"], "got lint; allowed are memcheck, racecheck, consan"),
    (["run", "--tools", "initcheck"], "got initcheck; allowed are memcheck, racecheck, consan"),
    (["run", "--calls", "forward,backwards"], "got backwards; allowed are beginnings of forward_one_consumer"),
    (["call", "nothing"], "invalid choice: 'nothing'")])
def test_wrong_names_are_errors_that_say_what_is_allowed(arguments, words, capsys):
    with pytest.raises(SystemExit) as caught:
        sanitizer.parsed(arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_a_sanitizer_that_is_not_there_is_an_error_that_says_where_it_was_looked_for(monkeypatch, capsys):
    monkeypatch.setattr(sanitizer.shutil, "which", lambda name: None)
    with pytest.raises(FileNotFoundError, match="compute-sanitizer is not at compute-sanitizer or /usr/local/cuda"):
        sanitizer.found_sanitizer(None)
    with pytest.raises(FileNotFoundError, match=r"is not at /own/path\. It comes with CUDA's toolkit"):
        sanitizer.found_sanitizer("/own/path")
    assert sanitizer.run(sanitizer.parsed(["run", "--tools", "memcheck"])) == 2
    assert "It comes with CUDA's toolkit; name it with --sanitizer" in capsys.readouterr().err


# In the place of compute-sanitizer: it prints what it was called with, and what a tool says of some calls.
DOUBLE = """#!/bin/sh
if [ "$1" = --version ]; then echo "Version 2025.3.0.0 (build 1) (public-release)"; exit; fi
echo "========= COMPUTE-SANITIZER"
for call; do :; done
case "$2 $call" in
  "memcheck decode") echo "========= Invalid __shared__ write of size 4 bytes";
                     echo "=========     at combine_kernel+0x10";;
  "racecheck decode") sleep 60;;
  "racecheck float32") echo "========= Error: Device not supported. Please refer to the documentation";;
esac
[ "$PYTORCH_NO_CUDA_MEMORY_CACHING" = 1 ] && echo "the call has ended"
"""


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Arguments of a run with the double, whose calls without a tool are clean."""
    double = tmp_path / "compute-sanitizer"
    double.write_text(DOUBLE)
    double.chmod(0o755)
    command = sanitizer.command_of
    monkeypatch.setattr(sanitizer, "command_of", lambda tool, call, path: (
        [sys.executable, "-c", f"print({sanitizer.DONE!r})"] if tool == "" else command(tool, call, path)))
    provenance = SimpleNamespace(device_name="GPU", driver="1", torch="2", triton="3", commit="c", date="d")
    monkeypatch.setattr("tilewise.bench.provenance.provenance", lambda *arguments: provenance)

    def made(tools, calls):
        return argparse.Namespace(out=tmp_path / "rows.csv", tools=tools, calls=calls, jobs=2, timeout=3.0,
                                  sanitizer=str(double), logs=tmp_path / "logs", commit=None)

    return made


def test_a_run_in_which_tools_report_nothing_ends_well(given):
    own = given(["memcheck", "racecheck"], ["forward_w", "float32_"])
    assert sanitizer.run(own) == 0
    header, *rows = own.out.read_text().splitlines()
    assert header.startswith("tool,call,outcome,known,other,classes,seconds,sanitizer,device_name,")
    assert [row.split(",")[:3] for row in rows] == [
        [tool, call, "clean"] for tool in own.tools for call in ("forward_window", "float32_lengths")]
    assert "2025.3.0.0" in rows[0]
    assert "=== COMPUTE-SANITIZER" in (own.logs / "float32_lengths.memcheck.txt").read_text()


@pytest.mark.parametrize(("tool", "outcome", "words"), [
    ("memcheck", "found", "Invalid __shared__ write of size 4 bytes in combine_kernel (!)"),
    ("racecheck", "timed out", "")])
def test_a_run_with_a_report_or_a_call_without_end_is_a_failure(given, tool, outcome, words):
    own = given([tool], ["decode", "forward_w"])
    assert sanitizer.run(own) == 1
    row = next(row for row in own.out.read_text().splitlines() if ",decode," in row)
    assert row.startswith(f"{tool},decode,{outcome},")
    assert words in row


def test_a_machine_that_the_tool_refuses_is_told_and_no_rows_are_written(given, capsys):
    own = given(["racecheck"], ["float32"])
    assert sanitizer.run(own) == 2
    assert "compute-sanitizer refuses this machine: Device not supported" in capsys.readouterr().err
    assert not own.out.exists()


def test_a_run_that_does_not_end_leaves_the_rows_of_the_tools_that_did(given, monkeypatch):
    own, outcome_of = given(["memcheck", "racecheck"], ["forward_w", "float32_"]), sanitizer.outcome_of

    def cut(tool, *arguments, **options):
        if tool == "racecheck":
            raise KeyboardInterrupt
        return outcome_of(tool, *arguments, **options)

    monkeypatch.setattr(sanitizer, "outcome_of", cut)
    with pytest.raises(KeyboardInterrupt):
        sanitizer.run(own)
    assert [row.split(",")[:2] for row in own.out.read_text().splitlines()[1:]] == [
        ["memcheck", "forward_window"], ["memcheck", "float32_lengths"]]


def test_calls_that_fail_without_a_tool_end_the_run(given, monkeypatch, capsys):
    monkeypatch.setattr(sanitizer, "command_of", lambda tool, call, path: [sys.executable, "-c", "raise SystemExit(3)"])
    assert sanitizer.run(given(["memcheck"], ["decode"])) == 1
    assert "calls fail without any tool" in capsys.readouterr().err


def test_the_concurrency_sanitizer_is_triton_in_a_process_with_a_cache_of_its_own():
    made = sanitizer.environment_of("consan", "/folder")
    assert made["TRITON_INSTRUMENTATION_MODE"] == "consan"
    assert made["TRITON_CACHE_DIR"] != sanitizer.environment_of("memcheck", "/folder")["TRITON_CACHE_DIR"]
    assert "TRITON_INSTRUMENTATION_MODE" not in sanitizer.environment_of("memcheck", "/folder")
    assert sanitizer.command_of("consan", "decode", "")[1:] == [str(SCRIPT), "call", "decode"]


class Made(Exception):
    """What a call raises in the place of its tensors."""


@pytest.mark.parametrize("mode", ["consan", ""])
def test_the_concurrency_sanitizer_has_scratch_memory_in_the_thread_of_both_passes(monkeypatch, mode):
    """Its kernels want it at each launch, and Triton knows an allocator in the thread alone that set it."""
    allocation = pytest.importorskip("triton.runtime._allocation", reason="Triton is not installed")

    def refuse(*given, **options):
        raise Made

    monkeypatch.setenv("TRITON_INSTRUMENTATION_MODE", mode)
    monkeypatch.setattr("tilewise.testing.inputs.make_inputs", refuse)
    asked, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, **options: asked.append((size, options)) or empty(0))

    def call():
        with pytest.raises(Made):
            sanitizer.make_call("float32")
        return allocation._allocator.get(), torch._C._is_multithreading_enabled()

    try:
        allocate, threads = contextvars.copy_context().run(call)
    finally:
        torch.autograd.set_multithreading_enabled(True)
    if not mode:
        assert (allocate, threads) == (allocation._allocator.get(), True)
        return
    assert not threads
    allocate(4096, 128, None)
    assert asked == [(4096, {"dtype": torch.int8, "device": "cuda"})]


@pytest.mark.gpu
@pytest.mark.parametrize("name", sanitizer.CALLS)
def test_each_call_is_one_that_its_backend_takes(name, device):
    if sanitizer.CALLS[name].backend == "gluon" and torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("runs on Hopper GPUs")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(Path(__file__).parents[1])])}
    done = subprocess.run(sanitizer.command_of("", name, ""), env=environment, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert sanitizer.DONE in done.stdout
