"""Each role of a warp-specialised kernel, late at every barrier, gives the bits that it gives in time.

The kernels are built with delays (races/delays.py), a build for each kernel and each kind of mask, of which each role
is one launch. Each call below is a process of its own (races/delayed_calls.py), since its caches must be. Their
builds, some 50, beside those of the kernels around them, which have no delays:

========================================================  ==========================================
forward, one to three consumers                           full, causal, window (three: not in a window)
forward, head dim 256, cut along the keys                 full, causal, window
forward, rows of a group's heads; cut, all tiles or some  full
forward, tiles that come again                            causal
forward, padded and packed sequences                      causal
backward to 64: in order, heads alone, heads shared       full, causal, window
backward to 64: tiles drawn                               full, causal
backward to 128: in order, drawn, alone                   full, causal, window
backward with a bias, to 64 and to 128: tiles drawn       full, causal
backward to 128, padded and packed                        causal at 64 columns, full at 128
wide, with dq, padded and packed                          causal
backward in pieces; wide, with dq                         full, causal, window
gradient of a bias                                        full, causal, window
decoding, and what combines parts                         full: each warp a role
========================================================  ==========================================
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compiled.compile_process import BETWEEN, INSTALLED, ROOT, VERSIONS
from races import delays
from races.delayed_calls import CALLS, COMBINE_DECODED, DECODE, FORWARD, Delayed, differing, judge, make_call
from tilewise.testing.cases import Case

SCRIPT = Path(__file__).with_name("delayed_calls.py")
LONGEST_WAIT = 400  # seconds, of one process; kernels that wait for ever take all of them


def finished(*arguments, source=ROOT / "src", version=INSTALLED):
    """Return the row that the script prints, in a process with this source and this Triton."""
    paths = [str(source), str(ROOT / "tests")]
    if version != INSTALLED:
        folder = ROOT / ".triton" / version
        if not folder.is_dir():
            pytest.fail(f"Triton {version} is not at {folder}: run 'make triton-versions'")
        paths.insert(0, str(folder))
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False,
                          env=environment, timeout=LONGEST_WAIT)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("name", CALLS)
def test_a_late_role_changes_no_bit_of_what_repeats_and_keeps_the_budget_of_what_does_not(name):
    row = finished("run", name)
    assert row["roles"] == CALLS[name].roles
    assert (row["differing"], row["over_budget"]) == ([], [])
    assert [late for late in row["late"] if late["differing"] or late["over_budget"]] == []
    assert [late for late in row["late"] if late["programs"] == "all" and not late["delays"]] == []  # it was late


# A fault each: a call that is to show it, the file, the function, the line, and where it goes instead: in front of the
# next line that holds these words, or nowhere. A wait and an arrival are moved, not taken out: without one of them a
# kernel hangs, which needs no delay to be seen.
FAULTS = {
    "keys are read before they are awaited": (
        "forward_1_full", "hopper/forward/kernel.py", "attend_block", "consumer_wait(kv.full,",
        "consumer_release_after_mma(kv.empty,"),
    "keys are given back before they are read": (
        "forward_1_full", "hopper/forward/kernel.py", "attend_block", "consumer_release_after_mma(kv.empty,",
        "stage = count"),
    "dO is read before it is awaited": (
        "backward_stays_full", "hopper/backward/d128.py", "attend_blocks", "consumer_wait(smem.dout.full,",
        "ds_stage = count & 1"),
    "warpgroups do not meet over dS": (
        "backward_in_order_full", "hopper/backward/d128.py", "attend_blocks", "named_barrier_sync(C.CONSUMERS)", None),
    "parts are combined before they are there": ("decode", "triton/decode.py", "combine_kernel", "gdc_wait()", None),
}


def with_fault(text, function, line, before):
    """Return source with a line of a function moved in front of another, or replaced by one that does nothing."""
    start = text.index(f"\ndef {function}(")
    end = text.find("\n@", start)
    lines = text[start:end].splitlines(keepends=True)
    (place,) = [i for i, own in enumerate(lines) if line in own]
    moved = lines[place]
    if before is None:
        lines[place] = moved[:len(moved) - len(moved.lstrip())] + "pass\n"
    else:
        del lines[place]
        (target,) = [i for i, own in enumerate(lines) if before in own]
        lines.insert(target, moved)
    return text[:start] + "".join(lines) + text[end:]


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_one_of_the_source_as_it_is(fault):
    _, file, function, line, before = FAULTS[fault]
    text = (ROOT / "src/tilewise/kernels" / file).read_text()
    changed = with_fault(text, function, line, before)
    assert changed != text
    assert sorted(changed.split()) == sorted(text.split()) or before is None
    compile(changed, file, "exec")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_late_role_shows_a_missing_order(fault, tmp_path):
    """What the test above passes says something only if it fails where there is a race."""
    name, file, function, line, before = FAULTS[fault]
    source = tmp_path / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
    path = source / "tilewise/kernels" / file
    path.write_text(with_fault(path.read_text(), function, line, before))
    row = finished("run", name, source=source)
    assert [late for late in row["late"] if late["differing"] or late["over_budget"]], row


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("version", [*VERSIONS, BETWEEN])
def test_builds_with_delays_have_the_kernels_ptx_and_delays_and_default_builds_have_none(version):
    found = finished("compile", "forward_1_causal", "decode", version=version)
    assert found["forward_1_causal"].keys() == {FORWARD}
    assert found["decode"].keys() == {DECODE, COMBINE_DECODED}
    forward, decoding, combining = found["forward_1_causal"][FORWARD], *found["decode"].values()
    for kernel in (forward, decoding, combining):
        assert (kernel["in_default"], kernel["in_cubin"], kernel["alike"]) == (False, True, True)
    # Two warps without work come before the one that loads, and one behind it fills the warpgroup up.
    assert forward["roles"] == [[0, 4], [6, 1]]
    assert decoding["roles"] == combining["roles"] == [[warp, 1] for warp in range(4)]
    assert forward["delays"] > 80
    assert decoding["delays"] > 2
    assert combining["delays"] > 2


# Two consumers and a warp that loads. What a warp branches by differs between Tritons, the table does not.
SPECIALISED = """.version 8.7
.visible .entry some_kernel(
	.param .u32 some_kernel_param_0
)
.reqntid 384
{
	st.shared.v2.b32 	[global_smem+230968], {0, 50397698};
	barrier.sync 	1;
	ret;
$L__BB0_2:
	barrier.sync 	1;
	mov.b32 	%r67, global_smem;
	add.s32 	%r112, %r67, %r3;
	ld.shared.b8 	%r111, [%r112+230964];
	brx.idx 	%r111, $L_brx_0;
$L__BB0_42:                             //   in Loop: Header=BB0_2 Depth=1
	.loc	1 377 0                         // hopper_forward.py:377
	setmaxnreg.dec.sync.aligned.u32 	24;
	barrier.sync 	1;
	barrier.sync 	1;
	bra.uni 	$L__BB0_2;
$L__BB0_24:
	ld.shared.b8 	%rs14, [%r259+229376];
	// begin inline asm

{
	.reg .pred complete;
	waitLoop:
	mbarrier.try_wait.parity.shared::cta.b64 complete, [%r202], %r1609;
	@!complete bra.uni waitLoop;
}

	// end inline asm
$L__tmp9:
	.loc	2 111 65                        // pipeline.py:111:65, after the bar.sync
	add.s32 	%r1, %r2, %r3;
	// begin inline asm
	@%p30 mbarrier.arrive.shared::cta.b64 _, [%r204];
	// end inline asm
	bar.sync 	0, 128;
	st.shared.v2.b32 	[global_smem+230968], {67372036, 67372036};
	bra.uni 	$L__BB0_2;
}
"""
TTGIR = """
    ttg.warp_specialize(%q_desc, %k_desc)
    default {
    }
    partition0(%arg48: !tt.tensordesc<tensor<1x1x64x128xbf16, #shared>>) num_warps(4) {
    }
    partition1(%arg48: !tt.tensordesc<tensor<1x1x64x128xbf16, #shared>>) num_warps(1) {
    }
