"""Routes about the running sources: status, discovery, requests for tables, quarantine, events."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from streamer.admin.api.request_parameters import Number, Text
from streamer.admin.live.events import Events, Subscription
from streamer.admin.mapping import api_models
from streamer.admin.service.access import Access, UserIdentity, actor_of
from streamer.admin.service.admin_service import AdminService
from streamer.commands.quarantined_rows import Choice
from streamer.mapping.scope import Scope


def add_servers(router: APIRouter, service: AdminService, access: Access, events: Events) -> None:
    """Add the routes about the running sources."""
    _add_views(router, service)
    _add_actions(router, service)
    _add_quarantine(router, service)
    _add_events(router, access, events)


def _add_views(router: APIRouter, service: AdminService) -> None:
    @router.get("/status", tags=["servers"])
    async def status() -> dict[str, Any]:
        """Return the output of `streamer status --json`."""
        return await service.status()

    @router.get("/discover", tags=["servers"])
    async def discover(
        request: Request,
        url_id: Annotated[int, Query(ge=1, le=api_models.ID_MAX)],
    ) -> dict[str, Any]:
        """List the tables of a source, and the obstacles to replicating them."""
        return await service.discover(None, url_id, actor_of(request))

    @router.post("/discover", tags=["servers"])
    async def discover_url(request: Request, values: api_models.DiscoverBody) -> dict[str, Any]:
        """List the tables of any database by its url, and the obstacles to replicating them."""
        return await service.discover(values.url, values.url_id, actor_of(request))


def _add_actions(router: APIRouter, service: AdminService) -> None:
    @router.post("/tables/{number}/resync", tags=["servers"], status_code=202)
    async def resync(
        request: Request, number: Number, values: api_models.ResyncBody | None = None
    ) -> dict[str, Any]:
        """Copy a table again while the remaining tables keep streaming."""
        body = values or api_models.ResyncBody()
        options = body.resync().to_json()
        names = await service.request_for_rule(
            "resync", number, body.sid, actor_of(request), options
        )
        return {"action": "resync", "tables": names}

    @router.post("/tables/{number}/pause", tags=["servers"], status_code=202)
    async def pause(
        request: Request, number: Number, values: api_models.ActionBody | None = None
    ) -> dict[str, Any]:
        """Hold a table's changes."""
        sid = values.sid if values is not None else None
        names = await service.request_for_rule("pause", number, sid, actor_of(request))
        return {"action": "pause", "tables": names}

    @router.post("/tables/{number}/resume", tags=["servers"], status_code=202)
    async def resume(
        request: Request, number: Number, values: api_models.ResumeBody | None = None
    ) -> dict[str, Any]:
        """Resume a table that is paused or in error."""
        body = values or api_models.ResumeBody()
        options = {"skip_deletes": True} if body.skip_deletes else None
        names = await service.request_for_rule(
            "resume", number, body.sid, actor_of(request), options
        )
        return {"action": "resume", "tables": names}


def _add_quarantine(router: APIRouter, service: AdminService) -> None:
    @router.get("/quarantine", tags=["servers"])
    async def list_quarantine(
        table: Text = None,
        database: Text = None,
        sid: Text = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> dict[str, Any]:
        """List changes that the target refused, the oldest first."""
        return await service.quarantine(Choice(table, database, sid), limit)

    @router.get("/conflicts", tags=["servers"])
    async def list_conflicts(
        table: Text = None,
        database: Text = None,
        sid: Text = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> dict[str, Any]:
        """List changes whose row the target lacked, or had already, the newest first."""
        scope = Scope(() if table is None else (table,), database, sid)
        return await service.conflicts(scope, limit)

    def add_quarantine_action(action: str, summary: str) -> None:
        async def act(request: Request, values: api_models.QuarantineBody) -> dict[str, Any]:
            choice = Choice(values.table, values.database, values.sid, tuple(values.ids))
            requested = await service.request_quarantine_action(action, choice, actor_of(request))
            return {"action": action, "tables": requested}

        router.add_api_route(
            f"/quarantine/{action}",
            act,
            methods=["POST"],
            status_code=202,
            summary=summary,
            name=f"{action}_quarantine",
            tags=["servers"],
        )

    add_quarantine_action("retry", "Apply changes in quarantine again")
    add_quarantine_action("drop", "Drop changes in quarantine")


def _add_events(router: APIRouter, access: Access, events: Events) -> None:
    @router.get(
        "/events",
        tags=["servers"],
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
    )
    async def listen(
        request: Request, source: Text = None, brief: bool = False
    ) -> StreamingResponse:
        """Send server-sent events: snapshot, state, lag, rate, progress, verified, target, draft,
        applied.

        `source`: the label of a source, for its events only. `brief`: without lag, rate and
        progress, and without states in the snapshot.
        """
        identity: UserIdentity = request.state.identity

        def may_go_on() -> bool:
            return identity.session is None or access.session(request) is not None

        stream = events.stream(events.subscribe(Subscription(source, brief)), may_go_on)
        headers = {"X-Accel-Buffering": "no"}
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)
