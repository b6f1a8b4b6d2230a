"""Runs scripts of ``streamer execute`` at the target, when the stream reaches them.

The reader stops before the transaction that carries a script. Every lane makes earlier changes
durable; then a single transaction at the target runs and records the script. After that the reader
dispatches the transaction and continues. A crash before the COMMIT of the script leaves no trace,
and the source sends the message again. After the COMMIT, the record shows that the script has run.

The script does not wait for a lane that awaits a copy: its table matches no single position. The
script does wait for a table that is paused or in error, because held changes of that table come
before the script.

If the target refuses the script, the source stops with a `ScriptError`. Each later attempt runs the
script again, so a correction of the cause is enough.
"""

import json
from typing import Final

import structlog

from streamer.apply.lanes.lane import Hold, Lane
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.scripts import (
    ScriptRecord,
    ScriptSide,
    ScriptState,
    finish_script,
    read_scripts,
    set_script_error,
)
from streamer.bookkeeping.sources import set_source_state
from streamer.errors.error_classes import Retry, ScriptError, StreamerError, TargetFencedError
from streamer.errors.error_reports import ErrorReport
from streamer.errors.remedies import Remedy, run
from streamer.mapping.rules import SourceMapping
from streamer.postgres.script_sql import AFTER_SCRIPT_SQL, script_sql
from streamer.runtime.session.dispatcher import ScriptsReached
from streamer.runtime.tables.relations import Relations
from streamer.source.script_at_source import place
from streamer.target.connection import TargetAddress, TargetConnection
from streamer.target.fencing_token import FencingToken
from streamer.util.failpoints import failpoint
from streamer.util.lsn import Lsn
from streamer.util.waiting import wait_for_event

log = structlog.get_logger()

REPORT_SECONDS: Final = 2.0
"""How long a script waits for a table before status shows the wait."""

# Restores the durability of all changes: a script may weaken the setting.
_DURABLE_SQL: Final = """
select pg_catalog.set_config('synchronous_commit', 'on', true)
where pg_catalog.current_setting('synchronous_commit') not in ('on', 'remote_apply')
"""


