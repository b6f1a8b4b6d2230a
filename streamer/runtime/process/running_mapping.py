"""The mapping that a process runs, and the change to a new mapping while the sources stream."""

import asyncio
from collections.abc import Collection, Iterable, Iterator, Sequence
from collections.abc import Mapping as AnyMapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import structlog

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_schema import read_installation
from streamer.bookkeeping.relation_records import read_relation_records
from streamer.bookkeeping.replicas import Fleet
from streamer.bookkeeping.sources import read_source_records
from streamer.errors.error_classes import MappingError, SourceError, StreamerError
from streamer.mapping.lost_mapping import MappingProblem, find_lost_mapping
from streamer.mapping.relation_names import RelationName, parse_name
from streamer.mapping.rules import Mapping, RelationMapping, find_source
from streamer.mapping.shared_targets import (
    NO_CLASHES,
    Clash,
    Clashes,
    TableWriter,
    find_clashes,
    new_table_error,
)
from streamer.runtime.process.running_sources import RunningSources
from streamer.runtime.session.supervisor import Supervisor
from streamer.runtime.tables.relations import resolve_at
from streamer.runtime.wal_retention.backlog_guards import BacklogGuards
from streamer.source.connection import connection
from streamer.source.slot_and_publications.slot import drop_slot_sql

log = structlog.get_logger()

StoredNames = AnyMapping[str, Collection[RelationName]]
NOTHING_STORED: Final[StoredNames] = MappingProxyType({})


class RunningMapping:
    """Owns the mapping; makes one change of the mapping or of its tables at a time."""

    def __init__(
        self,
        mapping: Mapping,
        guards: BacklogGuards,
        stopping: asyncio.Event,
        *,
        is_partial: bool,
    ) -> None:
        self.now = mapping
        self.is_partial = is_partial
        """Whether other processes run the rest of the target's sources."""
        self.changing = asyncio.Lock()
        self.sources: RunningSources | None = None
        """The sources of the mapping; None until the target answers."""
        self._guards = guards
        self._stopping = stopping
        self._lost: MappingProblem | None = None
        self._appeared: asyncio.Queue[str] = asyncio.Queue()
        """Labels of sources with new tables under their patterns."""

    @property
    def problem(self) -> MappingProblem | None:
        """Why no source streams although the target has records of sources; None with a mapping."""
        return None if self.now.sources else self._lost

    @property
    def state(self) -> str:
        """The state of a process without a running source."""
        return "starting" if self.sources is None or self.now.sources else "no sources"

    @property
    def fleet(self) -> Fleet:
        """The replicas that this process knows."""
        return Fleet() if self.sources is None else self.sources.fleet

    @property
    def leads(self) -> bool:
        """Whether this process, alone among replicas, does the work that belongs to no source."""
        return self.sources is None or self.sources.leads()

    @property
    def reports_removed(self) -> bool:
        """Whether this process, alone among replicas, reports sources that no mapping contains.

        A process with a part of the mapping, or with an old mapping, cannot identify such sources.
        """
        sources = self.sources
        if self.is_partial or sources is None or not sources.has_newest_mapping:
            return False
        return sources.leads(*(source.label for source in self.now.sources))

    def leads_source(self, label: str) -> bool:
        """Whether this process does the shared work of the replicas for source *label*."""
        return self.sources is None or self.sources.leads(label)

    def led(self) -> Mapping:
        """Return the sources for which this process does the shared work of the replicas."""
        led = tuple(source for source in self.now.sources if self.leads_source(source.label))
        return replace(self.now, sources=led)

    async def warn_of_forgotten(self, bookkeeping: Bookkeeping) -> None:
        """Log the sources of the target that the mapping lacks: their slots lack a reader."""
        records = await read_source_records(bookkeeping)
        self._lost = find_lost_mapping(len(self.now.sources), [record.label for record in records])
        if self._lost is not None:
            log.error("the mapping was lost", error=self._lost.error, hint=self._lost.hint)
            return
        for record in records:
            if find_source(self.now.sources, record.database, record.sid) is None:
                log.warning(
                    "the bookkeeping has a source that the configuration lacks; the source's slot"
                    " keeps WAL. Add the source again, or drop the slot at the source",
                    source=record.label,
                    to_drop_run_there=drop_slot_sql(record.slot),
                )

    def begin(self, sources: RunningSources) -> None:
        """Run all sources of the mapping, by their priority."""
        self.sources = sources
        for source in sorted(self.now.sources, key=lambda source: -source.priority):
            sources.add(source)

    async def change(self, mapping: Mapping) -> None:
        """Switch to *mapping*: add, change and remove sources while the unchanged sources continue.
        New tables of a source that match a pattern join, too. Raises ConfigurationError for an
        invalid mapping, in which case no source has changed; any later error concerns a single
        source.
        """
        async with self.changing:
            if self._stopping.is_set():
                return
            if self.sources is None:
                self.now = mapping
                self._guards.keep(mapping.sources)
                return
            await _check_resolves(mapping)
            errors = await self._change(mapping, self.sources)
            self.now = mapping
            if errors:
                raise errors[0]

    async def _change(self, mapping: Mapping, sources: RunningSources) -> list[StreamerError]:
        """Switch to *mapping*; return the errors of single sources."""
        running = {supervisor.source.label: supervisor for supervisor in sources.supervisors}
        labels = {source.label for source in mapping.sources}
        removed = [running[label] for label in sorted(running.keys() - labels)]
        bookkeeping = sources.services.bookkeeping
        installation = await _read_installation(removed, bookkeeping) if removed else ""
        errors: list[StreamerError] = []
        for supervisor in removed:
            try:
                await sources.remove(supervisor, installation)
            # the supervisor has stopped, so the next sources may write its rows
            except StreamerError as exc:
                errors.append(exc)
        for source in mapping.sources:
            if source.label not in running:
                sources.add(source)
                continue
            try:
                await running[source.label].change(source)
            except StreamerError as exc:
                errors.append(exc)
        return errors

    def tables_appeared(self, label: str) -> None:
        """Request the start of new tables at the source *label* that match a pattern."""
        self._appeared.put_nowait(label)

    async def join_tables(self) -> None:
        """Start the requested new tables, until cancelled."""
        while True:
            labels = {await self._appeared.get()}
            async with self.changing:
                if self._stopping.is_set() or self.sources is None:
                    return
                while not self._appeared.empty():
                    labels.add(self._appeared.get_nowait())
                try:
                    stored = await _read_stored_names(self.sources.services.bookkeeping)
                    clashes = _find_new_clashes(await _resolve(self.now, stored), stored)
                except StreamerError as exc:
                    log.error("new tables cannot join", error=str(exc), **exc.log_fields)
                    continue
                for supervisor in self.sources.supervisors:
                    if (label := supervisor.source.label) in labels:
                        await _join(supervisor, clashes.get(label, NO_CLASHES))


