"""The kernels of decoding compile for every architecture, within shared memory and registers, with wide copies."""

from pathlib import Path

import pytest

from compiled.compile_process import INSTALLED, VERSIONS, compile_all

pytestmark = pytest.mark.aot
SCRIPT = Path(__file__).with_name("decode_ahead.py")
ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")
CALLS = ({"d": 128}, {"d": 128, "splits": 1}, {"d": 128, "page": 16}, {"d": 128, "page": 256}, {"d": 64}, {"d": 256},
         {"d": 128, "sq": 64}, {"d": 128, "page": 64, "every": True, "sq": 2})


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("version", VERSIONS)
def test_kernels_of_decoding_compile_without_spills_and_copy_16_bytes_at_once(version, arch):
    calls = CALLS if version == INSTALLED else (CALLS[2], CALLS[-1])
    wanted = [{"arch": arch, "kernel": "decode", "dtype": "bfloat16", **call} for call in calls]
    wanted += [{"arch": arch, "kernel": kernel, "dtype": "bfloat16", **CALLS[-1]} for kernel in ("append", "combine")]
    rows = compile_all(version, wanted, SCRIPT)
    assert len(rows) == len(wanted)
    for row in rows:
        assert row["shared"] <= row["limit"], row
        assert row["stack"] == 0, row
        if row["kernel"] == "decode":
            assert row["shared"] <= row["planned"], row
        if row["kernel"] == "decode" and arch != "gfx942":
            assert row["copies"] == [16], row


def test_an_overlapped_combine_kernel_waits_for_the_splits():
    wanted = [{"arch": "sm_90", "kernel": kernel, "dtype": "bfloat16", "d": 128, "overlapped": overlapped}
              for kernel in ("decode", "combine") for overlapped in (True, False)]
    rows = compile_all(INSTALLED, wanted, SCRIPT)
    assert [(row["lets"] > 0, row["waits"] > 0) for row in rows] == [
        (True, False), (False, False), (False, True), (False, False)]


@pytest.mark.parametrize("arch", ARCHS)
def test_float32_decoding_compiles_within_shared_memory(arch):
    wanted = [{"arch": arch, "kernel": "decode", "dtype": "float32", "d": d} for d in (64, 128, 256)]
    rows = compile_all(INSTALLED, wanted, SCRIPT)
    assert len(rows) == len(wanted)
    for row in rows:
        assert row["shared"] <= min(row["limit"], row["planned"]), row
