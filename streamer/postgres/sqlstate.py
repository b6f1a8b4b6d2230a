"""The meaning of each SQLSTATE, for both servers and both drivers. PostgreSQL docs, Appendix A.

The meaning says whether the error is transient, and whether the values of a row caused the error.
Callers treat some states separately (a slot in use, a missing slot, a constraint), where they
translate a driver's errors. Pure.
"""

import enum
import re
from typing import Final


class Meaning(enum.Enum):
    """The reaction that a server's error needs."""

    LOST = "lost"
    """The session has ended, or could not begin: connect again."""
    BUSY = "busy"
    """The same statement may succeed later."""
    REJECTED = "rejected"
    """The server refuses the role, password or database, or a privilege is missing."""
    SCHEMA = "schema"
    """A relation, column, type or function is missing or has changed."""
    VALUE = "value"
    """A value does not fit the type."""
    CONFLICT = "conflict"
    """A constraint, a trigger or a DO block of streamer raised the error."""
    OTHER = "other"


LOCK_NOT_AVAILABLE: Final = "55P03"
_MEANINGS: Final[dict[str, Meaning]] = {
    "08": Meaning.LOST,
    "21": Meaning.CONFLICT,  # cardinality_violation
    "22": Meaning.VALUE,
    "23": Meaning.CONFLICT,
    "25006": Meaning.BUSY,  # read_only_sql_transaction: a fail-over or a full disk, for a while
    "28": Meaning.REJECTED,
    "3D": Meaning.REJECTED,
    "3F": Meaning.SCHEMA,
    "40": Meaning.BUSY,  # serialization_failure, deadlock_detected
    "42": Meaning.SCHEMA,
    "42501": Meaning.REJECTED,  # insufficient_privilege
    "53": Meaning.BUSY,  # insufficient_resources
    "55006": Meaning.BUSY,  # object_in_use
    LOCK_NOT_AVAILABLE: Meaning.BUSY,
    "57": Meaning.LOST,  # shutdown, or a backend that crashed
    "57014": Meaning.BUSY,  # query_canceled
    "58": Meaning.BUSY,  # io_error and other errors of the operating system
    "P0": Meaning.CONFLICT,
}

PRIVILEGE_HINT: Final = (
    "grant the role the privilege on the object in the message, or make the role its owner"
)
"""The remedy for 42501 if the statement is unknown."""

_CATALOG_RACE: Final = re.compile(
    r"could not map filen(umber|ode) |could not open relation with OID |cache lookup failed for "
    r"|could not find .* for relation |tuple concurrently (updated|deleted)$"
)
"""Internal errors (XX000) of a session that reads an object while a concurrent session changes,
drops or rolls back the object. A walsender raises the first error for a table that a transaction in
progress rewrote and then rolled back. PostgreSQL does not translate internal errors.
"""

NOT_ROW_SPECIFIC: Final = (
    *("08", "0A", "25", "26", "28", "34", "3D", "3F", "40", "42"),
    *("53", "55", "57", "58", "XX"),
)
"""SQLSTATE classes of errors that do not depend on a row's values. The next row would fail in the
same way, or a retry of this row would succeed.
"""


CONFLICT_KINDS: Final = {
    "23502": "not_null",
    "23503": "foreign_key",
    "23505": "insert_exists",
    "23514": "check",
    "23P01": "exclusion",
    "P0002": "update_missing",
    "P0003": "several_rows",
}
"""Kinds of conflicts, by SQLSTATE."""


def meaning(state: str, severity: str | None = None, message: str = "") -> Meaning:
    """Return the meaning of *state*; *severity* and first line of the message qualify some states.

    *severity* is not localized.
    """
    if is_catalog_race(state, message):
        return Meaning.BUSY
    if state == "08P01" and severity == "ERROR":
        # The connection is intact, but a binary value is shorter or longer than its type requires.
        return Meaning.VALUE
    return _MEANINGS.get(state) or _MEANINGS.get(state[:2], Meaning.OTHER)


def is_catalog_race(state: str, message: str) -> bool:
    """Return whether a concurrent change of definitions caused an internal error."""
    return state == "XX000" and _CATALOG_RACE.search(message) is not None


def is_transient(state: str, severity: str | None = None, message: str = "") -> bool:
    """Whether a retry may succeed later, perhaps over a new connection."""
    return meaning(state, severity, message) in (Meaning.LOST, Meaning.BUSY)


def is_row_specific(state: str) -> bool:
    """Whether the values of a row are at fault."""
    return state[:2] not in NOT_ROW_SPECIFIC


DEPENDANTS_HINT: Final = (
    "drop the objects in parentheses at the target before the change, and create them again after "
    "it"
)
_NAMES_DEPENDANTS: Final = frozenset({"2BP01", "0A000"})


def dependants_of(state: str, detail: str | None) -> str | None:
    """Return the dependent objects of a changed definition, from the server's *detail*."""
    if state not in _NAMES_DEPENDANTS or not detail:
        return None
    return "; ".join(detail.splitlines())
