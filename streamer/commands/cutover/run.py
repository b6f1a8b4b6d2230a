"""Runs the steps of a cut-over, and undoes them.

Each step is stored before its work begins and may be done twice. A command that was killed is run
again: it goes on with the step that began last, or back with ``--undo``. The last step is the one
that cannot be undone, because programs write at the target from then on.
"""

import asyncio
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final

from streamer.commands.cutover import reverse
from streamer.commands.cutover.equality import Equality, uncountable
from streamer.commands.cutover.plan import (
    CutoverOptions,
    FinalComparison,
    Step,
    StopWrites,
    describe,
    steps,
)
from streamer.commands.scope import Scope
from streamer.commands.wait import wait
from streamer.compare.change_marks import Marks
from streamer.config.settings import Settings
from streamer.errors import CutoverError, MappingError, StreamerError
from streamer.failpoints import failpoint
from streamer.hints import command
from streamer.lsn import NOTHING, Lsn
from streamer.mapping.rules import Mapping, RelationMapping, SourceMapping, find_source
from streamer.mapping.sequences import places
from streamer.postgres.quoting import quote_qualified
from streamer.progress.bookkeeping import Bookkeeping
from streamer.progress.cutovers import (
    CutoverRecord,
    finish_cutover,
    forget_cutover,
    read_cutover,
    store_marker,
    store_step,
)
from streamer.progress.relations import read_relation_records
from streamer.progress.schema import is_installed
from streamer.progress.server_of_run import connection_of_run
from streamer.progress.sources import read_source_records
from streamer.remedies import Remedy
from streamer.runtime.sequence_follower import obstacle_of
from streamer.source.catalog import flush_wal
from streamer.source.connection import Connection, fetch_one
from streamer.source.sequences import SourceSequence, read_exact, read_sequences
from streamer.source.stop_writes import (
    allow_sql,
    end_sessions,
    read_write_facts,
    read_writers,
    stop_sql,
)
from streamer.target.allow_writes import allow_writes
from streamer.target.connection import TargetAddress
from streamer.target.sequences import TargetSequence, find_sequences, set_ahead, set_exact

POLL_SECONDS: Final = 0.2

Report = Callable[[str, str], None]
"""Called with a step and its outcome, in words."""


@dataclass(frozen=True, slots=True)
class CutoverState:
    """The state of a source's cut-over, for the command to show. ``left``: steps to come."""

    label: str
    database: str
    record: CutoverRecord | None
    options: CutoverOptions
    left: tuple[Step, ...]

    def lines(self) -> list[str]:
        """Return the steps that are left, in words."""
        return [
            f"{number}. {step.value}: {describe(step, self.options, self.label, self.database)}"
            for number, step in enumerate(self.left, 1)
        ]


