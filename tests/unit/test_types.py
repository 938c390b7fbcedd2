"""Types that a user's checker sees: mypy's own answers, and that overloads say no less than their functions."""

import inspect
import os
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch

import tilewise as tw
from tilewise.functions import MaskFunction
from tilewise.integrations import flash_attn, flash_attn_cute, flash_attn_interface
from tilewise.problem.operands import parted
from unit import typed_user

ROOT = Path(__file__).resolve().parents[2]
MASKS = typed_user.masks(torch.tensor([1, 1, 2]), torch.ones(3, 3, dtype=torch.bool),
                         MaskFunction(torch=lambda batch, head, q_idx, k_idx: (q_idx - k_idx) % 2 == 0))
FLAGS = ("return_attn_probs", "return_softmax_lse", "return_lse")
CALLS = [getattr(module, name) for module in (flash_attn, flash_attn_interface, flash_attn_cute)
         for name in module.__all__ if name.startswith("flash_attn") and name != "flash_attn_combine"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_users_annotated_code_passes_mypy_strictly(tmp_path):
    """Without our settings: in a folder of their own, as theirs would be."""
    pytest.importorskip("mypy", reason="mypy is not installed: nothing to ask")
    options = ["--strict", "--config-file=", "--ignore-missing-imports", "--follow-imports=silent",
               "--cache-dir", str(ROOT / ".mypy_cache/user")]
    done = subprocess.run([sys.executable, "-m", "mypy", *options, typed_user.__file__], cwd=tmp_path, check=False,
                          env=os.environ | {"MYPYPATH": str(ROOT / "src")}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_any_mask_is_what_a_call_takes(mask):
    assert isinstance(mask, tw.AnyMask)
    parted(mask)


@pytest.mark.parametrize("other", ["causal", 3, None, True, [True]], ids=repr)
def test_nothing_else_is_any_mask(other):
    assert not isinstance(other, tw.AnyMask)
    if other is not None:
        with pytest.raises(tw.InvalidInput, match="mask is a"):
            parted(other)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.__module__.rpartition('.')[2]}.{call.__name__}")
def test_overloads_have_the_arguments_of_their_function(call):
    def described(function):
        types = typing.get_type_hints(function)
        return {one.name: (types[one.name], one.default) for one in inspect.signature(function).parameters.values()}

    whole = described(call)
    flag = next(name for name in whole if name in FLAGS)
    returned = typing.get_type_hints(call)["return"]
    overloads = typing.get_overloads(call)
    assert len(overloads) >= 2
    for one in overloads:
        told = described(one)
        assert list(told) == list(whole)
        assert {name: said for name, said in told.items() if name != flag} == {
            name: said for name, said in whole.items() if name != flag}
    assert typing.get_type_hints(overloads[-1])["return"] == returned
