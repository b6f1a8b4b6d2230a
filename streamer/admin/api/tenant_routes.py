"""Routes about tenants: list, add, remove, purge, drift."""

from typing import Any

from fastapi import APIRouter, Request

from streamer.admin.api.request_parameters import Text
from streamer.admin.mapping import api_models
from streamer.admin.service.access import actor_of
from streamer.admin.service.admin_service import AdminService
from streamer.mapping.scope import Scope


def add_tenants(router: APIRouter, service: AdminService) -> None:
    """Add the routes about tenants."""

    @router.get("/tenants", tags=["tenants"])
    async def list_tenants(database: Text = None) -> dict[str, Any]:
        """List the tenants, and removed tenants whose rows may still be in the target."""
        return {"items": await service.tenants.list(database)}

    @router.post("/tenants", tags=["tenants"], status_code=201)
    async def add_tenant(request: Request, values: api_models.NewTenantBody) -> dict[str, Any]:
        """Add a database to a group, with the tables of the group.

        streamer applies the draft, unless the draft contains other changes. `next_step` is the
        operator's next step, if any.
        """
        return await service.tenants.add(values.database, values.url, values.sid, actor_of(request))

    @router.post("/tenants/remove", tags=["tenants"])
    async def remove_tenant(request: Request, values: api_models.TenantBody) -> dict[str, Any]:
        """Stop a tenant, and drop its slot and publications. Its rows stay."""
        return await service.tenants.remove(values.database, values.sid, actor_of(request))

    @router.post("/tenants/purge", tags=["tenants"], status_code=202)
    async def purge_tenant(request: Request, values: api_models.TenantBody) -> dict[str, Any]:
        """Begin to delete the rows of a removed tenant; the list of tenants shows the progress.

        `remaining`: the tables without a column sid, where rows of the tenant may remain.
        """
        remaining = await service.tenants.purge(values.database, values.sid, actor_of(request))
        answer = {"action": "purge", "database": values.database, "sid": values.sid}
        return answer | {"remaining": [table.to_json() for table in remaining]}

    @router.get("/tenants/drift", tags=["tenants"])
    async def drift(database: Text = None, sid: Text = None, table: Text = None) -> dict[str, Any]:
        """Compare columns, types, keys and constraints of all tenants and the target."""
        scope = Scope(() if table is None else (table,), database, sid)
        return (await service.tenants.drift(scope)).to_json()
