"""All routes in one application, and the OpenAPI description."""

from typing import Any, Final

from fastapi import APIRouter, FastAPI, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse

from streamer import __version__
from streamer.admin.api.draft_routes import add_draft
from streamer.admin.api.error_answers import install_errors
from streamer.admin.api.fleet_routes import add_fleet
from streamer.admin.api.gate import PREFIX, Gate
from streamer.admin.api.login_routes import add_sessions
from streamer.admin.api.mapping_routes import add_mapping
from streamer.admin.api.server_routes import add_servers
from streamer.admin.api.tenant_routes import add_tenants
from streamer.admin.live.events import Events
from streamer.admin.live.status_reader import StatusReader
from streamer.admin.mapping import api_models
from streamer.admin.service.access import COOKIE, Access
from streamer.admin.service.admin_service import AdminService
from streamer.observability.http_server import add_routes

_SCHEMAS: Final = "#/components/schemas/{model}"
_ERROR_SCHEMA: Final = {"$ref": _SCHEMAS.format(model=api_models.ErrorAnswer.__name__)}

# With a model, FastAPI would build a validator for each status of each route. The validators would
# take half of the time of a start.
_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"description": text, "content": {"application/json": {"schema": _ERROR_SCHEMA}}}
    for status, text in {
        401: "No login, or the wrong token",
        403: "The role does not allow it, or the request comes from another site",
        404: "Not found",
        409: "Conflict with the current state: taken, read-only or not ready",
        422: "A field is wrong; the message names it",
    }.items()
}


def make_router(
    service: AdminService, access: Access, events: Events, status: StatusReader
) -> APIRouter:
    """Make all routes."""
    router = APIRouter(prefix=PREFIX, responses=_ERRORS)
    add_mapping(router, service)
    add_draft(router, service)
    add_servers(router, service, access, events)
    add_fleet(router, service, events, status)
    add_tenants(router, service)
    add_sessions(router, access)
    return router


def openapi(app: FastAPI) -> dict[str, Any]:
    """Describe the API."""
    schema = get_openapi(
        title="streamer",
        version=__version__,
        description="The mapping, its status and operators' requests. Edits change a draft; "
        "`POST /api/apply` applies it.",
        routes=app.routes,
    )
    components = schema.setdefault("components", {})
    error = api_models.ErrorAnswer.model_json_schema(mode="serialization", ref_template=_SCHEMAS)
    components["schemas"] |= error.pop("$defs") | {api_models.ErrorAnswer.__name__: error}
    components["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer"},
        "session": {"type": "apiKey", "in": "cookie", "name": COOKIE},
    }
    schema["security"] = [{"token": []}, {"session": []}]
    schema["paths"]["/api/login"]["post"]["security"] = []
    return schema


def install_api(
    app: FastAPI, service: AdminService, access: Access, events: Events, status: StatusReader
) -> None:
    """Add the API to *app*, and the gate before the API."""
    add_routes(app, make_router(service, access, events, status))

    @app.get("/api/openapi.json", include_in_schema=False)
    async def describe() -> Response:
        if app.openapi_schema is None:
            app.openapi_schema = openapi(app)
        return JSONResponse(app.openapi_schema)

    install_errors(app)
    app.add_middleware(Gate, access=access, service=service)
