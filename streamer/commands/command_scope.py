"""The part of a fleet that a command concerns: sources by database and sid, and tables. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeVar

from streamer.errors.command_lines import command
from streamer.errors.error_classes import MappingError
from streamer.mapping.relation_names import parse_name, parse_relation
from streamer.mapping.rules import Mapping, SourceMapping

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Scope:
    """Sources and tables; empty: all.

    ``tables``: names or patterns. ``labels``: labels of sources, in addition to ``database`` and
    ``sid``.
    """

    tables: tuple[str, ...] = ()
    database: str | None = None
    sid: str | None = None
    labels: frozenset[str] | None = None

    def sources(self, mapping: Mapping) -> list[SourceMapping]:
        """Return the sources in the scope. Raises MappingError if the scope contains no source."""
        named = [
            source
            for source in mapping.sources
            if self.database in (None, source.database) and self.sid in (None, source.sid)
        ]
        if not named and (self.database, self.sid) != (None, None):
            hint = f"`{command('status')}` shows the sources"
            raise MappingError("no source has this database and sid", hint=hint)
        return [s for s in named if self.labels is None or s.label in self.labels]

    def select(self, items: Iterable[tuple[str, T]]) -> list[T]:
        """Return the items whose table is in the scope; each item comes with the name of a table.

        Raises MappingError for a faulty pattern.
        """
        patterns = [parse_relation(table, "public") for table in self.tables]
        return [
            item
            for name, item in items
            if not patterns or any(pattern.matches(parse_name(name)) for pattern in patterns)
        ]


ALL: Final = Scope()
