"""The version of the bookkeeping schema, and whether this program runs on that version.

Migrations of a newer program may be applied while this program runs. `Migration.needs` of a
migration shows whether older programs can run on the migrated schema.
"""

from dataclasses import dataclass
from typing import Final

from streamer.bookkeeping.bookkeeping_table import Executor
from streamer.errors.error_classes import TargetError
from streamer.util.migrations import read_migrations

NEWER_HINT: Final = "run that version or a later one"
_LOCK: Final = 0x73747265616D  # "stream"
_LOCK_SQL: Final = "select pg_catalog.pg_advisory_xact_lock($1)"
_SHARED_LOCK_SQL: Final = "select pg_catalog.pg_advisory_xact_lock_shared($1)"
_VERSION_SQL: Final = """
select pg_catalog.max(number) as number, pg_catalog.max(needs) as needs from streamer.migration
"""


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """``number``: the newest migration of the schema. ``needs``: the newest migration that a
    program must know to run on the schema.
    """

    number: int
    needs: int

    @property
    def is_usable(self) -> bool:
        """Whether this program runs on the schema. Otherwise the program is too old."""
        return self.needs <= read_migrations("target")[-1].number

    @property
    def is_complete(self) -> bool:
        """Whether the schema has all migrations of this program."""
        return self.number >= read_migrations("target")[-1].number

    @property
    def problem(self) -> str:
        """Why this program is too old."""
        return f"was made by a newer streamer (migration {self.number})"


async def read_version(session: Executor) -> SchemaVersion | None:
    """Return the version of the bookkeeping schema; None before the first migration."""
    (row,) = await session.fetch(_VERSION_SQL)
    return None if row["number"] is None else SchemaVersion(row["number"], row["needs"])


async def read_usable_version(session: Executor) -> SchemaVersion | None:
    """Return the version. Raises TargetError if this program is too old for the schema."""
    version = await read_version(session)
    if version is not None and not version.is_usable:
        raise TargetError(f"the bookkeeping in the target {version.problem}", hint=NEWER_HINT)
    return version


async def lock_schema(session: Executor) -> None:
    """Block migrations by other processes, and new replicas, until the COMMIT."""
    await session.execute(_LOCK_SQL, _LOCK)


async def share_schema(session: Executor) -> None:
    """Block migrations until the COMMIT. Raises TargetError if this program is too old."""
    await session.execute(_SHARED_LOCK_SQL, _LOCK)
    await read_usable_version(session)
