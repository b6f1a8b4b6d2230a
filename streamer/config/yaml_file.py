"""The YAML file: values with the line of every key, environment variables replaced.

pydantic names only the key at fault, but an operator also needs the line. So the reader composes
nodes, which know their lines, and builds values from the nodes. The reader rejects duplicate keys,
which YAML forbids and PyYAML accepts.
"""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from streamer.errors.error_classes import SettingsError

# ``$${`` stands for a literal ``${``.
_VARIABLE: Final = re.compile(r"\$\$\{|\$\{([A-Za-z_][A-Za-z0-9_]*)\}")

Location = tuple[str | int, ...]

_MISSING: Final = object()
_ALIAS_VALUES_MAX: Final = 300_000


@dataclass(slots=True)
class Replaced:
    """The variables that the environment replaced in strings, and the missing variables of one
    source.
    """

    variables: dict[Location, list[str]] = field(default_factory=dict)
    """The names of the variables in a string."""
    written: dict[Location, str] = field(default_factory=dict)
    """The text of such a string in the file."""
    missing: dict[Location, str] = field(default_factory=dict)
    """The fault of a string that belongs to one source."""

    def in_source(self, value: Any, location: Location) -> Any:
        """Return *value* of the source at *location*, with its variables replaced.

        Leave out a string whose variable is missing. Keep the text of a url, because its value does
        not name the source. Raises LookupError for database and sid, which name the source.
        """
        if isinstance(value, dict):
            items = {key: self.in_source(item, (*location, key)) for key, item in value.items()}
            return without_missing(items, location)
        if isinstance(value, list):
            return [self.in_source(item, (*location, n)) for n, item in enumerate(value)]
        if not isinstance(value, str):
            return value
        names = names_in(value)
        if not names:
            return replace_variables(value)
        self.variables[location] = names
        self.written[location] = value
        is_url = location[2:3] == ("urls",) and location[4:] == ("url",)
        try:
            replaced = replace_variables(value)
        except LookupError as exc:
            if location[2:] == ("database",) or location[4:] == ("sid",):
                raise
            self.missing[location] = str(exc.args[0])
            return value if is_url or isinstance(location[-1], int) else _MISSING
        if is_url and not replaced:
            self.missing[location] = f"environment variable {names[0]} is empty"
            return value
        return replaced


@dataclass(frozen=True, slots=True)
class Document:
    """The values of a file, and the line of each value."""

    path: Path
    values: dict[str, Any]
    lines: dict[Location, int] = field(default_factory=dict)
    replaced: "Replaced" = field(default_factory=lambda: Replaced())
    is_list: bool = False
    """The document is a list, which the reader stored under a key."""

    def where(self, location: Location) -> str:
        """Return the file and the line of the value at *location*, or of its nearest parent."""
        for length in range(len(location), -1, -1):
            if (line := self.lines.get(location[:length])) is not None:
                return f"{self.path}, line {line}"
        return str(self.path)


def read_document(path: Path) -> Document:
    """Read a YAML file, with its variables replaced. Raises SettingsError with file and line."""
    return parse_document(path, read_text(path))


