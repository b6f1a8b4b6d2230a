"""Errors of the target's driver, as streamer's own."""

from types import SimpleNamespace
from typing import Any

import asyncpg
from structlog.testing import capture_logs

from streamer.errors.error_classes import TargetContentionError, TargetPrivilegeError
from streamer.errors.remedies import Remedy
from streamer.target.driver_errors import translate
from streamer.target.missing_grants import advise_grants


def test_an_empty_name_of_a_constraint_is_none() -> None:
    """A block of PL/pgSQL passes on an error without a constraint with empty texts."""
    error = asyncpg.CheckViolationError("no partition of relation found for row")
    error.constraint_name = error.column_name = ""
    translated = translate(error)
    assert (translated.constraint, translated.column) == (None, None)
    error.constraint_name = "positive"
    assert translate(error).constraint == "positive"


async def test_the_log_has_the_reason_why_an_error_lacks_grants() -> None:
    async def fetch(*_: object) -> None:
        raise TargetContentionError("a lock on the catalog")

    connection: Any = SimpleNamespace(is_closed=False, fetch=fetch)
    error = TargetPrivilegeError("permission denied for table t", hint="ask")
    with capture_logs() as logs:
        await advise_grants(error, connection)
    assert error.remedy == Remedy.of("ask")
    assert [(line["error"], line["reason"]) for line in logs] == [
        (error.message, "a lock on the catalog")
    ]
