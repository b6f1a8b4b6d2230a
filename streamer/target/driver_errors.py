"""The errors of the target's driver, as errors of streamer."""

import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import asyncpg

from streamer.errors.error_classes import (
    ConflictError,
    StreamerError,
    TargetConnectionError,
    TargetContentionError,
    TargetError,
    TargetFencedError,
    TargetPrivilegeError,
    TargetRejectedError,
    TargetSchemaError,
    TextEncodingError,
    ValueConversionError,
)
from streamer.postgres import pooler
from streamer.postgres.connect_failures import connect_hint, first_line
from streamer.postgres.conninfo import TLS_HINT
from streamer.postgres.row_values import quote_unrecognized
from streamer.postgres.server_limits import limit_hint
from streamer.postgres.sqlstate import (
    CONFLICT_KINDS,
    DEPENDANTS_HINT,
    PRIVILEGE_HINT,
    Meaning,
    dependants_of,
    meaning,
)

FENCED_STATE: Final = "STR01"
"""SQLSTATE of ``streamer.set_progress``: the stored progress differs from the expected progress.
The error's detail lists the ids of the affected relations.
"""
CHANGED_STATE: Final = "STR02"
"""SQLSTATE of ``streamer.require_facts``: the table differs from the planned table."""
DRIVER_ERRORS: Final = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
    TimeoutError,
)


def translate(error: BaseException) -> StreamerError:
    """Translate a driver error of the target."""
    translated = _translate(error)
    translated.change_number = _change_number(error)
    # A block of PL/pgSQL has empty texts for an error without column or constraint.
    translated.column = getattr(error, "column_name", None) or None
    translated.constraint = getattr(error, "constraint_name", None) or None
    # streamer's block for exact order reports the key of the change as the hint. No hint of a
    # server has this form.
    hint = getattr(error, "hint", None)
    translated.key = hint if hint is not None and hint.startswith("Key (") else None
    staged = _COPY_COLUMN.search(getattr(error, "context", None) or "")
    translated.staged_column = int(staged[1]) if staged else None
    return translated


_COPY_LINE: Final = re.compile(r"^COPY streamer_stage_\d+(?:_p\d+)?, line (\d+)", re.MULTILINE)
_COPY_COLUMN: Final = re.compile(
    r"^COPY streamer_stage_\d+(?:_p\d+)?, line \d+, column c_(\d+)", re.MULTILINE
)


def _change_number(error: BaseException) -> int | None:
    """Return the number of the staged row in an error of streamer's block for exact order, or of
    COPY.
    """
    sequence = getattr(error, "data_type_name", None)
    if sequence and sequence.isdigit():
        return int(sequence)
    line = _COPY_LINE.search(getattr(error, "context", None) or "")
    return int(line[1]) - 1 if line else None


def _translate(error: BaseException) -> StreamerError:
    state = getattr(error, "sqlstate", None)
    if not isinstance(error, asyncpg.PostgresError) or state is None:
        # asyncpg reports an internal error when a concurrent operation lost the connection.
        if isinstance(
            error, OSError | TimeoutError | asyncpg.InterfaceError | asyncpg.InternalClientError
        ):
            message = first_line(error)
            hint = connect_hint(message)
            if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
                hint = hint or TLS_HINT
            return TargetConnectionError(f"target: {message}", hint=hint)
        return TargetError(f"target: {first_line(error)}")
    if state == FENCED_STATE:
        ids = (getattr(error, "detail", None) or "").split(",")
        return TargetFencedError(f"target: {first_line(error)}", relations=list(map(int, ids)))
    if pooler.is_lost_statement(state, first_line(error)):
        return TargetRejectedError(f"target: {pooler.POOLED}", hint=pooler.HINT)
    # The server's own error for a prepared statement whose result types have changed.
    if state == CHANGED_STATE or isinstance(error, asyncpg.InvalidCachedStatementError):
        return TargetSchemaError(f"target: {first_line(error)}")
    context = getattr(error, "context", None)
    dependants = dependants_of(state, getattr(error, "detail", None))
    text = first_line(error) + (f" ({dependants})" if dependants else "")
    message = f"target: {quote_unrecognized(text, state, context)}"
    match meaning(state, getattr(error, "severity_en", None), first_line(error)):
        case Meaning.LOST:
            return TargetConnectionError(message)
        case Meaning.BUSY:
            hint = limit_hint(f"{message} {getattr(error, 'hint', None) or ''}")
            return TargetContentionError(message, hint=hint)
        case Meaning.REJECTED if state == "42501":
            return TargetPrivilegeError(message, hint=PRIVILEGE_HINT)
        case Meaning.REJECTED:
            return TargetRejectedError(message)
        case Meaning.CONFLICT:
            return _conflict(error, state, message)
        case Meaning.VALUE if state == "22021":  # character_not_in_repertoire
            return TextEncodingError(message)
        case Meaning.VALUE:
            return ValueConversionError(message)
        case Meaning.SCHEMA:
            return TargetSchemaError(message, hint=dependants and DEPENDANTS_HINT)
        case Meaning.OTHER:
            return TargetError(message, hint=dependants and DEPENDANTS_HINT)


def _conflict(error: asyncpg.PostgresError, state: str, message: str) -> ConflictError:
    detail = getattr(error, "detail", None)
    # "Key (id)=(5) already exists." names the row in question; other details show whole rows.
    if detail and detail.startswith("Key ("):
        message = f"{message}: {detail.rstrip('.')}"
    return ConflictError(message, kind=CONFLICT_KINDS.get(state, "constraint"))


@contextmanager
def translating() -> Iterator[None]:
    """Translate every driver error raised inside."""
    try:
        yield
    except DRIVER_ERRORS as exc:
        raise translate(exc) from exc