async def _read_installation(removed: Sequence[Supervisor], bookkeeping: Bookkeeping) -> str:
    """Return the installation id that marks the objects of removed sources.

    Raises MappingError if the target does not answer: the source would continue, while another
    source may be about to write its rows.
    """
    try:
        return await read_installation(bookkeeping)
    except StreamerError as exc:
        labels = ", ".join(f'"{supervisor.source.label}"' for supervisor in removed)
        raise MappingError(
            f"the mapping is unchanged: to remove {labels}, streamer needs its target: "
            f"{exc.message}",
            hint="restore the target, then reload or apply again",
        ) from exc


async def _read_stored_names(bookkeeping: Bookkeeping) -> StoredNames:
    """Return the tables in the bookkeeping, by the labels of their sources."""
    labels = {record.source_id: record.label for record in await read_source_records(bookkeeping)}
    stored: dict[str, set[RelationName]] = {}
    for record in await read_relation_records(bookkeeping):
        if record.source_id in labels:
            stored.setdefault(labels[record.source_id], set()).add(parse_name(record.source))
    return stored


async def _join(supervisor: Supervisor, clashes: Clashes) -> None:
    """Start the new tables of a source, without the tables in *clashes*."""
    try:
        await supervisor.change(supervisor.source, clashes)
    except StreamerError as exc:
        label = supervisor.source.label
        log.error("new tables cannot join", source=label, error=str(exc), **exc.log_fields)


async def _check_resolves(mapping: Mapping) -> None:
    """Check that the rules fit the sources that answer. Raises MappingError."""
    for _, clash in _find_all_clashes(await _resolve(mapping)):
        raise MappingError(clash.message, hint=clash.hint)


async def _resolve(
    mapping: Mapping, stored: StoredNames = NOTHING_STORED
) -> dict[str, list[RelationMapping]]:
    """Return the tables of the sources that answer, by label. Raises MappingError.

    *stored*: the tables that stream already. A new table without a sid or target stops none of the
    streaming tables.
    """
    tables = {}
    for source in mapping.sources:
        try:
            async with connection(source) as plain:
                tables[source.label], _, _ = await resolve_at(
                    plain, source, mapping.target_namespace, stored.get(source.label, ())
                )
        except SourceError as exc:
            log.warning(
                "cannot read the tables of the source, so its rules stay unchecked",
                source=source.label,
                error=str(exc),
            )
    return tables


def _find_all_clashes(
    tables: AnyMapping[str, Iterable[RelationMapping]],
) -> Iterator[tuple[RelationName, Clash]]:
    """Yield the target tables with rows that several sources would write. Pure."""
    writers: dict[RelationName, list[TableWriter]] = {}
    for label, mapped in tables.items():
        for table in mapped:
            writer = TableWriter(label, table.sid, table.rule.is_disjoint)
            writers.setdefault(table.target, []).append(writer)
    for target, several in writers.items():
        for clash in find_clashes(target, several):
            yield target, clash


def _find_new_clashes(
    tables: AnyMapping[str, Iterable[RelationMapping]], stored: StoredNames
) -> dict[str, Clashes]:
    """Return the new tables of each source that would write rows of another source. Pure."""
    clashes: dict[str, Clashes] = {}
    for target, clash in _find_all_clashes(tables):
        for label in clash.labels:
            for table in tables[label]:
                has_rows = (table.target, table.sid) == (target, clash.sid)
                if has_rows and table.source not in stored.get(label, ()):
                    error = new_table_error(table.source, clash)
                    clashes[label] = {**clashes.get(label, NO_CLASHES), table.source: error}
    return clashes
