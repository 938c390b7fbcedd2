"""Settings of the documentation; build it with ``make docs``."""

import re
import sys
from importlib.resources import files
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.fileutil import copy_asset

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from tilewise import __version__

project = "tilewise"
author = "The tilewise authors"
copyright = "The tilewise authors"
version = release = __version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "myst_parser"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3

# Docstrings name shapes and dtypes in words; the signature already shows the types.
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_use_ivar = True
napoleon_use_rtype = False

# The journal of what was tried lies in the repository, not on the site: here a link to it is its path.
_JOURNAL = r"\[([^\]]+)\]\(\.\./(benchmarks/journal/[\w-]+\.md)(?:#[\w-]+)?\)"

html_theme = "furo"
html_title = f"tilewise {version}"
html_static_path = ["_static"]
pygments_dark_style = "github-dark"
html_css_files = ["tilewise.css"]

# Pages load nothing from other hosts: MathJax and its fonts are copied out of a package.
MATHJAX = Path(str(files("sphinx-mathjax-offline"))) / "static/mathjax"
MATHJAX_FILES = {"tex-chtml-full.js": "", "output/chtml/fonts/woff-v2": "output/chtml/fonts/woff-v2"}
mathjax_path = "mathjax/tex-chtml-full.js"
mathjax3_config = {"options": {"enableMenu": False}}  # the menu would load more


def copy_mathjax(app: Sphinx, error: Exception | None) -> None:
    """Put the files that pages with formulas load into the built site."""
    if error is None and app.builder.format == "html":
        for name, folder in MATHJAX_FILES.items():
            copy_asset(MATHJAX / name, Path(app.outdir, "_static/mathjax", folder))


def keep_tagged_equations_whole(app: Sphinx, document: nodes.document) -> None:
    r"""Keep Sphinx from putting what has a ``\\`` into a ``split`` environment, in which TeX allows no ``\tag``."""
    for block in document.findall(nodes.math_block):
        if r"\tag" in block.astext():
            text = rf"\begin{{equation}}{block.astext().strip()}\end{{equation}}"
            block.children = [nodes.Text(text)]
            block["no-wrap"] = True


def _name_the_journal(app: Sphinx, name: str, source: list[str]) -> None:
    source[0] = re.sub(rf"\({_JOURNAL}\)", r"(\1: `\2`)", source[0])
    source[0] = re.sub(_JOURNAL, r"\1 (`\2`)", source[0])


def setup(app: Sphinx) -> None:
    """Prepare links and formulas, and copy MathJax behind every build."""
    app.connect("source-read", _name_the_journal)
    app.connect("doctree-read", keep_tagged_equations_whole)
    app.connect("build-finished", copy_mathjax)
