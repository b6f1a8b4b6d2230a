"""``streamer tenants list``: the mapped sources, the tenants that are schemas of a source, and
removed tenants whose rows are still in the target.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_schema import is_installed
from streamer.bookkeeping.purges import PurgeRecord, read_purges
from streamer.bookkeeping.sources import SourceRecord, read_source_records
from streamer.commands.status import SourceStatus, TableStatus, read_stored_status
from streamer.commands.terminal_table import Listing, ListingColumn
from streamer.mapping.rules import Mapping, SourceLabel
from streamer.report.problem_facts import ReportedSource, shown_state
from streamer.report.problems import needs_operator, of_source
from streamer.target.connection import TargetAddress

REMOVED = "removed"
"""The state of a tenant without a mapping whose rows are still in the target."""
PURGING = "purging"
"""The state of such a tenant after a purge of the rows begins."""


@dataclass(slots=True)
class Tenant:
    """A tenant in ``tenants list --json``.

    ``state``: the state of the source, or `REMOVED` or `PURGING`. ``purge``: the tables with rows
    of a removed tenant. ``rows_purged`` also counts the finished tables. ``source``: the source
    whose rules give the tables this sid; None for a tenant that is a source itself.
    """

    database: str
    sid: str | None
    state: str
    slot: str | None
    tables: int = 0
    tables_ready: int = 0
    error: str | None = None
    process: str | None = None
    purge: list[PurgeRecord] = field(default_factory=list)
    source: str | None = None
    source_sid: str | None = None
    rows_purged: int = 0

    @property
    def label(self) -> str:
        return SourceLabel(self.database, self.sid)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"purge": [record.to_json() for record in self.purge]}


async def read_tenants(
    address: TargetAddress, mapping: Mapping, database: str | None = None
) -> list[Tenant]:
    """Return the mapped tenants, and unmapped tenants whose rows are still in the target.

    The answer comes from the target alone. Raises TargetConnectionError, TargetRejectedError.
    """
    bookkeeping = Bookkeeping(address, "streamer tenants")
    records: list[SourceRecord] = []
    purges: list[PurgeRecord] = []
    try:
        statuses = await read_stored_status(bookkeeping, mapping)
        if await is_installed(bookkeeping):
            records = await read_source_records(bookkeeping)
            purges = await read_purges(bookkeeping)
    finally:
        await bookkeeping.close()
    mapped = [_mapped(status) for status in statuses]
    mapped += [tenant for status in statuses for tenant in _of_rules(status)]
    tenants = mapped + _remaining({tenant.label for tenant in mapped}, records, purges)
    return [tenant for tenant in tenants if database in (None, tenant.database)]


def _mapped(status: SourceStatus) -> Tenant:
    is_stopped = status.state == "streaming" and status.process is None
    state = "stopped" if is_stopped else status.state
    problems = needs_operator(of_source(ReportedSource(status.database, status.sid, state)))
    return Tenant(
        status.database,
        status.sid,
        state,
        status.slot,
        tables=len(status.tables),
        tables_ready=_count_ready(state, status.tables),
        error=status.error or next((problem.sentence for problem in problems), None),
        process=status.process,
    )


def _count_ready(state: str, tables: Iterable[TableStatus]) -> int:
    """Return the number of ready tables of a source in *state*."""
    return sum(shown_state(state, table.state, table.wait) == "ready" for table in tables)


def _of_rules(status: SourceStatus) -> Iterator[Tenant]:
    """Yield the tenants whose rows have a sid by the rules of their tables."""
    tables: dict[str, list[TableStatus]] = {}
    for table in status.tables:
        if table.sid is not None and table.sid != status.sid:
            tables.setdefault(table.sid, []).append(table)
    tenant_of = _mapped(status)
    for sid, tables_of_sid in sorted(tables.items()):
        yield replace(
            tenant_of,
            sid=sid,
            tables=len(tables_of_sid),
            tables_ready=_count_ready(tenant_of.state, tables_of_sid),
            source=status.label,
            source_sid=status.sid,
        )


def _remaining(
    mapped: Collection[str], records: Sequence[SourceRecord], purges: Sequence[PurgeRecord]
) -> list[Tenant]:
    """Return the tenants without a mapping whose rows may be in the target. *mapped*: the labels of
    mapped sources.
    """
    removed: dict[str, Tenant] = {}
    for record in records:
        if record.sid is not None:
            tenant = Tenant(record.database, record.sid, REMOVED, record.slot)
            removed[tenant.label] = tenant
    for purge in purges:
        if not purge.is_finished:
            label = SourceLabel(purge.database, purge.sid)
            tenant = removed.setdefault(label, Tenant(purge.database, purge.sid, REMOVED, None))
            tenant.purge.append(purge)
            if purge.has_begun:
                tenant.state = PURGING
    for purge in purges:
        if (tenant_of := removed.get(SourceLabel(purge.database, purge.sid))) is not None:
            tenant_of.rows_purged += purge.rows_deleted
    return [tenant for label, tenant in removed.items() if label not in mapped]


def remark_of(tenant: Tenant) -> str:
    """Return the remark about a tenant: its error, or its remaining rows."""
    if tenant.error:
        return tenant.error
    if tenant.source is not None:
        return f"tables of {tenant.source}"
    if tenant.state not in (REMOVED, PURGING):
        return ""
    begun = f"; {tenant.rows_purged:,} rows deleted so far" if tenant.state == PURGING else ""
    return f"its rows may still be in the target{begun}"


def _ready(tenant: Tenant) -> str:
    return f"{tenant.tables_ready} of {tenant.tables} ready" if tenant.tables else ""


LISTING: Final[Listing[Tenant]] = Listing(
    "tenants",
    (
        ListingColumn("tenant", lambda tenant: tenant.label),
        ListingColumn("state", lambda tenant: tenant.state),
        ListingColumn("tables", _ready),
        ListingColumn("process", lambda tenant: tenant.process),
        ListingColumn("note", remark_of),
    ),
    "no tenants",
)
