"""``streamer execute``: runs a script once, at a defined point of the stream.

The command stores the script in the target's bookkeeping, opens a transaction at the source, and
also stores the number of the transaction. The transaction emits the message, runs the script and
commits. After a kill at any step, a command with the same script id reads the outcome of that
transaction from the source. The process that streams runs the script at the target
(`streamer.runtime.session.script_runner`).
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_schema import is_installed
from streamer.bookkeeping.requests import EXECUTE, Act, acting
from streamer.bookkeeping.scripts import (
    ScriptRecord,
    ScriptSide,
    ScriptState,
    add_script,
    end_script,
    read_scripts,
    replace_script,
    set_script_xid,
)
from streamer.bookkeeping.server_of_run import connection_of_run
from streamer.bookkeeping.sources import SourceRecord, read_source_records
from streamer.commands.table_requests import command_actor
from streamer.commands.terminal_table import Listing, ListingColumn
from streamer.errors.error_classes import MappingError, ScriptError
from streamer.errors.error_reports import ErrorReport
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import TableType
from streamer.mapping.rules import Mapping, SourceMapping, find_source, resolve
from streamer.mapping.scope import Scope
from streamer.runtime.guards.missed_scripts import missed
from streamer.source.catalog import read_relation_names, read_relations
from streamer.source.connection import Connection, translating
from streamer.source.script_at_source import (
    ScriptOrigin,
    ScriptRun,
    begin_script,
    current_xid,
    has_committed,
    read_origin,
    run_script,
    unknown_outcome,
)
from streamer.source.stream.replication_stream import MESSAGES_VERSION
from streamer.target.connection import TargetAddress
from streamer.util.failpoints import failpoint
from streamer.util.lsn import INVALID_LSN

POLL_SECONDS: Final = 0.1
STOPPED: Final = (ScriptState.ERROR, ScriptState.MISSED)
"""States that only an operator can end."""


@dataclass(frozen=True, slots=True)
class Script:
    """The arguments of the command."""

    id: str
    text: str
    side: ScriptSide


@dataclass(frozen=True, slots=True)
class ScriptResult:
    """The outcome for a source. ``is_new``: no earlier command ran or announced the script."""

    database: str
    sid: str | None
    label: str
    record: ScriptRecord
    is_new: bool

    def to_json(self) -> dict[str, Any]:
        record = self.record
        return {
            "database": self.database,
            "sid": self.sid,
            "id": record.id,
            "on": record.side.value,
            "state": record.state.value,
            "lsn": None if record.lsn is None else str(record.lsn),
            "error": record.error,
        }


LISTING: Final[Listing[ScriptResult]] = Listing(
    "scripts",
    (
        ListingColumn("source", lambda result: result.label),
        ListingColumn("id", lambda result: result.record.id),
        ListingColumn("on", lambda result: result.record.side.value),
        ListingColumn("state", lambda result: result.record.state.value),
        ListingColumn("lsn", lambda result: result.record.lsn),
        ListingColumn("error", lambda result: result.record.error),
    ),
    "no scripts",
)


def choose(
    mapping: Mapping, database: str | None, sid: str | None, side: ScriptSide
) -> list[SourceMapping]:
    """Return the chosen sources. Raises MappingError.

    The target runs a script when a stream reaches it, so such a script belongs to a single source.
    """
    chosen = Scope(database=database, sid=sid).sources(mapping)
    if side is not ScriptSide.SOURCE and len(chosen) > 1:
        labels = ", ".join(source.label for source in chosen)
        raise MappingError(
            f"the target would run the script once for each of {labels}",
            hint="choose one of them with --database and --sid",
        )
    return chosen


async def execute(
    address: TargetAddress,
    sources: Sequence[SourceMapping],
    script: Script,
    *,
    seconds: float,
    target_namespace: str,
) -> list[ScriptResult]:
    """Run *script* once for each source, and wait until the target has run it.

    After *seconds* a script may still wait for its stream. Raises ScriptError, MappingError,
    SourceError, TargetError.
    """
    bookkeeping = Bookkeeping(address, "streamer execute")
    results = []
    try:
        for source in sources:
            stored = await _source_record(bookkeeping, source)
            execution = _Execution(bookkeeping, source, stored.source_id, script, target_namespace)
            async with _acting(bookkeeping, source, script.id, "run") as act:
                is_new = await execution.run()
                record = await execution.until_ended(seconds)
                result = ScriptResult(source.database, source.sid, source.label, record, is_new)
                if not record.has_ended:
                    act.error = ErrorReport(describe(result), ScriptError.code)
            results.append(result)
    finally:
        await bookkeeping.close()
    return results


async def change(
    address: TargetAddress, sources: Sequence[SourceMapping], script_id: str, text: str | None
) -> None:
    """Make the target run *text* in place of a stored script, or skip the script if *text* is None.

    Raises ScriptError if the script has run, or was never stored.
    """
    bookkeeping = Bookkeeping(address, "streamer execute")
    try:
        for source in sources:
            source_id = (await _source_record(bookkeeping, source)).source_id
            act = "skip" if text is None else "replace"
            async with _acting(bookkeeping, source, script_id, act):
                if text is None:
                    has_changed = await end_script(
                        bookkeeping, source_id, script_id, ScriptState.SKIPPED
                    )
                else:
                    has_changed = await replace_script(bookkeeping, source_id, script_id, text)
                if not has_changed:
                    for record in await read_scripts(bookkeeping, source_id, script_id):
                        if record.state is ScriptState.MISSED:
                            raise missed(record, source.database, source.sid)
                    raise ScriptError(
                        f'no script "{script_id}" of source "{source.label}" waits',
                        hint="`streamer execute --list` shows all of them",
                    )
    finally:
        await bookkeeping.close()


def _acting(
    bookkeeping: Bookkeeping, source: SourceMapping, script_id: str, act: str
) -> AbstractAsyncContextManager[Act]:
    """Record an act on a script, and the outcome of the act, for the audit."""
    options = {"id": script_id, "do": act}
    return acting(bookkeeping, command_actor(), EXECUTE, source.label, options)


async def list_scripts(
    address: TargetAddress, sources: Sequence[SourceMapping]
) -> list[ScriptResult]:
    """Return the scripts of *sources*, oldest first."""
    bookkeeping = Bookkeeping(address, "streamer execute")
    try:
        if not await is_installed(bookkeeping):
            return []
        records = await read_source_records(bookkeeping)
        return [
            ScriptResult(source.database, source.sid, source.label, script, is_new=False)
            for source in sources
            if (record := find_source(records, source.database, source.sid)) is not None
            for script in await read_scripts(bookkeeping, record.source_id)
        ]
    finally:
        await bookkeeping.close()


async def _source_record(bookkeeping: Bookkeeping, source: SourceMapping) -> SourceRecord:
    if await is_installed(bookkeeping):
        records = await read_source_records(bookkeeping)
        record = find_source(records, source.database, source.sid)
        # Without a slot, no stream would reach the script.
        if record is not None and record.acknowledged_lsn != INVALID_LSN:
            return record
    raise MappingError(
        f'source "{source.label}" has never been streamed', hint="start `streamer run` first"
    )


class _Execution:
    """A script of a source."""

    def __init__(
        self,
        bookkeeping: Bookkeeping,
        source: SourceMapping,
        source_id: int,
        script: Script,
        target_namespace: str,
    ) -> None:
        self._bookkeeping = bookkeeping
        self._source = source
        self._source_id = source_id
        self._script = script
        self._target_namespace = target_namespace

    async def run(self) -> bool:
        """Run the source's part; return False if an earlier command ran that part."""
        script, source = self._script, self._source
        record = await add_script(
            self._bookkeeping, self._source_id, script.id, script.text, script.side
        )
        failpoint("execute.stored")
        self._check_same(record)
        if record.has_ended or record.state is ScriptState.MISSED:
            return False
        async with connection_of_run(source, self._bookkeeping) as plain:
            self._check_version(plain)
            origin = await read_origin(plain)
            await begin_script(plain, script.id)
            record = await self._read()
            if record.has_ended or record.state is ScriptState.MISSED:
                return False
            is_new = not await self._has_committed(plain, record, origin)
            if is_new:
                await self._commit(plain, origin)
        if script.side is ScriptSide.SOURCE:
            await end_script(self._bookkeeping, self._source_id, script.id, ScriptState.DONE)
        return is_new

    async def _has_committed(
        self, plain: Connection, record: ScriptRecord, origin: ScriptOrigin
    ) -> bool:
        """Return whether an earlier command has committed the script at the source.

        After a failover, a different transaction can have the transaction id. In that case the
        stream delivers the script, or the process reports that the stream lacks the script. Raises
        ScriptError for a script that runs only at the source.
        """
        if record.source_xid is None:
            return False
        former = record.system_identifier, record.timeline
        if former == origin or None in (*former, *origin):
            return await has_committed(plain, record.source_xid)
        if record.side is ScriptSide.SOURCE:
            raise unknown_outcome(record.source_xid)
        return True

    async def until_ended(self, seconds: float) -> ScriptRecord:
        """Wait until the script ends or the target refuses it, at most *seconds*."""
        deadline = time.monotonic() + seconds
        while True:
            record = await self._read()
            if record.has_ended or record.state in STOPPED:
                return record
            if time.monotonic() >= deadline:
                return record
            await asyncio.sleep(POLL_SECONDS)

    async def _read(self) -> ScriptRecord:
        (record,) = await read_scripts(self._bookkeeping, self._source_id, self._script.id)
        return record

    def _check_same(self, record: ScriptRecord) -> None:
        script = self._script
        if record.side is script.side and record.script == script.text:
            return
        conflict = "another script" if record.side is script.side else f"--on {record.side.value}"
        raise MappingError(
            f'the id "{script.id}" was used for {conflict} at source "{self._source.label}"',
            hint="give this script a new --id",
        )

    def _check_version(self, plain: Connection) -> None:
        if (
            self._script.side is not ScriptSide.SOURCE
            and plain.info.server_version < MESSAGES_VERSION
        ):
            raise ScriptError(
                f'source "{self._source.label}": PostgreSQL before 14 does not send messages in '
                "its stream, so a script cannot have a position in the stream",
                hint="pause the writers, run `streamer wait`, and run the script with psql",
            )

    async def _commit(self, plain: Connection, origin: ScriptOrigin) -> None:
        script = self._script
        xid = await current_xid(plain)
        await set_script_xid(self._bookkeeping, self._source_id, script.id, xid, origin)
        failpoint("execute.announced")
        run = ScriptRun(
            script.id,
            None if script.side is ScriptSide.TARGET else script.text,
            emits=script.side is not ScriptSide.SOURCE,
        )
        changed = await run_script(plain, self._source.label, run)
        if script.side is ScriptSide.BOTH:
            await self._check_changed(plain, changed)
        with translating(self._source.label):
            await plain.execute("commit")
        failpoint("execute.source_committed")

    async def _check_changed(self, plain: Connection, changed: list[RelationName]) -> None:
        """Refuse a script for both sides that changes rows of a table without a key.

        The target runs the script, and also receives its changes in the stream. For a clone with a
        key, the second change is harmless.
        """
        source = self._source
        names = set(await read_relation_names(plain, source)) | source.exact_names.keys()
        mappings = {
            mapping.source: mapping
            for mapping in resolve(source, names, self._target_namespace)
            if mapping.source in changed
        }
        relations = await read_relations(plain, list(mappings))
        for name, mapping in mappings.items():
            relation = relations.get(name)
            is_safe = mapping.type is TableType.CLONE and (relation is None or bool(relation.key))
            if not is_safe:
                raise ScriptError(
                    f'script "{self._script.id}" changes rows of "{name}", which would '
                    "reach the target twice; it was rolled back",
                    hint="move these changes to a second script and run the second script "
                    "with --on source: the stream carries its changes",
                )


def describe(result: ScriptResult) -> str:
    """Return the outcome in words. Pure."""
    record = result.record
    where = f'script "{record.id}" of {result.label}'
    if record.state is ScriptState.SKIPPED:
        return f"{where} was skipped at the target"
    if record.state is ScriptState.DONE:
        at = "" if record.lsn is None else f", at {record.lsn} of the stream"
        return f"{where} {'is done' if result.is_new else 'was done before'}{at}"
    if record.state is ScriptState.MISSED:
        return str(missed(record, result.database, result.sid))
    if record.state is ScriptState.ERROR:
        return record.error or f"{where} failed at the target"
    return f"{where} waits for its place in the stream: is `streamer run` running?"
