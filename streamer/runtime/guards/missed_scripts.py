"""Finds scripts of ``streamer execute`` that no stream will carry to the target.

A new slot begins after the transactions that its snapshot sees, so its stream leaves out their
scripts. A failover or a restored server can lose the transaction of a script. The transaction's
number then belongs to another transaction, or is free. The target would then wait for the
script forever.

The source stops instead, with a `ScriptError`. streamer does not run the script: the stream has
passed the script's place, and copies may already contain its rows.

A failover can also lose the source's part of a script that the target has run. No row of a mapped
table shows that, and the source stops in the same way.
"""

from typing import Final

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.scripts import (
    ScriptRecord,
    ScriptSide,
    ScriptState,
    read_scripts,
    set_scripts_missed,
)
from streamer.errors.error_classes import ScriptError
from streamer.errors.remedies import Remedy, run
from streamer.mapping.rules import SourceMapping
from streamer.source.catalog import SourceServer
from streamer.source.script_at_source import seen_by
from streamer.source.slot_and_publications.slot import ExportedSnapshot
from streamer.source.timeline_branches import Branch
from streamer.util.lsn import Lsn

LEFT_OUT: Final = "the slot of the source is new and begins after this script"
OTHER_HISTORY: Final = "the source has a different history than at the time of this script"
LOST_AT_SOURCE: Final = "a failover has lost its transaction at the source"


class MissedScripts:
    """The scripts of a source, for one attempt to stream the source."""

    def __init__(
        self,
        source: SourceMapping,
        server: SourceServer,
        bookkeeping: Bookkeeping,
        source_id: int,
    ) -> None:
        self._source = source
        self._server = server
        self._bookkeeping = bookkeeping
        self._source_id = source_id

    async def record_forked(self, acknowledged_lsn: Lsn, branch: Branch) -> None:
        """Record the scripts whose transactions a failover lost, once the target contains all
        changes from before the fork. *branch*: the history of the source.
        """
        records = await read_scripts(self._bookkeeping, self._source_id)
        system_identifier = self._server.system_identifier
        past = [
            record.id
            for record in records
            if record.is_awaited and is_past_fork(record, branch, acknowledged_lsn)
        ]
        lost = [r.id for r in records if is_lost_at_source(r, system_identifier, branch)]
        await self._set_missed(past, OTHER_HISTORY)
        await self._set_missed(lost, LOST_AT_SOURCE)

    async def record_left_out(self, snapshot: ExportedSnapshot) -> None:
        """Record the scripts that a new slot leaves out, before the slot's position is stored.

        If the attempt dies before that, the next attempt creates the slot again.
        """
        awaited = await self._awaited()
        origin = self._server.system_identifier, self._server.timeline
        foreign = [script.id for script in awaited if is_of_another_server(script, *origin)]
        await self._set_missed(foreign, OTHER_HISTORY)
        # This snapshot has no transaction with a number of another server.
        by_xid = {script.source_xid: script.id for script in awaited if script.id not in foreign}
        if by_xid:
            xids = [xid for xid in by_xid if xid is not None]
            seen = await seen_by(snapshot.snapshot_name, self._source, xids)
            await self._set_missed([by_xid[xid] for xid in seen], LEFT_OUT)

    async def refuse(self) -> None:
        """Raise ScriptError while a script has the state `MISSED`."""
        for record in await read_scripts(self._bookkeeping, self._source_id):
            if record.state is ScriptState.MISSED:
                source = self._source
                raise missed(record, source.database, source.sid)

    async def _awaited(self) -> list[ScriptRecord]:
        records = await read_scripts(self._bookkeeping, self._source_id)
        return [record for record in records if record.is_awaited]

    async def _set_missed(self, script_ids: list[str], reason: str) -> None:
        if script_ids:
            await set_scripts_missed(self._bookkeeping, self._source_id, script_ids, reason)


def is_of_another_server(record: ScriptRecord, system_identifier: str, timeline: int) -> bool:
    """Return whether a script ran on a different server or timeline than a new slot.

    Such a slot omits the script: the transaction is older than the slot, or lost. Pure.
    """
    if record.system_identifier is None:
        return False
    return (record.system_identifier, record.timeline) != (system_identifier, timeline)


def is_past_fork(record: ScriptRecord, branch: Branch, acknowledged_lsn: Lsn) -> bool:
    """Return whether a script ran on a former timeline, after the end of that timeline. Pure."""
    if record.timeline is None or record.timeline >= branch.timeline or not branch.has_ends:
        return False
    fork_lsn = branch.end_of(record.timeline)
    return fork_lsn is None or acknowledged_lsn >= fork_lsn


def is_lost_at_source(record: ScriptRecord, system_identifier: str, branch: Branch) -> bool:
    """Return whether the target has run a script of both sides, and the source lacks the script.

    Its transaction then lies after the point where its timeline ended. Pure.
    """
    if record.side is not ScriptSide.BOTH or record.state is not ScriptState.DONE:
        return False
    if record.system_identifier != system_identifier or None in (record.timeline, record.lsn):
        return False
    assert record.timeline is not None
    assert record.lsn is not None
    fork_lsn = branch.end_of(record.timeline)
    return fork_lsn is not None and record.lsn >= fork_lsn


def missed(record: ScriptRecord, database: str, sid: str | None) -> ScriptError:
    """Return the error for a script that never reaches the target, or a lost script. Pure."""
    skip = run("execute", None, "--id", record.id, "--skip", database=database, sid=sid)
    outcome = "never reaches the target" if record.lsn is None else "has run at the target only"
    return ScriptError(
        f'script "{record.id}" {outcome}: {record.error}',
        hint=Remedy.of(
            "check on both sides whether the script took effect, and run its text with psql "
            "where it did not; then run `",
            skip,
            "`, and the source continues",
        ),
    )
