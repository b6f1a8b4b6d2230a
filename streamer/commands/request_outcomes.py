"""``streamer requests``, and the outcomes for which commands wait."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_schema import installed
from streamer.bookkeeping.requests import (
    RESTART,
    Request,
    RequestState,
    end_request,
    read_requests,
)
from streamer.bookkeeping.sources import SourceRecord, read_source_records
from streamer.commands.terminal_table import Listing, ListingColumn
from streamer.errors.error_classes import MappingError
from streamer.errors.error_reports import ErrorReport
from streamer.errors.remedies import Remedy, run
from streamer.report.problem_facts import ReportedSource
from streamer.report.problems import Problem, of_source
from streamer.target.connection import TargetAddress

POLL_SECONDS: Final = 0.2
TAKE_SECONDS: Final = 60.0
"""How long a command waits for a process to take the request."""
ABSENT_SECONDS: Final = 10.0
"""How long a command waits for a process to run the source again: a restart takes less time."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Requests at the end of a wait. ``obstacle``: why some requests are still open.

    ``is_absent``: no process runs the source of an open request; otherwise the process is late.
    """

    requests: list[Request]
    obstacle: str | None = None
    is_absent: bool = False


async def read(address: TargetAddress, request_id: int | None, limit: int) -> list[Request]:
    """Return the newest requests, or request *request_id*. Raises MappingError for a wrong id."""
    ids = None if request_id is None else [request_id]
    async with installed(address, "streamer requests") as bookkeeping:
        requests = await read_requests(bookkeeping, ids, limit)
    if request_id is not None and not requests:
        raise MappingError(
            f"no request has the number {request_id}", hint="`streamer requests` lists the requests"
        )
    return requests


def find_causes(
    records: Iterable[SourceRecord], source_ids: Collection[int | None]
) -> list[Problem]:
    """Return the problems for which sources do not stream, as status shows the problems. Pure."""
    return [
        of_source(ReportedSource(record.database, record.sid, record.state, record.error))[0]
        for record in records
        if record.source_id in source_ids and record.state != "streaming" and record.error
    ]


async def await_outcomes(
    bookkeeping: Bookkeeping,
    ids: Collection[int],
    *,
    expects_process: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> Outcomes:
    """Wait until requests have ended, or until no process will take a request.

    *expects_process*: without a process for the source, wait for its next start. *report* receives
    each cause for which a source does not stream meanwhile, once. The requests may be the remedy
    for an earlier cause, so causes that commands mend do not count if they exist already.
    """
    causes: set[str] | None = None
    began = time.monotonic()
    last_run_at = began if expects_process else began - ABSENT_SECONDS
    while True:
        requests = await read_requests(bookkeeping, list(ids))
        waiting = [request for request in requests if request.is_open]
        if not waiting:
            return Outcomes(requests)
        if delay := await _find_starting(bookkeeping, waiting):
            return Outcomes(requests, delay)
        source_ids = {request.source_id for request in waiting}
        records = await read_source_records(bookkeeping)
        problems = find_causes(records, source_ids)
        causes = {p.sentence for p in problems if p.commands} if causes is None else causes
        for problem in problems:
            if problem.sentence not in causes:
                report(f"{problem.subject}: {problem.sentence}")
                causes.add(problem.sentence)
        absent = _find_absent(records, source_ids)
        now = time.monotonic()
        if not absent:
            last_run_at = now
        elif now >= last_run_at + ABSENT_SECONDS:
            if await _withdraw_restarts(bookkeeping, waiting, absent):
                continue
            return Outcomes(requests, f"no process runs source {absent}", is_absent=True)
        is_queued = any(request.state is RequestState.QUEUED for request in waiting)
        if is_queued and now >= began + TAKE_SECONDS:
            return Outcomes(
                requests,
                f"the process of the source has not taken the request within {TAKE_SECONDS:g} s",
            )
        await asyncio.sleep(POLL_SECONDS)


def _find_absent(records: Iterable[SourceRecord], source_ids: Collection[int | None]) -> str:
    """Return the sources that no process runs."""
    absent = [r.label for r in records if r.source_id in source_ids and r.holder is None]
    return ", ".join(f'"{label}"' for label in absent)


async def _find_starting(bookkeeping: Bookkeeping, waiting: Collection[Request]) -> str | None:
    """Return why a restarting source cannot start yet; None if no start waits.

    The request ends with the start, so the command need not wait for the end.
    """
    ids = {request.source_id for request in waiting if request.action == RESTART}
    for record in await read_source_records(bookkeeping) if ids else ():
        if record.source_id in ids and record.holder is not None and record.waiting_for:
            return f'source "{record.label}" is starting, and waits for {record.waiting_for}'
    return None


async def _withdraw_restarts(
    bookkeeping: Bookkeeping, waiting: Collection[Request], absent: str
) -> bool:
    """Fail the requested restarts of sources that no process runs; return whether any was open.

    The next process starts these sources anyway.
    """
    restarts = [request for request in waiting if request.action == RESTART]
    problem = f"no process runs source {absent}"
    error = MappingError(problem, hint=Remedy.of("to stream it, run: ", run("run")))
    for request in restarts:
        await end_request(bookkeeping, request.request_id, ErrorReport.of(error))
    return bool(restarts)


def _state(request: Request) -> str:
    reason = request.reason
    return str(request.state) if reason is None else f"{request.state}: {reason}"


LISTING: Final[Listing[Request]] = Listing(
    "requests",
    (
        ListingColumn("id", lambda request: request.request_id, is_number=True),
        ListingColumn("requested", lambda request: f"{request.requested_at:%Y-%m-%d %H:%M:%S%z}"),
        ListingColumn("by", lambda request: request.actor or "streamer"),
        ListingColumn("action", lambda request: request.verb),
        ListingColumn("table", lambda request: request.label),
        ListingColumn("state", _state),
    ),
    "no requests",
)
