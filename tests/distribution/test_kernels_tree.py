"""The folder for Hugging Face's kernels: what is rewritten, and that kernels loads it beside the installed package."""

import ast
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tilewise

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src/tilewise"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "_tilewise_0123456"
spec = importlib.util.spec_from_file_location("kernels_tree", ROOT / "packaging/kernels_tree.py")
kernels_tree = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels_tree)


def rewritten(text, within="problem/problem.py"):
    return kernels_tree.rewritten(text, Path(within), NAME)


@pytest.mark.parametrize(("within", "text", "wanted"), [
    ("api.py", "from tilewise.masks import Mask", "from .masks import Mask"),
    ("api.py", "from tilewise import errors", "from . import errors"),
    ("masks/mask.py", "from tilewise.errors import (\n    InvalidInput,\n)",
     "from ..errors import (\n    InvalidInput,\n)"),
    ("masks/__init__.py", "from tilewise.masks.mask import Mask", "from ..masks.mask import Mask"),
    ("kernels/hopper/forward/kernel.py", "def f():\n    from tilewise.kernels import driver",
     "def f():\n    from ....kernels import driver"),
    ("api.py", "import tilewise.masks.mask as m", "from .masks import mask as m"),
    ("a/b.py", "import torch\nimport tilewise.api as api  # why", "import torch\nfrom .. import api as api"),
    ("a/b.py", "from tilewise_other.masks import Mask", "from tilewise_other.masks import Mask"),
    ("a/b.py", 'define("tilewise::attention", torch.ops.tilewise.attention)',
     f'define("{NAME}::attention", torch.ops.{NAME}.attention)'),
    ("a/b.py", 'f"tilewise::{name}"', f'f"{NAME}::{{name}}"'),
])
def test_imports_become_relative_and_operators_get_the_name(within, text, wanted):
    assert rewritten(text, within) == wanted


@pytest.mark.parametrize(("text", "message"), [
    ("import tilewise", "'import tilewise' binds the name tilewise"),
    ("import tilewise.api", "'import tilewise.api' binds the name tilewise"),
    ("import tilewise.api as a, torch", "'import tilewise.api' binds the name tilewise"),
    ("from tilewise.api  import attention", r"is not of the form 'from tilewise\.api import \.\.\.'"),
    ('importlib.import_module(f"tilewise.backends.{name}")', r"'tilewise\.backends\.' names a module of tilewise"),
    ('resources.files("tilewise.tuning")', r"'tilewise\.tuning' names a module of tilewise"),
])
def test_what_would_still_name_the_package_is_refused(text, message):
    with pytest.raises(kernels_tree.CannotRewriteError, match=rf"^problem/problem\.py:1: .*{message}"):
        rewritten(text)


