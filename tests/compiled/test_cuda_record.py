"""The record of compiled CUDA kernels: whose spills are known without compiling, and whose are not."""

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from compiled import cuda_record
from compiled.cuda_record import CudaRecord
from tilewise.kernels.cuda.config import CudaConfig
from tilewise.kernels.cuda.program import Program

PROGRAM = Program("forward", CudaConfig(0, 4, 4, 32), d=64, dv=64, vectors=True)
NEVER, ALWAYS = 2**31, 1  # of so many kernels one is compiled though it is on record


@pytest.fixture
def compiled(monkeypatch):
    """What was compiled; the compiler says that it spills 8 bytes in one kernel of a source, and 4 in another."""
    asked = []

    def compile_program(program, arch, *_options):
        asked.append((program.d, arch))
        return b"\x7fELF", "0 bytes stack, 8 bytes spill stores\n4 bytes spill stores"

    monkeypatch.setattr(cuda_record, "compile_program", compile_program)
    monkeypatch.setattr(cuda_record, "SAMPLE", NEVER)
    return asked


def recorded(path):
    assert CudaRecord(path, anew=True).spills_of(PROGRAM, "sm_90") == 8
    return CudaRecord(path)


def test_what_is_on_record_is_not_compiled(tmp_path, compiled):
    record = recorded(tmp_path / "nvrtc.jsonl")
    assert record.spills_of(PROGRAM, "sm_90") == 8
    assert compiled == [(64, "sm_90")]


def test_what_goes_into_a_kernel_and_is_not_on_record_is_compiled_once(tmp_path, compiled, monkeypatch):
    record = recorded(tmp_path / "nvrtc.jsonl")
    wide = Program("forward", PROGRAM.config, d=128, dv=64, vectors=True)
    for _ in range(2):
        record.spills_of(PROGRAM, "sm_80")
        record.spills_of(wide, "sm_90")
        with monkeypatch.context() as patch:
            patch.setattr(cuda_record, "source_files", lambda: {"other.cu": b"// another"})
            record.spills_of(PROGRAM, "sm_90")
    assert compiled == [(64, "sm_90"), (64, "sm_80"), (128, "sm_90"), (64, "sm_90")]


def test_one_of_the_sample_has_to_become_what_the_record_says(tmp_path, compiled, monkeypatch):
    record = recorded(tmp_path / "nvrtc.jsonl")
    monkeypatch.setattr(cuda_record, "SAMPLE", ALWAYS)
    assert record.spills_of(PROGRAM, "sm_90") == 8
    monkeypatch.setattr(cuda_record, "compile_program", lambda *_: (b"\x7fELF", "12 bytes spill stores"))
    with pytest.raises(ValueError, match=r"nvrtc.jsonl says of kernel \w+: {'spills': 8}; it became {'spills': 12}"):
        CudaRecord(tmp_path / "nvrtc.jsonl").spills_of(PROGRAM, "sm_90")
