"""The pages that explain the kernels are short and name what is there; figures are what the script draws."""

import importlib.util
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tilewise.problem import AttentionProblem
from tilewise.tuning.heuristics_hopper import forward_heuristic

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/hopper-forward.md", "docs/hopper-backward.md")
SOURCES = {path.relative_to(ROOT / "src/tilewise").as_posix(): path.read_text("utf-8")
           for folder in ("kernels", "tuning") for path in sorted((ROOT / "src/tilewise" / folder).rglob("*.py"))}
WORDS = set(re.findall(r"\w+", "\n".join(SOURCES.values())))


def text_of(name):
    return (ROOT / name).read_text("utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_about_a_pass_of_the_hopper_kernels_has_at_most_350_lines(name):
    """They were one page of 2283 lines, most of it a journal of what had been tried."""
    lines = text_of(name).splitlines()
    assert len(lines) <= 350
    assert [line for line in lines if len(line) > 130 and not line.startswith(("|", "!["))] == []


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_names_is_in_the_source(name):
    names = re.findall(r"`([^`\n]+)`", text_of(name))
    files = {word for word in names if word.endswith(".py")}
    words = {word for text in names if text not in files for word in re.findall(r"\w+", text)}
    assert len(files) > 5
    known = {f"/src/tilewise/{path}" for path in SOURCES}
    assert {file for file in files if not any(path.endswith(f"/{file}") for path in known)} == set()
    assert words - WORDS == set()


def test_every_file_of_the_hopper_kernels_is_on_a_page():
    folder = "kernels/hopper/"
    launches = ("launch", "types", "compat", "__init__")  # told apart by their names
    files = {path.removeprefix(folder) for path in SOURCES if path.startswith(folder)}
    told = "".join(text_of(name) for name in PAGES)
    assert {file for file in files if f"`{file}`" not in told and f"`{Path(file).name}`" not in told
            and not any(word in Path(file).stem for word in launches)} == set()


def test_the_table_of_forward_tiles_is_what_the_heuristic_chooses():
    rows = re.findall(r"^\| (\d+), (\d+) \| (\d) \| (\d+) \| (\d) \| (\d) of (\d+) columns \|$", text_of(PAGES[0]),
                      re.MULTILINE)
    assert len(rows) == 6
    for d, dv, consumers, block_n, q_stages, slots, columns in (map(int, row) for row in rows):
        problem = AttentionProblem(b=4, hq=16, hk=16, sq=4096, sk=4096, d=d, dv=dv, dtype=torch.bfloat16, scale=1.0,
                                   device=torch.device("cuda"))
        config = forward_heuristic(problem)
        assert (config.consumers, config.block_n, config.q_stages) == (consumers, block_n, q_stages), problem
        assert config.out_buffers(problem) == (columns, slots), problem


def drawing():
    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs/figures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_figures_are_what_the_script_draws(tmp_path):
    if find_spec("triton") is None:
        pytest.skip("a figure asks the tile scheduler, which is in Gluon, and here is no Triton")
    figures = drawing()
    figures.main(tmp_path)
    drawn = {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()}
    assert set(drawn) == {f"{name}.svg" for name in figures.FIGURES}
    version = re.compile(r"Matplotlib v([\w.]+)")
    committed = {name: text_of(f"docs/figures/{name}") for name in drawn}
    assert all("<svg" in text for text in committed.values())
    if {version.search(text)[1] for text in committed.values()} != {version.search(text)[1] for text in drawn.values()}:
        pytest.skip("the committed figures are of another version of matplotlib, which draws other bytes")
    assert [name for name in drawn if drawn[name] != committed[name]] == [], "run: python docs/figures.py"


def test_every_figure_of_the_script_is_on_a_page():
    told = "".join(path.read_text("utf-8") for path in (ROOT / "docs").glob("*.md"))
    assert [name for name in drawing().FIGURES if f"figures/{name}.svg" not in told] == []


def test_the_first_kernel_of_the_mathematics_is_the_example():
    page = text_of("docs/maths.md")
    assert page.index("{literalinclude} ../examples/attention_in_60_lines.py") < page.index("## 1. ")
