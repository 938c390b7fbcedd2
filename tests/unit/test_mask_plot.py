"""``mask.plot``: its tiles are those of the dense mask, its legend counts them, and it says what it cannot draw."""

import sys

import matplotlib as mpl
import pytest
import torch
from matplotlib.figure import Figure

import tilewise as tw
from tilewise.functions import MaskFunction
from tilewise.masks.plot import STATES

mpl.use("Agg")
IDS = torch.tensor([0] * 30 + [1] * 37 + [0] * 20 + [2] * 13)
HALF = torch.rand(100, 100, generator=torch.Generator().manual_seed(0)) > 0.5
BLOCKS = HALF[::10, ::10].repeat_interleave(10, 0).repeat_interleave(10, 1)
EVEN = MaskFunction(torch=lambda batch, head, q_idx, k_idx: (q_idx - k_idx) % 2 == 0)
# A mask, and the lengths and the tiles that it is drawn with.
PICTURES = {
    "none": (tw.Mask(), (100, 100), (16, 16)),
    "causal": (tw.causal(), (100, 100), (16, 16)),
    "causal_bottom_right_more_keys": (tw.causal("bottom_right"), (50, 100), (16, 32)),
    "causal_rows_that_see_nothing": (tw.causal("bottom_right"), (100, 50), (16, 16)),
    "window": (tw.window(20, 7), (100, 100), (10, 20)),
    "prefix": (tw.prefix(33), (100, 100), (16, 16)),
    "chunk": (tw.causal() & tw.chunk(24), (100, 100), (12, 12)),
    "sink_tokens": (tw.causal() & tw.window(9, 0) & tw.sink_tokens(3), (100, 100), (8, 8)),
    "documents": (tw.causal() & tw.documents(IDS), (100, 100), (16, 8)),
    "tensor": (tw.causal() & BLOCKS, (100, 100), (10, 10)),
    "tensor_of_batches_and_heads": (tw.Mask() & BLOCKS.expand(2, 3, 100, 100), (100, 100), (10, 10)),
    "tiled": ((tw.causal() & BLOCKS).tiled(100, 100), (100, 100), (128, 128)),
    "function_alone": (EVEN, (40, 40), (1, 4)),
    "function_and_band": (tw.causal() & EVEN, (40, 40), (1, 4)),
    "tiles_of_one_pair": (tw.causal(), (7, 7), (1, 1)),
    "one_query": (tw.causal("bottom_right"), (1, 100), (128, 16)),
}


def dense(mask, lengths):
    visible = mask.visible(*lengths)
    return visible[0, 0] if visible.dim() == 4 else visible


@pytest.mark.parametrize("name", PICTURES)
def test_each_tile_has_the_colour_of_what_the_dense_mask_holds(name):
    mask, (sq, sk), (rows, columns) = PICTURES[name]
    visible = dense(mask, (sq, sk))
    expected = [["full" if tile.all() else "partial" if tile.any() else "skipped"
                 for j in range(0, sk, columns) for tile in [visible[i:i + rows, j:j + columns]]]
                for i in range(0, sq, rows)]
    ax = mask.plot(sq, sk, block=(rows, columns), ax=Figure().subplots())
    (mesh,) = ax.collections
    found = [[STATES[number][0] for number in row] for row in mesh.get_array().tolist()]
    assert found == expected
    for number, (state, color) in enumerate(STATES):
        assert mesh.cmap(mesh.norm(number)) == pytest.approx(mpl.colors.to_rgba(color))
        count = sum(row.count(state) for row in expected)
        assert f"{state}: {count}" in [text.get_text() for text in ax.get_legend().get_texts()]
    assert ax.get_legend().get_title().get_text() == f"{sum(map(len, expected))} tiles of {rows} x {columns}"


def test_edges_of_tiles_end_with_the_lengths():
    ax = tw.causal().plot(100, block=(64, 48), ax=Figure().subplots())
    corners = ax.collections[0].get_coordinates()
    assert corners[0, :, 0].tolist() == [0, 48, 96, 100]
    assert corners[:, 0, 1].tolist() == [0, 64, 100]
    assert (ax.get_xlim(), ax.get_ylim()) == ((0, 100), (100, 0))


@pytest.mark.parametrize("name", ["sink_tokens", "documents", "function_and_band"])
def test_few_pairs_are_drawn_one_by_one_above_their_tiles(name):
    mask, lengths, block = PICTURES[name]
    ax = mask.plot(*lengths, block=block, ax=Figure().subplots())
    (image,) = ax.images
    assert torch.equal(torch.from_numpy(image.get_array().filled()), dense(mask, lengths))
    assert image.get_extent() == [0, lengths[1], lengths[0], 0]
    assert image.get_zorder() > ax.collections[0].get_zorder()


def test_many_pairs_are_not_drawn():
    assert len(tw.causal().plot(513, ax=Figure().subplots()).images) == 0


def test_lengths_default_to_one_another_and_tiles_to_128():
    ax = tw.causal().plot(512, ax=Figure().subplots())
    assert ax.collections[0].get_array().shape == (4, 4)
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("key", "query", "causal()")


def test_without_axes_it_makes_a_figure():
    from matplotlib import pyplot

    ax = tw.causal().plot(64)
    assert ax.figure is pyplot.gcf()
    pyplot.close(ax.figure)


@pytest.mark.parametrize("style", ["default", "dark_background"])
def test_text_has_the_colour_of_the_style(style):
    """So that a dark notebook reads it."""
    with mpl.style.context(style):
        ax = tw.causal().plot(64, ax=Figure().subplots())
        for text in (ax.title, *ax.get_legend().get_texts()):
            assert mpl.colors.same_color(text.get_color(), mpl.rcParams["text.color"])


@pytest.mark.parametrize(("arguments", "message"), [
    ((0,), "sq is 0; allowed to plot is an integer of 1 and more."),
    ((4, -1), "sk is -1; allowed to plot is an integer of 1 and more."),
    ((4.0,), "sq is 4.0; allowed to plot is an integer of 1 and more."),
])
def test_lengths_without_a_picture_are_refused(arguments, message):
    with pytest.raises(tw.InvalidInput) as caught:
        tw.causal().plot(*arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize("block", [64, (64,), (64, 0), (64, 1.5), [64, 64]])
def test_a_block_that_is_no_pair_is_refused(block):
    with pytest.raises(tw.InvalidInput, match=r"block is .*; allowed is a pair of integers of 1 and more, queries and"):
        tw.causal().plot(128, block=block)


def test_an_ambiguous_mask_and_a_function_without_a_picture_say_so():
    with pytest.raises(tw.InvalidInput, match="bottom_right"):
        tw.causal().plot(3, 5)
    without_torch = EVEN.with_tensors()
    object.__setattr__(without_torch, "torch", None)
    with pytest.raises(tw.InvalidInput, match="has no torch function, which is what a picture is made of"):
        without_torch.plot(4)


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="matplotlib, which is not installed; pip install matplotlib brings it"):
        tw.causal().plot(8)


def test_the_figures_of_the_documents_are_drawn_by_their_script(tmp_path):
    from importlib import util
    from pathlib import Path

    docs = Path(__file__).resolve().parents[2] / "docs"
    spec = util.spec_from_file_location("mask_figure", docs / "mask_figure.py")
    script = util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main(tmp_path / "mask-plot.svg", tmp_path / "mask-tables.svg")
    for figure in (script.FIGURE, script.TABLES):
        assert (tmp_path / figure.name).read_text("utf-8").count("<path") > 50
        assert figure.is_file()
        assert f"(figures/{figure.name})" in (docs / "masks.md").read_text("utf-8")
