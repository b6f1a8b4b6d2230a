"""``streamer resync``, ``pause`` and ``resume``: requests through the bookkeeping in the target.

A notification wakes a running process at once; a stopped process finds the request at the next
start.
"""

import getpass
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_schema import installed
from streamer.bookkeeping.relation_records import (
    RelationRecord,
    read_relation_records,
    read_sources_of_sid,
)
from streamer.bookkeeping.requests import make_requests
from streamer.bookkeeping.sources import SourceRecord, read_source_records
from streamer.bookkeeping.taken_requests import find_gap, find_mixed_rows
from streamer.control.resync_options import Resync
from streamer.errors.command_lines import command
from streamer.errors.error_classes import MappingError, StreamerError, TargetError
from streamer.errors.remedies import Remedy, run
from streamer.mapping.relation_names import RelationPattern, parse_name, parse_relation
from streamer.mapping.rules import Named, SourceLabel
from streamer.mapping.scope import Scope
from streamer.observability.logs import redact
from streamer.target.catalog import read_relations
from streamer.target.connection import TargetAddress


def command_actor() -> str:
    """Return the user of the command line, as named in the audit."""
    try:
        return f"command line: {getpass.getuser()}"
    except (OSError, KeyError):
        return "command line: unknown"


@dataclass(frozen=True, slots=True)
class Requested:
    """The requests made: the names of the tables by the ids of the requests.

    ``left_out``: the tables that wait before a mass delete.
    """

    requests: dict[int, str]
    left_out: list[str]

    @property
    def names(self) -> list[str]:
        return list(self.requests.values())


Matching = list[tuple[SourceRecord, RelationRecord]]
"""Tables, with their sources."""


def labels(tables: Matching) -> list[str]:
    return [f"{source.label} {relation.source}" for source, relation in tables]


async def read_matching(
    bookkeeping: Bookkeeping, pattern: RelationPattern | None, database: str | None, sid: str | None
) -> Matching:
    """Return the tables that match *pattern*, of *database* and *sid*: see `Scope`."""
    scope = Scope(database=database, sid=sid)
    of_sid = set() if sid is None else await read_sources_of_sid(bookkeeping, sid)
    return [
        (source, relation)
        for source in await read_source_records(bookkeeping)
        if scope.names(source) or source.source_id in of_sid
        for relation in scope.select(
            source, by_name(await read_relation_records(bookkeeping, source.source_id))
        )
        if pattern is None or pattern.matches(parse_name(relation.source))
    ]


def by_name(
    relations: Iterable[RelationRecord],
) -> Iterator[tuple[str, str | None, RelationRecord]]:
    """Yield *relations* in the form that `Scope.select` expects."""
    return ((relation.source, relation.row_sid, relation) for relation in relations)


async def request(
    address: TargetAddress,
    action: str,
    table: str,
    *,
    database: str | None,
    sid: str | None,
    options: dict[str, Any] | None = None,
    actor: str | None = None,
    unless: Sequence[RelationPattern] | None = None,
) -> Requested:
    """Request *action* for the tables that *table*, a name or a pattern, matches.

    *unless*: names of further tables that *table* may match without an error. *actor*: the
    operator; by default the user of the command line. Raises MappingError if no table matches.
    """
    pattern = parse_relation(table, "public")
    async with installed(address, f"streamer {action}") as bookkeeping:
        matching = [
            (source, relation)
            for source, relation in await read_matching(bookkeeping, pattern, database, sid)
            if not any(excluded.matches(parse_name(relation.source)) for excluded in unless or ())
        ]
        decides = bool((options or {}).get("skip_deletes"))
        meant = [m for m in matching if is_meant(m[1], pattern, action, decides=decides)]
        if not meant:
            raise _no_table(table, matching, decides=decides)
        left_out = [] if decides else [m for m in matching if m not in meant]
        _check_gaps(meant, action, options)
        await _check_columns(bookkeeping, meant, (options or {}).get("columns") or ())
        made = await make_requests(
            bookkeeping,
            [relation.relation_id for _, relation in meant],
            action,
            options,
            actor=actor or command_actor(),
        )
        if len(made) > len(meant):  # tables with the same target, see `make_requests`
            meant = await read_matching(bookkeeping, None, None, None)
    names = {
        relation.relation_id: name for (_, relation), name in zip(meant, labels(meant), strict=True)
    }
    return Requested({number: names[key] for key, number in made.items()}, labels(left_out))


def is_meant(
    relation: RelationRecord, pattern: RelationPattern, action: str, *, decides: bool
) -> bool:
    """Whether a request with *pattern*, which matches the relation, concerns the relation. Pure.

    A mass delete needs a separate decision, so a pattern alone resumes no table that waits before a
    mass delete. *decides*: the request skips the deletes of such tables.
    """
    waits = relation.waiting_mass_delete is not None
    return waits if decides else not (waits and action == "resume" and pattern.is_pattern)


def _no_table(table: str, matching: Matching, *, decides: bool) -> MappingError:
    """Return the reason why a request about *table* has no effect. Pure."""
    if decides:
        return MappingError(
            f'no table "{table}" is paused before a mass delete',
            hint="`streamer status` shows the transaction for which a table is paused",
        )
    if not matching:
        return MappingError(
            f'no table "{table}" is streamed', hint="`streamer status` lists the tables"
        )
    ((source, relation), *_) = matching
    resume = run("resume", relation.source, database=source.database, sid=source.sid)
    return MappingError(
        f'table "{relation.source}" is paused before a mass delete, and a request with a pattern '
        "does not resume such a table",
        hint=Remedy.of("`streamer status` shows the transaction; to apply it, run: ", resume),
    )


