"""Routes of the mapping: lists, rows of databases, urls and tables, settings, the audit."""

from typing import Annotated, Any, Final

from fastapi import APIRouter, Body, Request, Response

from streamer.admin.api.gate import PREFIX
from streamer.admin.api.request_parameters import (
    IdFilter,
    Number,
    Order,
    PageNumber,
    PerPage,
    Search,
    Sort,
    Text,
    given_fields,
)
from streamer.admin.mapping import api_models
from streamer.admin.mapping.admin_store import Query
from streamer.admin.service.access import actor_of
from streamer.admin.service.admin_service import AdminService

_EXAMPLES: Final[dict[str, dict[str, Any]]] = {
    "database": {"name": "shop"},
    "url": {
        "database_id": 1,
        "url": "postgresql://streamer:${SHOP_EU_PASSWORD}@eu-db.example/shop",
        "sid": "eu",
    },
    "table": {
        "database_id": 1,
        "schema": "public",
        "name": "orders",
        "target": "sales.orders",
        "type": "history",
    },
}


def add_mapping(router: APIRouter, service: AdminService) -> None:
    """Add the routes of the mapping."""
    _add_lists(router, service)
    _add_databases(router, service)
    _add_urls(router, service)
    _add_tables(router, service)
    _add_settings(router, service)


def _page(rows: tuple[list[Any], int], query: Query, response: Response) -> Any:
    items, total = rows
    response.headers["X-Total-Count"] = str(total)
    return {"items": items, "total": total, "page": query.page, "per_page": query.per_page}


def _add_lists(router: APIRouter, service: AdminService) -> None:
    async def listed(kind: str, query: Query, filters: dict[str, Any], response: Response) -> Any:
        query.filters.update({k: v for k, v in filters.items() if v is not None})
        return _page(await service.store.page(kind, query), query, response)

    @router.get("/databases", tags=["mapping"], response_model=api_models.DatabasePage)
    async def list_databases(
        response: Response,
        page: PageNumber = 1,
        per_page: PerPage = 50,
        sort: Sort = "id",
        order: Order = "asc",
        q: Search = None,
        name: Text = None,
    ) -> Any:
        """List groups of databases."""
        query = Query(page, per_page, sort, order == "desc", q)
        return await listed("database", query, {"name": name}, response)

    @router.get("/urls", tags=["mapping"], response_model=api_models.UrlPage)
    async def list_urls(
        response: Response,
        page: PageNumber = 1,
        per_page: PerPage = 50,
        sort: Sort = "id",
        order: Order = "asc",
        q: Search = None,
        database_id: IdFilter = None,
        database: Text = None,
        sid: Text = None,
    ) -> Any:
        """List source databases."""
        query = Query(page, per_page, sort, order == "desc", q)
        filters = {"database_id": database_id, "database": database, "sid": sid}
        return await listed("url", query, filters, response)

    @router.get("/tables", tags=["mapping"], response_model=api_models.TablePage)
    async def list_tables(
        response: Response,
        page: PageNumber = 1,
        per_page: PerPage = 50,
        sort: Sort = "id",
        order: Order = "asc",
        q: Search = None,
        database_id: IdFilter = None,
        database: Text = None,
        schema: Text = None,
        name: Text = None,
        target: Text = None,
        type: Text = None,
    ) -> Any:
        """List the replicated tables."""
        query = Query(page, per_page, sort, order == "desc", q)
        filters = {
            "database_id": database_id,
            "database": database,
            "schema": schema,
            "name": name,
            "target": target,
            "type": type,
        }
        return await listed("table", query, filters, response)

    @router.get("/audit", tags=["mapping"], response_model=api_models.AuditPage)
    async def list_audit(response: Response, page: PageNumber = 1, per_page: PerPage = 50) -> Any:
        """List changes and requests with their users, the newest first."""
        query = Query(page, per_page)
        return _page(await service.audit(query), query, response)


def _examples(kind: str) -> tuple[Any, Any]:
    """Return request bodies as examples for OpenAPI: a complete row, and a single field."""
    example = _EXAMPLES[kind]
    last = list(example)[-1]
    return {"typical": {"value": example}}, {"typical": {"value": {last: example[last]}}}


