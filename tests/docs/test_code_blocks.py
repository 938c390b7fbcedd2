"""The Python that the documents show is the Python that runs, each block alone, as a reader copies it."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
CODE_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
DOCUMENTS = {path.relative_to(ROOT).as_posix(): CODE_BLOCK.findall(path.read_text("utf-8"))
             for path in (*(ROOT / name for name in ("README.md", "DESCRIPTION.md", "CONTRIBUTING.md")),
                          *sorted((ROOT / "docs").glob("*.md")))}
# A derivation, whose blocks go on from one another.
GO_ON = {"docs/maths.md"}
BLOCKS = {f"{name}, block {number}": block for name, blocks in DOCUMENTS.items() if name not in GO_ON
          for number, block in enumerate(blocks, start=1)}
# What a block enters into other packages would be there in every later test, and Triton reads the file of a kernel.
IN_A_FILE = re.compile(r"\.(?:install|register)\(|^import triton$", re.MULTILINE)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_of_python_runs_alone(name, tmp_path, monkeypatch):
    if "import triton\n" in BLOCKS[name] and find_spec("triton") is None:
        pytest.skip("the block has a kernel, and Triton is not installed")
    if IN_A_FILE.search(BLOCKS[name]):
        done = run_in_a_process(BLOCKS[name], tmp_path)
        assert done.returncode == 0, done.stderr
        return
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        exec(compile(BLOCKS[name], name, "exec"), {"__name__": "document"})


@pytest.mark.parametrize("name", sorted(GO_ON))
def test_blocks_of_a_derivation_run_in_order(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "document"}
    for number, block in enumerate(DOCUMENTS[name], start=1):
        exec(compile(block, f"{name}, block {number}", "exec"), namespace)


def test_no_document_shows_python_that_does_not_run():
    hidden = re.compile(r"^(?:```|:::)\{code-block\} python|^```(?:py|py3|python3)$", re.MULTILINE)
    assert [name for name in DOCUMENTS if hidden.search((ROOT / name).read_text("utf-8"))] == []


def test_documents_that_teach_by_code_have_code():
    assert {"README.md", "docs/index.md", "docs/start.md", "docs/move-here.md", "docs/huggingface.md", "docs/masks.md",
            "docs/how-it-works.md", "docs/faq.md", "docs/maths.md"} <= {
        name for name, blocks in DOCUMENTS.items() if blocks}


def run_in_a_process(block, folder):
    (folder / "block.py").write_text(block, "utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "block.py"], capture_output=True, text=True, check=False, cwd=folder,
                          env=environment | {"PYTHONPATH": str(ROOT / "src")})
