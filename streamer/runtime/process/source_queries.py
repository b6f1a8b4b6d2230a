"""The planner's queries to the sources, over connections that successive queries share."""

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from streamer.mapping.expressions import ExpressionFacts
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import RelationMapping, SourceMapping
from streamer.schema.definition_message import DefinitionMessage
from streamer.schema.indexes_constraints_types import DefinedType
from streamer.source.capture.ddl_capture import read_present
from streamer.source.catalog import SourceRelation, read_relations
from streamer.source.server.idle_connections import IdleConnections
from streamer.source.server.wait_limits import set_lock_timeout
from streamer.source.tables.expression_check import read_expressions
from streamer.source.tables.user_defined_types import read_named_types, read_type_names
from streamer.target.add_columns import TypeKey

FindSource: TypeAlias = Callable[[str, str | None], SourceMapping | None]

LOCK_TIMEOUT_SECONDS: Final = 1.0
"""How long the description of a table waits for its lock; the lane tries again later."""


class SourceQueries:
    """Queries the source of a database and sid; *find* returns None for a removed source."""

    def __init__(self, find: FindSource, sources: IdleConnections) -> None:
        self._find = find
        self._sources = sources

    async def name_types(
        self, database: str, sid: str | None, keys: Sequence[TypeKey]
    ) -> dict[TypeKey, str]:
        """Return the names of existing types. Raises SourceError."""
        if (source := self._find(database, sid)) is None:
            return {}
        async with self._sources.connection(source) as plain:
            return await read_type_names(plain, keys)

    async def describe_types(
        self, database: str, sid: str | None, names: Sequence[str]
    ) -> list[DefinedType]:
        """Return types by their names, and their parts. Raises SourceError."""
        if (source := self._find(database, sid)) is None:
            return []
        async with self._sources.connection(source) as plain:
            return await read_named_types(plain, names)

    async def describe_expressions(
        self, database: str, sid: str | None, mapping: RelationMapping
    ) -> ExpressionFacts:
        """Describe a rule's expressions. Raises MappingError, SourceError."""
        if (source := self._find(database, sid)) is None:
            return ExpressionFacts({}, {})
        async with self._sources.connection(source) as plain:
            return await read_expressions(plain, mapping)

    async def read_relations(
        self, database: str, sid: str | None, names: Sequence[RelationName]
    ) -> dict[RelationName, SourceRelation]:
        """Return the definitions of existing tables. Raises SourceError."""
        if (source := self._find(database, sid)) is None:
            return {}
        async with self._sources.connection(source) as plain:
            return await read_relations(plain, list(names))

    async def read_present(
        self, database: str, sid: str | None, name: RelationName
    ) -> DefinitionMessage | None:
        """Return the present definition of a table with capture. Raises SourceError, SyncError."""
        if (source := self._find(database, sid)) is None:
            return None
        async with self._sources.connection(source) as plain:
            await set_lock_timeout(plain, LOCK_TIMEOUT_SECONDS)
            return await read_present(plain, source, name)
