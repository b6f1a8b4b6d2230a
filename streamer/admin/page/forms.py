"""Forms for the settings of a database, a url or a table, made from the models of the API.

So a setting that is added there is here as well, and nothing is checked twice: what is sent goes to
the service, whose error names the field. Pure.
"""

import enum
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Union, get_args, get_origin

import yaml

from streamer.admin import models
from streamer.errors import InvalidError

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Field:
    """A setting in a form. ``kind``: choice, flag, number, text, lines or yaml."""

    name: str
    label: str
    help: str
    kind: str
    choices: tuple[tuple[str, str], ...] = ()
    is_optional: bool = False
    is_seldom: bool = False


_TEXTS: Final[dict[str, tuple[str, str]]] = {
    "target": ("Target", "Table of the target, also with its schema. Empty: the same name."),
    "type": ("Type", ""),
    "columns": (
        "Columns",
        "Only these, one a line as `source: target`. Empty: all, under their names.",
    ),
    "exclude": ("Columns left out", "One a line."),
    "filter": ("Filter", "An SQL condition over the source's columns; rows without it stay away."),
    "set": ("Computed columns", "One a line as `column: SQL expression`."),
    "on_error": ("When the target refuses a change", ""),
    "initial": ("Rows that are there already", ""),
    "truncate_target": (
        "Remove rows of others from the target first",
        "Before the copy, whoever wrote them.",
    ),
    "on_column_added": ("When the source gets a column", ""),
    "streaming": (
        "Stream large transactions while they run",
        "Otherwise the source keeps each of them until its end.",
    ),
    "transport": ("Transport", ""),
    "failover": (
        "Failover slot",
        "Standbys with sync_replication_slots keep the slot (PostgreSQL 17 and later).",
    ),
    "forward_origins": (
        "Pass on what the source got by replication",
        "For cascades; never in a circle.",
    ),
    "max_retained_wal": (
        "Limit on the WAL that the source keeps",
        "Say 20GB. Empty: none.",
    ),
    "on_max_retained_wal": ("When that is reached", ""),
    "heartbeat_interval": (
        "Seconds between heartbeats",
        "They measure the way from commit to visible. 0: none.",
    ),
}
_CHOICES: Final = {
    "clone": "clone: keep it equal",
    "append": "append: never delete",
    "history": "history: keep every version",
    "stop": "stop, and wait for somebody",
    "quarantine": "quarantine: put the row aside and go on",
    "copy": "copy them",
    "keep": "are in the target: keep those",
    "none": "leave them out",
    "add": "add it to the target",
    "ignore": "do without it",
    "warn": "warn, and let it grow",
    "spool": "spool: take it to our own disk",
    "drop": "drop the slot: tables are copied again",
    "text": "text: always works",
    "binary": "binary: a little faster, same types on both sides",
}
OFTEN: Final = frozenset({"target", "type"})
"""What a form shows at once; the rest is folded away."""


def fields_of(kind: str) -> list[Field]:
    """Return the settings of a kind of row, in the model's order."""
    return [
        _field(field.alias or name, field.annotation)
        for name, field in models.BODIES[kind].model_fields.items()
        if (field.alias or name) not in models.COLUMNS[kind]
    ]


def _field(name: str, annotation: Any) -> Field:
    label, help_text = _TEXTS.get(name, (name.replace("_", " ").capitalize(), ""))
    inner, is_optional = _without_none(annotation)
    kind = "yaml"
    choices: tuple[tuple[str, str], ...] = ()
    if isinstance(inner, type) and issubclass(inner, enum.Enum):
        kind, choices = "choice", tuple(_choice(str(member.value)) for member in inner)
    elif get_origin(inner) is not None and all(isinstance(a, str) for a in get_args(inner)):
        kind, choices = "choice", tuple(_choice(value) for value in get_args(inner))
    elif inner is bool:
        kind = "flag"
    elif inner in (int, float):
        kind = "number"
    elif inner is str:
        kind = "text"
    elif inner == list[str]:
        kind = "lines"
    return Field(name, label, help_text, kind, choices, is_optional, name not in OFTEN)


def _choice(value: str) -> tuple[str, str]:
    return value, _CHOICES.get(value, value)


def _without_none(annotation: Any) -> tuple[Any, bool]:
    """Take ``Annotated`` and ``| None`` off a type."""
    if get_origin(annotation) is Annotated:
        return _without_none(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        rest = [each for each in get_args(annotation) if each is not type(None)]
        if len(rest) == 1:
            return _without_none(rest[0])[0], len(rest) < len(get_args(annotation))
    return annotation, False


def written(field: Field, row: Row) -> str:
    """Return a value of *row* as it stands in its field."""
    value = row.get(field.name)
    if value is None or value in ([], {}):
        return ""
    match field.kind:
        case "lines":
            return "\n".join(str(item) for item in value)
        case "yaml":
            return yaml.safe_dump(
                value, allow_unicode=True, default_flow_style=False, sort_keys=False, width=10_000
            )
        case _:
            return str(value)


def read(fields: Iterable[Field], given: Mapping[str, Any]) -> Row:
    """Return the values that a form was sent with. Raises InvalidError."""
    return {field.name: _value(field, _text(given.get(field.name))) for field in fields}


def _text(value: Any) -> str:
    """Return the text of a field; files are none. Browsers end lines with both characters."""
    return value.replace("\r\n", "\n") if isinstance(value, str) else ""


def _value(field: Field, text: str) -> Any:
    match field.kind:
        case "flag":
            return text == "on"
        case "lines":
            return [line for line in text.split("\n") if line.strip()]
        case "choice" | "text":
            return text if text or not (field.is_optional or field.kind == "text") else None
        case "number":
            return _number(field, text)
        case _:
            return _from_yaml(field, text)


def _number(field: Field, text: str) -> Any:
    text = text.strip()
    if not text:
        return None if field.is_optional else 0
    if re.fullmatch(r"-?\d{1,30}", text, re.ASCII):
        return int(text)
    # Whatever else it is, the model knows: a size may have a unit.
    return float(text) if re.fullmatch(r"-?\d{1,30}\.\d{1,30}", text, re.ASCII) else text


def _from_yaml(field: Field, text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as exc:
        mark = getattr(exc, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise InvalidError(f"{field.name}: cannot be read{line}: expected `name: value`") from None
    if value is None:
        return None if field.is_optional else {}
    return value


def faulty_field(message: str, names: Iterable[str]) -> str | None:
    """Return the field that an error is about: its message begins with the name."""
    found = [name for name in names if message.startswith((f"{name}:", f"{name}.", f"{name}["))]
    return found[0] if found else None
