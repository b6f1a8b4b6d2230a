"""SQL expressions of rules: ``filter`` and ``set``.

The source runs the text of an expression in the SELECT of a copy, and the target runs the text on
staged rows. So the text must be exactly one expression, with the same meaning in both places. This
module checks the text twice. A lexer follows PostgreSQL's lexer (``scan.l``) for the allowed
tokens, and rejects comments, dollar quotes, backslashes, semicolons and unbalanced brackets. A text
that passes cannot end the parentheses around it. sqlglot then checks that the text is a single
expression, and finds its columns. The servers check the expression again when a table starts.

The allow list `allowed_functions` names the functions. An expression that depends on the clock, the
session or rows of tables would give two different values. This module rejects such an expression by
name. When a table starts, a check of the source's catalogs follows (`functions_sql`). Pure.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from streamer.mapping.allowed_functions import ALLOWED, PINNED_STABLE
from streamer.postgres.quoting import quote_identifier, quote_literal

EXPRESSION_BYTES_MAX: Final = 10_000


class ExpressionError(ValueError):
    """The text is not an expression with the same meaning in the copy and in the stream."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token: ``name`` (folded to lower case), ``quoted``, ``string``, ``number`` or ``mark``."""

    kind: str
    value: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Conjunct:
    """A condition that a filter joins with AND, and the names in the condition."""

    text: str
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class Expression:
    """The text of an expression in the configuration.

    ``columns``: the column names that sqlglot finds. ``names``: all words that can be columns; a
    word is a column only if the relation has a column of that name. ``is_plain``: the expression
    consists of columns, constants and comparisons, which never fail on a row.
    ``may_follow_locale``: the expression can sort text or change its case, and names no collation.
    """

    text: str
    columns: frozenset[str] = field(compare=False)
    names: frozenset[str] = field(compare=False)
    functions: frozenset[str] = field(compare=False)
    conjuncts: tuple[Conjunct, ...] = field(compare=False)
    is_plain: bool = field(compare=False)
    may_follow_locale: bool = field(compare=False)

    def unknown(self, available: Iterable[str]) -> list[str]:
        """Return the columns that are not *available*."""
        return sorted(self.columns - set(available))

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class ExpressionFacts:
    """Types and collations that the source reports for a rule's expressions.

    ``types``: the known types of the values of `set`, by target column. ``collations``: the
    collations of columns that expressions use, if they differ from those of the types.
    """

    types: dict[str, str]
    collations: dict[str, str]

    def with_collations(self, types: dict[str, str]) -> dict[str, str]:
        """Return the *types* of columns with their collations, in the form that a cast requires."""
        return {
            name: f"{kind} collate {self.collations[name]}" if name in self.collations else kind
            for name, kind in types.items()
        }


def over_columns(expression: Expression, available: Mapping[str, str], table: str) -> str:
    """Return *expression* over columns of *table*. *available*: the table's column names, by name
    in the expression.
    """
    used = sorted(available.keys() & expression.names)
    columns = ", ".join(
        f"{table}.{quote_identifier(available[name])} as {quote_identifier(name)}" for name in used
    )
    return f"(select ({expression}) from (select {columns}) s)"  # noqa: S608  # a checked text


# ---- tokens ------------------------------------------------------------------------------------

_TOKEN: Final = re.compile(
    r"""
    (?P<space>[ \t\n\r\f\v]+)
  | (?P<comment>--|/\*)
  | (?P<unicode>[uU]&['"])
  | (?P<string>[bBxXnN]?'(?:[^']|'')*' | [eE]'(?:[^'\\]|''|\\[\\'nrtbf])*')
  | (?P<escape>[eE]')
  | (?P<quoted>"(?:[^"]|"")+")
  | (?P<number>(?:[0-9]+(?:\.(?!\.)[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?
        (?![A-Za-z_0-9\x80-\U0010ffff]))
  | (?P<name>[A-Za-z_\x80-\U0010ffff][A-Za-z0-9_$\x80-\U0010ffff]*)
  | (?P<mark>::|[-+*/<>=~!@\#%^&|?]+|[\]\[(),.:])
    """,
    re.VERBOSE | re.DOTALL,
)
_CLOSES: Final = {")": "(", "]": "["}


