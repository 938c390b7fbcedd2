"""What documents and comments refer to exists."""

import re
from pathlib import Path

import pytest
import torch

from tilewise import dispatch
from tilewise.dispatch import BACKENDS
from tilewise.problem import AttentionProblem

ROOT = Path(__file__).resolve().parents[2]
MATHS = (ROOT / "docs/maths.md").read_text("utf-8")
PACKAGE = sorted((ROOT / "src").rglob("*.py"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
EQUATIONS = [int(number) for number in re.findall(r"\\tag\{(\d+)\}", MATHS)]
SECTIONS = {int(number) for number in re.findall(r"^## (\d+)\. ", MATHS, re.MULTILINE)}
CITATION = re.compile(r"\b(?:eq\.|equations?) (\d+)(?:(?: to |, | and )(\d+))*")


def cited_equations(text):
    return {int(number) for match in CITATION.finditer(text) for number in re.findall(r"\d+", match[0])}


def test_equations_are_numbered_in_order():
    assert list(range(1, 27)) == EQUATIONS


def test_cited_equations_exist():
    cited = {path.name: cited_equations(path.read_text("utf-8")) - set(EQUATIONS) for path in PACKAGE}
    assert {name: missing for name, missing in cited.items() if missing} == {}


def test_every_equation_is_cited_by_the_source():
    cited = {number for path in PACKAGE for match in CITATION.finditer(path.read_text("utf-8"))
             for number in spanned(match[0])}
    assert cited >= set(EQUATIONS)


def spanned(citation):
    """Numbers that a citation covers: ``eq. 4 to 6`` is 4, 5 and 6."""
    numbers = [int(number) for number in re.findall(r"\d+", citation)]
    return range(numbers[0], numbers[-1] + 1) if " to " in citation else numbers


def test_cited_sections_of_the_mathematics_exist():
    cited = {int(number) for path in PACKAGE
             for number in re.findall(r"maths\.md, section (\d+)", path.read_text("utf-8"))}
    assert cited
    assert cited <= SECTIONS


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(path):
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", path.read_text("utf-8"))
    # contributing.md of the docs is CONTRIBUTING.md included.
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_that_documents_name_exist(path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", path.read_text("utf-8"), re.MULTILINE))
    assert named <= targets


def test_readme_gives_the_two_commands():
    readme = (ROOT / "README.md").read_text("utf-8")
    assert "\nmake bench" in readme
    assert "\nmake test" in readme


def test_ci_runs_the_test_command_of_the_readme():
    steps = re.findall(r"^timed (\S+)$", (ROOT / ".ci/run").read_text("utf-8"), re.MULTILINE)
    assert {"test", "lint"} <= set(steps)
    assert steps[-1] == "test"


def test_nothing_is_installed_before_the_pins_are_known():
    """The resolver once fetched the newest torch, half a gigabyte, before it read which one `dev` asks for."""
    installs = re.findall(r"pip install .*", (ROOT / "Makefile").read_text("utf-8"))
    assert installs
    assert [line for line in installs if "--constraint $(PINS)" not in line and "--no-deps" not in line] == []


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_has_its_file_and_its_line_in_the_documents(name):
    assert (ROOT / f"src/tilewise/backends/{name}.py").exists()
    assert f"| `{name}` |" in (ROOT / "docs/backends.md").read_text("utf-8")


def test_the_orders_of_preference_are_those_of_the_documents(monkeypatch):
    monkeypatch.setattr(dispatch, "prefers_gluon", lambda problem: problem.sq > 64)
    calls = [(device, dtype, sq) for device in ("cuda", "cpu") for dtype in (torch.float32, torch.float16)
             for sq in (64, 128)]
    made = {dispatch.order(AttentionProblem(b=1, hq=1, hk=1, sq=sq, sk=sq, d=16, dv=16, dtype=dtype, scale=1.0,
                                            device=torch.device(device))) for device, dtype, sq in calls}
    page = (ROOT / "docs/backends.md").read_text("utf-8").partition("## How one is chosen")[2].partition("\n## ")[0]
    written = re.findall(r"^\|[^|]+\| ((?:`\w+`(?:, )?)+) \|$", page, re.MULTILINE)
    assert sorted(written) == sorted(", ".join(f"`{name}`" for name in names) for names in made)


def test_markers_of_generated_blocks_come_in_pairs():
    for path in DOCUMENTS:
        text = path.read_text("utf-8")
        opened = re.findall(r"<!-- (?!/)([\w:-]+(?: \w+)*) -->", text)
        assert [name for name in opened if text.count(f"<!-- /{name} -->") != 1] == [], path.name


def test_version_is_the_same_everywhere():
    version = re.search(r'__version__ = "(.*)"', (ROOT / "src/tilewise/__init__.py").read_text("utf-8"))[1]
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")
