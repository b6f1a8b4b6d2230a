"""Reasons why a table cannot be copied, for `check` and `run` alike. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from streamer.errors.error_classes import SyncError, TargetSchemaError
from streamer.errors.remedies import Remedy, at_source
from streamer.mapping.relation_names import RelationName
from streamer.postgres.quoting import quote_identifier
from streamer.source.catalog import SourceRelation, SourceServer
from streamer.source.copy_grants import select_sql, usage_sql
from streamer.source.reached_server import STARTED_SQL, TIMELINE_SQL

OCCUPIED_WORDS: Final = (
    "or set `truncate_target: true` to replace them, `initial: keep` to keep rows that the source "
    "lacks, or `initial: none` if the table is in sync with the source"
)


def find_unusable_namespace(relation: SourceRelation, role: str) -> Iterator[SyncError]:
    """Yield the reason why *role* cannot read a table despite grants on the table. Pure."""
    if not relation.in_usable_namespace:
        namespace = relation.name.namespace
        yield SyncError(
            f'"{relation.name}" cannot be read by role "{role}", which may not use its schema',
            hint=Remedy.of("run at the source: ", at_source(usage_sql(namespace, role))),
        )


def find_unreadable(relation: SourceRelation, role: str) -> Iterator[SyncError]:
    """Yield the reasons why *role* cannot read a table, or cannot read all rows. Pure."""
    if relation.row_security:
        yield SyncError(
            f'row level security would hide rows of "{relation.name}" from the copy',
            hint=Remedy.of(
                "run at the source: ",
                at_source(f"alter role {quote_identifier(role)} bypassrls"),
                "; or make that role the table's owner",
            ),
        )
    if not relation.selectable:
        yield SyncError(
            f'"{relation.name}" cannot be read by role "{role}"',
            hint=Remedy.of("run at the source: ", at_source(select_sql(relation.name, role))),
        )


def occupied_error(target: RelationName, hint: Remedy | None = None) -> SyncError:
    """Return the error of a copy that may not replace the rows of *target*."""
    return SyncError(f'target table "{target}" already holds rows of this source', hint=hint)


@dataclass(frozen=True, slots=True)
class TargetDatabase:
    """The database of the target. ``started``: the start time of the server."""

    system_identifier: str
    timeline: int
    started: int
    database: str

    def is_of(self, source: SourceServer) -> bool:
        """Whether writes to the target become changes of the source.

        A promoted standby and a restored backup have the origin's system identifier, but a new
        timeline. A copied data directory has the same timeline, too, but a different start time.
        """
        place = source.system_identifier, source.timeline, source.database
        is_one_server = source.in_recovery or source.started in (0, self.started)
        return place == (self.system_identifier, self.timeline, self.database) and is_one_server


TARGET_DATABASE_SQL: Final = f"""
select (select system_identifier::text from pg_catalog.pg_control_system()) as system_identifier,
       {TIMELINE_SQL} as timeline, {STARTED_SQL} as started,
       pg_catalog.current_database()::text as database
"""


def own_target_error(table: RelationName) -> TargetSchemaError:
    """Return the error for a *table* that is its own target."""
    return TargetSchemaError(
        f'table "{table}" is its own target: source and target are the same database',
        hint="give it another `target`, or correct a url",
    )