class Cutover:
    """The cut-over of one source. Use it as a context manager."""

    def __init__(
        self,
        settings: Settings,
        mapping: Mapping,
        source: SourceMapping,
        options: CutoverOptions,
        report: Report,
    ) -> None:
        self._settings = settings
        self._mapping = mapping
        self._source = source
        self._asked = self._options = options
        self._report = report
        self._address = TargetAddress.parse(settings.target.url)
        self._bookkeeping = Bookkeeping(self._address, "streamer cutover")
        self._source_id = 0
        self._record: CutoverRecord | None = None
        self._equality = Equality(settings, mapping, source, self._bookkeeping)
        self._marks: Marks | None = None
        """From before the comparison that found everything equal."""
        self._compared_seconds = 0.0
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Cutover":
        self._stack.push_async_callback(self._bookkeeping.close)
        await self._stack.enter_async_context(self._equality)
        return self

    async def __aexit__(self, *details: Any) -> None:
        await self._stack.aclose()

    # ---- for the command -----------------------------------------------------------------------

    async def state(self) -> CutoverState:
        """Read how far the cut-over is. Raises MappingError if the source never streamed."""
        source = self._source
        if await is_installed(self._bookkeeping):
            records = await read_source_records(self._bookkeeping)
            record = find_source(records, source.database, source.sid)
            if record is not None and record.acknowledged_lsn != NOTHING:
                self._source_id = record.source_id
        if not self._source_id:
            raise MappingError(
                f'source "{source.label}" has never been streamed',
                hint="start `streamer run` first",
            )
        self._record = await read_cutover(self._bookkeeping, self._source_id)
        self._options = self._asked.begun_with(self._record)
        async with connection_of_run(source, self._bookkeeping) as plain:
            row = await fetch_one(plain, "select pg_catalog.current_database() as name")
        return CutoverState(
            source.label,
            row["name"],
            self._record,
            self._options,
            tuple(steps(self._options, self._record)),
        )

    async def check(self) -> list[str]:
        """Return everything that stands in the way; changes nothing."""
        found = []
        waits = await wait(self._address, self._mapping, self._options.seconds, self._scope)
        if waits is not None:
            found.append(waits)
        async with connection_of_run(self._source, self._bookkeeping) as plain:
            facts = await read_write_facts(plain)
            stops = self._options.stop_writes is StopWrites.READ_ONLY
            found += facts.obstacles(stops=stops)
            mappings = await self._equality.mappings(plain)
            found += await self._check_sequences(plain, mappings)
        if self._options.reverse is not None:
            found += reverse.obstacles(self._source, mappings)
        if self._options.comparison is FinalComparison.COUNTS:
            found += uncountable(self._source, mappings)
        if not found:
            marks = await self._equality.read_marks(self._source_id)
            answer = await self._equality.compare_all()
            found += answer.problems()
            self._marks, self._compared_seconds = marks, answer.seconds
        return found

    async def run(self) -> None:
        """Do the steps that are left. Raises CutoverError at the first that cannot be done."""
        for step in steps(self._options, self._record):
            await self._do(step)

    async def undo(self) -> None:
        """Go back to the state before the cut-over. Raises CutoverError if it has finished."""
        record = self._record
        if record is None:
            self._report("undo", "there is nothing to undo")
            return
        if record.is_finished:
            raise CutoverError(
                "programs may have written to the target since the cut-over finished",
                hint="run a cut-over in the other direction, with the configuration of the "
                "stream back",
            )
        if self._options.reverse is not None and Step(record.step) in (Step.REVERSE, Step.FINISH):
            await reverse.remove(self._options.reverse)
            self._report("undo", "the stream back has been removed")
        if record.details["has_stopped"]:
            sql = await self._allow_writes(record)
            self._report("undo", f"writes are allowed at {self._source.label} again: {sql}")
        failpoint("cutover.undone")
        await forget_cutover(self._bookkeeping, self._source_id)
        self._report("undo", "the cut-over has been undone")

    # ---- steps ---------------------------------------------------------------------------------

    async def _do(self, step: Step) -> None:
        if step is Step.CHECK:
            found = await self.check()
            if found:
                raise CutoverError("; ".join(found))
            self._report(
                step.value,
                "every table is ready and equal, and the target has every sequence; "
                f"compared in {self._compared_seconds:.1f} s",
            )
            return
        work = {
            Step.STOP_WRITES: self._stop_writes,
            Step.DRAIN: self._drain,
            Step.COMPARE: self._compare_again,
            Step.SEQUENCES: self._set_sequences,
            Step.REVERSE: self._reverse,
            Step.FINISH: self._finish,
        }[step]
        try:
            if step is not Step.STOP_WRITES:  # which stores more
                await self._store(step, self._details)
            self._report(step.value, await work())
        except StreamerError as exc:
            source = self._source
            again = command("cutover", database=source.database, sid=source.sid)
            go_on = f"run `{again} --yes` again, or `{again} --undo` to go back"
            exc.remedy = Remedy.of(exc.remedy or "fix that", "; then ", go_on)
            raise

    @property
    def _details(self) -> dict[str, Any]:
        assert self._record is not None
        return self._record.details

    async def _store(self, step: Step, details: dict[str, Any]) -> None:
        await store_step(self._bookkeeping, self._source_id, step.value, details)
        failpoint("cutover.step_stored")
        self._record = await read_cutover(self._bookkeeping, self._source_id)

    async def _stop_writes(self) -> str:
        """Store how to undo this, make the database read-only, and end its sessions."""
        stops = self._options.stop_writes is StopWrites.READ_ONLY
        async with connection_of_run(self._source, self._bookkeeping) as plain:
            facts = await read_write_facts(plain)
            if obstacles := facts.obstacles(stops=stops):
                raise CutoverError("; ".join(obstacles))
            details = {"setting": facts.setting, "has_stopped": stops, **self._options.to_json()}
            details["marks"] = None if self._marks is None else self._marks.to_json()
            if self._record is not None:  # the value of before is that of the first time
                details |= self._record.details
            await self._store(Step.STOP_WRITES, details)
            if stops:
                await plain.execute(stop_sql(facts.database).encode())
                failpoint("cutover.writes_stopped")
                now = await fetch_one(plain, "select pg_catalog.clock_timestamp()::text as now")
                details["stopped_at"] = now["now"]
                await self._store(Step.STOP_WRITES, details)
            await self._until_no_writer(plain, ends=stops)
            marker = await flush_wal(plain)
        await store_marker(self._bookkeeping, self._source_id, marker)
        failpoint("cutover.marked")
        self._record = await read_cutover(self._bookkeeping, self._source_id)
        return f"no session writes any more; the last position is {marker}"

    async def _until_no_writer(self, plain: Connection, *, ends: bool) -> None:
        deadline = time.monotonic() + self._options.seconds
        while True:
            if ends:
                await end_sessions(plain)
            writers = await read_writers(plain, every_session=False)
            if not writers:
                return
            if time.monotonic() > deadline:
                raise CutoverError(f"sessions still write to the source: {', '.join(writers)}")
            await asyncio.sleep(POLL_SECONDS)

    async def _allow_writes(self, record: CutoverRecord) -> str:
        async with connection_of_run(self._source, self._bookkeeping) as plain:
            facts = await read_write_facts(plain)
            sql = allow_sql(facts.database, record.details["setting"])
            await plain.execute(sql.encode())
        return sql

    async def _drain(self) -> str:
        waits = await wait(self._address, self._mapping, self._options.seconds, self._scope)
        if waits is not None:
            raise CutoverError(waits)
        return "the target has everything"

    async def _compare_again(self) -> str:
        if self._options.comparison is FinalComparison.COUNTS:
            if found := await self._equality.count():
                raise CutoverError("; ".join(found))
            return "every table has the same number of rows"
        details, equality = self._details, self._equality
        if self._options.comparison is FinalComparison.FULL or details["marks"] is None:
            answer = await equality.compare_all()
        else:
            before, stopped_at = Marks.from_json(details["marks"]), details.get("stopped_at")
            answer = await equality.compare_changes(self._source_id, before, stopped_at)
        if found := answer.problems():
            raise CutoverError("; ".join(found))
        return answer.describe()

    async def _set_sequences(self) -> str:
        async with connection_of_run(self._source, self._bookkeeping) as plain:
            mappings = await self._equality.mappings(plain)
            if found := await self._check_sequences(plain, mappings):
                raise CutoverError("; ".join(found))
            pairs = await self._sequences(plain, mappings)
            values = await read_exact(plain, [sequence.name for sequence, _ in pairs])
        shared = await self._find_shared(there.oid for _, there in pairs if there is not None)
        async with self._bookkeeping.connection() as target:
            for sequence, there in pairs:
                assert there is not None
                value, is_called = values[sequence.name]
                if there.oid in shared:
                    await set_ahead(target, there, value)
                else:
                    await set_exact(target, there, value, is_called=is_called)
        failpoint("cutover.sequences_set")
        later = ", or later ones where others use them" if shared else ""
        return f"{len(pairs)} sequences have the source's values{later}"

    async def _find_shared(self, oids: Iterable[int]) -> set[int]:
        """Return which sequences of the target have values of others, by their OIDs.

        Programs of a source that went over earlier draw values of them by now, so they may not go
        back. Two sequences of one source may have the same place, too.
        """
        counts = Counter(oids)
        records = await read_source_records(self._bookkeeping)
        if self._source.sid is not None or len(records) > 1:
            return set(counts)
        return {oid for oid, count in counts.items() if count > 1}

    async def _reverse(self) -> str:
        path = self._options.reverse
        assert path is not None
        async with connection_of_run(self._source, self._bookkeeping) as plain:
            mappings = await self._equality.mappings(plain)
        reverse.write(path, reverse.document(self._settings, self._source, mappings))
        await reverse.prepare(path)
        failpoint("cutover.reversed")
        start = shlex.join(["streamer", "run", "--config", str(path)])
        return f"the target keeps its changes for the stream back; start it: {start}"

    async def _finish(self) -> str:
        await self._drain()
        if self._record is None or self._record.marker_lsn is None:
            raise CutoverError("writes to the source were never stopped")
        if late := await self._written_behind(self._record.marker_lsn):
            raise CutoverError(f"rows were written to the source after the stop: {', '.join(late)}")
        async with self._bookkeeping.connection() as target:
            await allow_writes(target)
        await finish_cutover(self._bookkeeping, self._source_id)
        return "programs may now write to the target"

    async def _written_behind(self, marker: Lsn) -> list[str]:
        records = await read_relation_records(self._bookkeeping, self._source_id)
        return [
            f'table "{record.source}"'
            for record in records
            if record.end_lsn > max(marker, record.snapshot_lsn or NOTHING)
        ]

    # ---- facts ---------------------------------------------------------------------------------

    @property
    def _scope(self) -> Scope:
        return Scope(database=self._source.database, sid=self._source.sid)

    async def _sequences(
        self, plain: Connection, mappings: list[RelationMapping]
    ) -> list[tuple[SourceSequence, TargetSequence | None]]:
        """Return the sequences that have a place at the target, with those that are there."""
        sequences = await read_sequences(plain)
        wanted = places(sequences, mappings, self._settings.target.schema_)
        async with self._bookkeeping.connection() as target:
            found = await find_sequences(target, wanted)
        return [(each, found.get(each.name)) for each in sequences if each.name in wanted]

    async def _check_sequences(
        self, plain: Connection, mappings: list[RelationMapping]
    ) -> list[str]:
        problems = []
        for sequence, there in await self._sequences(plain, mappings):
            if there is None:
                name = quote_qualified(self._settings.target.schema_, sequence.name.name)
                what = (
                    f"run at the target: create sequence {name}"
                    if sequence.owner is None
                    else "make the column of the target table an identity or serial column"
                )
                problems.append(
                    f'the target has no counterpart of sequence "{sequence.name}"; {what}'
                )
                continue
            obstacle, remedy = obstacle_of(sequence, there)
            if obstacle is not None:
                problems.append(f'sequence "{sequence.name}": {obstacle}; {remedy}')
        return problems
