"""A short text that is equal in processes with the same mapping. Pure."""

import hashlib
import json
from collections.abc import Mapping as AnyMapping
from collections.abc import Set
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Final

from streamer.mapping.rules import Mapping, MappingFault
from streamer.postgres.conninfo import parse_conninfo
from streamer.postgres.secret import Secret

LENGTH: Final = 12


def fingerprint(mapping: Mapping) -> str:
    """Return the fingerprint of *mapping*, 12 hexadecimal digits.

    The fingerprint leaves out passwords, because each reader of the bookkeeping could try
    candidates. The fingerprint also leaves out settings with their defaults, so that a version with
    further settings agrees with an older version.
    """
    text = json.dumps(_plain(mapping), sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:LENGTH]


def _plain(value: Any) -> Any:
    if isinstance(value, Secret):
        return _without_passwords(value.reveal())
    # leave out the fault's text, because it may name a file, whose path differs between processes
    if isinstance(value, MappingFault):
        return "fault"
    if is_dataclass(value):
        return {
            item.name: _plain(getattr(value, item.name))
            for item in fields(value)
            if item.compare and not _is_default(item, getattr(value, item.name))
        }
    if isinstance(value, AnyMapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted(map(str, value))
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)


def _is_default(field: "Field[Any]", value: Any) -> bool:
    if field.default_factory is not MISSING:
        return bool(value == field.default_factory())
    return field.default is not MISSING and bool(value == field.default)


def _without_passwords(url: str) -> dict[str, str]:
    try:
        parameters = parse_conninfo(url)
    except ValueError:  # the source has a fault, too
        return {}
    return {name: text for name, text in parameters.items() if "password" not in name}