@pytest.mark.parametrize(("commit", "source", "message"), [
    ("main", SOURCE, "--commit is 'main'; allowed are 7 to 40 lower-case hexadecimal digits"),
    (COMMIT, ROOT, "has no __init__.py; allowed is the folder of the package"),
])
def test_a_wrong_argument_is_refused(commit, source, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        kernels_tree.build(source, tmp_path, commit)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A repository with the one variant, made by the command."""
    out = tmp_path_factory.mktemp("kernels")
    command = [sys.executable, str(ROOT / "packaging/kernels_tree.py"), str(SOURCE), str(out), "--commit", COMMIT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == out / "build/torch-universal"
    return out


def test_no_module_of_the_folder_imports_the_package_by_its_name(repository):
    def imported(path):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                yield node.module

    modules = {path: {name.partition(".")[0] for name in imported(path)} for path in repository.rglob("*.py")}
    assert len(modules) > 100
    assert [path for path, names in modules.items() if "tilewise" in names] == []


def test_commands_and_their_tests_are_left_out_and_data_is_not(repository):
    variant = repository / "build/torch-universal"
    assert not any((variant / name).exists() for name in ("cli", "bench", "testing", "__main__.py"))
    assert list(variant.rglob("*.cu"))
    assert list((variant / "tuning/tables").rglob("*.json"))
    assert list(variant.rglob("__pycache__")) == []


def test_a_second_build_is_the_same_and_leaves_nothing_of_the_first(tmp_path):
    first = kernels_tree.build(SOURCE, tmp_path, COMMIT)
    files = kernels_tree.digests(first)
    (first / "stray.py").write_text("")
    assert kernels_tree.digests(kernels_tree.build(SOURCE, tmp_path, COMMIT)) == files
    dirty = json.loads((kernels_tree.build(SOURCE, tmp_path, COMMIT, True) / "metadata.json").read_text())
    assert dirty["id"] == f"{NAME}_dirty"
    assert dirty["build-info"] == {"kernel": {"sha": COMMIT, "dirty": True}}


def test_kernels_accepts_the_metadata_and_the_digest(repository):
    rust = pytest.importorskip("kernels._rust", reason="kernels is not installed: nothing to read the metadata with")
    variant = repository / "build/torch-universal"
    found = rust.Metadata.read_from_file(variant / "metadata.json")
    assert (found.id, found.name.python_name, found.version, found.license) == (NAME, "tilewise", 0, "Apache-2.0")
    found.digest.validate(rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, variant))
    assert found.provenance is None or not found.provenance.dirty


def test_kernels_loads_the_folder_beside_the_installed_package(repository):
    kernels = pytest.importorskip("kernels", reason="kernels is not installed: nothing to load the folder with")
    loaded = kernels.get_local_kernel(repository)
    assert loaded.__name__ == NAME
    assert loaded.attention is not tilewise.attention
    assert loaded.__version__ == tilewise.__version__
    found = []
    for package in (loaded, tilewise):
        q, k, v = (torch.randn(2, 4, 33, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_()
                   for seed in range(3))
        out = package.attention(q, k, v, mask=package.causal() & package.window(9, 0))
        out.square().sum().backward()
        found.append((out.detach(), q.grad, k.grad, v.grad))
    assert all(map(torch.equal, *found))
    assert "chosen" in str(loaded.explain(q, k, v, mask=loaded.causal()))
    assert hasattr(getattr(torch.ops, NAME), "attention_forward")


IN_THE_INTERPRETER = """
import importlib.util, sys, torch
folder, name = sys.argv[1:]
spec = importlib.util.spec_from_file_location(name, f"{folder}/__init__.py")
package = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
q, k, v = (torch.randn(1, 2, 33, 16, requires_grad=True) for _ in range(3))
out = package.attention(q, k, v, mask=package.causal(), backend="triton")
wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
weights = torch.randn_like(out)
for ours, theirs in zip(torch.autograd.grad((out * weights).sum(), (q, k, v)),
                        torch.autograd.grad((wanted * weights).sum(), (q, k, v))):
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
assert not [name for name in sys.modules if name.partition(".")[0] == "tilewise"]
"""


@pytest.mark.interpret
def test_triton_kernels_of_the_folder_run_where_nothing_is_installed(repository):
    """Under another name, and without kernels: Triton finds the helpers of a kernel in the kernel's own package."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", IN_THE_INTERPRETER, str(repository / "build/torch-universal"), NAME],
                          capture_output=True, text=True, check=False, timeout=300,
                          env=environment | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr


def test_integrations_of_the_loaded_folder_are_its_own(repository):
    kernels = pytest.importorskip("kernels", reason="kernels is not installed: nothing to load the folder with")
    transformers = pytest.importorskip("transformers", reason="Transformers is not installed: there is no model")
    kernels.get_local_kernel(repository)
    integration = importlib.import_module(f"{NAME}.integrations.transformers")
    integration.register("tilewise_of_kernels")
    config = transformers.LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    tokens, found = torch.randint(0, 61, (2, 9)), []
    for name in ("eager", "tilewise_of_kernels"):
        model.set_attn_implementation(name)
        found.append(model(input_ids=tokens).logits.detach())
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


def test_release_and_make_name_the_command():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert re.search(r"^kernels-tree: .*\n.*\n\tgit archive HEAD .*\n\t.* packaging/kernels_tree\.py ", makefile,
                     re.MULTILINE)
    assert "make kernels-tree" in (ROOT / "RELEASE.md").read_text("utf-8")
