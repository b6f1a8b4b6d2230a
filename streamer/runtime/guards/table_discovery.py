"""Finds new tables at a source that match a pattern or have the name of a dropped table, and
mapped tables that joined an extension.

At an interval, the task compares the names of the source's tables with the mapped tables. The task
compares at once when the stream sends the definition of a table that is not mapped (`ddl:
capture`). The process then adds and removes the tables, as when an operator changes the rules.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from streamer.errors.error_classes import MappingError
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import OnTableDropped
from streamer.mapping.rules import TableRule, resolve_new
from streamer.runtime.tables.table_events import TableEvents
from streamer.source.catalog import read_extension_tables, read_relation_names
from streamer.source.connection import Connection, translating
from streamer.util.waiting import wait_for_event

log = structlog.get_logger()

PAUSE_SECONDS: Final = 1.0
"""The minimum pause between two checks, however many definitions the stream sends."""


class Discovery:
    """See the module. An object serves one attempt to stream a source."""

    def __init__(
        self,
        tables: TableEvents,
        interval: float,
        appeared: Callable[[str], None],
        target_namespace: str,
    ) -> None:
        """*interval*: seconds between checks; 0: no periodic checks.

        Calls *appeared* with the label of the source.
        """
        self._tables = tables
        self._interval = interval or None
        self._appeared = appeared
        self._target_namespace = target_namespace
        self._logged: dict[str, list[RelationName]] = {}
        """The tables of the last check, by event: only a changed list is logged."""

    async def run(self, plain: Connection) -> None:
        """Check until cancelled. Raises SourceConnectionError."""
        relations = self._tables.relations
        while True:
            await wait_for_event(relations.unmapped_defined, self._interval)
            relations.unmapped_defined.clear()
            if any(map(_may_appear, self._tables.source.rules)):
                await self._compare(plain)
            await asyncio.sleep(PAUSE_SECONDS)

    async def _compare(self, plain: Connection) -> None:
        source = self._tables.source
        present = {mapped.mapping.source for mapped in self._tables.relations}
        with translating(source.label):
            names = await read_relation_names(plain, source)
            absent = present.difference(names)
            of_extensions = absent & await read_extension_tables(plain) if absent else set()
        if not (new := self._new(names)):
            self._tables.clash = None
        for event, tables in (
            ("tables appeared", new),
            ("tables joined an extension", sorted(of_extensions)),
        ):
            if tables and self._logged.get(event) != tables:
                log.info(event, source=source.label, tables=", ".join(map(str, tables)))
            self._logged[event] = tables
        if new or of_extensions:
            self._appeared(source.label)

    def _new(self, names: list[RelationName]) -> list[RelationName]:
        """Return the *names* that the rules map and that are not mapped yet."""
        tables = self._tables
        present = {mapped.mapping.source for mapped in tables.relations}
        everything = present.union(names)  # a rule for a table that vanished is not a mistake
        try:
            mapped, tables.refused = resolve_new(
                tables.source, present, everything, self._target_namespace
            )
        except MappingError as exc:  # the rules of tables that stream no longer fit the source
            tables.refused = exc
            return []
        return sorted({mapping.source for mapping in mapped} - present)


def _may_appear(rule: TableRule) -> bool:
    """Whether a table of *rule* can join later: as new, or after a drop."""
    return rule.pattern.is_pattern or rule.on_table_dropped is not OnTableDropped.STOP
