"""Which backend serves which call, asked of the backends themselves, for GPUs that are not here too."""

import importlib.util

import pytest
import torch

from tilewise.bench.support import as_if_on, describe, rows, supported
from tilewise.dispatch import explain_problem
from tilewise.errors import InvalidInput
from tilewise.masks import causal
from tilewise.support.names import DTYPES

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None,
                                  reason="Triton is not installed, without which backends of GPUs cannot be asked")


@needs_triton
def test_architectures_answer_each_for_itself_in_one_process():
    half = describe("cuda", mask=causal(), lengths=(4096, 4096))
    single = describe("cuda", dtype=torch.float32)
    served = {}
    for arch in ("sm_90", "sm_80", "sm_75", "sm_90"):
        with as_if_on(arch):
            served[arch] = [explain_problem(problem).forward for problem in (half, single)]
    assert served == {"sm_90": ["gluon", "cuda"], "sm_80": ["triton", "triton"], "sm_75": ["triton", "triton"]}


@needs_triton
def test_nothing_of_the_other_gpu_is_left_behind():
    before = torch.cuda.get_device_capability
    with as_if_on("sm_90"):
        assert torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.get_device_capability is before


@needs_triton
def test_widths_that_shared_memory_bounds_differ_by_architecture():
    wide = describe("cuda", dims=(512, 512), dtype=torch.float32)
    answers = []
    for arch in ("sm_90", "sm_75"):
        with as_if_on(arch):
            answers.append(explain_problem(wide).reasons["forward", "triton"])
    assert answers[0] is None
    assert "sm_75 has 65536" in answers[1]


@pytest.mark.parametrize("arch", ["sm_70", "sm90", "hopper", "sm_", "gfx942", ""])
def test_what_names_no_architecture_is_refused(arch):
    with pytest.raises(InvalidInput, match=f"arch is '{arch}'; allowed are NVIDIA's from sm_75 on"), as_if_on(arch):
        pass


def test_without_triton_no_gpu_can_be_asked_about(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match="Triton is not installed"), as_if_on("sm_90"):
        pass


def test_every_dtype_is_asked_about_every_head_dim_and_kind_of_call():
    steps = []
    found = supported("cpu", steps.append)
    assert len(steps) == len(found)
    names = {group: [one.name for one in found if one.group == group] for group in ("head dims", *DTYPES)}
    assert names["head dims"].count("64") == names["head dims"].count("192, of v 128") == len(DTYPES)
    kinds = {name for name in rows("cpu") if name not in DTYPES and "gradient" not in name}
    for dtype in DTYPES:
        assert set(names[dtype]) == {*kinds, "no mask, no option", "deterministic=True"}
        assert {str(one.answer.problem.dtype) for one in found if one.group == dtype} == {f"torch.{dtype}"}


def test_the_answers_are_the_backends_own():
    for one in supported("cpu")[::7]:
        assert one.answer == explain_problem(one.answer.problem)