def tokenize(text: str) -> list[Token]:
    """Cut *text* into tokens. Raises ExpressionError for a forbidden token."""
    tokens: list[Token] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        kind = match.lastgroup if match else None
        if match is None or kind is None:
            raise ExpressionError(f"{text[position]!r} is not understood at character {position}")
        lexeme = match[0]
        if kind == "comment" or (kind == "mark" and ("--" in lexeme or "/*" in lexeme)):
            raise ExpressionError("a comment is not an expression")
        if kind == "escape" or lexeme == "=>":
            raise ExpressionError(f"{lexeme} … is not supported")
        if kind == "unicode":
            raise ExpressionError("U& quoting is not supported; write the characters themselves")
        if kind != "space":
            value = lexeme
            if kind == "name":
                value = _fold(lexeme)
            elif kind == "quoted":
                value = lexeme[1:-1].replace('""', '"')
            tokens.append(Token(kind, value, position, match.end()))
        position = match.end()
    _check_balance(tokens)
    return tokens


def _fold(name: str) -> str:
    """Fold a name to lower case as PostgreSQL does in UTF-8 databases: only ASCII letters."""
    return "".join(chr(ord(c) + 32) if "A" <= c <= "Z" else c for c in name)


def _check_balance(tokens: Sequence[Token]) -> None:
    open_ones: list[str] = []
    for token in tokens:
        if token.kind != "mark":
            continue
        if token.value in "([":
            open_ones.append(token.value)
        elif token.value in _CLOSES and (not open_ones or open_ones.pop() != _CLOSES[token.value]):
            raise ExpressionError(
                f"{token.value!r} has no opening counterpart at character {token.start}"
            )
        elif token.value == ":" and open_ones[-1:] != ["["]:
            raise ExpressionError("a colon is allowed only between the bounds of a slice")
    if open_ones:
        raise ExpressionError(f"{open_ones[-1]!r} is not closed")


# ---- rejected by name --------------------------------------------------------------------------

_QUERIES: Final = frozenset(
    {
        *("select", "with", "values", "table", "exists", "union", "intersect", "except", "lateral"),
        *("into", "returning", "limit", "group", "order", "having", "window", "where", "default"),
    }
)
_MOMENTS: Final = frozenset(
    {
        *("current_date", "current_time", "current_timestamp", "localtime", "localtimestamp"),
        *("current_user", "session_user", "system_user", "user", "current_role"),
        *("current_catalog", "current_schema"),
    }
)
_MOMENT_FUNCTIONS: Final = frozenset(
    {
        *("now", "transaction_timestamp", "statement_timestamp", "clock_timestamp", "timeofday"),
        *("random", "random_normal", "gen_random_uuid", "uuidv4", "uuidv7", "nextval", "currval"),
        *("setval", "lastval", "txid_current", "pg_current_xact_id", "set_config", "pg_sleep"),
        *("current_setting", "current_database", "current_schemas", "version"),
    }
)
"""Well-known functions that `check_functions` would reject, for an immediate error."""

_AFTER_CALL: Final = {"over": "a window", "filter": "an aggregate", "within": "an aggregate"}
_SYNTAX: Final = frozenset(
    {
        *("coalesce", "nullif", "greatest", "least", "cast", "row", "in", "any", "some", "all"),
        *("not", "and", "or", "when", "then", "else", "case", "between", "like", "ilike", "is"),
        *("extract", "trim", "array", "on", "from", "for", "to", "similar", "using", "distinct"),
        *("symmetric", "escape", "collate", "zone", "true", "false", "null", "as", "end"),
        *("both", "leading", "trailing", "placing", "isnull", "notnull", "only", "at"),
    }
)
"""Words after which a parenthesis does not begin a function call."""

_TYPE_WORDS: Final = frozenset(
    {
        *("numeric", "decimal", "dec", "varchar", "char", "character", "varying", "nchar", "bit"),
        *("float", "timestamp", "timestamptz", "time", "timetz", "interval", "national"),
    }
)
_MOMENT_WORDS: Final = frozenset({"now", "today", "tomorrow", "yesterday"})
_TIME_WORDS: Final = frozenset({"allballs", "am", "pm", "utc", "gmt", "z", "t"})


