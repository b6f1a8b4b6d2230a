"""A table whose definition changes, and the command at the source that changed the table."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from streamer.apply.lanes.lane import MappedRelation
from streamer.bookkeeping.ddl_records import DdlPlace
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import RelationMapping, SourceMapping
from streamer.schema.definition_message import DefinitionMessage
from streamer.schema.source_definition import SourceDefinition
from streamer.target.connection import TargetConnection
from streamer.target.missing_types import ReadTypes
from streamer.util.lsn import Lsn

ReadPresent = Callable[[], Awaitable[SourceDefinition | None]]
"""Reads the present definition of a table at its source."""


class Tables(Protocol):
    """The tables of a source; see `streamer.apply.lanes.lane.LaneOwner`."""

    def find_mapping(self, name: RelationName) -> RelationMapping | None: ...
    def is_behind(self, name: RelationName, lsn: Lsn) -> bool: ...


@dataclass(frozen=True, slots=True)
class ChangedTable:
    """A table whose definition changes, in the transaction of a session of the target.

    ``tables``: the tables of the source. ``read_types`` and ``read_present`` query the source.
    """

    session: TargetConnection
    source: SourceMapping
    tables: Tables
    mapped: MappedRelation
    read_types: ReadTypes
    read_present: ReadPresent


@dataclass(frozen=True, slots=True)
class SourceCommand:
    """A command at the source that changed a table.

    ``definition``: the definition at the source after ``message``. ``at``: the time of the change
    at the source. ``reason``: the cause of the change, as text for an error; None if ``message``
    has the statement. ``copy_follows``: a copy of all rows follows. ``is_late``: a new column may
    have the name of a dropped column, so existing rows may contain values of the dropped column.
    """

    place: DdlPlace
    message: DefinitionMessage
    definition: SourceDefinition
    at: str
    reason: str | None = None
    copy_follows: bool = False
    is_late: bool = False

    @property
    def cause(self) -> str:
        ran = self.message.query.strip() or self.message.tag
        return self.reason or f"the source ran: {ran}"