"""


def test_roles_are_the_partitions_whose_numbers_the_warps_get():
    """Of the warps that one warp is filled up to a warpgroup with, two come before it."""
    assert delays.partitions_of(TTGIR) == 2
    assert delays.roles_of(SPECIALISED, 2) == [(0, 4), (4, 4), (10, 1)]


def test_a_kernel_without_partitions_has_a_role_a_warp():
    assert delays.partitions_of("tt.func public @some_kernel() { tt.return }") == 0
    assert delays.roles_of(".visible .entry some_kernel()\n.reqntid 64\n{\n\tret;\n}\n", 0) == [(0, 1), (1, 1)]


@pytest.mark.parametrize(("old", "new", "partitions", "words"), [
    (".reqntid 384", "", 0, "does not say how many threads"),
    ("ld.shared.b8 \t%r", "ld.shared.b64 \t%r", 2, "does not read a warp's partition"),
    ("+230968]", "+230960]", 2, r"partition 0 has the warps \[\]"),
    ("50397698", "50397697", 2, r"partition 1 has the warps \[8, 10\]"), ("", "", 9, "partition 4 has the warps")])
def test_ptx_that_says_no_roles_is_an_error(old, new, partitions, words):
    assert old in SPECIALISED
    with pytest.raises(ValueError, match=words):
        delays.roles_of(SPECIALISED.replace(old, new), partitions)


def test_delays_stand_around_what_orders_warps_and_nowhere_else():
    made = delays.with_delays(SPECIALISED)
    assert made.replace(delays.DELAY, "").replace(delays.DECLARED, "") == SPECIALISED
    assert made.count(delays.DECLARED) == 1
    lines = made.replace(delays.DELAY, "<late>\n").splitlines()
    lines = [line.strip().split("//")[0].strip() for line in lines]
    lines = [line for line in lines if line and not line.startswith((".loc", "$L__tmp"))]
    wait = lines.index("mbarrier.try_wait.parity.shared::cta.b64 complete, [%r202], %r1609;")
    assert lines[wait - 4:wait + 4] == ["<late>", "{", ".reg .pred complete;", "waitLoop:", lines[wait],
                                        "@!complete bra.uni waitLoop;", "}", "<late>"]
    rest = lines[wait + 4:]
    assert rest[:6] == ["add.s32 \t%r1, %r2, %r3;", "<late>", "@%p30 mbarrier.arrive.shared::cta.b64 _, [%r204];",
                        "<late>", "bar.sync \t0, 128;", "<late>"]
    # Two in a row share the one between them: of a warp without work two barriers have three.
    idle = lines[lines.index("$L__BB0_42:"):lines.index("$L__BB0_24:")]
    assert idle.count("<late>") == 3


def test_a_kernel_without_barriers_stays_as_it_is():
    ptx = ".visible .entry some_kernel()\n.reqntid 64\n{\n\tadd.s32 %r1, %r2, %r3;  // bar.sync\n\tret;\n}\n"
    assert delays.with_delays(ptx) == ptx


def test_what_is_compared_is_held_against_the_oracle_and_bit_by_bit(device):
    small = Delayed(Case("small", hq=4, hk=4, sq=40, sk=50, d=16, dv=16, bias="1hqk"), {}, "reference", backward=True)
    run, inputs, operands = make_call(small, "cpu", 0)
    over_budget, found = judge(small, inputs, operands), run()
    assert found.keys() == {"out", "lse", "dq", "dk", "dv", "dbias"}
    assert over_budget(found) == []
    assert differing(found, run(), tuple(found)) == []
    wrong = found | {"dv": found["dv"] * 1.5}
    assert [report.split()[0] for report in over_budget(wrong)] == ["dv"]
    assert differing(found, wrong, ("dq", "dv")) == ["dv"]
    # NaN has bits too, and -0 is not 0.
    nan, zero = torch.full((3,), float("nan")), torch.zeros(3)
    assert differing({"a": nan, "b": zero}, {"a": nan.clone(), "b": -zero}, ("a", "b")) == ["b"]
    others = make_call(small, "cpu", 1)[0]()
    assert len(differing(found, others, tuple(found))) == len(found)