def _is_moment(literal: str) -> bool:
    """Whether PostgreSQL reads a string as a date or time that depends on the present time."""
    words = re.findall(r"[a-z]+", literal.lower())
    return bool(_MOMENT_WORDS.intersection(words)) and all(
        word in _MOMENT_WORDS or word in _TIME_WORDS for word in words
    )


def _check_words(tokens: Sequence[Token]) -> None:
    for n, token in enumerate(tokens):
        previous = tokens[n - 1] if n else None
        follower = tokens[n + 1] if n + 1 < len(tokens) else None
        if token.kind == "string" and _is_moment(token.value):
            raise ExpressionError(
                f"{token.value} may mean a date or time that depends on the moment"
            )
        if token.kind == "mark" and token.value == ".":
            _check_dot(tokens, n)
        if token.kind != "name":
            continue
        opens = follower is not None and follower.value == "(" and follower.kind == "mark"
        if token.value in _MOMENTS:
            raise ExpressionError(f"{token.value} depends on the session, so it is not allowed")
        if token.value in _MOMENT_FUNCTIONS and opens:
            raise ExpressionError(
                f"{token.value}() is not immutable, so the values of copy and stream would differ"
            )
        if token.value in _AFTER_CALL and previous is not None and previous.value == ")":
            raise ExpressionError(f"{_AFTER_CALL[token.value]} is not allowed: it needs other rows")
        if token.value in ("operator", "grouping") and opens:
            raise ExpressionError(f"{token.value} ( … ) is not allowed")
        if token.value in _QUERIES and not (
            # `with time zone` is part of a type's name, and VALUES may be a column's.
            (token.value == "with" and follower is not None and follower.value == "time")
            or (token.value == "values" and not opens)
        ):
            raise ExpressionError(
                f"{token.value.upper()} is not allowed: an expression has no query"
            )
        if _is_type(tokens, n) and token.value.startswith("reg"):
            raise ExpressionError(
                f"type {token.value} is not allowed: its OIDs differ between servers"
            )


def _check_dot(tokens: Sequence[Token], n: int) -> None:
    """Allow ``pg_catalog.f(``, ``::schema.type`` and ``(row).field`` only."""
    previous = tokens[n - 1] if n else None
    follower = tokens[n + 1] if n + 1 < len(tokens) else None
    if previous is not None and follower is not None and follower.kind in ("name", "quoted"):
        is_own = previous.kind in ("name", "quoted") and previous.value == "pg_catalog"
        is_field = previous.kind == "mark" and previous.value in ")]"
        if is_own or is_field or _is_type(tokens, n - 1):
            return
    raise ExpressionError(
        "a name with a dot is not allowed: write a column without its table, and a function of "
        "PostgreSQL without its schema"
    )


def _is_type(tokens: Sequence[Token], n: int) -> bool:
    """Whether token *n* begins the name of a type to cast to, or is its second part."""
    if n >= 2 and tokens[n - 1].value == "." and tokens[n - 1].kind == "mark":
        return tokens[n - 2].kind in ("name", "quoted") and _is_type(tokens, n - 2)
    previous = tokens[n - 1] if n else None
    return previous is not None and (
        (previous.kind == "mark" and previous.value == "::")
        or (previous.kind == "name" and previous.value == "as")
    )


# ---- reading -----------------------------------------------------------------------------------


def parse_expression(text: str) -> Expression:
    """Read a scalar expression. Raises ExpressionError that names the problem."""
    if len(text.encode(errors="replace")) > EXPRESSION_BYTES_MAX:
        raise ExpressionError(f"longer than {EXPRESSION_BYTES_MAX} bytes")
    tokens = tokenize(text)
    if not tokens:
        raise ExpressionError("empty")
    _check_words(tokens)
    columns = _parse(text)
    names = _candidates(tokens)
    return Expression(
        text=text.strip(),
        columns=columns & names,
        names=names,
        functions=_functions(tokens),
        conjuncts=tuple(
            Conjunct(text[part[0].start : part[-1].end], _candidates(part))
            for part in _conjuncts(tokens)
        ),
        is_plain=_is_plain(tokens, columns),
        may_follow_locale=_may_follow_locale(tokens),
    )


