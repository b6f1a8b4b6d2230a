"""The documentation as pages under ``/help``, so that links to runbooks need no network."""

import re
from collections.abc import Container
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import Final

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

from streamer.util.listen_address import local_url

HELP: Final = "/help"
INDEX: Final = "index"


@dataclass(frozen=True, slots=True)
class ManualPage:
    """A page of the documentation as HTML. *title*: the first heading."""

    title: str
    html: Markup


@cache
def manual_texts() -> dict[str, str]:
    """Return the pages as Markdown, by name, such as ``runbooks/slot-lost``. The first call reads
    the files.
    """
    root = manual_root()
    return {
        path.relative_to(root).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(root.rglob("*.md"))
    }


@cache
def manual_page(name: str) -> ManualPage:
    """Return a page. Raises KeyError."""
    texts = manual_texts()
    text = texts[name]
    return ManualPage(title_of(text), Markup(to_html(text, name, texts)))


def manual_root() -> Path:
    """Return the folder of the documentation: in the installed package, or beside the source."""
    package = Path(str(files("streamer")))
    shipped = package / "docs"
    return shipped if shipped.is_dir() else package.parent / "docs"


def title_of(text: str) -> str:
    """Return the first heading. Pure."""
    return text.partition("\n")[0].removeprefix("# ")


def to_html(text: str, name: str = INDEX, names: Container[str] = ()) -> str:
    """Return the Markdown of page *name* as HTML. Pure.

    The renderer escapes raw HTML. A link to a page of *names* leads to the address of that page
    under ``/help``. Links to files outside the manual become text.
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(text)
    for number, token in enumerate(tokens):
        if token.type == "heading_open":
            token.attrSet("id", anchor_of(tokens[number + 1].content))
        if token.children:
            token.children = _with_addresses(token.children, name, names)
    rendered: str = parser.renderer.render(tokens, parser.options, {})
    return rendered


def anchor_of(heading: str) -> str:
    """Return the anchor of a heading, as links in the documentation write the anchor."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def address_of(link: str, name: str, names: Container[str]) -> str | None:
    """Return the address of a link on page *name*; None for a page outside of *names*. Pure."""
    if link.startswith(("#", "http://", "https://")):
        return link
    path, hash_sign, anchor = link.partition("#")
    linked = normpath(join(dirname(name), path)).removesuffix(".md")
    if not path.endswith(".md") or linked not in names:
        return None
    return f"{help_address(linked)}{hash_sign}{anchor}"


def help_address(name: str) -> str:
    """Return the address of a page of the documentation."""
    return HELP if name == INDEX else f"{HELP}/{name}"


def reachable_address(page: str, listen: str | None) -> str:
    """Return an address of *page*, a path under ``/help``, that a person can open here.

    *listen*: host and port of a process on this machine; None: return the path of the page's file.
    """
    if listen is None:
        return str(manual_root() / f"{page.removeprefix(HELP).strip('/')}.md")
    return f"{local_url(listen)}{page}"


def _with_addresses(tokens: list[Token], name: str, names: Container[str]) -> list[Token]:
    visible = []
    address: str | None = None
    for token in tokens:
        if token.type == "link_open":
            address = address_of(str(token.attrGet("href")), name, names)
            if address is not None:
                token.attrSet("href", address)
        is_link = token.type in ("link_open", "link_close")
        if token.type != "image" and not (is_link and address is None):
            visible.append(token)
    return visible
