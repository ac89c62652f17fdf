"""How Sphinx builds these pages, and how it runs their examples.

Every ``python`` block of a page is executed, in order, one namespace a page. If a ``text`` block follows it directly,
what the code prints must end with that text. Examples in docstrings are doctests, which pytest runs.
"""

import doctest
import os
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the examples import `recipes`

from lightning_dp import __version__  # noqa: E402

project = "lightning-dp"
author = "the lightning-dp founders"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.doctest", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"lightning-dp {__version__}"

doctest_show_successes = False
doctest_test_doctest_blocks = ""
doctest_global_setup = """
import logging, warnings
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.simplefilter("ignore")
"""


def run_python_blocks(app: Sphinx, doctree: nodes.document) -> None:
    """Turns each ``python`` block into a test that expects the ``text`` block after it at the end of its output."""
    for block in list(doctree.findall(nodes.literal_block)):
        if block.get("language") != "python":
            continue
        block["testnodetype"] = "testcode"
        following = block.next_node(descend=False, siblings=True)
        is_output = isinstance(following, nodes.literal_block) and following.get("language") == "text"
        shown = following.astext() if is_output else ""
        expected = nodes.comment("", f"...{shown}", testnodetype="testoutput")
        block["groups"] = expected["groups"] = ["page"]
        expected["options"] = {doctest.NORMALIZE_WHITESPACE: True, doctest.ELLIPSIS: True}
        block.parent.insert(block.parent.index(block) + 1, expected)


def write_into_build_folder(app: Sphinx) -> None:
    """Keeps what the examples write, such as logs and checkpoints, out of the checkout."""
    if app.builder.name == "doctest":
        os.chdir(app.outdir)


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", write_into_build_folder)
    app.connect("doctree-read", run_python_blocks)
