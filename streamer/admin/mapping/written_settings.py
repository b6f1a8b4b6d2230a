"""Finds the secrets among the values of a configuration file by the loaded settings."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from streamer.config.connection_settings import COMMAND_FIELDS
from streamer.config.settings import Settings, load_settings
from streamer.config.yaml_file import Location, parse_document, read_text
from streamer.postgres.secret import Secret
from streamer.postgres.url_passwords import is_reference

Hide = Callable[[Location, str, str], str]
"""Returns the text in place of a secret, from its location, its text and its value."""


@dataclass(frozen=True, slots=True)
class WrittenSettings:
    """``values``: as written, with references to variables. ``loaded``: the settings as read."""

    values: dict[str, Any] = field(default_factory=dict)
    loaded: Settings | None = None

    def without_secrets(self, hide: Hide) -> dict[str, Any]:
        """Return the values, with the result of *hide* in place of each secret in plain text."""
        hidden = _without_secrets((), self.values, self.loaded, hide)
        assert isinstance(hidden, dict)
        return hidden


def is_url(location: Location) -> bool:
    """Whether the secret at *location* is a connection string, of which a part is secret."""
    return location[0] in ("target", "sources") and location[-1] == "url"


def read_written(path: Path) -> WrittenSettings:
    """Read a configuration file. Raises SettingsError."""
    text = read_text(path)
    written = parse_document(path, text, replace=False).values
    return WrittenSettings(written, load_settings(parse_document(path, text)))


def _without_secrets(location: Location, written: Any, loaded: Any, hide: Hide) -> Any:
    if isinstance(loaded, Secret):
        return _hidden(location, str(written), loaded.reveal(), hide)
    if written is not None and location[-1:] and location[-1] in COMMAND_FIELDS:
        return _hidden(location, str(written), str(written), hide)
    if isinstance(written, dict):
        return {
            key: _without_secrets((*location, key), value, _part(loaded, str(key)), hide)
            for key, value in written.items()
        }
    if isinstance(written, list):
        values = loaded if isinstance(loaded, list) else []
        return [
            _without_secrets((*location, number), *pair, hide)
            for number, pair in enumerate(zip_longest(written, values))
        ]
    return written


def _hidden(location: Location, text: str, loaded: str, hide: Hide) -> str:
    return text if is_reference(text) else hide(location, text, loaded)


def _part(loaded: Any, key: str) -> Any:
    if isinstance(loaded, BaseModel):
        names = {field.alias or name: name for name, field in type(loaded).model_fields.items()}
        return getattr(loaded, names.get(key, key), None)
    return loaded.get(key) if isinstance(loaded, dict) else None
