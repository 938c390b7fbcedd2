"""The documentation builds without a warning, and its generated parts are what the code says."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments, **environment):
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=ROOT,
                          env=clean | {"PYTHONPATH": str(ROOT / "src")} | environment)


class Loads(HTMLParser):
    """What a browser fetches to show a page: addresses of scripts, styles, icons, images and frames."""

    def __init__(self, page):
        super().__init__()
        self.addresses = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed", "object"):
            self.addresses += [found[name] for name in ("src", "srcset", "data") if found.get(name)]
        elif tag == "link" and not {"next", "prev", "search", "index", "genindex", "author"} & {*found["rel"].split()}:
            self.addresses.append(found["href"])
        self.addresses += re.findall(r"url\(([^)]+)\)", found.get("style") or "")


def is_elsewhere(address):
    return re.match(r"[\"']?(?:[a-z]+:)?//", address) is not None


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = run("-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", str(folder / "doctrees"), "docs",
               str(folder / "html"))
    return done, folder / "html"


def test_documentation_builds_without_a_warning(site):
    done, html = site
    assert done.returncode == 0, done.stdout + done.stderr
    page = (html / "maths.html").read_text("utf-8")
    assert page.count(r"\tag{") == 26
    assert "tilewise.attention" in (html / "api.html").read_text("utf-8")


def test_an_address_of_another_host_is_found():
    page = '<link rel="stylesheet" href="//a.org/x.css"><script src="x.js"></script><a href="https://b.org">b</a>'
    assert [is_elsewhere(address) for address in Loads(page).addresses] == [True, False]


def test_pages_load_nothing_from_other_hosts(site):
    """Formulas came with a script of a content delivery network: without it, or off line, a page showed TeX."""
    _, html = site
    loaded = {address for path in html.rglob("*.html") for address in Loads(path.read_text("utf-8")).addresses}
    assert len(loaded) > 10
    assert [address for address in loaded if is_elsewhere(address)] == []
    styles = "".join(path.read_text("utf-8") for path in html.rglob("*.css"))
    assert [address for address in re.findall(r"(?:url\(|@import\s+)([^);]+)", styles) if is_elsewhere(address)] == []


def test_pages_with_formulas_find_their_script_and_its_fonts(site):
    _, html = site
    loaded = Loads((html / "maths.html").read_text("utf-8")).addresses
    (script,) = [address for address in loaded if "mathjax" in address]
    assert (html / script.partition("?")[0]).is_file()
    assert len(list((html / "_static/mathjax/output/chtml/fonts/woff-v2").glob("*.woff"))) > 20


def test_no_tagged_equation_is_in_an_environment_that_has_no_tags(site):
    r"""Sphinx puts what has a line break into ``split``, where TeX allows no ``\tag``: three equations were errors."""
    page = (site[1] / "maths.html").read_text("utf-8")
    blocks = re.findall(r'<div class="math notranslate nohighlight"[^>]*>(.*?)</div>', page, re.DOTALL)
    assert len([block for block in blocks if r"\tag" in block]) == 26
    assert [block for block in blocks if r"\tag" in block and r"\begin{split}" in block] == []


def test_figures_of_how_it_works_are_what_their_script_draws(tmp_path):
    code = ("import sys, pathlib; sys.path.insert(0, 'docs'); import how_it_works_figures as figures; "
            f"figures.draw(pathlib.Path({str(tmp_path)!r})); "
            "print(*sorted({name for step in figures.STEPS for name in (*step.files, figures.FAST_PATH)}))")
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    assert [name for name in done.stdout.split() if not (ROOT / "src/tilewise" / name).exists()] == []
    drawn = {path.name: labels_of(path) for path in tmp_path.glob("*.svg")}
    assert len(drawn) == 4
    assert all(drawn.values())
    committed = {path.name: labels_of(path) for path in (ROOT / "docs/figures/how-it-works").glob("*.svg")}
    assert drawn == committed, "run: python docs/how_it_works_figures.py"
    page = (ROOT / "docs/how-it-works.md").read_text("utf-8")
    assert sorted(re.findall(r"\{image\} figures/how-it-works/(\S+)", page)) == sorted(drawn)


def test_figures_of_context_parallel_are_what_their_script_draws(tmp_path):
    done = run("docs/context_parallel_figures.py", str(tmp_path))
    assert done.returncode == 0, done.stderr
    drawn = {path.name: labels_of(path) for path in tmp_path.glob("*.svg")}
    assert len(drawn) == 4
    assert all(drawn.values())
    committed = {path.name: labels_of(path) for path in (ROOT / "docs/figures/context-parallel").glob("*.svg")}
    assert drawn == committed, "run: python docs/context_parallel_figures.py"
    page = (ROOT / "docs/context-parallel.md").read_text("utf-8")
    assert sorted(re.findall(r"\{image\} figures/context-parallel/(\S+)", page)) == sorted(drawn)


def labels_of(path):
    """What stands in a figure: matplotlib notes each text beside its outlines, and every version draws these anew."""
    return re.findall(r"<!-- (.*?) -->", path.read_text("utf-8"))


def test_links_to_the_journal_are_paths_on_the_site(site):
    page = (site[1] / "hopper-forward.html").read_text("utf-8")
    assert "benchmarks/journal/hopper-forward.md</span>" in page
    assert 'href="../benchmarks' not in page


def test_support_table_is_what_the_backends_answer():
    if find_spec("triton") is None:
        pytest.skip("the table shows an installed Triton, and here there is none")
    code = "import sys; sys.path.insert(0, 'docs'); import support_table; sys.stdout.write(support_table.render())"
    done = run("-c", code, PYTHONIOENCODING="utf-8")
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs/backends.md").read_text("utf-8")
    assert done.stdout in page, "run: python docs/support_table.py"


def test_list_of_torture_checks_is_what_the_suite_has():
    code = "import sys; sys.path.insert(0, 'docs'); import torture_checks; sys.stdout.write(torture_checks.render())"
    done = run("-c", code, PYTHONIOENCODING="utf-8")
    assert done.returncode == 0, done.stderr
    assert "`one_query`" in done.stdout
    assert done.stdout in (ROOT / "docs/torture.md").read_text("utf-8"), "run: python docs/torture_checks.py"


def test_tables_of_committed_rows_are_what_their_scripts_make():
    code = ("import sys; sys.path.insert(0, 'docs'); import tables; found = tables.pages(); "
            "assert len(found) > 2, found; "
            "print(*[page for page in found if tables.rendered(page.read_text('utf-8')) != page.read_text('utf-8')])")
    done = run("-c", code, PYTHONIOENCODING="utf-8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], "run: python docs/tables.py"
