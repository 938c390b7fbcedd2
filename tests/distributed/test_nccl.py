"""The same over NCCL, on as many GPUs of this machine as there are, up to four: exactly in float64, and by kernels."""

import pytest
import torch

import tilewise as tw
from distributed import equality, packed
from distributed.conftest import ROOT
from distributed.equality import TOLERANCE, Case
from distributed.workers import RANKS, Workers

pytestmark = [pytest.mark.gpu,
              pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs of one machine")]
SCHEDULES = ("ring", "all_gather", "ulysses")
WINDOW = tw.causal() & tw.window(150, 0) & tw.sink_tokens(4)
OF_KERNELS = [
    Case("long", 6000, b=1, hq=8, hk=2, d=128, dv=128, mask=tw.causal(), dtype=torch.bfloat16),
    Case("causal", 700, hq=8, hk=2, d=128, dv=128, mask=tw.causal(), dtype=torch.bfloat16),
    Case("sink_tokens", 700, hq=8, hk=2, d=64, dv=64, mask=WINDOW, sinks=True, softcap=20.0, dtype=torch.bfloat16),
    Case("documents", 700, hq=8, hk=8, d=128, dv=128, mask=tw.causal(), documents=5, dtype=torch.bfloat16),
    Case("bias", 320, hq=4, hk=4, d=64, dv=64, mask=tw.causal(), bias=(1, 0, 0, 0), alibi=True, dtype=torch.bfloat16),
    Case("wide", 500, hq=4, hk=2, d=256, dv=256, mask=tw.causal(), dtype=torch.float16)]
BFLOAT16 = 2.0**-7  # of the largest number: one rounding of each of the two results, and one of P in the parts


@pytest.fixture(scope="module")
def ranks():
    return 2 if torch.cuda.device_count() < RANKS else RANKS


@pytest.fixture(scope="module")
def gpus(ranks):
    started = Workers([str(ROOT / "src"), str(ROOT / "tests")], ranks, "cuda")
    yield started
    started.close()


def wrong(results, tolerance):
    return [{name: error for name, error in found.items() if not error <= tolerance} for found in results]


# The reference gives a sequence bits that depend on its batch on a GPU, and refuses deterministic=True.
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", [case for case in equality.CASES if not case.deterministic], ids=str)
def test_results_and_gradients_are_those_of_one_device(gpus, ranks, case, schedule):
    if schedule in case.refused:
        pytest.skip(case.refused[schedule])
    found = gpus.run(ranks, "distributed.equality", "compare", case, "zigzag", schedule)
    assert wrong(found, TOLERANCE) == [{}] * ranks


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", packed.CASES, ids=str)
def test_packed_sequences_are_those_of_one_device(gpus, ranks, case, schedule):
    found = gpus.run(ranks, "distributed.packed", "compare", case.name, "zigzag", schedule)
    assert wrong(found, TOLERANCE) == [{}] * ranks


@pytest.mark.parametrize("case", [case for case in OF_KERNELS if case.hk % 2 == 0], ids=str)
def test_an_all_gather_of_two_groups_of_heads_computes_the_same(gpus, ranks, case):
    found = gpus.run(ranks, "distributed.equality", "compare_groups", case, "zigzag", 2, None)
    assert wrong(found, BFLOAT16) == [{}] * ranks


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("schedule", [*SCHEDULES, None])
@pytest.mark.parametrize("case", OF_KERNELS, ids=str)
def test_kernels_in_16_bits_compute_the_same(gpus, ranks, case, schedule, layout):
    found = gpus.run(ranks, "distributed.equality", "compare", case, layout, schedule, None)
    assert wrong(found, BFLOAT16) == [{}] * ranks
