"""The tenants of the applied mapping, for API and page: list, add, remove, purge, drift.

The module calls the functions of `streamer tenants`. A purge runs as a task of this process,
because a purge can take hours. The bookkeeping stores the progress, so a purge that ends with the
process continues when an operator requests the purge again.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from streamer.admin.mapping.mapping_rows import Row
from streamer.admin.service import edit_draft
from streamer.admin.service.local_client import LocalClient
from streamer.admin.service.server_reads import ALL, TARGET
from streamer.commands.tenants import add_and_remove, tenant_list
from streamer.commands.tenants.purge_rows import RemainingTable, find_remaining, purge
from streamer.commands.tenants.tenant_drift import DriftReport, read_drift
from streamer.errors.error_classes import InvalidError, MappingError, StreamerError, UnreadyError
from streamer.mapping.rules import SourceLabel
from streamer.mapping.scope import Scope
from streamer.observability.logs import redact
from streamer.target.connection import TargetAddress

if TYPE_CHECKING:
    from streamer.admin.service.admin_service import AdminService

log = structlog.get_logger()


class Tenants:
    """The operations on tenants of *service*."""

    def __init__(self, service: "AdminService") -> None:
        self._service = service
        self._address = TargetAddress.parse(service.settings.target.url)
        self._purges: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, str] = {}

    async def list(self, database: str | None = None) -> list[Row]:
        """Return the tenants; ``is_purged_here``: whether this process purges the tenant now.

        ``error`` includes the error of the last purge here. Raises TargetError.
        """
        tenants = await self._service.reads.get(
            ("tenants", database),
            TARGET,
            lambda: tenant_list.read_tenants(self._address, self._service.mapping, database),
        )
        rows = []
        for tenant in tenants:
            row = tenant.to_json() | {"is_purged_here": tenant.label in self._purges}
            row["error"] = row["error"] or self._failures.get(tenant.label)
            rows.append(row)
        return rows

    async def add(self, database: str, url: str, sid: str, actor: str) -> Row:
        """Add a tenant to the draft, and apply a draft without other changes.

        Raises InvalidError, UnreadyError, TakenError.
        """
        self._service.check_writable()
        try:
            await add_and_remove.check_new(self._address, self._service.mapping, database, [sid])
        except MappingError as exc:
            raise InvalidError(exc.message, hint=exc.hint) from None
        client = LocalClient(self._service, actor)
        done = await edit_draft.add_tenants(
            client, database, add_and_remove.urls_of(url, [sid]), applies=True
        )
        return done.to_json()

    async def remove(self, database: str, sid: str, actor: str) -> Row:
        """Remove a tenant from the mapping; the process then drops the slot.

        Raises InvalidError, NotFoundError, UnreadyError.
        """
        self._service.check_writable()
        self._service.source(database, sid)
        client = LocalClient(self._service, actor)
        done = await edit_draft.remove_tenant(client, database, sid, applies=True)
        return done.to_json()

    async def purge(self, database: str, sid: str, actor: str) -> Sequence[RemainingTable]:
        """Begin to delete the rows of a removed tenant, and return the tables whose rows remain.

        Raises UnreadyError for a mapped tenant.
        """
        label = SourceLabel(database, sid)
        if label not in self._purges:
            await self._require_removed(label, database)
        remaining = await find_remaining(self._address, database, sid)
        if label not in self._purges:
            self._failures.pop(label, None)
            self._purges[label] = asyncio.create_task(
                self._purge(database, sid, actor), name=f"purge {label}"
            )
        return remaining

    async def _require_removed(self, label: str, database: str) -> None:
        tenants = await tenant_list.read_tenants(self._address, self._service.mapping, database)
        states = {tenant.label: tenant.state for tenant in tenants}
        if states.get(label) not in (tenant_list.REMOVED, tenant_list.PURGING):
            raise UnreadyError(
                f'"{label}" is not a removed tenant with rows in the target',
                hint="remove it first",
            )

    async def _purge(self, database: str, sid: str, actor: str) -> None:
        label = SourceLabel(database, sid)
        log.info("purge began", source=label, actor=actor)
        try:
            outcome = await purge(self._address, self._service.mapping, database, sid, actor=actor)
        except StreamerError as exc:
            self._failures[label] = redact(str(exc))
            log.error("purge failed", source=label, error=str(exc), **exc.log_fields)
        else:
            log.info("purge ended", source=label, rows=outcome.rows_deleted)
            for table in outcome.remaining:
                fields = {"reason": table.problem, "hint": str(table.remedy)}
                log.warning("rows may remain", source=label, table=table.target, **fields)
        finally:
            del self._purges[label]

    async def drift(self, scope: Scope) -> DriftReport:
        """Compare definitions of tenants and target. Raises InvalidError, TargetError."""
        try:
            return await self._service.reads.get(
                ("drift", scope),
                ALL,
                lambda: read_drift(self._address, self._service.mapping, scope),
            )
        except MappingError as exc:
            raise InvalidError(exc.message, hint=exc.hint) from None

    async def close(self) -> None:
        """End the purges of this process."""
        tasks = list(self._purges.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
