"""Quotes identifiers and literals; all SQL text gets names and literals from this module.

Values travel as parameters or COPY data. Names must be in the text, and so must the few literals of
utility statements (`CREATE PUBLICATION`, `COPY (SELECT …)`), which take no parameters. Pure.
"""

import re
from collections.abc import Iterable
from typing import Final


def quote_identifier(name: str) -> str:
    """Quote *name* as an identifier, always with quotes, so that reserved words and case are
    safe.
    """
    if "\0" in name:
        raise ValueError("an identifier cannot contain a NUL character")
    return '"' + name.replace('"', '""') + '"'


def quote_qualified(namespace: str, name: str) -> str:
    """Quote ``namespace.name``."""
    return f"{quote_identifier(namespace)}.{quote_identifier(name)}"


def quote_columns(names: Iterable[str]) -> str:
    """Quote column names and join them with commas."""
    return ", ".join(map(quote_identifier, names))


def quote_literal(value: str) -> str:
    """Quote *value* as a string constant that ``standard_conforming_strings`` cannot change."""
    if "\0" in value:
        raise ValueError("a string constant cannot contain a NUL character")
    quoted = value.replace("'", "''")
    if "\\" in quoted:
        return " E'" + quoted.replace("\\", "\\\\") + "'"
    return f"'{quoted}'"


_TOKENS: Final = re.compile(
    r"""
    \$function\$.*?\$function\$ | "(?:[^"]|"")*"
    | (?P<escapes>\bE'(?:[^'\\]|''|\\.)*') | '(?:[^']|'')*'
    """,
    re.DOTALL | re.VERBOSE,
)
_CONTROL: Final = re.compile(r"[\x01-\x1f\x7f]")


def without_line_breaks(sql: str) -> str:
    """Return *sql* with escapes for control characters in names and string constants.

    Otherwise such a name could look like a separate line where *sql* is printed. The bodies of
    streamer's functions stay unchanged.
    """

    def escaped(token: re.Match[str]) -> str:
        text = token[0]
        if text.startswith("$") or not _CONTROL.search(text):
            return text
        if text.startswith('"'):
            text = text.replace("\\", "\\\\")
            return "U&" + _CONTROL.sub(lambda found: f"\\{ord(found[0]):04X}", text)
        text = text if token["escapes"] else "E" + text.replace("\\", "\\\\")
        return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)

    return _TOKENS.sub(escaped, sql)


def grants_on_sequence(
    privileges: str, namespace: str, name: str, role: str, *, has_usage: bool
) -> tuple[str, ...]:
    """Return the SQL that grants *privileges* on a sequence to *role*.

    *has_usage*: the role has USAGE on the schema.
    """
    to = f"to {quote_identifier(role)}"
    grant = f"grant {privileges} on sequence {quote_qualified(namespace, name)} {to}"
    if has_usage:
        return (grant,)
    return f"grant usage on schema {quote_identifier(namespace)} {to}", grant


def do_block(body: str) -> str:
    """Return a DO statement with *body*, which may contain names and literals of any kind."""
    tag = "$streamer$"
    while tag in body:
        tag = tag[:-1] + "_$"
    return f"do {tag}{body} {tag}"
