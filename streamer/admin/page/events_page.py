"""Recent events, and the conflicts and quarantined changes of all tables."""

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from streamer.admin.live import status_view
from streamer.admin.live.past_events import KINDS, EventFilter, PastEvent, with_durations
from streamer.admin.live.status_reader import StatusReader
from streamer.admin.page.page_frame import Frame, Row, form_text, row_number
from streamer.admin.service.access import actor_of
from streamer.commands.conflict_log import fields_as_text
from streamer.commands.quarantined_rows import Choice
from streamer.errors.error_classes import InvalidError, StreamerError
from streamer.mapping.relation_names import parse_name
from streamer.mapping.rules import SourceLabel, SourceMapping
from streamer.mapping.scope import Scope

EVENTS_PER_PAGE: Final = 100
QUARANTINE_MAX: Final = 200
CONFLICTS_MAX: Final = 200


def routes(frame: Frame, status: StatusReader) -> APIRouter:
    router = frame.router()
    _add_events(router, frame)
    _add_quarantine(router, frame, status)
    _add_conflicts(router, frame)
    return router


def _add_events(router: APIRouter, frame: Frame) -> None:
    @router.get("/events")
    async def events(request: Request) -> Response:
        parameters = request.query_params
        number = row_number(parameters.get("page", "1"), "page")
        kind = parameters.get("kind", "")
        choice = EventFilter(kind if kind in KINDS else "", parameters.get("source", "")[:300])
        past = frame.events.past()
        timed = with_durations(past, datetime.now(UTC))
        matches = [entry for entry in timed if choice.matches(entry.event)]
        end = number * EVENTS_PER_PAGE
        sources = {source.label: source for source in frame.service.mapping.sources}
        labels = {*sources, *(event.source for event in past if event.source is not None)}

        def address_of(page: int) -> str:
            return status_view.address(
                "/events", kind=choice.kind or None, source=choice.source or None, page=page
            )

        return await frame.page(
            request,
            "events.html",
            past=[
                {"timed": entry, "event": entry.event, "address": _page_of(entry.event, sources)}
                for entry in matches[end - EVENTS_PER_PAGE : end]
            ],
            choice=choice,
            kinds=KINDS,
            labels=sorted(labels),
            is_empty=not past,
            newer=address_of(number - 1) if number > 1 else None,
            older=address_of(number + 1) if end < len(matches) else None,
        )


def _page_of(event: PastEvent, sources: dict[str, SourceMapping]) -> str | None:
    """Return the address of the page about the subject of *event*, if the subject has a page."""
    source = sources.get(event.source or "")
    if source is None:
        return None
    subject: Row = {"database": source.database, "sid": source.sid}
    if event.table:
        return status_view.table_address(subject, event.table)
    return status_view.address("/source", **subject)


def _add_quarantine(router: APIRouter, frame: Frame, status: StatusReader) -> None:
    service = frame.service

    @router.get("/quarantine")
    async def quarantine(request: Request) -> Response:
        try:
            listed = await service.quarantine(Choice(), QUARANTINE_MAX) | {"error": None}
        except StreamerError as exc:
            listed = {"items": [], "total": 0, "error": str(exc)}
        for row in listed["items"]:
            row["label"] = SourceLabel(row["database"], row["sid"])
            row["address"] = status_view.table_address(row, row["table"])
        scopes = await _scopes(status) if len(listed["items"]) > 1 else {}
        return await frame.page(request, "quarantine.html", quarantine=listed, scopes=scopes)

    @router.post("/quarantine")
    async def act(request: Request) -> Response:
        form = await request.form()
        action = form_text(form, "action")
        if action not in ("retry", "drop"):
            raise InvalidError("action: unknown")
        choices = await _choices(form, status)
        if not choices:
            advice = "Select changes, or choose all"
            return frame.redirect("/quarantine", advice, "warning")
        count = 0
        for choice in choices:
            requested = await service.request_quarantine_action(action, choice, actor_of(request))
            count += sum(relation["changes"] for relation in requested)
        status.forget()
        return frame.redirect("/quarantine", outcome_text(action, count))


def _add_conflicts(router: APIRouter, frame: Frame) -> None:
    @router.get("/conflicts")
    async def conflicts(request: Request) -> Response:
        try:
            listed = await frame.service.conflicts(Scope(), CONFLICTS_MAX) | {"error": None}
        except StreamerError as exc:
            listed = {"items": [], "error": str(exc)}
        for row in listed["items"]:
            row["label"] = SourceLabel(row["database"], row["sid"])
            row["address"] = status_view.table_address(row, row["table"])
            row["row"], row["target_row"] = (
                fields_as_text(row["key"]),
                fields_as_text(row["existing"]),
            )
        return await frame.page(request, "conflicts.html", conflicts=listed)


def outcome_text(action: str, count: int) -> str:
    """Return the note about a request to retry or drop *count* changes."""
    word = "being retried" if action == "retry" else "being dropped"
    return f"{count} {'change is' if count == 1 else 'changes are'} {word}"


async def _choices(form: Any, status: StatusReader) -> list[Choice]:
    """Return the changes that a form selects: the ticked changes, or all changes of a scope."""
    which = form_text(form, "which")
    if which not in ("", "ticked"):
        scope = (await _scopes(status)).get(which)
        return [] if scope is None else scope.choices
    ids = tuple(row_number(str(text), "id") for text in form.getlist("id"))
    return [Choice(ids=ids)] if ids else []


@dataclass(frozen=True, slots=True)
class _Scope:
    """Tables whose changes in quarantine a form can select together."""

    text: str
    choices: list[Choice] = field(default_factory=list)


async def _scopes(status: StatusReader) -> dict[str, _Scope]:
    """Return the tables with changes in quarantine: all, those of each source, and each table.

    A key is JSON, because a label and a table can contain any character.
    """
    scopes: dict[str, _Scope] = {}
    sources, _ = await status.read()
    for source in sources:
        label = str(SourceLabel(source["database"], source["sid"]))
        for table in source["tables"]:
            if table["quarantined"]:
                name = str(parse_name(table["source"]))
                choice = Choice(name, source["database"], source["sid"])
                for key, text in (
                    ("all", "all"),
                    (json.dumps([label]), f"all of {label}"),
                    (json.dumps([label, name]), f"all of {label} {name}"),
                ):
                    scopes.setdefault(key, _Scope(text)).choices.append(choice)
    return scopes
