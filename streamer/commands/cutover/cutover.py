"""Runs the steps of a cut-over, and undoes them.

The command stores each step before its work begins, and each step may run twice. After a kill, the
next command continues with the last step, or with ``--undo`` restores the state before the
cut-over. The last step cannot be undone, because programs then write at the target.

Each step after the check has a time limit. If a step exceeds the limit, the command restores the
state before the cut-over, so that programs write to the source again.
"""

import asyncio
import shlex
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_schema import is_installed
from streamer.bookkeeping.cutovers import (
    CutoverRecord,
    finish_cutover,
    forget_cutover,
    read_cutover,
    store_marker,
    store_step,
)
from streamer.bookkeeping.relation_records import read_relation_records
from streamer.bookkeeping.requests import CUTOVER, acting
from streamer.bookkeeping.server_of_run import connection_of_run
from streamer.bookkeeping.sources import read_source_records
from streamer.commands.cutover import reverse_stream
from streamer.commands.cutover.cutover_steps import (
    CutoverOptions,
    FinalComparison,
    Step,
    StepObstacle,
    StopWrites,
    describe,
    marked,
    steps,
)
from streamer.commands.cutover.prove_equality import Equality, uncountable
from streamer.commands.table_requests import command_actor
from streamer.commands.wait import wait
from streamer.compare.change_counters import ChangeCounters
from streamer.config.settings import Settings
from streamer.errors.command_lines import command
from streamer.errors.error_classes import CutoverError, MappingError, StreamerError
from streamer.errors.remedies import Remedy, at_target
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import Mapping, RelationMapping, SourceMapping, find_source
from streamer.mapping.scope import Scope
from streamer.mapping.sequence_places import places
from streamer.runtime.session.sequence_follower import obstacle_of
from streamer.source.catalog import flush_wal
from streamer.source.connection import Connection, fetch_one
from streamer.source.stop_writes import (
    allow_sql,
    end_sessions,
    read_write_facts,
    read_writers,
    stop_sql,
)
from streamer.source.tables.source_sequences import (
    SourceSequence,
    create_sql,
    read_exact,
    read_sequences,
)
from streamer.target.allow_writes import allow_writes, find_obstacles
from streamer.target.connection import TargetAddress
from streamer.target.target_sequences import TargetSequence, find_sequences, set_ahead, set_exact
from streamer.util.failpoints import failpoint
from streamer.util.lsn import INVALID_LSN, Lsn

POLL_SECONDS: Final = 0.2
GRACE_SECONDS: Final = 10.0
"""A step may take this much longer than its wait, so that the error of the wait, which names the
cause, comes first.
"""
COMPARE_FACTOR: Final = 2.0

Problem = tuple[str, Remedy | None]
"""The reason why a step would fail, and the remedy."""

Report = Callable[[str, str], None]
"""Called with the name and the outcome of a step."""


@dataclass(frozen=True, slots=True)
class CutoverState:
    """The state of a source's cut-over, for the command to show. ``remaining``: the steps that have
    not run.
    """

    label: str
    database: str
    record: CutoverRecord | None
    options: CutoverOptions
    remaining: tuple[Step, ...]

    def lines(self) -> list[str]:
        """Return the remaining steps, in words."""
        return [
            f"{number}. {step.value}: {describe(step, self.options, self.label, self.database)}"
            for number, step in enumerate(self.remaining, 1)
        ]

    def marked_lines(self, obstacles: Sequence[StepObstacle]) -> list[str]:
        """Return the steps with the verdicts of the check, and the obstacles below each step."""
        lines = []
        for step, line in zip(self.remaining, self.lines(), strict=True):
            lines.append(f"{marked(step, obstacles):<5} {line}")
            for obstacle in obstacles:
                if obstacle.step is step:
                    lines += [f"        {text}" for text in obstacle.lines()]
        return lines


