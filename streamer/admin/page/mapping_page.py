"""The draft: databases, urls, tables and all settings."""

import re
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response

from streamer.admin.mapping import api_models
from streamer.admin.mapping.admin_store import Query
from streamer.admin.mapping.mapping_of_draft import groups_of, unfinished
from streamer.admin.page import settings_forms
from streamer.admin.page.page_frame import Frame, Row, form_text
from streamer.admin.service.access import actor_of
from streamer.errors.error_classes import AdminError, InvalidError, StreamerError
from streamer.observability.logs import redact
from streamer.postgres.url_passwords import MASK, mask, with_password

Number = Annotated[int, Path(ge=1, le=api_models.ID_MAX)]

FIELDS = {kind: settings_forms.fields_of(kind) for kind in ("database", "url", "table")}


def full_url(text: str, password: str) -> str:
    """Return a url with the password of a separate field. Raises InvalidError."""
    text = text.strip()
    if not text:
        raise InvalidError("url: required, but not given")
    return with_password(text, password) if password else text


def shown_url(text: str) -> str:
    """Return a typed url without passwords, even an unreadable url."""
    return re.sub(r":[^/:@\s]*@", f":{MASK}@", redact(mask(text)))


async def of_database(frame: Frame, kind: str, number: int) -> list[Row]:
    """Return all rows of a kind that belong to a database."""
    rows: list[Row] = []
    while True:
        query = Query(len(rows) // 500 + 1, 500, "id", filters={"database_id": number})
        part, total = await frame.service.store.page(kind, query)
        rows += part
        if len(rows) >= total or not part:
            return rows


def routes(frame: Frame) -> APIRouter:
    router = frame.router()
    service = frame.service
    _add_pages(router, frame)
    _add_database(router, frame)
    _add_row(router, frame, "url", _url_values)
    _add_row(router, frame, "table", _table_values)

    @router.post("/urls/{number}/test")
    async def test_url(request: Request, number: Number) -> Response:
        await service.store.get("url", number)
        try:
            discovered = await service.discover(None, number, actor_of(request))
        except StreamerError as exc:
            return frame.redirect(f"/urls/{number}", error_text(exc), "bad")
        return frame.redirect(f"/urls/{number}", server_line(discovered))

    @router.post("/import")
    async def import_yaml(request: Request) -> Response:
        text = form_text(await request.form(), "yaml")
        values = api_models.validate_as(api_models.ImportBody, {"yaml": text})
        notes = await service.import_text(FilePath("yaml"), values["yaml"], actor_of(request))
        note = "; ".join(["The draft now has the file's contents", *notes])
        return frame.redirect("/plan", note, "warning" if notes else "good")

    @router.post("/settings")
    async def change_settings(request: Request) -> Response:
        form = await request.form()
        names = api_models.MappingSettings.model_fields
        typed = {name: form_text(form, name).strip() or None for name in names}
        await service.set_settings(
            api_models.validate_as(api_models.MappingSettings, typed), actor_of(request)
        )
        return frame.redirect("/mapping", "Saved to the draft")

    return router


def server_line(discovered: Row) -> str:
    """Return a text that names the server that answered."""
    server = discovered["server"]
    return (
        f"Connected: PostgreSQL {server['version']}, database {server['database']}, "
        f"as {server['role']}"
    )


def error_text(error: StreamerError) -> str:
    """Return the text of an error about a new database, still without a label."""
    message = error.message.removeprefix('source "discover": ')
    return f"{message}; {error.hint}" if error.hint else message


def _add_pages(router: APIRouter, frame: Frame) -> None:
    @router.get("/mapping")
    async def mapping(request: Request) -> Response:
        content = await frame.service.store.content()
        file, failure = None, None
        if frame.service.is_static:
            try:
                file = await frame.service.file_values()
            except StreamerError as exc:  # the file has changed since the start
                failure = exc
        return await frame.page(
            request,
            "mapping.html",
            file=file,
            failure=failure,
            groups=groups_of(content),
            unfinished=unfinished(content),
            settings=await frame.service.store.settings(),
            defaults=frame.service.settings,
        )


def _add_database(router: APIRouter, frame: Frame) -> None:
    service = frame.service

    async def show(
        request: Request, number: int, typed: Row | None = None, failure: AdminError | None = None
    ) -> Response:
        row = await service.store.get("database", number)
        fields = FIELDS["database"]
        return await frame.page(
            request,
            "database.html",
            status=200 if failure is None else failure.status,
            row=row,
            urls=await of_database(frame, "url", number),
            tables=await of_database(frame, "table", number),
            fields=fields,
            given=typed if typed is not None else as_given(fields, row) | {"name": row["name"]},
            failure=failure,
            faulty=_faulty(failure, fields, "name"),
        )

    @router.get("/databases/{number}")
    async def database(request: Request, number: Number) -> Response:
        return await show(request, number)

    @router.post("/databases/{number}")
    async def change(request: Request, number: Number) -> Response:
        form = await request.form()
        try:
            values = {
                **settings_forms.read(FIELDS["database"], form),
                "name": form_text(form, "name"),
            }
            await service.patch("database", number, values, actor_of(request))
        except AdminError as exc:
            return await show(request, number, _texts(form), exc)
        return frame.redirect(f"/databases/{number}", "Saved to the draft")

    @router.post("/databases/{number}/remove")
    async def remove(request: Request, number: Number) -> Response:
        await service.delete("database", number, actor_of(request))
        return frame.redirect("/mapping", "Removed from the draft; see the plan, and apply it")


def _url_values(form: Any) -> Row:
    return {
        **settings_forms.read(FIELDS["url"], form),
        "url": full_url(form_text(form, "url"), form_text(form, "password")),
        "sid": form_text(form, "sid").strip() or None,
    }


def _table_values(form: Any) -> Row:
    return settings_forms.read(FIELDS["table"], form)


def _add_row(router: APIRouter, frame: Frame, kind: str, values_of: Callable[[Any], Row]) -> None:
    service, fields = frame.service, FIELDS[kind]

    async def show(
        request: Request, number: int, typed: Row | None = None, failure: AdminError | None = None
    ) -> Response:
        row = await service.store.get(kind, number)
        if typed is None:
            typed = as_given(fields, row)
            if kind == "url":
                typed |= {"url": row["url"], "sid": row["sid"] or ""}
        return await frame.page(
            request,
            f"{kind}.html" if kind == "url" else "rule.html",
            status=200 if failure is None else failure.status,
            row=row,
            fields=fields,
            given=typed,
            failure=failure,
            faulty=_faulty(failure, fields, "url", "sid"),
            is_unfolded=failure is not None or _has_extra_settings(kind, fields, row),
        )

    @router.get(f"/{kind}s/{{number}}", name=f"page_{kind}")
    async def edit(request: Request, number: Number) -> Response:
        return await show(request, number)

    @router.post(f"/{kind}s/{{number}}", name=f"change_{kind}_form")
    async def change(request: Request, number: Number) -> Response:
        form = await request.form()
        try:
            await service.patch(kind, number, values_of(form), actor_of(request))
        except AdminError as exc:
            return await show(request, number, _texts(form), exc)
        return frame.redirect(f"/{kind}s/{number}", "Saved to the draft")

    @router.post(f"/{kind}s/{{number}}/remove", name=f"remove_{kind}")
    async def remove(request: Request, number: Number) -> Response:
        row = await service.store.get(kind, number)
        await service.delete(kind, number, actor_of(request))
        return frame.redirect(
            f"/databases/{row['database_id']}", "Removed from the draft; see the plan, and apply it"
        )


def as_given(fields: list[settings_forms.Field], row: Row) -> Row:
    """Return a row in the shape of a sent form."""
    return {
        field.name: ("on" if row.get(field.name) else "")
        if field.kind == "flag"
        else settings_forms.written(field, row)
        for field in fields
    }


def _has_extra_settings(kind: str, fields: list[settings_forms.Field], row: Row) -> bool:
    """Whether a row has settings outside the settings that a form shows at once."""
    usual = api_models.default_settings(kind)
    return any(field.is_seldom and row.get(field.name) != usual.get(field.name) for field in fields)


def _texts(form: Any) -> Row:
    """Return the typed text for the form, without the password."""
    typed = {name: form_text(form, name) for name in form if name not in ("password", "csrf")}
    return typed | {"url": shown_url(typed["url"])} if "url" in typed else typed


def _faulty(
    failure: AdminError | None, fields: list[settings_forms.Field], *more: str
) -> str | None:
    if failure is None:
        return None
    return settings_forms.faulty_field(failure.message, [*(field.name for field in fields), *more])
