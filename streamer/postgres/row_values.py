"""Hides the values of rows in errors, for readers who may not see these values. Pure.

PostgreSQL's messages contain values, and a value may contain any character. No pattern can find
where a value ends and further text begins. Therefore hints, which contain only catalog names,
travel apart from messages. In a message, the text from the first value to the last character that
can end a value is hidden.

A message that this program does not recognize (from a trigger, or not in English) may contain
values anywhere. `quote_unrecognized` puts such a message between quotation marks. `hide_values`
then hides the whole quotation as a value.

An SQLSTATE alone proves nothing about values. Functions raise any SQLSTATE, and the input of some
types reports values as syntax errors (tsquery, jsonpath) or as missing objects (regclass). In both
cases the server reports a context.
"""

import re
from typing import Final

from streamer.postgres.sqlstate import is_row_specific

# A syntax error quotes its text, and an internal error may quote any text.
_QUOTING: Final = ("42601", "XX")

_NAME: Final = r'"[^"]*"'
_TYPE: Final = r'[\w ."\[\]]+(?:\([\d,]+\))?[\w ]*'
_KNOWN: Final = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        rf"value too long for type {_TYPE}",
        rf"bit string (?:length \d+ does not match|too long for) type {_TYPE}",
        rf"null value in column {_NAME} of relation {_NAME} violates not-null constraint",
        rf"duplicate key value violates unique constraint {_NAME}",
        rf"conflicting key value violates exclusion constraint {_NAME}",
        (
            rf"(?:insert or update|update or delete) on table {_NAME} violates foreign key"
            rf" constraint {_NAME}(?: on table {_NAME})?"
        ),
        rf"new row for relation {_NAME} violates (?:check|partition) constraint(?: {_NAME})?",
        rf"no partition of relation {_NAME} found for row",
        rf"value for domain {_TYPE} violates check constraint {_NAME}",
        rf"domain {_TYPE} does not allow null values",
        rf"cannot insert a non-DEFAULT value into column {_NAME}",
        (
            r"(?:bigint|integer|smallint|oid|money|date|time|timestamp|interval|numeric|real)"
            r" out of range"
        ),
        r"value out of range: (?:over|under)flow",
        (r"numeric field overflow|division by zero"),
        # Statements of this program raise these messages.
        r"an update or delete came for a table without replica identity",
        r"the target already has an open version of this key",
        r"several rows of the target table have the key of one change",
        r"the row to insert lacks its unchanged \(TOAST\) values",
        r"the row to update is missing, so its unchanged values are lost",
        (
            r"no row matches the old row; give every partition of the source table the replica"
            r" identity of the table, and resync the table"
        ),
        (
            r"the (?:filter|expression of .+) needs an unchanged value that was not sent; run at"
            r" the source: alter table .+ replica identity full, and then resync the table"
        ),
        # The value comes last, or only fixed text of PostgreSQL follows the value.
        rf'invalid input syntax for type {_TYPE}: ".*"',
        r'(?:date/time|interval) field value out of range: ".*"',
        rf'invalid input value for enum {_TYPE}: ".*"',
        r'malformed (?:array|record|range|multirange) literal: ".*"',
        rf'value ".*" is out of range for type {_TYPE}',
        # Messages about the state of the server, which depend on no row.
        r"deadlock detected",
        r"canceling statement due to [a-z ]+",
        r"terminating connection due to [a-z ]+",
        r"could not serialize access due to [a-z/ ]+",
        rf"could not obtain lock on (?:row in )?relation {_NAME}",
        (
            r"could not (?:extend|write(?: to)?|read|open|create|fsync) (?:temporary )?file"
            rf" {_NAME}: .*"
        ),
        r"out of (?:shared )?memory",
        r"permission denied for [a-z ]+ [^ ]+",
        r"temporary file size exceeds \"temp_file_limit\" \(\d+kB\)",
        r"cannot execute [A-Z ]+ in a read-only transaction",
    )
)


def _may_hold_values(state: str) -> bool:
    return is_row_specific(state) or state.startswith(_QUOTING)


def quote_unrecognized(message: str, state: str | None, context: str | None) -> str:
    """Return a server's *message*: unchanged if recognized, otherwise as a single quotation.

    *context*: the server's description of the place. Only a statement that begins or waits has no
    context.
    """
    if state is None or not (context or _may_hold_values(state)):
        return message
    if any(pattern.fullmatch(message) for pattern in _KNOWN):
        return message
    return f'the server says: "{message}"'


# The values of a key, rows that PostgreSQL quotes, and bytes that are not text.
_OPENING: Final = re.compile(r'\)=\(|(?::|\bvalue|\bstring|\btoken|\bzone) "| 0x')
_ENDINGS: Final = {"(": ")", '"': '"'}


def hide_values(message: str) -> str:
    """Return *message* without the values of rows. A hint must not be part of *message*.

    A value without an end extends to the last character, because a driver reports only the first
    line.
    """
    match = _OPENING.search(message)
    if match is None:
        return message
    opening = message[: match.end()]
    end = message.rfind(_ENDINGS.get(opening[-1], ""), match.end())
    # The values of a key can follow a quotation, and end after the quotation.
    key = message.rfind(")")
    if opening[-1] == '"' and ")=(" in message[match.end() :]:
        end = max(end, key)
    return f"{opening}…{message[end:] if end >= 0 else ''}"