def _parse(text: str) -> frozenset[str]:
    """Parse *text* by sqlglot; return its columns."""
    # The import takes a third of a second, and most configurations have no expressions.
    from sqlglot import ErrorLevel, exp, parse
    from sqlglot.errors import SqlglotError

    try:
        statements: list[Any] = parse(
            f"select (\n{text}\n)", read="postgres", error_level=ErrorLevel.IMMEDIATE
        )
    except (SqlglotError, RecursionError) as exc:
        details = getattr(exc, "errors", None) or [{}]
        description = details[0].get("description") or "it cannot be parsed"
        near = details[0].get("highlight")
        near = f" near {near!r}" if near and near.strip() else ""
        raise ExpressionError(f"not an SQL expression: {description.rstrip('.')}{near}") from None
    if len(statements) != 1 or not isinstance(statements[0], exp.Select):
        raise ExpressionError("not one SQL expression")
    select = statements[0]
    (first, *further) = select.expressions
    if further or not isinstance(first, exp.Paren) or set(_parts(select)) != {"expressions"}:
        raise ExpressionError("not one SQL expression")
    refused = (
        (exp.Query, "a query is not allowed"),
        (exp.AggFunc, "an aggregate is not allowed: it needs other rows"),
        (exp.Window, "a window is not allowed: it needs other rows"),
        (exp.Star, "* is not an expression of its own"),
        (exp.Alias, "AS is not allowed here"),
        (exp.Command, "not an SQL expression"),
        (exp.Placeholder, "a parameter is not allowed"),
        (exp.Parameter, "a parameter is not allowed"),
    )
    for node in first.walk():
        for kind, problem in refused:
            if isinstance(node, kind):
                raise ExpressionError(problem)
    return frozenset(
        column.name if column.this.args.get("quoted") else _fold(column.name)
        for column in first.find_all(exp.Column)
    )


def _parts(select: Any) -> Iterator[str]:
    return (name for name, value in select.args.items() if value)


def _candidates(tokens: Sequence[Token]) -> frozenset[str]:
    """Return every name that may be a column."""
    names = set()
    for n, token in enumerate(tokens):
        previous = tokens[n - 1] if n else None
        follower = tokens[n + 1] if n + 1 < len(tokens) else None
        if token.kind not in ("name", "quoted"):
            continue
        if follower is not None and follower.kind == "mark" and follower.value in ("(", "."):
            continue
        if previous is not None and previous.kind == "mark" and previous.value == ".":
            continue
        if previous is not None and previous.kind == "name" and previous.value == "collate":
            continue
        if not _is_type(tokens, n):
            names.add(token.value)
    return frozenset(names)


def _functions(tokens: Sequence[Token]) -> frozenset[str]:
    """Return the names of the called functions."""
    names = set()
    for n, token in enumerate(tokens[:-1]):
        follower = tokens[n + 1]
        if token.kind not in ("name", "quoted") or follower.kind != "mark":
            continue
        if follower.value != "(" or _is_type(tokens, n):
            continue
        if token.kind == "name" and token.value in _SYNTAX | _TYPE_WORDS:
            continue
        if token.value not in ALLOWED:
            raise ExpressionError(
                f"{token.value}() is not among the functions that an expression may call; "
                "docs/reference/functions.md lists them"
            )
        names.add(token.value)
        if token.value == "age" and _argument_count(tokens, n + 1) < 2:
            raise ExpressionError("age() of one value depends on today's date")
    return frozenset(names)


def _argument_count(tokens: Sequence[Token], opening: int) -> int:
    depth, count = 0, 1
    for token in tokens[opening:]:
        if token.kind == "mark":
            depth += (token.value in "([") - (token.value in ")]")
            count += token.value == "," and depth == 1
            if depth == 0:
                break
    return count