class Scripts:
    """The scripts of a source, for one attempt to stream the source."""

    def __init__(
        self,
        source: SourceMapping,
        fence: FencingToken,
        address: TargetAddress,
        bookkeeping: Bookkeeping,
        relations: Relations,
    ) -> None:
        """*address*: the address of the target. Each connection checks *fence*, and so reaches the
        server that holds the lock.
        """
        self._source = source
        self._fence = fence
        self._address = address
        self._bookkeeping = bookkeeping
        self._relations = relations

    async def run(self, reached: ScriptsReached) -> None:
        """Run the scripts of a transaction that have not run yet.

        Raises ScriptError if the target refuses a script, TargetError if it is out of reach.
        """
        carried = await self._find(reached)
        for record in carried:
            if record.has_ended or not await self._drain(record):
                continue
            await self._run(record, reached.lsn)
            # Tables may have new columns now.
            for mapped in self._relations:
                mapped.plan = None
        reached.is_made = await self._is_made(carried)

    async def _is_made(self, carried: list[ScriptRecord]) -> bool:
        """Whether the target, too, has run a script that ran at the source."""
        ids = [record.id for record in carried if record.side is ScriptSide.BOTH]
        if not ids:
            return False
        records = await read_scripts(self._bookkeeping, self._fence.source_id)
        return any(script.id in ids and script.state is ScriptState.DONE for script in records)

    async def _find(self, reached: ScriptsReached) -> list[ScriptRecord]:
        """Return the scripts for the target that the messages of a transaction announce.

        Every role of the source may write messages. So the runner reads their content only in a
        transaction of a streamer command, and no statement contains the content.
        """
        scripts = {
            record.id: record
            for record in await read_scripts(self._bookkeeping, self._fence.source_id)
            if record.is_in_transaction(reached.xid)
        }
        ids = [script_id_of(message.content) for message in reached.messages] if scripts else [None]
        if not scripts.keys() >= set(ids):
            log.warning(
                "ignoring a message about a script from a foreign program",
                source=self._source.label,
                xid=reached.xid,
            )
        announced = [scripts[script_id] for script_id in dict.fromkeys(ids) if script_id in scripts]
        return [record for record in announced if record.side is not ScriptSide.SOURCE]

    async def _drain(self, record: ScriptRecord) -> bool:
        """Wait until all dispatched changes are durable; return whether to run the script then.

        An operator may skip the script meanwhile.
        """
        is_reported = False
        for lane in self._relations.lanes():
            while lane.pending and not lane.is_held_for_copy:
                lane.queue.hurry()
                lane.changed.clear()
                if await wait_for_event(lane.changed, REPORT_SECONDS):
                    continue
                obstacle = _obstacle(lane)
                if obstacle is not None and not is_reported:
                    is_reported = True
                    await self._report(f'script "{record.id}" waits for {obstacle}')
                source_id = self._fence.source_id
                now = await read_scripts(self._bookkeeping, source_id, record.id)
                if not now or now[0].has_ended:
                    await self._report(None)
                    return False
        if is_reported:
            await self._report(None)
        return True

    async def _report(self, waits: str | None) -> None:
        report = None if waits is None else ErrorReport(waits, ScriptError.code)
        await set_source_state(self._bookkeeping, self._fence.source_id, "streaming", report)
        if waits is not None:
            log.warning(waits, source=self._source.label)

    async def _run(self, record: ScriptRecord, lsn: Lsn) -> None:
        log.info("a script runs at the target", source=self._source.label, script=record.id)
        connection = await TargetConnection.connect(self._address, "streamer script", applies=True)
        try:
            connection.begin("begin")
            await connection.execute(script_sql(record.target_script))
            await connection.execute(AFTER_SCRIPT_SQL)
            await connection.execute(_DURABLE_SQL)
            if not await finish_script(connection, self._fence, record.id, lsn):
                raise TargetFencedError(
                    f'target: script "{record.id}" belongs to another process now'
                )
            failpoint("execute.before_commit")
            await connection.commit()
            failpoint("execute.after_commit")
        except StreamerError as exc:
            if exc.retry is Retry.TIMED:
                raise
            error = self._refused(record, exc)
            await set_script_error(
                self._bookkeeping, self._fence.source_id, record.id, error.message
            )
            raise error from exc
        finally:
            connection.terminate()  # no later statement may run under the script's settings

    def _refused(self, record: ScriptRecord, error: StreamerError) -> ScriptError:
        where = place(record.target_script, error.__cause__)
        name = ("--id", record.id)
        database, sid = self._source.database, self._source.sid
        skip = run("execute", None, *name, "--skip", database=database, sid=sid)
        replace = run("execute", "FILE", *name, "--replace", database=database, sid=sid)
        return ScriptError(
            f'script "{record.id}" failed at the target{where}, and no later change is applied: '
            f"{error.message}",
            hint=Remedy.of(
                "correct the cause, and the script runs again within seconds; or run `",
                replace,
                "` with other text; or run `",
                skip,
                "`",
            ),
        )


def script_id_of(content: bytes) -> str | None:
    """Return the id in a message about a script; None without an id. Pure."""
    try:
        message = json.loads(content)
    except (ValueError, RecursionError):
        return None
    script_id = message.get("id") if isinstance(message, dict) else None
    return script_id if isinstance(script_id, str) else None


def _obstacle(lane: Lane) -> str | None:
    name = lane.table or "the tables"
    if Hold.PAUSED in lane.hold:
        return f'table "{name}", which is paused; run `streamer resume`'
    if Hold.ERROR in lane.hold:
        return f'table "{name}", which is in error: {lane.error}'
    return None