def read_text(path: Path) -> str:
    """Read a file's text. Raises SettingsError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as exc:
        raise SettingsError(
            f"cannot read {path}: {exc.strerror}",
            hint="check the path; --config names the configuration, and config.example.yaml "
            "is an example",
        ) from None
    except UnicodeDecodeError:
        raise SettingsError(f"{path} is not UTF-8 text") from None


def parse_document(
    path: Path, text: str, *, replace: bool = True, list_key: str | None = None
) -> Document:
    """Read YAML *text* that came from *path*; without *replace*, variables stay as written.

    A list is an error unless *list_key* names a key for it. Raises SettingsError with file and
    line.
    """
    try:
        return _parse(path, text, replace, list_key)
    except RecursionError:
        raise SettingsError(f"{path}: its values are nested too deeply") from None


def _parse(path: Path, text: str, replace: bool, list_key: str | None) -> Document:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(exc, "problem", None) or str(exc).splitlines()[0]
        raise SettingsError(f"{path}{line}: not valid YAML: {problem}") from None
    document = Document(path, {})
    if node is None:
        return document
    if list_key is not None and isinstance(node, yaml.SequenceNode):
        document = Document(path, {}, is_list=True)
        document.values[list_key] = _Builder(document, replace, text).value(node, (list_key,))
        return document
    if not isinstance(node, yaml.MappingNode):
        raise SettingsError(f"{path}, line 1: expected keys and values")
    document.values.update(_Builder(document, replace, text).value(node, ()))
    return document


class _Builder:
    """Builds values from nodes, up to a limit. An alias counts as many values as its node."""

    def __init__(self, document: Document, replace: bool, text: str) -> None:
        self._left = len(text) + _ALIAS_VALUES_MAX
        self._open: set[int] = set()
        self._document = document
        self._replaces = replace
        self._constructor = yaml.SafeLoader("")

    def mapping(self, node: yaml.MappingNode, location: Location) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is None:
                raise self._error(key_node, location, "a key must be a string")
            if key in values:
                raise self._error(key_node, (*location, key), "given twice")
            self._document.lines[*location, key] = key_node.start_mark.line + 1
            values[key] = self.value(value_node, (*location, key))
        return without_missing(values, location)

    def value(self, node: yaml.Node, location: Location) -> Any:
        self._document.lines.setdefault(location, node.start_mark.line + 1)
        self._left -= 1
        if self._left < 0:
            raise self._error(node, (), f"its aliases stand for over {_ALIAS_VALUES_MAX} values")
        if isinstance(node, yaml.CollectionNode):
            if id(node) in self._open:
                raise self._error(node, location, "an alias in this value stands for the value")
            self._open.add(id(node))
            try:
                return self._collection(node, location)
            finally:
                self._open.discard(id(node))
        try:
            value = self._constructor.construct_object(node)
        except (ValueError, KeyError, AttributeError, yaml.YAMLError):  # errors of the value's type
            kind = node.tag.rpartition(":")[2]
            raise self._error(node, location, f"this value cannot be read as {kind}") from None
        if not isinstance(value, str) or not self._replaces:
            return value
        return self._replace(node, value, location)

    def _collection(self, node: yaml.CollectionNode, location: Location) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, location)
        return [self.value(item, (*location, n)) for n, item in enumerate(node.value)]

    def _replace(self, node: yaml.Node, value: str, location: Location) -> Any:
        replaced = self._document.replaced
        try:
            if location[:1] == ("sources",) and len(location) > 2:
                return replaced.in_source(value, location)
            return replace_variables(value)
        except LookupError as exc:
            raise self._error(node, location, str(exc.args[0])) from None

    def _error(self, node: yaml.Node, location: Location, problem: str) -> SettingsError:
        name = format_location(location)
        line = node.start_mark.line + 1
        prefix = f"{name}: " if name else ""
        return SettingsError(f"{self._document.path}, line {line}: {prefix}{problem}")


def without_missing(items: dict[str, Any], location: Location) -> dict[str, Any]:
    """Remove the values whose variable is missing; a table stays, without settings."""
    is_tables = location[:1] == ("sources",) and location[2:] == ("tables",)
    return {
        key: None if item is _MISSING else item
        for key, item in items.items()
        if is_tables or item is not _MISSING
    }


def replace_variables(text: str) -> str:
    """Replace every ``${NAME}`` from the environment. Raises LookupError for an unset variable."""

    def lookup(match: re.Match[str]) -> str:
        if match[0] == "$${":
            return "${"
        value = os.environ.get(match[1])
        if value is None:
            raise LookupError(f"environment variable {match[1]} is not set")
        return value

    return _VARIABLE.sub(lookup, text)


def names_in(text: str) -> list[str]:
    """Return the names of the variables in *text*."""
    return [match[1] for match in _VARIABLE.finditer(text) if match[1]]


def escape_references(text: str) -> str:
    """Return *text* so that `replace_variables` restores *text*."""
    return text.replace("${", "$${")


def format_location(location: Location) -> str:
    """Write a location as a path: ``sources[0].urls[1].sid``."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text
