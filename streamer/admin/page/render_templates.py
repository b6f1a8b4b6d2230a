"""Templates and static files of the package, read once, so that the event loop reads no files.

Templates escape every value, from any origin.
"""

import functools
import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any, Final

from jinja2 import DictLoader, Environment, StrictUndefined

from streamer import __version__
from streamer.admin.page import number_text
from streamer.admin.page.manual_page import manual_texts
from streamer.observability.logs import redact

_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """A static file. ``version`` changes with the content, so that browsers may cache the file."""

    content: bytes
    media_type: str
    version: str


@functools.cache
def assets() -> dict[str, Asset]:
    """Return the static files by name. The first call reads the files."""
    by_name = {}
    for file in (files("streamer.admin.page") / "static").iterdir():
        suffix = file.name[file.name.rfind(".") :]
        if suffix in _TYPES:
            content = file.read_bytes()
            version = hashlib.sha256(content).hexdigest()[:12]
            by_name[file.name] = Asset(content, _TYPES[suffix], version)
    return by_name


@functools.cache
def environment() -> Environment:
    """Return the compiled templates. The first call reads the files."""
    folder = files("streamer.admin.page") / "templates"
    sources = {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir()}
    templates = Environment(
        loader=DictLoader(sources),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    templates.filters |= {
        "number": number_text.count,
        "grouped": number_text.grouped,
        "size": number_text.size,
        "duration": number_text.duration,
        "latency": number_text.latency,
        "rate": number_text.rate,
        "written": number_text.written,
        "ago": lambda value: number_text.ago(value, datetime.now(UTC)),
        "plural": number_text.plural,
        "state_kind": number_text.state_kind,
        "state_word": number_text.state_word,
        "prose": number_text.prose,
        "unbroken": number_text.unbroken,
        "redact": redact,
    }
    versions = {name: asset.version for name, asset in assets().items()}
    templates.globals |= {
        "asset": lambda name: f"/static/{name}?v={versions[name]}",
        "version": __version__,
    }
    for name in sources:
        templates.get_template(name)
    return templates


def load() -> None:
    """Read all files early, because later reads would block the event loop."""
    environment()
    manual_texts()


def render(template: str, **values: Any) -> str:
    return environment().get_template(template).render(**values)