class Cutover:
    """The cut-over of a source. Use it as a context manager."""

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
        self._counters: ChangeCounters | None = None
        """The change counters from before the comparison that found all tables equal."""
        self._compared_seconds = 0.0
        self.obstacles: list[StepObstacle] = []
        """The findings of the last check."""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Cutover":
        self._stack.push_async_callback(self._bookkeeping.close)
        await self._stack.enter_async_context(self._equality)
        return self

    async def __aexit__(self, *details: Any) -> None:
        await self._stack.aclose()

    # ---- for the command -----------------------------------------------------------------------

    async def state(self) -> CutoverState:
        """Read the state of the cut-over. Raises MappingError if the source never streamed."""
        source = self._source
        if await is_installed(self._bookkeeping):
            records = await read_source_records(self._bookkeeping)
            record = find_source(records, source.database, source.sid)
            if record is not None and record.acknowledged_lsn != INVALID_LSN:
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

    async def check(self) -> list[StepObstacle]:
        """Return the obstacles to every step, without changes.

        The check tests each privilege that a step needs, on both sides and for the undo.
        """
        begun = steps(self._options, self._record)
        if not begun:
            return []
        findings: list[StepObstacle] = []

        async def check_step(
            step: Step, find_problems: Callable[[], Awaitable[list[Problem]]]
        ) -> None:
            where = step if step in begun else begun[0]
            try:
                findings.extend(StepObstacle(where, *problem) for problem in await find_problems())
            except StreamerError as exc:
                findings.append(StepObstacle(where, exc.message, exc.remedy))

        await check_step(Step.CHECK, self._find_waits)
        await check_step(Step.STOP_WRITES, self._find_write_obstacles)
        if self._options.comparison is FinalComparison.COUNTS:
            await check_step(Step.COMPARE, self._find_uncountable)
        await check_step(Step.SEQUENCES, self._find_sequence_obstacles)
        if self._options.reverse is not None:
            await check_step(Step.REVERSE, self._find_reverse_obstacles)
        await check_step(Step.FINISH, self._find_target_obstacles)
        if not findings:
            await check_step(Step.CHECK, self._find_differences)
        self.obstacles = findings
        return findings

    async def _find_waits(self) -> list[Problem]:
        waits = await wait(self._address, self._mapping, self._options.seconds, self._scope)
        return [] if waits is None else [(waits, None)]

    async def _find_write_obstacles(self) -> list[Problem]:
        async with connection_of_run(self._source, self._bookkeeping) as plain:
            facts = await read_write_facts(plain)
        stops = self._options.stop_writes is StopWrites.READ_ONLY
        return [*facts.obstacles(stops=stops)]

    async def _find_uncountable(self) -> list[Problem]:
        return [(text, None) for text in uncountable(await self._mappings())]

    async def _find_sequence_obstacles(self) -> list[Problem]:
        async with connection_of_run(self._source, self._bookkeeping) as plain:
            return await self._check_sequences(plain, await self._equality.mappings(plain))

    async def _find_reverse_obstacles(self) -> list[Problem]:
        path, mappings = self._options.reverse, await self._mappings()
        assert path is not None
        if reasons := reverse_stream.obstacles(self._source, mappings):
            return [(text, None) for text in reasons]
        content = reverse_stream.document(self._settings, self._source, mappings)
        return [*await reverse_stream.find_missing(path, content)]

    async def _find_target_obstacles(self) -> list[Problem]:
        async with self._bookkeeping.connection() as target:
            return [*await find_obstacles(target)]

    async def _find_differences(self) -> list[Problem]:
        counters = await self._equality.read_counters(self._source_id)
        answer = await self._equality.compare_all()
        self._counters, self._compared_seconds = counters, answer.seconds
        return [(text, None) for text in answer.problems()]

    async def _mappings(self) -> list[RelationMapping]:
        async with connection_of_run(self._source, self._bookkeeping) as plain:
            return await self._equality.mappings(plain)

    async def run(self) -> None:
        """Run the remaining steps. Raises CutoverError for the first step that fails."""
        for step in steps(self._options, self._record):
            async with self._acting(step.value):
                await self._do(step)

    async def undo(self) -> None:
        """Restore the state before the cut-over. Raises CutoverError after the last step."""
        async with self._acting("undo"):
            await self._undo()

    def _acting(self, step: str) -> AbstractAsyncContextManager[object]:
        return acting(
            self._bookkeeping, command_actor(), CUTOVER, self._source.label, {"step": step}
        )

    async def _undo(self) -> None:
        record = self._record
        if record is None:
            self._report("undo", f"{self._source.label} has no cut-over to undo")
            return
        if record.is_finished:
            raise CutoverError(
                "programs may have written to the target since the cut-over finished",
                hint="run a cut-over in the other direction, with the configuration of the "
                "reverse stream",
            )
        if record.details["has_stopped"]:  # first, because programs wait for the source
            sql = await self._allow_writes(record)
            self._report("undo", f"writes are allowed at {self._source.label} again: {sql}")
        if self._options.reverse is not None and Step(record.step) in (Step.REVERSE, Step.FINISH):
            await reverse_stream.remove(self._options.reverse)
            self._report("undo", "the reverse stream has been removed")
        failpoint("cutover.undone")
        await forget_cutover(self._bookkeeping, self._source_id)
        self._report("undo", "the cut-over has been undone")

    # ---- steps ---------------------------------------------------------------------------------

    async def _do(self, step: Step) -> None:
        if step is Step.CHECK:
            if obstacles := await self.check():
                raise _refused([(obstacle.problem, obstacle.remedy) for obstacle in obstacles])
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
            if step is not Step.STOP_WRITES:  # STOP_WRITES stores more details
                await self._store(step, self._details)
            async with asyncio.timeout(self._limit(step)):
                outcome = await work()
            if step is Step.FINISH:
                outcome = await self._open_target()
            self._report(step.value, outcome)
        except TimeoutError as exc:
            reason = str(exc) or f"the step took longer than {self._limit(step):g} s"
            await self._undo_after(f"{step.value}: {reason}")
        except StreamerError as exc:
            go_on = f"run `{self._command} --yes` again, or `{self._command} --undo` to go back"
            exc.remedy = Remedy.of(exc.remedy or "remove the cause", "; then ", go_on)
            exc.add_note(f"step {step.value}")
            raise

    @property
    def _command(self) -> str:
        return command("cutover", database=self._source.database, sid=self._source.sid)

    def _limit(self, step: Step) -> float:
        """Return the limit of a step, which exceeds the limit of each wait in the step.

        A comparison may take as long as the comparison of the check, which ran beside writing
        programs.
        """
        seconds = self._options.seconds + GRACE_SECONDS
        if step is Step.COMPARE:
            seconds += COMPARE_FACTOR * self._details.get("compared_seconds", 0.0)
        return seconds

    async def _undo_after(self, failure: str) -> NoReturn:
        """Restore the state before the cut-over, and raise CutoverError."""
        try:
            async with asyncio.timeout(self._options.seconds + GRACE_SECONDS):
                self._record = await read_cutover(self._bookkeeping, self._source_id)
                await self._undo()
        except (StreamerError, TimeoutError) as exc:
            why = str(exc) or "the undo took too long"
            undo = Remedy.of(f"undo the cut-over with `{self._command} --undo`")
            raise CutoverError(f"{failure}; the undo failed: {why}", hint=undo) from exc
        raise CutoverError(
            f"{failure}; the command restored the state before the cut-over, so programs may "
            f"write to {self._source.label}",
            hint=f"correct the cause, then begin again with `{self._command} --yes`",
        )

    @property
    def _details(self) -> dict[str, Any]:
        assert self._record is not None
        return self._record.details

    async def _store(self, step: Step, details: dict[str, Any]) -> None:
        await store_step(self._bookkeeping, self._source_id, step.value, details)
        failpoint("cutover.step_stored")
        self._record = await read_cutover(self._bookkeeping, self._source_id)

    async def _stop_writes(self) -> str:
        """Store how to undo the step, make the database read-only, and end its sessions."""
        stops = self._options.stop_writes is StopWrites.READ_ONLY
        async with connection_of_run(self._source, self._bookkeeping) as plain:
            facts = await read_write_facts(plain)
            if obstacles := facts.obstacles(stops=stops):
                raise _refused([*obstacles])
            details = {"setting": facts.setting, "has_stopped": stops, **self._options.to_json()}
            details["marks"] = None if self._counters is None else self._counters.to_json()
            details["compared_seconds"] = self._compared_seconds
            if self._record is not None:  # the first attempt stored the former setting
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
            writers = await read_writers(plain, ends=ends)
            if not writers:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"sessions still write to the source: {', '.join(writers)}")
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
            raise TimeoutError(waits)
        return "the target has all changes"

    async def _compare_again(self) -> str:
        if self._options.comparison is FinalComparison.COUNTS:
            if differences := await self._equality.count():
                raise CutoverError("; ".join(differences))
            return "every table has the same number of rows"
        details, equality = self._details, self._equality
        if self._options.comparison is FinalComparison.FULL or details["marks"] is None:
            answer = await equality.compare_all()
        else:
            counters = ChangeCounters.from_json(details["marks"])
            stopped_at = details.get("stopped_at")
            answer = await equality.compare_changes(self._source_id, counters, stopped_at)
        if differences := answer.problems():
            raise CutoverError("; ".join(differences))
        return answer.describe()

    async def _set_sequences(self) -> str:
        async with connection_of_run(self._source, self._bookkeeping) as plain:
            mappings = await self._equality.mappings(plain)
            if obstacles := await self._check_sequences(plain, mappings):
                raise _refused(obstacles)
            pairs = await self._sequences(plain, mappings)
            values = await read_exact(plain, [sequence.name for sequence, _ in pairs])
        shared = await self._find_shared(c.oid for _, c in pairs if c is not None)
        async with self._bookkeeping.connection() as target:
            for sequence, counterpart in pairs:
                assert counterpart is not None
                value, is_called = values[sequence.name]
                if counterpart.oid in shared:
                    await set_ahead(target, counterpart, value)
                else:
                    await set_exact(target, counterpart, value, is_called=is_called)
        failpoint("cutover.sequences_set")
        later = ", or later values for sequences that other sources use" if shared else ""
        return f"{len(pairs)} sequences have the source's values{later}"

    async def _find_shared(self, oids: Iterable[int]) -> set[int]:
        """Return the sequences of the target that several sources use, by OID.

        Programs that moved to the target earlier draw values from these sequences, so the values
        may not go back. Two sequences of a source may also share a counterpart.
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
        reverse_stream.write(path, reverse_stream.document(self._settings, self._source, mappings))
        await reverse_stream.prepare(path, self._options.seconds)
        failpoint("cutover.reversed")
        start = shlex.join(["streamer", "run", "--config", str(path)])
        return f"the target retains its changes for the reverse stream; start that stream: {start}"

    async def _finish(self) -> str:
        await self._drain()
        if self._record is None or self._record.marker_lsn is None:
            raise CutoverError("writes to the source were never stopped")
        if late := await self._written_after(self._record.marker_lsn):
            raise CutoverError(f"rows were written to the source after the stop: {', '.join(late)}")
        return ""

    async def _open_target(self) -> str:
        """Allow programs to write at the target. From then on, the cut-over is final."""
        try:
            async with asyncio.timeout(self._options.seconds + GRACE_SECONDS):
                async with self._bookkeeping.connection() as target:
                    await allow_writes(target)
                await finish_cutover(self._bookkeeping, self._source_id)
        except TimeoutError:
            raise CutoverError(
                "the target did not answer, and programs may write to the target already"
            ) from None
        return "programs may now write to the target"

    async def _written_after(self, marker: Lsn) -> list[str]:
        records = await read_relation_records(self._bookkeeping, self._source_id)
        return [
            f'table "{record.source}"'
            for record in records
            if record.end_lsn > max(marker, record.snapshot_lsn or INVALID_LSN)
        ]

    # ---- facts ---------------------------------------------------------------------------------

    @property
    def _scope(self) -> Scope:
        return Scope.of(self._source)

    async def _sequences(
        self, plain: Connection, mappings: list[RelationMapping]
    ) -> list[tuple[SourceSequence, TargetSequence | None]]:
        """Return the mapped sequences, and their counterparts at the target, if any."""
        sequences = await read_sequences(plain)
        expected = places(sequences, mappings, self._settings.target.schema_)
        async with self._bookkeeping.connection() as target:
            counterparts = await find_sequences(target, expected)
        return [(s, counterparts.get(s.name)) for s in sequences if s.name in expected]

    async def _check_sequences(
        self, plain: Connection, mappings: list[RelationMapping]
    ) -> list[Problem]:
        problems: list[Problem] = []
        for sequence, counterpart in await self._sequences(plain, mappings):
            if counterpart is None:
                name = RelationName(self._settings.target.schema_, sequence.name.name)
                fix = Remedy.of("make the column of the target table an identity or serial column")
                if sequence.owner is None:
                    fix = Remedy.of("run at the target: ", at_target(create_sql(sequence, name)))
                text = f'the target has no counterpart of sequence "{sequence.name}"'
                problems.append((text, fix))
                continue
            obstacle, remedy = obstacle_of(sequence, counterpart)
            if obstacle is not None:
                problems.append((f'sequence "{sequence.name}": {obstacle}', remedy))
        return problems


def _refused(problems: list[Problem]) -> CutoverError:
    """Return a single error for all *problems*, with their statements."""
    parts: list[Remedy | str] = []
    for _, remedy in problems:
        if remedy is not None:
            parts += ["; " if parts else "", remedy]
    return CutoverError(
        "; ".join(text for text, _ in problems), hint=Remedy.of(*parts) if parts else None
    )
