"""The package without torch: what needs it comes when torch does, in whatever order the two are imported."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tilewise

SOURCE = Path(__file__).resolve().parents[2] / "src"
REGISTERED = "print(torch._C._dispatch_has_kernel('tilewise::attention_forward_plain'))"


def python(code, *arguments):
    done = subprocess.run([sys.executable, "-W", "error", "-c", code, *map(str, arguments)], capture_output=True,
                          text=True, check=False, env=os.environ | {"PYTHONPATH": str(SOURCE)}, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_version_names_and_errors_come_without_torch():
    assert python("""
import sys, tilewise
assert tilewise.__version__ and set(tilewise.__all__) <= set(dir(tilewise))
assert issubclass(tilewise.InvalidInput, tilewise.TilewiseError)
assert not hasattr(tilewise, "attend")
print("torch" in sys.modules)
""") == "False"


@pytest.mark.parametrize("code", [
    "import tilewise, torch", "import torch, tilewise", "import tilewise; tilewise.causal(); import torch",
    "from tilewise import Mask; import torch", "import tilewise.masks, torch", "from tilewise.functions import "
    "ScoreFunction; import torch", "import tilewise; tilewise.masks; import torch", "import tilewise.merging, torch",
    # Asking whether torch is installed is not importing it.
    "import tilewise, importlib.util; importlib.util.find_spec('torch'); import torch",
    "import tilewise.cli.app, torch",
], ids=lambda code: code.replace("import ", "").replace("; ", ", "))
def test_operators_and_all_public_names_are_there_once_both_are_imported(code):
    """An exported program names torch.ops.tilewise and asks the package for nothing."""
    assert python(f"""
{code}
{REGISTERED}
import sys, tilewise
assert set(tilewise.__all__) <= set(vars(tilewise))
assert callable(tilewise.merge)
assert type(torch.__spec__.loader) is type(torch.__loader__) is type(torch.nn.__loader__)
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("tilewise")]
""") == "True"


@pytest.mark.parametrize("first", ["tilewise", "torch"])
def test_an_exported_program_runs_where_the_package_was_imported_and_nothing_else_of_it(first, tmp_path):
    class Attend(torch.nn.Module):
        def forward(self, q):
            return tilewise.attention(q, q, q, mask=tilewise.causal(), backend="reference")

    q = torch.randn(1, 2, 12, 8, generator=torch.Generator().manual_seed(0))
    program = torch.export.export(Attend(), (q,))
    assert "torch.ops.tilewise.attention_forward" in program.graph_module.code
    torch.export.save(program, tmp_path / "program.pt2")
    torch.save({"q": q, "out": Attend()(q)}, tmp_path / "tensors.pt")
    second = {"tilewise": "torch", "torch": "tilewise"}[first]
    assert python(f"""
import sys
import {first}
import {second}
tensors = torch.load(sys.argv[2])
out = torch.export.load(sys.argv[1]).module()(tensors["q"])
print((out - tensors["out"]).abs().max().item())
""", tmp_path / "program.pt2", tmp_path / "tensors.pt") == "0.0"


def test_an_import_that_fails_is_tried_again_and_found():
    assert python(f"""
import sys, tilewise
sys.modules["torch"] = None
try:
    tilewise.causal
except ImportError:
    pass
else:
    raise AssertionError("there is no torch")
del sys.modules["torch"]
import torch
{REGISTERED}
""") == "True"


def test_what_was_pickled_is_read_in_a_process_that_has_imported_nothing(tmp_path):
    file = tmp_path / "mask.pickle"
    file.write_bytes(pickle.dumps((tilewise.causal() & tilewise.window(3, 0), tilewise.attention)))
    assert python("""
import pickle, sys
mask, function = pickle.load(open(sys.argv[1], "rb"))
import tilewise
assert mask == tilewise.window(3, 0) and function is tilewise.attention
print(tilewise.Mask.__name__)
""", file) == "Mask"
