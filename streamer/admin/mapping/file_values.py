"""The values that a configuration file sets, as YAML without secrets, for the page."""

from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from streamer.admin.mapping.export_and_import import write_yaml
from streamer.config import static_mapping
from streamer.config.yaml_file import parse_document, read_text
from streamer.postgres.secret import Secret
from streamer.postgres.url_passwords import MASK, is_reference, mask


def read_file_values(path: Path) -> str:
    """Return the YAML. References to variables stay as written. Raises SettingsError."""
    written = parse_document(path, read_text(path), replace=False).values
    _, settings = static_mapping.read(path)
    return write_yaml(_without_secrets("", written, settings))


def _without_secrets(name: str, written: Any, loaded: Any) -> Any:
    """Return *written*, the text of a value, with secrets masked. *loaded*: the value as read."""
    if isinstance(loaded, Secret):
        return _masked(name, str(written))
    if isinstance(written, dict):
        return {
            key: _without_secrets(str(key), value, _part(loaded, key))
            for key, value in written.items()
        }
    if isinstance(written, list):
        values = loaded if isinstance(loaded, list) else []
        return [_without_secrets(name, *pair) for pair in zip_longest(written, values)]
    return written


def _masked(name: str, text: str) -> str:
    if is_reference(text):
        return text
    return mask(text) if name == "url" else MASK


def _part(loaded: Any, key: str) -> Any:
    if isinstance(loaded, BaseModel):
        names = {field.alias or name: name for name, field in type(loaded).model_fields.items()}
        return getattr(loaded, names.get(key, key), None)
    return loaded.get(key) if isinstance(loaded, dict) else None