async def _check_columns(
    bookkeeping: Bookkeeping,
    matching: Matching,
    columns: Sequence[str],
) -> None:
    """Refuse columns that a target table lacks. Raises MappingError."""
    if not columns:
        return
    names = [parse_name(relation.target) for _, relation in matching]
    async with bookkeeping.connection() as target:
        relations = await read_relations(target, names)
    for name in names:
        present = relations[name].columns if name in relations else {}
        missing = [column for column in columns if column not in present]
        if missing:
            raise MappingError(
                f'target table "{name}" has no column "{missing[0]}"',
                hint=f"its columns are: {', '.join(present)}",
            )


@dataclass(frozen=True, slots=True)
class SourceKey:
    """The name of a source."""

    database: str
    sid: str | None

    @property
    def label(self) -> str:
        return SourceLabel(self.database, self.sid)


def _check_gaps(
    named: Iterable[tuple[Named, RelationRecord]], action: str, options: dict[str, Any] | None
) -> None:
    """Refuse a resync that streamer cannot make, or that needs consent to a gap in a table's past.

    Raises MappingError.
    """
    if action != "resync":
        return
    resync = Resync.from_json(options)
    for key, relation in named:
        if (mixed := find_mixed_rows(relation, resync, key)) is not None:
            raise mixed
        if (gap := find_gap(relation, resync, key)) is not None:
            raise gap


RESUMABLE = ("error", "paused")
"""The states of tables that a request to resume changes."""


@dataclass(frozen=True, slots=True)
class SourceOutcome:
    """The outcome of a request to several sources, for one source.

    ``tables``: the number of tables in the request. ``error``: why the request skips some or all
    tables.
    """

    database: str
    sid: str | None
    tables: int
    error: str | None = None
    hint: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


async def request_each(
    address: TargetAddress,
    action: str,
    sources: Sequence[SourceKey],
    *,
    tables: Sequence[str] = (),
    state: str | None = None,
    options: dict[str, Any] | None = None,
    actor: str | None = None,
) -> list[SourceOutcome]:
    """Request *action* from several sources, each in a transaction; return the outcome of each.

    *tables*: names or patterns; none means all tables. *state*: the state of the tables; None for
    any. A source that fails leaves the requests to the remaining sources in place. Raises
    MappingError for a faulty pattern, and TargetError.
    """
    scope = Scope(tuple(tables))
    for table in tables:
        parse_relation(table, "public")
    outcomes: list[SourceOutcome] = []
    async with installed(address, f"streamer {action}") as bookkeeping:
        records = {
            SourceKey(record.database, record.sid): record.source_id
            for record in await read_source_records(bookkeeping)
        }
        relations: dict[int, list[RelationRecord]] = {}
        for relation in await read_relation_records(bookkeeping):
            relations.setdefault(relation.source_id, []).append(relation)
        lost: TargetError | None = None
        for key in dict.fromkeys(sources):
            if lost is not None:
                outcomes.append(_failed(key, lost))
                continue
            source_relations = relations.get(records.get(key, -1), [])
            chosen = scope.select(key, by_name(source_relations))
            try:
                outcome = choose(key, action, chosen, state)
                if isinstance(outcome, SourceOutcome):
                    outcomes.append(outcome)
                    continue
                ids, left_out = outcome
                named = [(key, relation) for relation in chosen if relation.relation_id in ids]
                _check_gaps(named, action, options)
                await make_requests(
                    bookkeeping, ids, action, options, actor=actor or command_actor()
                )
                outcomes.append(_outcome(key, len(ids), left_out))
            except StreamerError as exc:
                outcomes.append(_failed(key, exc))
                lost = exc if isinstance(exc, TargetError) else None
    return outcomes


def choose(
    key: SourceKey, action: str, relations: Iterable[RelationRecord], state: str | None
) -> tuple[list[int], list[str]] | SourceOutcome:
    """Return the relations to request, and the omitted tables; or why no relation remains.

    A table that waits before a mass delete needs a separate decision, so no request about many
    tables resumes such a table. Pure.
    """
    states = RESUMABLE if action == "resume" else None
    chosen = [
        relation
        for relation in relations
        if state in (None, relation.state)
        and (states is None or relation.state in states)
        and (action != "pause" or relation.state != "paused")
    ]
    waiting = [r for r in chosen if action == "resume" and r.waiting_mass_delete is not None]
    ids = [relation.relation_id for relation in chosen if relation not in waiting]
    names = [relation.source for relation in waiting]
    if ids:
        return ids, names
    if names:
        return _outcome(key, 0, names)
    error = f"no table to {action}" + (f" is in state {state}" if state is not None else "")
    return SourceOutcome(key.database, key.sid, 0, error, "`streamer status` lists the tables")


def _outcome(key: SourceKey, count: int, left_out: Sequence[str]) -> SourceOutcome:
    if not left_out:
        return SourceOutcome(key.database, key.sid, count)
    more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
    return SourceOutcome(
        key.database,
        key.sid,
        count,
        f"{left_out[0]}{more}: paused before a mass delete, so name the table to resume it",
        command("resume", left_out[0], database=key.database, sid=key.sid),
    )


def _failed(key: SourceKey, error: StreamerError) -> SourceOutcome:
    hint = None if error.hint is None else redact(error.hint)
    return SourceOutcome(key.database, key.sid, 0, redact(error.message), hint)
