"""The part of a fleet that a command concerns: sources by database and sid, and tables. Pure.

A sid names the source whose url has the sid, with all tables of that source. A sid also names a
tenant that is a schema: the tables whose rows get the sid by a rule.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self, TypeVar

from streamer.errors.command_lines import command
from streamer.errors.error_classes import MappingError
from streamer.mapping.relation_names import parse_name, parse_relation
from streamer.mapping.rules import Mapping, Named, SourceLabel, SourceMapping

T = TypeVar("T")
_UNKNOWN: Final = "no source has this database and sid, and no rows of a table have this sid"
_HINT: Final = f"`{command('status')}` shows the sources, `{command('tenants list')}` the tenants"


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

    @classmethod
    def of(cls, source: Named) -> Self:
        """Return the scope of *source*, without tables of other sources that have its sid."""
        label = SourceLabel(source.database, source.sid)
        return cls(database=source.database, labels=frozenset({label}))

    @property
    def words(self) -> str:
        """The names of tables and the sid, for a message."""
        named = ", ".join(f'"{table}"' for table in self.tables)
        return named if self.sid is None else f'{named} with sid "{self.sid}"'.lstrip()

    def names(self, source: Named) -> bool:
        """Whether the scope names *source* by database, sid and label."""
        return self._allows(source) and self.sid in (None, source.sid)

    def has_whole(self, source: Named) -> bool:
        """Whether the scope contains all tables of *source*."""
        return not self.tables and self.names(source)

    def sources(self, mapping: Mapping) -> list[SourceMapping]:
        """Return the sources that the scope names. Raises MappingError for an unknown source."""
        named = [source for source in mapping.sources if self.names(source)]
        return self._known(named, "no source has this database and sid")

    def sources_of_tables(self, mapping: Mapping) -> list[SourceMapping]:
        """Return the sources that may have tables in the scope.

        Raises MappingError if no source may have such tables.
        """
        named = [
            source
            for source in mapping.sources
            if self.names(source) or (self._allows(source) and source.has_tenants)
        ]
        return self._known(named, _UNKNOWN)

    def select(self, source: Named, tables: Iterable[tuple[str, str | None, T]]) -> list[T]:
        """Return the items in the scope. Each item comes with the name of a table of *source*, and
        the sid of the table's rows.

        Raises MappingError for a faulty pattern.
        """
        patterns = [parse_relation(table, "public") for table in self.tables]
        if not self._allows(source):
            return []
        return [
            item
            for name, row_sid, item in tables
            if self.sid in (None, source.sid, row_sid)
            if not patterns or any(pattern.matches(parse_name(name)) for pattern in patterns)
        ]

    def unknown(self) -> MappingError:
        """Return the error for a scope without a source or a table."""
        return MappingError(_UNKNOWN, hint=_HINT)

    def _allows(self, source: Named) -> bool:
        label = SourceLabel(source.database, source.sid)
        return self.database in (None, source.database) and (
            self.labels is None or label in self.labels
        )

    def _known(self, sources: list[SourceMapping], error: str) -> list[SourceMapping]:
        if not sources and self.labels is None and (self.database, self.sid) != (None, None):
            raise MappingError(error, hint=_HINT)
        return sources


ALL: Final = Scope()
