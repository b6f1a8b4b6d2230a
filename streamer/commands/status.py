"""``streamer status`` and ``streamer wait``: from the databases alone, whether or not a process
runs.
"""

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from streamer.apply.target import TargetAddress
from streamer.errors import SourceError, StreamerError
from streamer.lsn import Lsn
from streamer.progress.store import RelationRecord, SourceRecord, Store
from streamer.route.mapping import Mapping, SourceMapping
from streamer.source.catalog import flush_wal, read_flush_lsn
from streamer.source.connection import connection
from streamer.source.slot import read_slot

WAIT_POLL_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class TableStatus:
    """A table in ``status --json``."""

    source: str
    target: str
    type: str
    state: str
    end_lsn: str
    rows_copied: int
    rows_total: int | None
    error: str | None
    quarantined: int


@dataclass(slots=True)
class SourceStatus:
    """A source in ``status --json``."""

    database: str
    sid: str | None
    state: str
    slot: str
    confirmed_flush_lsn: str | None = None
    lag_bytes: int | None = None
    lag_seconds: float | None = None
    retained_wal_bytes: int | None = None
    error: str | None = None
    tables: list[TableStatus] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        fields["tables"] = [
            {name: getattr(table, name) for name in table.__slots__} for table in self.tables
        ]
        return fields


_COPYING_SQL: Final = """
select p.relation_id, coalesce(sum(p.rows_copied), 0)::int8 as rows_copied
from streamer.sync_partition p where p.finished_at is not null group by p.relation_id
"""


async def read_status(address: TargetAddress, mapping: Mapping) -> list[SourceStatus]:
    """Read the status of every mapped source. Raises TargetConnectionError, TargetRejectedError."""
    store = Store(address, "streamer status")
    try:
        records: dict[str, SourceRecord] = {}
        relations: list[RelationRecord] = []
        copied: dict[int, int] = {}
        if await store.exists():
            records = {record.label: record for record in await store.sources()}
            relations = await store.relations()
            async with store.connection() as target:
                copied = {
                    row["relation_id"]: row["rows_copied"]
                    for row in await target.fetch(_COPYING_SQL)
                }
    finally:
        await store.close()
    statuses = []
    for source in mapping.sources:
        record = records.get(source.label)
        status = SourceStatus(
            source.database,
            source.sid,
            record.state if record else "not started",
            source.slot,
            error=record.error if record else None,
        )
        if record is not None:
            status.tables = [
                _table_status(relation, copied)
                for relation in relations
                if relation.source_id == record.source_id
            ]
        statuses.append(status)
    await asyncio.gather(
        *(
            _add_positions(status, source, records.get(source.label))
            for status, source in zip(statuses, mapping.sources, strict=True)
        )
    )
    return statuses


def _table_status(relation: RelationRecord, copied: dict[int, int]) -> TableStatus:
    rows = relation.rows_copied
    if relation.state == "copying":
        rows = copied.get(relation.relation_id, 0)
    return TableStatus(
        source=relation.source,
        target=relation.target,
        type=relation.type,
        state=relation.state,
        end_lsn=str(relation.end_lsn),
        rows_copied=rows,
        rows_total=relation.rows_total,
        error=relation.error,
        quarantined=relation.quarantined,
    )


async def _add_positions(
    status: SourceStatus, source: SourceMapping, record: SourceRecord | None
) -> None:
    """Ask the source where its slot is; what it says wins over what was stored."""
    try:
        async with connection(source) as plain:
            slot = await read_slot(plain, source.slot)
            end = await read_flush_lsn(plain)
    except SourceError as exc:
        status.error = status.error or str(exc)
        status.state = "unreachable"
        return
    if slot is None:
        return
    if slot.confirmed_flush_lsn is not None:
        status.confirmed_flush_lsn = str(slot.confirmed_flush_lsn)
        status.lag_bytes = max(0, end - slot.confirmed_flush_lsn)
    if slot.restart_lsn is not None:
        status.retained_wal_bytes = max(0, end - slot.restart_lsn)
    if record is not None and record.visible_time is not None:
        age = (datetime.now(UTC) - record.visible_time).total_seconds()
        status.lag_seconds = 0.0 if status.lag_bytes == 0 else round(max(0.0, age), 3)


def render_status(statuses: list[SourceStatus], console: Console) -> None:
    """Print statuses for people."""
    for status in statuses:
        name = status.database if status.sid is None else f"{status.database}:{status.sid}"
        lag = "?" if status.lag_bytes is None else _bytes(status.lag_bytes)
        retained = "?" if status.retained_wal_bytes is None else _bytes(status.retained_wal_bytes)
        title = f"{name}: {status.state}, lag {lag}, WAL retained {retained}"
        table = Table(title=title, title_justify="left", expand=False)
        for column in ("table", "target", "type", "state", "position", "rows copied"):
            table.add_column(column, overflow="fold")
        for row in status.tables:
            copied = str(row.rows_copied)
            if row.state == "copying" and row.rows_total:
                copied = f"{row.rows_copied} of about {row.rows_total}"
            table.add_row(row.source, row.target, row.type, row.state, row.end_lsn, copied)
        console.print(table)
        if status.error:
            console.print(f"  error: {status.error}", markup=False)
        for row in status.tables:
            if row.error:
                console.print(f"  {row.source}: {row.error}", markup=False)
            if row.quarantined:
                console.print(
                    f"  {row.source}: {row.quarantined} changes are in quarantine; "
                    "streamer quarantine list shows them",
                    markup=False,
                )


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TB"


async def wait(address: TargetAddress, mapping: Mapping, seconds: float) -> str | None:
    """Wait until what is committed now is visible and every table ready; return why not, if so."""
    try:
        async with asyncio.timeout(seconds):
            positions = await asyncio.gather(*(_position(source) for source in mapping.sources))
            wanted = dict(zip((s.label for s in mapping.sources), positions, strict=True))
            return await _wait_for(address, wanted, seconds)
    except TimeoutError:
        return f"not everything is visible after {seconds:g} s"


async def _position(source: SourceMapping) -> Lsn:
    async with connection(source) as plain:
        return await flush_wal(plain)


async def _wait_for(address: TargetAddress, wanted: dict[str, Lsn], seconds: float) -> str | None:
    store = Store(address, "streamer wait")
    deadline = asyncio.get_running_loop().time() + seconds - 0.2
    missing = "nothing is set up yet: is `streamer run` running?"
    try:
        while asyncio.get_running_loop().time() < deadline:
            try:
                found = await _missing(store, wanted)
            except StreamerError as exc:  # it may restart; there is time
                found = str(exc)
            if found is None:
                return None
            missing = found
            await asyncio.sleep(WAIT_POLL_SECONDS)
        return f"after {seconds:g} s: {missing}"
    finally:
        await store.close()


async def _missing(store: Store, wanted: dict[str, Lsn]) -> str | None:
    """Say what is not there yet; None if nothing is missing."""
    if not await store.exists():
        return "nothing is set up yet: is `streamer run` running?"
    records = {record.label: record for record in await store.sources()}
    for label, lsn in wanted.items():
        record = records.get(label)
        if record is None:
            return f'source "{label}" was never started'
        for relation in await store.relations(record.source_id):
            if relation.state != "ready":
                return f'table "{relation.source}" of "{label}" is {relation.state}'
        if record.acknowledged_lsn < lsn:
            return f'source "{label}" is at {record.acknowledged_lsn}, to be at {lsn}'
    return None
