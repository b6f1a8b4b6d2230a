"""Routes of the draft: its state, plan, apply, export and import."""

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from streamer.admin.mapping import api_models
from streamer.admin.service.access import actor_of
from streamer.admin.service.admin_service import AdminService


def add_draft(router: APIRouter, service: AdminService) -> None:
    """Add the routes of the draft."""

    @router.get("/draft", tags=["draft"])
    async def get_draft() -> dict[str, Any]:
        """Return whether the draft differs from the applied mapping."""
        return await service.draft()

    @router.delete("/draft", tags=["draft"], status_code=204, response_class=Response)
    async def discard_draft(request: Request) -> Response:
        """Reset the draft to the mapping applied last."""
        await service.discard(actor_of(request))
        return Response(status_code=204)

    @router.get("/plan", tags=["draft"])
    async def get_plan() -> dict[str, Any]:
        """Return the effect of applying the draft; changes nothing."""
        return (await service.plan()).to_json()

    @router.post("/apply", tags=["draft"])
    async def apply(request: Request, values: api_models.ApplyBody | None = None) -> dict[str, Any]:
        """Apply the whole draft, or reject it."""
        force = values is not None and values.force
        return await service.apply(actor_of(request), force=force)

    @router.get(
        "/export",
        tags=["draft"],
        response_class=Response,
        responses={200: {"content": {"application/yaml": {"schema": {"type": "string"}}}}},
    )
    async def export() -> Response:
        """Return the draft as YAML, with a variable in place of each password."""
        text, variables = await service.export()
        headers = {"X-Streamer-Variables": ", ".join(variables)}
        return Response(text, media_type="application/yaml; charset=utf-8", headers=headers)

    @router.post("/import", tags=["draft"])
    async def import_mapping(request: Request, values: api_models.ImportBody) -> dict[str, Any]:
        """Replace the draft with a YAML file."""
        notes = await service.import_text(
            Path("yaml"),
            values.yaml,
            actor_of(request),
            excludes_missing=values.exclude_missing,
        )
        return {"notes": notes, "draft": await service.draft()}
