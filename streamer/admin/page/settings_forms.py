"""Forms for the settings of a database, a url or a table, made from the models of the API.

Labels and texts come from `config.settings` and `config.choices`. The service checks a sent form,
and names the field in an error. Pure.
"""

import enum
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from streamer.admin.mapping import api_models
from streamer.config.choices import CHOICES
from streamer.errors.error_classes import InvalidError

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


_FORMATS: Final = {
    "lines": "One per line.",
    "yaml": "One per line, as `name: value`.",
}
OFTEN: Final = frozenset({"target", "type"})
"""Settings that a form shows at once, above the folded settings."""


def fields_of(kind: str) -> list[Field]:
    """Return the settings of a kind of row, in the model's order."""
    return [
        _field(field.alias or name, field)
        for name, field in api_models.BODIES[kind].model_fields.items()
        if (field.alias or name) not in api_models.COLUMNS[kind]
    ]


def _field(name: str, setting: FieldInfo) -> Field:
    label = setting.title or name.replace("_", " ").capitalize()
    inner, is_optional = _without_none(setting.annotation)
    kind = "yaml"
    choices: tuple[tuple[str, str], ...] = ()
    if isinstance(inner, type) and issubclass(inner, enum.Enum):
        kind, choices = "choice", tuple(_choice(name, str(member.value)) for member in inner)
    elif get_origin(inner) is not None and all(isinstance(a, str) for a in get_args(inner)):
        kind, choices = "choice", tuple(_choice(name, value) for value in get_args(inner))
    elif inner is bool:
        kind = "flag"
    elif inner in (int, float):
        kind = "number"
    elif inner is str:
        kind = "text"
    elif inner == list[str]:
        kind = "lines"
    help_text = " ".join(filter(None, (first_sentence(setting), _FORMATS.get(kind))))
    return Field(name, label, help_text, kind, choices, is_optional, name not in OFTEN)


def first_sentence(setting: FieldInfo) -> str:
    """Return the first sentence of a description."""
    return (setting.description or "").split(". ", 1)[0].rstrip(".") + "."


def _choice(name: str, value: str) -> tuple[str, str]:
    # A browser shows the text of an option as is.
    return value, f"{value}: {CHOICES[name][value]}".replace("`", "")


def _without_none(annotation: Any) -> tuple[Any, bool]:
    """Remove ``Annotated`` and ``| None`` from a type."""
    if get_origin(annotation) is Annotated:
        return _without_none(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        if len(members) == 1:
            return _without_none(members[0])[0], len(members) < len(get_args(annotation))
    return annotation, False


def written(field: Field, row: Row) -> str:
    """Return a value of *row* as text for its field."""
    value = row.get(field.name)
    if value is None or value in ([], {}):
        return ""
    match field.kind:
        case "lines":
            return "\n".join(str(item) for item in value)
        case "yaml" if not isinstance(value, str):
            return yaml.safe_dump(
                value, allow_unicode=True, default_flow_style=False, sort_keys=False, width=10_000
            )
        case _:
            return str(value)


def read(fields: Iterable[Field], form: Mapping[str, Any]) -> Row:
    """Return the values of a sent form. Raises InvalidError."""
    return {field.name: _value(field, _text(form.get(field.name))) for field in fields}


def _text(value: Any) -> str:
    """Return the text of a field; files have no text. Browsers end lines with CR and LF."""
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
    # The model accepts more forms of a number: a size may have a unit.
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
    """Return the field whose name begins the message of an error."""
    matches = [name for name in names if message.startswith((f"{name}:", f"{name}.", f"{name}["))]
    return matches[0] if matches else None
