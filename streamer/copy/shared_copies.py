"""Copies into a target table that several tables share by `keys: disjoint`.

A row of the target does not show its source table. So a first copy inserts all rows of its table in
one transaction, and a row with the same key refuses the copy. A later copy would have to remove the
rows that its table wrote before. streamer removes the rows of all tables together, once every table
with this target waits for a copy and none of them writes. The first of these copies removes the
rows in the transaction that inserts its own rows, and the later copies insert like first copies.

A copy of differing rows inserts and updates by key, and deletes no row. The target's unique index
has checked only the rows that streamer inserted. So streamer refuses this copy for a table with
rows that the stream lacks, as after ATTACH PARTITION.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from streamer.apply.lanes.lane import MappedRelation
from streamer.bookkeeping.copies import forget_rows_of_sharers, read_sharers
from streamer.bookkeeping.relation_records import read_labels
from streamer.bookkeeping.requests import read_queued_resyncs
from streamer.control.table_state import Need, State
from streamer.copy.staging_tables import LOCK_SECONDS
from streamer.copy.swap_rows import WriteMode
from streamer.errors.error_classes import ConflictError, SharedTableError, TargetContentionError
from streamer.errors.remedies import Remedy, run
from streamer.mapping.disjoint_keys import describe_unguarded
from streamer.mapping.rules import SourceLabel
from streamer.target.connection import TargetConnection

NAMED_MAX: Final = 5
"""Tables that an error names."""


class Entry(enum.Enum):
    """How the rows of a table enter the shared target table."""

    INSERT = enum.auto()
    """The target contains no row of this table."""
    REPLACE_ALL = enum.auto()
    """Every table waits for a copy, which replaces all rows of the target."""
    WAIT = enum.auto()
    """A process has not taken the request for one of the tables yet."""
    REFUSE = enum.auto()
    """A further table streams, and the target may contain earlier rows of this table."""


@dataclass(frozen=True, slots=True)
class Sharer:
    """A table that writes to the shared target table.

    ``has_rows``: the target may contain rows of the table. ``awaits_copy``: the table does not
    write until its copy ends. ``is_requested``: a request for a copy is queued.
    """

    relation_id: int
    has_rows: bool
    awaits_copy: bool
    is_requested: bool = False


def choose_entry(relation_id: int, sharers: Sequence[Sharer]) -> Entry:
    """Return how the rows of *relation_id*, one of *sharers*, enter the target. Pure."""
    has_rows = any(sharer.has_rows for sharer in sharers if sharer.relation_id == relation_id)
    others = [sharer for sharer in sharers if sharer.relation_id != relation_id]
    if all(sharer.awaits_copy for sharer in others):
        is_filled = has_rows or any(sharer.has_rows for sharer in others)
        return Entry.REPLACE_ALL if is_filled else Entry.INSERT
    if not has_rows:
        return Entry.INSERT
    is_requested = all(sharer.awaits_copy or sharer.is_requested for sharer in others)
    return Entry.WAIT if is_requested else Entry.REFUSE


async def _read_entry(target: TargetConnection, mapped: MappedRelation) -> Entry:
    records = await read_sharers(target, str(mapped.mapping.target))
    requested = await read_queued_resyncs(target, [record.relation_id for record in records])
    sharers = [
        Sharer(
            record.relation_id,
            record.was_in_sync,
            record.table_state.need is Need.ROWS
            and record.state in (State.INIT.value, State.COPYING.value),
            record.relation_id in requested,
        )
        for record in records
    ]
    return choose_entry(mapped.relation_id, sharers)


async def require_common_copy(target: TargetConnection, mapped: MappedRelation) -> None:
    """Refuse a copy that would have to find the rows of its table. Raises SharedTableError."""
    if await _read_entry(target, mapped) is Entry.REFUSE:
        raise shared_copy_error(mapped)


async def is_first_of_all(target: TargetConnection, mapped: MappedRelation) -> bool:
    """Return whether the copy of *mapped* is to replace the rows of all tables.

    Raises TargetContentionError while a request is queued, and SharedTableError.
    """
    match await _read_entry(target, mapped):
        case Entry.WAIT:
            raise TargetContentionError(
                f'tables still write to target "{mapped.mapping.target}": their processes have not '
                "yet taken the requests for copies"
            )
        case Entry.REFUSE:
            raise shared_copy_error(mapped)
        case entry:
            return entry is Entry.REPLACE_ALL


async def begin_replacement(
    target: TargetConnection, mapped: MappedRelation, rows: str
) -> WriteMode:
    """Lock the table *rows* in the transaction that has just begun, and return the mode that
    replaces the rows of all tables.

    Raises TargetContentionError if a table resumed meanwhile.
    """
    await target.execute("set transaction isolation level repeatable read")
    await target.execute(f"set local lock_timeout = '{LOCK_SECONDS}s'")
    # Lock before the snapshot, so that transactions that wrote before the requests have ended.
    await target.execute(f"lock table {rows} in share row exclusive mode")
    if not await is_first_of_all(target, mapped):
        raise TargetContentionError(
            f'a table has begun to write to target "{mapped.mapping.target}"'
        )
    await forget_rows_of_sharers(target, str(mapped.mapping.target))
    return WriteMode.REPLACE


def shared_copy_error(mapped: MappedRelation) -> SharedTableError:
    """Return the error of a copy that would have to find the rows of its table. Pure."""
    mapping = mapped.mapping
    error = SharedTableError(
        f'a copy of only "{mapping.source}" cannot find the rows of "{mapping.source}" in target '
        f'"{mapping.target}", which several tables share'
    )
    advise_resync(mapped, error)
    return error


def unguarded_error(mapped: MappedRelation) -> SharedTableError:
    """Return the error of a copy of differing rows, for a table with rows that the stream lacks.
    Pure.
    """
    mapping = mapped.mapping
    error = SharedTableError(describe_unguarded(str(mapping.source), str(mapping.target)))
    advise_resync(mapped, error)
    return error


def advise_resync(mapped: MappedRelation, error: SharedTableError) -> None:
    """Add to *error* the command that copies all tables with the target of *mapped* again. Pure."""
    source, table = mapped.source, str(mapped.mapping.source)
    again = run("resync", table, database=source.database, sid=source.sid)
    choice = error.remedy and Remedy.of("; or, ", error.remedy)
    error.remedy = Remedy.of("to copy all tables with this target again, run: ", again, choice)


async def name_tables(
    target: TargetConnection, mapped: MappedRelation, error: ConflictError
) -> None:
    """Complete the message of *error* with the names of the tables that may have equal keys."""
    mapping, source = mapped.mapping, mapped.source
    label = SourceLabel(source.database, source.sid)
    sharers = {record.relation_id for record in await read_sharers(target, str(mapping.target))}
    labels = await read_labels(target, sharers - {mapped.relation_id})
    error.message = (
        f'"{mapping.source}" of source "{label}" has a key that {name_others(labels)} has, too, '
        f"although the rule says `keys: disjoint`: {error.message}"
    )


def advise_copy(mapped: MappedRelation, error: ConflictError) -> None:
    """Give the remedy to *error*, of a copy into a shared table. Pure."""
    mapping, source = mapped.mapping, mapped.source
    table, ids = str(mapping.source), {"database": source.database, "sid": source.sid}
    error.remedy = Remedy.of(
        "give one of the rows another key at its source, or give the rows a sid; then run: ",
        run("resume", table, **ids),
        "; or, if the table had another name, add that name to `exclude_tables`, reload the "
        "mapping (SIGHUP or `streamer apply`), and run: ",
        run("resync", table, **ids),
    )


def name_others(labels: Mapping[int, tuple[str, str]]) -> str:
    """Return in words the tables of *labels*: source and table by relation id. Pure."""
    names = [f'"{table}" of source "{label}"' for label, table in labels.values()]
    if not names:
        return "a row of the target"
    more = len(names) - NAMED_MAX
    return " or ".join(names[:NAMED_MAX]) + (f" or one of {more} more tables" if more > 0 else "")
