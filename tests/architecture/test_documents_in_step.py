"""What documents and comments refer to exists."""

import re
import tomllib
from pathlib import Path
from shutil import which

import pytest
import torch
from typer.main import get_command

from tilewise import dispatch
from tilewise.cli.app import app
from tilewise.dispatch import BACKENDS
from tilewise.problem import AttentionProblem

ROOT = Path(__file__).resolve().parents[2]
MATHS = (ROOT / "docs/maths.md").read_text("utf-8")
PACKAGE = sorted((ROOT / "src").rglob("*.py"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")),
             *sorted((ROOT / "benchmarks/journal").glob("*.md"))]
EQUATIONS = [int(number) for number in re.findall(r"\\tag\{(\d+)\}", MATHS)]
SECTIONS = {int(number) for number in re.findall(r"^## (\d+)\. ", MATHS, re.MULTILINE)}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
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


def name_of(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_relative_links_lead_somewhere(path):
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", path.read_text("utf-8"))
    # contributing.md of the docs is CONTRIBUTING.md included.
    assert [link for link in links if not (path.parent / link).exists()] == []


def anchors_of(path):
    """The anchors of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_linked_headings_exist(path):
    """Sphinx holds links between pages of the site; those to and from the journal, and on GitHub, nothing else does."""
    links = re.findall(r"\]\((?!https?://)([^)#\s]*)#([^)\s]+)\)", path.read_text("utf-8"))
    found = [(target, anchor) for target, anchor in links if not target or target.endswith(".md")]
    assert [link for link in found if link[1] not in anchors_of(path.parent / link[0] if link[0] else path)] == []


def test_documents_that_comments_name_exist():
    named = {(name_of(path), name) for path in (*PACKAGE, *sorted((ROOT / "benchmarks").glob("*.py")))
             for name in re.findall(r"\b(?:docs|benchmarks)/[\w/-]+\.md\b", path.read_text("utf-8"))}
    assert named
    assert {(path, name) for path, name in named if not (ROOT / name).exists()} == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
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


def test_version_and_its_date_are_the_same_everywhere():
    version = re.search(r'__version__ = "(.*)"', (ROOT / "src/tilewise/__init__.py").read_text("utf-8"))[1]
    date = re.search(r"^date-released: (\d{4}-\d\d-\d\d)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE)[1]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\n## [{version}] - {date}\n" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_changelog_has_its_numerics_for_every_version():
    versions = (ROOT / "CHANGELOG.md").read_text("utf-8").split("\n## ")[1:]
    assert versions
    assert [version.splitlines()[0] for version in versions if "\n### Numerics\n" not in version] == []


def test_steps_of_a_release_are_commands_that_exist():
    page = (ROOT / "RELEASE.md").read_text("utf-8")
    lines = [line.partition("  #")[0].split() for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
             for line in block.splitlines()]
    assert {line[0] for line in lines} == {".ci/run", "git", "make", "python", "tilewise"}
    unknown = [" ".join(line) for line in lines if not _exists(line)]
    assert unknown == []


def _exists(words):
    """Whether the program of a line, and the script, module, target or command that it is given, exist."""
    program, first, *rest = *words, ""
    if program == "python" and first == "-m":
        return any(re.match(rf"{rest[0]}\b", requirement) for requirement in EXTRAS["dev"])
    if program == "python":
        return (ROOT / first).is_file()
    if program == "make":
        return re.search(rf"^{first}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE) is not None
    if program == "tilewise":
        flags = {flag for parameter in get_command(app).commands[first].params for flag in parameter.opts}
        return flags >= {word for word in rest if word.startswith("-")}
    return (ROOT / program).is_file() or which(program) is not None


def test_every_extra_has_its_line_in_the_documents():
    page = (ROOT / "docs/install.md").read_text("utf-8")
    lines = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE))
    assert set(lines) == set(EXTRAS)
    brought = {extra: {re.match(r"[\w-]+(\[[\w,]+\])?", requirement)[0] for requirement in requirements}
               for extra, requirements in EXTRAS.items() if extra != "dev"}
    missing = {extra: [name for name in names if f"`{name}`" not in lines[extra]] for extra, names in brought.items()}
    assert {extra: names for extra, names in missing.items() if names} == {}


def test_the_description_of_the_package_index_has_no_link_that_breaks_there():
    page = (ROOT / "DESCRIPTION.md").read_text("utf-8")
    assert re.findall(r"\]\((?!https://)|!\[|<img|<a ", page) == []
    named = set(re.findall(r"tilewise\[(\w+)\]", page))
    assert named <= set(EXTRAS)
    assert PROJECT["readme"] == "DESCRIPTION.md"