class _Rows:
    """The routes of the rows of one kind. *row*: the model of an answer."""

    def __init__(self, router: APIRouter, service: AdminService, kind: str, row: Any) -> None:
        self._service = service
        self._router = router
        self._kind = kind
        self._row = row
        self._path = f"/{kind}s"
        self._row_path = f"{self._path}/{{number}}"

    def add(self, create: Any, replace: Any, change: Any) -> None:
        """Add the routes. The annotations of the functions name the models of request bodies."""
        service, kind = self._service, self._kind

        async def get(number: Number) -> Any:
            return await service.store.get(kind, number)

        async def delete(request: Request, number: Number) -> Response:
            await service.delete(kind, number, actor_of(request))
            return Response(status_code=204)

        for method, path, function, status, summary in (
            ("GET", self._row_path, get, 200, f"Get a {kind}"),
            ("POST", self._path, create, 201, f"Add a {kind} to the draft"),
            ("PUT", self._row_path, replace, 200, f"Replace a {kind} of the draft"),
            ("PATCH", self._row_path, change, 200, f"Change some fields of a {kind} of the draft"),
        ):
            self._router.add_api_route(
                path,
                function,
                methods=[method],
                status_code=status,
                response_model=self._row,
                summary=summary,
                name=f"{function.__name__}_{kind}",
                tags=["mapping"],
            )
        self._router.add_api_route(
            self._row_path,
            delete,
            methods=["DELETE"],
            status_code=204,
            summary=f"Remove a {kind}",
            name=f"delete_{kind}",
            tags=["mapping"],
            response_class=Response,
        )

    async def create(self, request: Request, response: Response, values: Any) -> Any:
        created = await self._service.create(self._kind, given_fields(values), actor_of(request))
        response.headers["Location"] = f"{PREFIX}{self._path}/{created['id']}"
        return created

    async def replace(self, request: Request, number: int, values: Any) -> Any:
        fields = given_fields(values)
        return await self._service.replace(self._kind, number, fields, actor_of(request))

    async def change(self, request: Request, number: int, values: Any) -> Any:
        fields = given_fields(values)
        return await self._service.patch(self._kind, number, fields, actor_of(request))


def _add_databases(router: APIRouter, service: AdminService) -> None:
    rows = _Rows(router, service, "database", api_models.DatabaseRow)
    whole, part = _examples("database")
    Whole = Annotated[api_models.DatabaseBody, Body(openapi_examples=whole)]
    Part = Annotated[api_models.DatabasePatch, Body(openapi_examples=part)]

    async def create(request: Request, response: Response, values: Whole) -> Any:
        return await rows.create(request, response, values)

    async def replace(request: Request, number: Number, values: Whole) -> Any:
        return await rows.replace(request, number, values)

    async def change(request: Request, number: Number, values: Part) -> Any:
        return await rows.change(request, number, values)

    rows.add(create, replace, change)


def _add_urls(router: APIRouter, service: AdminService) -> None:
    rows = _Rows(router, service, "url", api_models.UrlRow)
    whole, part = _examples("url")
    Whole = Annotated[api_models.UrlBody, Body(openapi_examples=whole)]
    Part = Annotated[api_models.UrlPatch, Body(openapi_examples=part)]

    async def create(request: Request, response: Response, values: Whole) -> Any:
        return await rows.create(request, response, values)

    async def replace(request: Request, number: Number, values: Whole) -> Any:
        return await rows.replace(request, number, values)

    async def change(request: Request, number: Number, values: Part) -> Any:
        return await rows.change(request, number, values)

    rows.add(create, replace, change)


def _add_tables(router: APIRouter, service: AdminService) -> None:
    rows = _Rows(router, service, "table", api_models.TableRow)
    whole, part = _examples("table")
    Whole = Annotated[api_models.TableBody, Body(openapi_examples=whole)]
    Part = Annotated[api_models.TablePatch, Body(openapi_examples=part)]

    async def create(request: Request, response: Response, values: Whole) -> Any:
        return await rows.create(request, response, values)

    async def replace(request: Request, number: Number, values: Whole) -> Any:
        return await rows.replace(request, number, values)

    async def change(request: Request, number: Number, values: Part) -> Any:
        return await rows.change(request, number, values)

    rows.add(create, replace, change)


def _add_settings(router: APIRouter, service: AdminService) -> None:
    @router.get("/settings", tags=["mapping"], response_model=api_models.MappingSettings)
    async def get_settings() -> Any:
        """Get the settings of the mapping as a whole."""
        return await service.store.settings()

    @router.patch("/settings", tags=["mapping"], response_model=api_models.MappingSettings)
    async def change_settings(request: Request, values: api_models.MappingSettings) -> Any:
        """Change settings of the mapping as a whole."""
        return await service.set_settings(given_fields(values), actor_of(request))
