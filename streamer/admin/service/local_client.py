"""The mapping for the command line and for tenants, through the service of this process."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from streamer.admin.mapping.admin_store import Query
from streamer.admin.mapping.mapping_rows import Row

if TYPE_CHECKING:
    from streamer.admin.service.admin_service import AdminService

PER_PAGE: Final = 500


class LocalClient:
    """Edits the mapping for *actor*: in this process or, without a running process, in the file."""

    def __init__(self, service: "AdminService", actor: str) -> None:
        self._service = service
        self._actor = actor

    async def rows(self, kind: str, filters: Row) -> list[Row]:
        rows: list[Row] = []
        while True:
            query = Query(len(rows) // PER_PAGE + 1, PER_PAGE, filters=filters)
            part, total = await self._service.store.page(kind, query)
            rows += part
            if len(rows) >= total or not part:
                return rows

    async def create(self, kind: str, fields: Row) -> Row:
        return await self._service.create(kind, fields, self._actor)

    async def patch(self, kind: str, number: int, changes: Row) -> Row:
        return await self._service.patch(kind, number, changes, self._actor)

    async def delete(self, kind: str, number: int) -> None:
        await self._service.delete(kind, number, self._actor)

    async def is_changed(self) -> bool:
        return bool((await self._service.draft())["changed"])

    async def plan(self) -> Row:
        return (await self._service.plan()).to_json()

    async def apply(self, *, force: bool) -> Row:
        return await self._service.apply(self._actor, force=force)

    async def export(self) -> tuple[str, list[str]]:
        return await self._service.export()

    async def import_text(self, path: Path, text: str, *, excludes_missing: bool) -> list[str]:
        return await self._service.import_text(
            path, text, self._actor, excludes_missing=excludes_missing
        )
