"""The rows of streamer.script: the scripts of ``streamer execute``.

A command first stores its script here, then the number of the source transaction that carries the
script, and then commits that transaction. So after a crash the source can tell whether the
transaction has committed. The stream carries only the id of a script. A message of a different
program, which any role of the source may write, never becomes SQL at the target.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_table import BookkeepingTable, Executor, Values
from streamer.bookkeeping.requests import CHANNEL
from streamer.source.script_at_source import ScriptOrigin
from streamer.target.fencing_token import FencingToken
from streamer.util.lsn import Lsn


class ScriptSide(enum.StrEnum):
    """Where a script runs."""

    SOURCE = "source"
    TARGET = "target"
    BOTH = "both"


class ScriptState(enum.StrEnum):
    """``waiting`` until the last side has run the script; ``error`` while the target refuses the
    script.

    ``missed``: the stream never carries the script, or the source has lost it
    (`streamer.runtime.guards.missed_scripts`).
    """

    WAITING = "waiting"
    ERROR = "error"
    MISSED = "missed"
    DONE = "done"
    SKIPPED = "skipped"


ENDED: Final = (ScriptState.DONE, ScriptState.SKIPPED)


@dataclass(frozen=True, slots=True)
class ScriptRecord:
    """A row of streamer.script. ``source_xid``: the 64-bit number of the source transaction on the
    server ``system_identifier`` and ``timeline``; all three are None if unknown.

    ``replacement``: the text for the target in place of ``script``, if any.
    """

    source_id: int
    id: str
    script: str
    replacement: str | None
    side: ScriptSide
    state: ScriptState
    source_xid: int | None
    system_identifier: str | None
    timeline: int | None
    lsn: Lsn | None
    error: str | None

    @property
    def is_awaited(self) -> bool:
        """Whether the target waits for the stream to carry the script."""
        is_open = self.state in (ScriptState.WAITING, ScriptState.ERROR)
        return is_open and self.side is not ScriptSide.SOURCE and self.source_xid is not None

    @property
    def target_script(self) -> str:
        return self.script if self.replacement is None else self.replacement

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    def is_in_transaction(self, xid: int) -> bool:
        """Whether source transaction *xid* (32 bits, as in the protocol) carries the script."""
        return self.source_xid is not None and self.source_xid & 0xFFFF_FFFF == xid


SCRIPTS: Final = BookkeepingTable("script", "s", ScriptRecord)
_OF_ID: Final = "where source_id = $2 and id = $3"
_FINISH_SQL: Final = """
where source_id = $2 and id = $3 and state in ('waiting', 'error')
  and exists (select from streamer.source o where o.id = $2 and o.lock_token = $4)
"""
_FINISHED: Final = "finished_at = pg_catalog.clock_timestamp()"


async def add_script(
    bookkeeping: Bookkeeping, source_id: int, script_id: str, script: str, side: ScriptSide
) -> ScriptRecord:
    """Store a script unless a script has this id; return the stored record."""
    row = {"source_id": source_id, "id": script_id, "script": script, "side": side}
    async with bookkeeping.connection() as connection:
        await SCRIPTS.insert(connection, [row], "on conflict do nothing")
        (record,) = await read_scripts(connection, source_id, script_id)
    return record


async def read_scripts(
    session: Executor, source_id: int, script_id: str | None = None
) -> list[ScriptRecord]:
    """Return the scripts of a source, oldest first; only *script_id*, if given."""
    return await SCRIPTS.read(
        session,
        "where source_id = $1 and ($2::text is null or id = $2) order by requested_at, id",
        source_id,
        script_id,
    )


async def set_script_xid(
    session: Executor, source_id: int, script_id: str, xid: int, origin: ScriptOrigin
) -> None:
    """Store the source transaction that is about to carry a script, before its commit."""
    values = {"source_xid": xid} | dict(zip(("system_identifier", "timeline"), origin, strict=True))
    await SCRIPTS.update(session, values, _OF_ID, source_id, script_id)


async def end_script(
    bookkeeping: Bookkeeping, source_id: int, script_id: str, state: ScriptState
) -> bool:
    """End a script from outside the stream, and wake the process; False if already ended."""
    values = {"state": state, "error": None}
    states = ("waiting", "error", "missed")
    return await _change(bookkeeping, source_id, script_id, values, states, also=_FINISHED)


async def _change(
    bookkeeping: Bookkeeping,
    source_id: int,
    script_id: str,
    values: Values,
    states: Sequence[str],
    also: str = "",
) -> bool:
    async with bookkeeping.connection() as connection:
        condition = f"{_OF_ID} and state = any ($4::text[])"
        count = await SCRIPTS.update(
            connection, values, condition, source_id, script_id, states, also=also
        )
        await connection.execute(f"notify {CHANNEL}")
    return bool(count)


async def replace_script(
    bookkeeping: Bookkeeping, source_id: int, script_id: str, script: str
) -> bool:
    """Replace the target's text of a script, and wake the process; False if the script has run."""
    values = {"replacement": script, "state": ScriptState.WAITING, "error": None}
    return await _change(bookkeeping, source_id, script_id, values, ("waiting", "error"))


async def set_scripts_missed(
    session: Executor, source_id: int, script_ids: list[str], reason: str
) -> None:
    """Record that only one side has these scripts, and that the stream cannot carry them."""
    await SCRIPTS.update(
        session,
        {"state": ScriptState.MISSED, "error": reason},
        "where source_id = $2 and id = any ($3::text[]) and state in ('waiting', 'error', 'done')",
        source_id,
        script_ids,
    )


async def set_script_error(session: Executor, source_id: int, script_id: str, error: str) -> None:
    await SCRIPTS.update(
        session,
        {"state": ScriptState.ERROR, "error": error},
        f"{_OF_ID} and state in ('waiting', 'error')",
        source_id,
        script_id,
    )


async def finish_script(session: Executor, fence: FencingToken, script_id: str, lsn: Lsn) -> bool:
    """Record, in the transaction of the script, that the script has run at *lsn*.

    Return False if the transaction must not commit: the source was taken over, or the script ended.
    """
    values = {"state": ScriptState.DONE, "lsn": lsn, "error": None}
    where = (_FINISH_SQL, fence.source_id, script_id, fence.token)
    return bool(await SCRIPTS.update(session, values, *where, also=_FINISHED))
