"""Names of relations: in PostgreSQL's form, in the form of a configuration, and as patterns.

Pure.
"""

import itertools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from streamer.errors.error_classes import MappingError

NAME_BYTES_MAX: Final = 63  # NAMEDATALEN - 1

_QUOTED_PART = re.compile(r'"((?:[^"]|"")+)"')
PLACEHOLDER: Final = re.compile(r"\*|\{(?:database|sid|schema|table)\}")
_STAR: Final = re.compile(r"\*")


@dataclass(frozen=True, slots=True, order=True)
class RelationName:
    """A schema-qualified relation name, in PostgreSQL's stored form."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{_written(self.namespace)}.{_written(self.name)}"


def _written(part: str) -> str:
    """Write a part of a name in the form that `parse_relation` reads."""
    if part and "." not in part and not part.startswith('"') and "*" not in part:
        return part
    return '"' + part.replace('"', '""') + '"'


@dataclass(frozen=True, slots=True)
class RelationPattern:
    """A relation name of a rule. Each part is exact, or contains ``*`` for any characters."""

    namespace: str
    name: str
    namespace_is_pattern: bool = False
    name_is_pattern: bool = False

    @property
    def is_pattern(self) -> bool:
        return self.namespace_is_pattern or self.name_is_pattern

    def matches(self, relation: RelationName) -> bool:
        return _part_matches(
            self.namespace, relation.namespace, self.namespace_is_pattern
        ) and _part_matches(self.name, relation.name, self.name_is_pattern)

    @property
    def written_namespace(self) -> str:
        return self.namespace if self.namespace_is_pattern else _written(self.namespace)

    @property
    def written_name(self) -> str:
        return self.name if self.name_is_pattern else _written(self.name)

    def __str__(self) -> str:
        return f"{self.written_namespace}.{self.written_name}"


def _part_matches(pattern: str, name: str, is_pattern: bool) -> bool:
    if not is_pattern:
        return pattern == name
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name, re.DOTALL) is not None


def parse_target(text: str, default_namespace: str) -> RelationPattern:
    """Read the ``target`` of a rule like `parse_relation`; a part without double quotes may hold
    ``{database}``, ``{sid}``, ``{schema}`` and ``{table}``. Raises MappingError.
    """
    return parse_relation(text, default_namespace, special=PLACEHOLDER)


def parse_relation(
    text: str, default_namespace: str, special: re.Pattern[str] = _STAR
) -> RelationPattern:
    """Read ``table``, ``schema.table`` or a name with ``*``.

    A part with a dot or a literal ``*``, or with a double quote at its beginning, needs double
    quotes, and doubled double quotes inside. Raises MappingError for a text of a different form. An
    unbalanced quote is an error, too: as a pattern, it would silently match no table.
    """
    parts: list[tuple[str, bool]] = []
    position = 0
    while True:
        quoted = _QUOTED_PART.match(text, position)
        if quoted and (quoted.end() == len(text) or text[quoted.end()] == "."):
            parts.append((quoted[1].replace('""', '"'), False))
            position = quoted.end()
        else:
            end = text.find(".", position)
            end = len(text) if end < 0 else end
            part = text[position:end]
            # The check below refuses an empty part.
            is_pattern = special.search(part) is not None
            parts.append(("" if part.startswith('"') else part, is_pattern))
            position = end
        if position >= len(text):
            break
        position += 1
    if len(parts) > 2 or not all(part for part, _ in parts):
        raise MappingError(
            f"{text!r} is not a table name",
            hint="write table or schema.table; a part that contains a dot or begins with a double "
            'quote goes in double quotes: "a.b", """a"',
        )
    for part, _ in parts:
        if not can_be_stored(part):
            raise MappingError(
                f"{text!r} is not a table name",
                hint="a name has at most 63 bytes of UTF-8, none of them zero",
            )
    if len(parts) == 1:
        parts.insert(0, (default_namespace, False))
    (namespace, namespace_is_pattern), (name, name_is_pattern) = parts
    return RelationPattern(namespace, name, namespace_is_pattern, name_is_pattern)


def is_name(text: str) -> bool:
    """Return whether PostgreSQL can store *text* as a name."""
    return bool(text) and can_be_stored(text)


def can_be_stored(part: str) -> bool:
    try:
        return len(part.encode()) <= NAME_BYTES_MAX and "\0" not in part
    except UnicodeEncodeError:  # half of a surrogate pair, which YAML can write
        return False


def parse_name(text: str) -> RelationName:
    """Read a name in the form of `RelationName`."""
    pattern = parse_relation(text, "public")
    return RelationName(pattern.namespace, pattern.name)


def ordered_renames(renames: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return steps that give all objects of *renames* their new names. The new name of each step is
    free.

    To break a circle, an object gets a temporary name first.
    """
    pending = dict(renames)
    steps = []
    while pending:
        former = next((old for old, new in pending.items() if new not in pending), None)
        if former is None:
            former, new = next(iter(pending.items()))
            aside = free_name(former, "_moves", {*pending, *renames.values()})
            steps.append((former, aside))
            del pending[former]
            pending[aside] = new
        else:
            steps.append((former, pending.pop(former)))
    return steps


def free_name(name: str, mark: str, used_names: Collection[str]) -> str:
    """Return another name for the object *name*: with *mark* and a number at the end."""
    marks = (f"{mark}{number}" for number in itertools.count(1))
    names = (name.encode()[: NAME_BYTES_MAX - len(m)].decode(errors="ignore") + m for m in marks)
    return next(candidate for candidate in names if candidate not in used_names)
