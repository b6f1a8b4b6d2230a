"""Why streamer cannot create or remove time partitions of target tables, by relation."""

from collections.abc import Mapping

from streamer.bookkeeping.bookkeeping_table import Executor
from streamer.bookkeeping.relation_records import RELATIONS, RelationRecord
from streamer.errors.error_reports import ErrorReport


async def read_partition_errors(session: Executor) -> list[RelationRecord]:
    """Return the relations whose time partitions streamer cannot create or remove."""
    return await RELATIONS.read(session, "where partition_error is not null")


async def set_partition_errors(session: Executor, errors: Mapping[int, ErrorReport | None]) -> None:
    """Store the errors of relations, by id; None once streamer has changed the partitions."""
    rows = ({"id": number, "partition_error": error} for number, error in errors.items())
    await RELATIONS.update_each(session, rows)
