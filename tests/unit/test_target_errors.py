"""Errors of the target's driver, as streamer's own."""

import asyncpg

from streamer.target.connection import translate


def test_an_empty_name_of_a_constraint_is_none() -> None:
    """A block of PL/pgSQL passes on an error without a constraint with empty texts."""
    error = asyncpg.CheckViolationError("no partition of relation found for row")
    error.constraint_name = error.column_name = ""
    translated = translate(error)
    assert (translated.constraint, translated.column) == (None, None)
    error.constraint_name = "positive"
    assert translate(error).constraint == "positive"
