"""The rows of streamer.script: the scripts of ``streamer execute``.

A command stores its script here first, then the number of the source transaction that carries it,
and then commits that transaction. So nothing is unknown after a crash: the source tells whether the
transaction has committed. The stream carries the id of a script alone. A message from another
program, which any role of the source may write, therefore never becomes SQL at the target.
"""

import enum
from dataclasses import dataclass
from typing import Final

from streamer.lsn import Lsn
from streamer.progress.bookkeeping import Bookkeeping
from streamer.progress.requests import CHANNEL
from streamer.source.scripts import ScriptOrigin
from streamer.target.claim import Claim
from streamer.target.connection import TargetConnection


class ScriptSide(enum.StrEnum):
    """Where a script runs."""

    SOURCE = "source"
    TARGET = "target"
    BOTH = "both"


class ScriptState(enum.StrEnum):
    """``waiting`` until the last side has run it; ``error`` while the target refuses it.

    ``missed``: the stream never brings it, or the source has lost it
    (`streamer.runtime.missed_scripts`).
    """

    WAITING = "waiting"
    ERROR = "error"
    MISSED = "missed"
    DONE = "done"
    SKIPPED = "skipped"


ENDED: Final = (ScriptState.DONE, ScriptState.SKIPPED)


@dataclass(frozen=True, slots=True)
class ScriptRecord:
    """A row of streamer.script. ``source_xid``: the 64-bit number of its source transaction, which
    the server ``system_identifier`` gave it on ``timeline``; these are None if they are not known.

    ``replacement``: the text for the target in place of ``script``, if an operator gave one.
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
        """Whether the target waits for the stream to bring it."""
        is_open = self.state in (ScriptState.WAITING, ScriptState.ERROR)
        return is_open and self.side is not ScriptSide.SOURCE and self.source_xid is not None

    @property
    def target_script(self) -> str:
        return self.script if self.replacement is None else self.replacement

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    def is_of(self, xid: int) -> bool:
        """Whether the source transaction *xid*, in the 32 bits of the protocol, carries it."""
        return self.source_xid is not None and self.source_xid & 0xFFFF_FFFF == xid


_READ_SQL: Final = """
select source_id, id, script, replacement, side, state, source_xid, system_identifier, timeline,
    lsn::text as lsn, error
from streamer.script where source_id = $1 and ($2::text is null or id = $2)
order by requested_at, id
"""
_FINISH_SQL: Final = """
update streamer.script set state = 'done', lsn = $4::text::pg_lsn, error = null,
    finished_at = pg_catalog.clock_timestamp()
where source_id = $1 and id = $2 and state in ('waiting', 'error')
  and exists (select from streamer.source s where s.id = $1 and s.lock_token = $3)
"""


def _record(row: object) -> ScriptRecord:
    fields = dict(row)  # type: ignore[call-overload]
    fields["side"], fields["state"] = ScriptSide(fields["side"]), ScriptState(fields["state"])
    fields["lsn"] = fields["lsn"] and Lsn.parse(fields["lsn"])
    return ScriptRecord(**fields)


async def add_script(
    bookkeeping: Bookkeeping, source_id: int, script_id: str, script: str, side: ScriptSide
) -> ScriptRecord:
    """Store a script unless its id is known; return the record that is there then."""
    async with bookkeeping.connection() as connection:
        await connection.execute(
            "insert into streamer.script (source_id, id, script, side) values ($1, $2, $3, $4)"
            " on conflict do nothing",
            source_id,
            script_id,
            script,
            side.value,
        )
        (row,) = await connection.fetch(_READ_SQL, source_id, script_id)
    return _record(row)


async def read_scripts(
    bookkeeping: Bookkeeping, source_id: int, script_id: str | None = None
) -> list[ScriptRecord]:
    """Return the scripts of a source, oldest first; the one with an id, if that is given."""
    async with bookkeeping.connection() as connection:
        rows = await connection.fetch(_READ_SQL, source_id, script_id)
    return [_record(row) for row in rows]


async def set_script_xid(
    bookkeeping: Bookkeeping, source_id: int, script_id: str, xid: int, origin: ScriptOrigin
) -> None:
    """Store the source transaction that is about to carry a script, before it commits."""
    async with bookkeeping.connection() as connection:
        await connection.execute(
            "update streamer.script set source_xid = $3, system_identifier = $4, timeline = $5"
            " where source_id = $1 and id = $2",
            source_id,
            script_id,
            xid,
            *origin,
        )


async def end_script(
    bookkeeping: Bookkeeping, source_id: int, script_id: str, state: ScriptState
) -> bool:
    """End a script from outside the stream, and wake the process; False if it has ended."""
    async with bookkeeping.connection() as connection:
        count = await connection.execute(
            "update streamer.script set state = $3, error = null,"
            " finished_at = pg_catalog.clock_timestamp()"
            " where source_id = $1 and id = $2 and state in ('waiting', 'error', 'missed')",
            source_id,
            script_id,
            state.value,
        )
        await connection.execute(f"notify {CHANNEL}")
    return bool(count)


async def replace_script(
    bookkeeping: Bookkeeping, source_id: int, script_id: str, script: str
) -> bool:
    """Have the target run other text under an id, and wake the process; False if it has run."""
    async with bookkeeping.connection() as connection:
        count = await connection.execute(
            "update streamer.script set replacement = $3, state = 'waiting', error = null"
            " where source_id = $1 and id = $2 and state in ('waiting', 'error')",
            source_id,
            script_id,
            script,
        )
        await connection.execute(f"notify {CHANNEL}")
    return bool(count)


async def set_scripts_missed(
    bookkeeping: Bookkeeping, source_id: int, script_ids: list[str], reason: str
) -> None:
    """Record that only one side has these scripts, and that the stream brings them to no other."""
    async with bookkeeping.connection() as connection:
        await connection.execute(
            "update streamer.script set state = 'missed', error = $3"
            " where source_id = $1 and id = any ($2::text[])"
            " and state in ('waiting', 'error', 'done')",
            source_id,
            script_ids,
            reason,
        )


async def set_script_error(
    bookkeeping: Bookkeeping, source_id: int, script_id: str, error: str
) -> None:
    async with bookkeeping.connection() as connection:
        await connection.execute(
            "update streamer.script set state = 'error', error = $3"
            " where source_id = $1 and id = $2 and state in ('waiting', 'error')",
            source_id,
            script_id,
            error,
        )


async def finish_script(
    connection: TargetConnection, claim: Claim, script_id: str, lsn: Lsn
) -> bool:
    """Record, in the transaction of the script, that it has run at *lsn*.

    Return False if it must not commit: another process has the source, or the script has ended.
    """
    return bool(
        await connection.execute(_FINISH_SQL, claim.source_id, script_id, claim.token, str(lsn))
    )
