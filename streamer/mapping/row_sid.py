"""The sid of a table's rows, as a rule writes it: ``{schema}``, or ``{schema:tenant_(.*)}``. Pure.

The regular expression of a placeholder has one group, and must match the whole name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from streamer.errors.error_classes import MappingError

PARTS_OF_NAME: Final = ("schema", "table")
PARTS_OF_SOURCE: Final = ("database", "sid")
_HINT: Final = (
    'write a text with {schema}, {table}, {database} or {sid}, such as "{schema}", or with a part '
    'of a name, such as "{schema:tenant_(.*)}"'
)


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A name in a sid, or the group of *pattern* in that name."""

    name: str
    pattern: re.Pattern[str] | None = None

    def fill(self, names: Mapping[str, str | None]) -> str:
        """Return the text for *names*. Raises MappingError."""
        value = names[self.name]
        if value is None:
            raise MappingError(
                "its sid contains {sid}, and the url has no sid",
                hint="give the url a sid, or remove {sid} from the sid of the table",
            )
        if self.pattern is None:
            return value
        match = self.pattern.fullmatch(value)
        if match is None or not match[1]:
            raise MappingError(
                f'its sid needs a {self.name} that matches "{self.pattern.pattern}"',
                hint="add the table to `exclude_tables`; or narrow the name of the rule, or change "
                f'the expression in `sid`, so that "{value}" matches',
            )
        return match[1]


@dataclass(frozen=True, slots=True)
class SidTemplate:
    """The sid of a rule. ``parts``: texts and placeholders in order."""

    text: str
    parts: tuple[str | Placeholder, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the `sid` of a rule. Raises MappingError."""
        parts: list[str | Placeholder] = []
        position = 0
        while position < len(text):
            if text[position] == "{":
                end = _closing_brace(text, position)
                parts.append(_placeholder(text[position + 1 : end]))
                position = end + 1
            else:
                end = text.find("{", position)
                end = len(text) if end < 0 else end
                parts.append(text[position:end])
                position = end
        if not parts or "\0" in text:
            raise MappingError(f"{text!r} is not a sid", hint=_HINT)
        return cls(text, tuple(parts))

    def fill(self, names: Mapping[str, str | None]) -> str:
        """Return the sid for *names*, by placeholder. Raises MappingError."""
        return "".join(part if isinstance(part, str) else part.fill(names) for part in self.parts)

    def distinguishes(self, name: str) -> bool:
        """Whether the sid depends on *name*, ``schema`` or ``table``, and so can differ by table.

        A pattern may extract equal sids from different names; only the existing tables show that.
        """
        return any(isinstance(part, Placeholder) and part.name == name for part in self.parts)


def _closing_brace(text: str, start: int) -> int:
    """Return the position of the brace that closes the brace at *start*. Raises MappingError."""
    depth, position = 0, start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    raise MappingError(f"{text!r} has a brace that is not closed", hint=_HINT)


def _placeholder(text: str) -> Placeholder:
    name, colon, expression = text.partition(":")
    if name not in (*PARTS_OF_NAME, *PARTS_OF_SOURCE) or (colon and name not in PARTS_OF_NAME):
        raise MappingError(f"{{{text}}} is not a placeholder of a sid", hint=_HINT)
    if not colon:
        return Placeholder(name)
    try:
        pattern = re.compile(expression, re.DOTALL)
    except re.error as exc:
        raise MappingError(
            f'"{expression}" is not a valid regular expression: {exc}', hint=_HINT
        ) from None
    if pattern.groups != 1:
        raise MappingError(
            f'"{expression}" has {pattern.groups} groups',
            hint="write one group, around the part of the name that is the sid; (?:…) does not "
            "count as a group",
        )
    return Placeholder(name, pattern)