def _conjuncts(tokens: list[Token]) -> list[list[Token]]:
    """Split at each AND that joins whole conditions; return a single part in doubtful cases."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        if token.kind == "mark" and token.value in ("(", "[", ")", "]"):
            depth += 1 if token.value in "([" else -1
        if depth == 0 and token.kind == "name":
            if token.value in ("or", "between", "case"):
                return [tokens]
            if token.value == "and":
                parts.append([])
                continue
        parts[-1].append(token)
    return parts if all(parts) else [tokens]


_PLAIN_WORDS: Final = frozenset(
    {"and", "or", "not", "in", "is", "null", "true", "false", "between"}
)
_PLAIN_MARKS: Final = frozenset({"=", "<>", "!=", "<", "<=", ">", ">=", "(", ")", ","})


def _is_plain(tokens: Sequence[Token], columns: frozenset[str]) -> bool:
    """Whether the expression has only columns, constants and comparisons."""
    for token, follower in zip(tokens, [*tokens[1:], None], strict=True):
        if token.kind == "mark" and token.value not in _PLAIN_MARKS:
            return False
        is_word = token.kind == "name" and token.value in _PLAIN_WORDS
        if token.kind in ("name", "quoted") and not is_word:
            if token.value not in columns:
                return False
            if follower is not None and (follower.kind == "string" or follower.value == "("):
                return False  # a type before a constant, or a function
    return True


_LOCALE_WORDS: Final = frozenset(
    {
        *("between", "greatest", "least", "ilike", "similar", "lower", "upper", "initcap"),
        *("casefold", "to_char"),
    }
)


def _may_follow_locale(tokens: Sequence[Token]) -> bool:
    words = {token.value for token in tokens if token.kind == "name"}
    if "collate" in words:
        return False
    return any(word in _LOCALE_WORDS or word.startswith("regexp_") for word in words) or any(
        token.kind == "mark" and ("~" in token.value or token.value in ("<", "<=", ">", ">="))
        for token in tokens
    )


# ---- checks by a server
# ---------------------------------------------------------------------------


def functions_sql(expressions: Iterable[Expression]) -> str | None:
    """Return the query for the rows of `check_functions`; None without a function call."""
    names = sorted({name for expression in expressions for name in expression.functions})
    if not names:
        return None
    listed = ", ".join(map(quote_literal, names))
    return (
        "select p.proname::text as name,"  # noqa: S608  # names are quoted
        " bool_or(p.provolatile = 'v') as is_volatile,"
        " bool_or(p.provolatile = 's') as is_stable,"
        " bool_or(p.prokind in ('a', 'w')) as needs_rows,"
        " bool_or(p.proretset) as returns_rows"
        " from pg_catalog.pg_proc p join pg_catalog.pg_namespace n on n.oid = p.pronamespace"
        f" where n.nspname = 'pg_catalog' and p.proname in ({listed}) group by p.proname"
    )


def check_functions(expression: Expression, rows: Iterable[Any]) -> None:
    """Refuse functions whose result can differ from call to call. Raises ExpressionError."""
    facts = {row["name"]: row for row in rows}
    for name in sorted(expression.functions):
        row = facts.get(name)
        if row is None:
            raise ExpressionError(f"{name}() is not one of PostgreSQL's own functions")
        if row["needs_rows"]:
            raise ExpressionError(f"{name}() is an aggregate or a window function")
        if row["returns_rows"]:
            raise ExpressionError(f"{name}() returns a set of rows")
        if row["is_volatile"] or (row["is_stable"] and name not in PINNED_STABLE):
            raise ExpressionError(
                f"{name}() is not immutable, so the values of copy and stream would differ"
            )


def over_row(expression: str, columns: Iterable[tuple[str, str]], *, cast: str = "") -> str:
    """Return SQL that computes *expression* with only *columns* in scope: pairs of a name and the
    SQL of its value.
    """
    listed = ", ".join(f"{value} as {quote_identifier(name)}" for name, value in columns)
    listed = f" {listed}" if listed else ""
    row = f"(select{listed}) streamer_row"  # names are quoted; streamer makes the values
    return f"(select ({expression}){cast} from {row})"  # noqa: S608  # parsed before
