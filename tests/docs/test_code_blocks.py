"""The Python that the documents show is the Python that runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
DOCUMENTS = {path.relative_to(ROOT).as_posix(): CODE_BLOCK.findall(path.read_text("utf-8"))
             for path in (*(ROOT / name for name in ("README.md", "DESCRIPTION.md", "CONTRIBUTING.md")),
                          *sorted((ROOT / "docs").glob("*.md")))}


@pytest.mark.parametrize("name", [name for name, blocks in DOCUMENTS.items() if blocks])
def test_python_blocks_of_a_document_run_in_order(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "document"}
    for number, block in enumerate(DOCUMENTS[name], start=1):
        exec(compile(block, f"{name}, block {number}", "exec"), namespace)


def test_documents_that_teach_by_code_have_code():
    assert {"README.md", "docs/maths.md", "docs/start.md", "docs/masks.md"} <= {
        name for name, blocks in DOCUMENTS.items() if blocks}
