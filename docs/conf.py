"""How the site is built: Markdown pages and docstrings, and no request to anyone.

    python -m sphinx -W docs build/site        then open build/site/index.html

Warnings are errors (-W). The theme's fonts are the reader's own, its script and styles
are copied beside the pages.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import regard

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "regard"
author = "The regard developers"
copyright = author  # noqa: A001 (Sphinx's name for it)
version = release = regard.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
nitpicky = False
highlight_language = "text"  # of blocks that name none
smartquotes = False  # quotes in prose are often code

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

default_role = "code"  # `x` in a docstring is code
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # shapes stand in the source, types in the signature there
autodoc_preserve_defaults = True
add_module_names = False
toc_object_entries = False

html_theme = "furo"
html_title = f"regard {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"

ARGUMENT = re.compile(r"[a-z_]+(?:, [a-z_]+)*: ")


def read_docstring(*event: Any) -> None:
    """Turn a docstring of ours into reStructuredText, in place: the lines come last."""
    lines: list[str] = event[-1]
    blocks = "\n".join(lines).strip().split("\n\n")
    lines[:] = [*"\n\n".join(map(read_block, blocks)).split("\n"), ""]


def read_block(block: str) -> str:
    """Return an example, a drawing, a list of arguments or a paragraph."""
    if block.startswith(">>>"):
        return block
    if block.startswith("    "):
        return "::\n\n" + block
    if block.startswith("Next: "):  # the next file of the reader's path
        return ""
    if ARGUMENT.match(block):
        listed, rest, last = block.partition("\nThe ")  # a sentence about the others
        items = re.split(rf"\n(?={ARGUMENT.pattern})", listed)
        return "\n".join(map(read_argument, items)) + f"\n{rest}{escape(last)}"
    return escape(block)


def read_argument(item: str) -> str:
    """Return `name: what it is` as an item of a list, in one line."""
    name, _, what = " ".join(item.split()).partition(": ")
    return f"- **{escape(name)}**: {escape(what)}"


def escape(text: str) -> str:
    """Escape what reStructuredText would take for markup, outside of `code`."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*|_\\])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def list_pages(app: Sphinx, name: str, source: list[str]) -> None:
    """List the lessons on their page, and every page on the front page.

    The page of the lessons is made by lessons/build.py. Pages of this folder that the
    front page does not name are added to the last of its lists.
    """
    if name == "lessons/index":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"
    if name == "index":
        named = {"index", *re.findall(r"(?m)^(?:.*<)?([\w-]+)>?$", source[0])}
        pages = {page for page in app.env.found_docs if "/" not in page}
        source[0] = source[0].rstrip().removesuffix("```")
        source[0] += "\n".join([*sorted(pages - named), "```", ""])


def setup(app: Sphinx) -> None:
    """Let Sphinx read our docstrings, and list every page."""
    app.connect("source-read", list_pages)
    app.connect("autodoc-process-docstring", read_docstring)
