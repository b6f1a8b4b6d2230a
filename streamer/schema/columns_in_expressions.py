"""Renames columns in expressions that PostgreSQL has deparsed. Pure.

``ruleutils.c`` writes a column of the only relation without a prefix, and keywords in upper case.
The deparser quotes every other word that is not in lower case. So an unquoted word in lower case is
a column, a function, a type, a schema, a collation or a field. The adjacent words decide.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from streamer.postgres.quoting import quote_identifier

_TOKEN: Final = re.compile(
    r"""
    (?P<space>\s+)
  | (?P<string>[eE]'(?:[^'\\]|''|\\.)*' | [bBxX]?'(?:[^']|'')*')
  | (?P<quoted>"(?:[^"]|"")+")
  | (?P<number>[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)
  | (?P<word>[^\W\d][\w$]*)
  | (?P<mark>::|=>|.)
    """,
    re.VERBOSE | re.DOTALL,
)
_TYPE_FOLLOWS: Final = frozenset({"::", "COLLATE", "AS", "RETURNING", "NAME", "."})


class UnclearExpressionError(ValueError):
    """An expression whose columns cannot be renamed word by word."""


class AbsentColumnError(ValueError):
    """An expression uses a column of the source that the target does not get."""

    def __init__(self, column: str) -> None:
        super().__init__(column)
        self.column = column


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str

    @property
    def name(self) -> str | None:
        """The identifier; None if the token is not an identifier."""
        if self.kind == "quoted":
            return self.text[1:-1].replace('""', '"')
        if self.kind == "word" and self.text == self.text.lower():
            return self.text
        return None


def rename_columns(text: str, names: Mapping[str, str]) -> str:
    """Return the expression *text* with renamed columns.

    *names*: new names by old name, for all columns that the expression uses. Raises
    UnclearExpressionError for a reference to a whole row.
    """
    if all(old == new for old, new in names.items()) and ".*" not in text:
        return text
    tokens = [_Token(m.lastgroup or "", m[0]) for m in _TOKEN.finditer(text)]
    solid = [token for token in tokens if token.kind != "space"]
    renamed: list[str] = []
    position = -1
    for token in tokens:
        if token.kind == "space":
            renamed.append(token.text)
            continue
        position += 1
        old = token.name
        if _is_whole_row(solid, position):
            raise UnclearExpressionError("it refers to a whole row")
        if old is not None and old in names and _is_column(solid, position):
            renamed.append(quote_identifier(names[old]))
        else:
            renamed.append(token.text)
    return "".join(renamed)


def uses_column(text: str, column: str) -> bool:
    """Whether an expression uses *column*: whether renaming the column changes the text.

    Raises UnclearExpressionError for a reference to a whole row.
    """
    return rename_columns(text, {column: f"{column}?"}) != text


def over_columns(text: str, names: Mapping[str, str | None]) -> str:
    """Return an expression of the source over the columns of the target.

    *names*: the target's names by name at the source, for all columns; None for an absent column.
    Raises AbsentColumnError if the expression uses such a column, and UnclearExpressionError if
    columns cannot be renamed.
    """
    for column, name in names.items():
        if name is None and uses_column(text, column):
            raise AbsentColumnError(column)
    return rename_columns(text, {column: name for column, name in names.items() if name})


_QUOTED: Final = re.compile(r'"([a-z_][a-z0-9_]*)"')


def without_needless_quotes(text: str) -> str:
    """Return comparable SQL: remove quotes around renamed columns that do not need quotes."""
    return _QUOTED.sub(r"\1", text)


def _is_whole_row(tokens: list[_Token], n: int) -> bool:
    return tokens[n].text == "*" and n > 1 and tokens[n - 1].text == "."


def _is_column(tokens: list[_Token], n: int) -> bool:
    previous = tokens[n - 1] if n else None
    after = tokens[n + 1] if n + 1 < len(tokens) else None
    if after is not None and after.text in ("(", ".", "=>"):
        return False  # a function, a schema, an argument's name
    if previous is None:
        return True
    if previous.text in _TYPE_FOLLOWS or previous.name is not None:
        return False  # a type, the second word of a type, a collation, a field
    is_field = previous.text == "(" and n > 1 and tokens[n - 2].text == "EXTRACT"
    return not is_field
