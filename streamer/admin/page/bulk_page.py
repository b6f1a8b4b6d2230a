"""Acts on the tables of many sources: a page to confirm, and a page with the outcomes."""

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from fastapi import APIRouter, Request, Response
from starlette.datastructures import FormData, QueryParams

from streamer.admin.live import fleet_overview
from streamer.admin.live.status_reader import StatusReader
from streamer.admin.live.status_view import address
from streamer.admin.mapping.api_models import SOURCES_MAX
from streamer.admin.page.overview_page import line_filter, overview_address
from streamer.admin.page.page_frame import Frame, form_text
from streamer.admin.service.access import actor_of
from streamer.admin.service.act_on_many_sources import ACTIONS, act_on_sources
from streamer.commands.table_requests import RESUMABLE, SourceKey, SourceOutcome
from streamer.control.resync_options import Mode, Resync
from streamer.errors.error_classes import InvalidError, NotFoundError

RESULTS_MAX: Final = 50
_STATES: Final = {"pause": ("",), "resume": ("", *RESUMABLE), "resync": ("error", "")}
"""The choices of tables by action, the first as the default; empty: all."""


class Results:
    """The outcomes of the last requests, for the page after the redirect."""

    def __init__(self) -> None:
        self._results: OrderedDict[str, tuple[str, list[SourceOutcome]]] = OrderedDict()

    def store(self, action: str, outcomes: list[SourceOutcome]) -> str:
        """Keep outcomes in memory; return the name for `find`."""
        name = secrets.token_urlsafe(12)
        self._results[name] = (action, outcomes)
        while len(self._results) > RESULTS_MAX:
            self._results.popitem(last=False)
        return name

    def find(self, name: str) -> tuple[str, list[SourceOutcome]]:
        """Return action and outcomes. Raises NotFoundError."""
        if name in self._results:
            return self._results[name]
        raise NotFoundError(
            "the process no longer has this result", hint="the history shows the request"
        )


def routes(frame: Frame, status: StatusReader) -> APIRouter:
    router = frame.router()
    results = Results()

    @router.get("/sources/act")
    async def ask(request: Request) -> Response:
        action = _action(request.query_params.get("action", ""))
        seen, _ = await status.fleet()
        chosen = _chosen(seen, request.query_params)
        counts = [
            {"state": state, "count": sum(_tables(line, action, state) for line in chosen)}
            for state in _STATES[action]
        ]
        return await frame.page(
            request,
            "bulk.html",
            action=action,
            lines=[line.row for line in chosen],
            counts=counts,
            modes=[mode.value for mode in Mode] if action == "resync" else [],
            back=overview_address(line_filter(request.query_params)),
        )

    @router.post("/sources/act")
    async def act(request: Request) -> Response:
        form = await request.form()
        action = _action(form_text(form, "action"))
        mapped = {source.label: source for source in frame.service.mapping.sources}
        labels = _picks(form)
        if missing := [label for label in labels if label not in mapped]:
            raise InvalidError(f"pick: no source {missing[0]} runs", hint="choose again")
        state = form_text(form, "state")
        if state not in _STATES[action]:
            raise InvalidError("state: not known")
        outcomes = await act_on_sources(
            frame.service,
            action,
            [SourceKey(mapped[label].database, mapped[label].sid) for label in labels],
            actor_of(request),
            state=state or None,
            options=_options(action, form),
        )
        status.forget()
        outcomes.sort(key=lambda outcome: outcome.error is None)
        return frame.redirect(f"/sources/done?result={results.store(action, outcomes)}")

    @router.get("/sources/done")
    async def done(request: Request) -> Response:
        action, outcomes = results.find(request.query_params.get("result", ""))
        return await frame.page(
            request,
            "bulk_done.html",
            action=action,
            outcomes=outcomes,
            labels=[SourceKey(o.database, o.sid).label for o in outcomes],
            addresses=[address("/source", database=o.database, sid=o.sid) for o in outcomes],
            tables=sum(outcome.tables for outcome in outcomes),
            failed=sum(outcome.error is not None for outcome in outcomes),
        )

    return router


def _action(text: str) -> str:
    if text in ACTIONS:
        return text
    raise InvalidError("action: unknown")


def _picks(form: FormData | QueryParams) -> list[str]:
    """Return the labels of the ticked sources. Raises InvalidError."""
    labels = [str(label) for label in form.getlist("pick")]
    if not labels:
        raise InvalidError("pick: select sources, or choose all")
    if len(labels) > SOURCES_MAX:
        raise InvalidError(f"pick: more than {SOURCES_MAX} sources")
    return labels


def _chosen(
    seen: fleet_overview.FleetOverview, form: QueryParams
) -> Sequence[fleet_overview.SourceLine]:
    """Return the ticked sources, or all that the filter shows. Raises InvalidError."""
    if form.get("which") == "all":
        chosen = fleet_overview.choose(seen, line_filter(form))
    else:
        labels = set(_picks(form))
        chosen = [line for line in seen.lines if line.label in labels]
    if not chosen:
        raise InvalidError("pick: no such source runs", hint="choose again")
    return chosen


def _tables(line: fleet_overview.SourceLine, action: str, state: str) -> int:
    """Return the number of tables of a source that *action* would change, by the last status."""
    states: dict[str, int] = line.row["states"]
    if state:
        return states.get(state, 0)
    if action == "resume":
        return sum(states.get(resumable, 0) for resumable in RESUMABLE)
    count: int = line.row["table_count"]
    return count - (states.get("paused", 0) if action == "pause" else 0)


def _options(action: str, form: FormData) -> dict[str, object] | None:
    if action != "resync":
        return None
    mode = form_text(form, "mode")
    if mode not in {choice.value for choice in Mode}:
        raise InvalidError("mode: not known")
    skips_changes = form_text(form, "skip_changes") == "on"
    return Resync(Mode(mode), skips_changes=skips_changes).to_json()
