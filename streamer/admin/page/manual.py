"""The README as a page, so that a problem can link to its section without a network."""

import re
from functools import cache
from importlib.resources import files
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup


@cache
def manual_html() -> Markup:
    """Return the README as HTML, its headings with the ids of their links. The first call reads
    it, see `load`.
    """
    package = Path(str(files("streamer")))
    shipped = package / "README.md"
    path = shipped if shipped.is_file() else package.parent / "README.md"
    return Markup(to_html(path.read_text(encoding="utf-8")))


def to_html(text: str) -> str:
    """Return Markdown as HTML. Raw HTML is escaped, and links to other files become text. Pure."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(text)
    for number, token in enumerate(tokens):
        if token.type == "heading_open":
            token.attrSet("id", anchor_of(tokens[number + 1].content))
        if token.children:
            token.children = _without_files(token.children)
    rendered: str = parser.renderer.render(tokens, parser.options, {})
    return rendered


def anchor_of(heading: str) -> str:
    """Return the anchor that links to a heading have."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _without_files(tokens: list[Token]) -> list[Token]:
    kept = []
    is_file = False
    for token in tokens:
        if token.type == "link_open":
            is_file = not str(token.attrGet("href")).startswith(("#", "http://", "https://"))
        is_link = token.type in ("link_open", "link_close")
        if token.type != "image" and not (is_link and is_file):
            kept.append(token)
    return kept
