"""Sphinx: the site from the Markdown pages and the docstrings of the package. `make docs` builds it."""

from fairseq_tutel import __version__

project = "fairseq_tutel"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# The source folder is the repository, so that pages link to each other as they do in a checkout.
include_patterns = ["README.md", "C*.md", "docs/**.md", "configs/README.md", "benchmarks/README.md"]
root_doc = "docs/site/index"
myst_enable_extensions = ["html_image"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"fairseq_tutel {release}"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"


def _escape(app, what, name, obj, options, lines) -> None:
    """Escape the bars of absolute values, because reStructuredText treats bars as substitutions."""
    lines[:] = [line.replace("|", r"\|") for line in lines]


def setup(app) -> None:
    """Register `_escape` at Sphinx."""
    app.connect("autodoc-process-docstring", _escape)
