"""Templates and static files of the package, read once, so that the event loop reads no files.

Templates escape every value, from any origin.
"""

import functools
import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

from jinja2 import DictLoader, Environment, StrictUndefined

from streamer import __version__
from streamer.admin.page import text
from streamer.admin.page.manual import manual_texts
from streamer.observability.logs import redact

_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """A static file. ``version`` changes with its content, so that browsers may keep it."""

    content: bytes
    media_type: str
    version: str


@functools.cache
def assets() -> dict[str, Asset]:
    """Return the static files by name. The first call reads them."""
    found = {}
    for file in (files("streamer.admin.page") / "static").iterdir():
        suffix = file.name[file.name.rfind(".") :]
        if suffix in _TYPES:
            content = file.read_bytes()
            version = hashlib.sha256(content).hexdigest()[:12]
            found[file.name] = Asset(content, _TYPES[suffix], version)
    return found


@functools.cache
def environment() -> Environment:
    """Return the templates, compiled. The first call reads them."""
    folder = files("streamer.admin.page") / "templates"
    sources = {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir()}
    made = Environment(
        loader=DictLoader(sources),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters |= {
        "number": text.count,
        "size": text.size,
        "duration": text.duration,
        "latency": text.latency,
        "rate": text.rate,
        "moment": text.moment,
        "plural": text.plural,
        "state_kind": text.state_kind,
        "state_word": text.state_word,
        "redact": redact,
    }
    versions = {name: asset.version for name, asset in assets().items()}
    made.globals |= {
        "asset": lambda name: f"/static/{name}?v={versions[name]}",
        "version": __version__,
    }
    for name in sources:
        made.get_template(name)
    return made


def load() -> None:
    """Read everything; it takes a moment, and files are not for the event loop."""
    environment()
    manual_texts()


def render(template: str, **values: Any) -> str:
    return environment().get_template(template).render(**values)
