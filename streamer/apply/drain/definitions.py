"""Applies changes of source definitions, in the target transaction of their place in the stream.

A drainer writes each lane transaction with such a change by itself. Earlier changes of the lane are
in the target by then, and later ones follow. The statements, the new definition and the lane's
progress commit together, so a crash leaves all of them or none.

`on_ddl` decides by kind. A change that has to wait for an operator ends the transaction. A row of
streamer.ddl then holds the statements, and the drainer tries again every few seconds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import structlog

from streamer.apply.lane import MappedRelation
from streamer.apply.lane_transaction import LaneTransaction
from streamer.apply.quarantine.writer import QuarantineWriter
from streamer.apply.sql.definition import DefinitionTranslator, Translation
from streamer.decode.pgoutput import Redefinition
from streamer.errors import DefinitionStopError, Retry, StreamerError, TargetSchemaError
from streamer.failpoints import failpoint
from streamer.hints import command
from streamer.mapping.definition import (
    ColumnChange,
    DefinitionMessage,
    SourceDefinition,
    difference,
)
from streamer.mapping.rules import OnDdl, SourceMapping
from streamer.postgres.quoting import quote_identifier
from streamer.progress.ddl import (
    SKIP,
    WAITING,
    DdlDecision,
    DdlPlace,
    put_ddl,
    read_decision,
    read_definition,
    read_others,
    store_definition,
)
from streamer.target.add_columns import store_known
from streamer.target.catalog import TargetRelation, holds_rows, read_relation
from streamer.target.connection import TargetConnection

log = structlog.get_logger()


def cut(piece: LaneTransaction) -> Iterator[LaneTransaction]:
    """Yield the parts of a piece: each is of rows, or one message about a definition. Pure."""
    rows: list[int] = []
    for number, (_, changes) in enumerate(piece.changes):
        if isinstance(changes.relation, Redefinition):
            if rows:
                yield _part(piece, rows)
            rows = []
            yield _part(piece, [number])
        else:
            rows.append(number)
    if rows:
        yield _part(piece, rows)


def _part(piece: LaneTransaction, numbers: Sequence[int]) -> LaneTransaction:
    return replace(piece, changes=[piece.changes[number] for number in numbers])


@dataclass(frozen=True, slots=True)
class Waiting:
    """A command that waits for a decision: its record, written after the rollback."""

    place: DdlPlace
    query: str
    changes: Sequence[str]
    statements: Sequence[str]
    reason: str
    seen: str | None
    """The decision that did not help."""


class Definitions:
    """Applies the messages about definitions in one target transaction."""

    def __init__(self, writer: QuarantineWriter, source: SourceMapping) -> None:
        self._writer = writer
        self._source = source
        self._counts: dict[MappedRelation, int] = {}
        self.waiting: Waiting | None = None

    @property
    def has_applied(self) -> bool:
        """Whether the transaction has met a message about a definition."""
        return bool(self._counts)

    @property
    def _target(self) -> TargetConnection:
        return self._writer.target

    async def apply(self, part: LaneTransaction) -> list[MappedRelation]:
        """Apply a part that `cut` returned; return the relations that it concerns.

        Raises DefinitionStopError if an operator has to decide, after which `store_waiting` is due.
        """
        concerned = []
        for mapped, changes in part.changes:
            for payload in changes.payloads:
                if mapped.has(part.transaction):
                    continue
                number = self._counts[mapped] = self._counts.get(mapped, 0) + 1
                place = DdlPlace(mapped.relation_id, part.transaction.final_lsn, number)
                message = DefinitionMessage.parse(payload)
                assert message is not None
                await self._apply(mapped, place, message)
                concerned.append(mapped)
        return concerned

    def forget_plans(self) -> None:
        """Make other plans: the definitions of these relations have changed, or not after all."""
        for mapped in self._counts:
            mapped.plan = None

    async def store_waiting(self) -> None:
        """Store the command for which a decision is due, after the rollback."""
        if (waiting := self.waiting) is None:
            return
        await put_ddl(
            self._target,
            waiting.place,
            query=waiting.query,
            changes=waiting.changes,
            statements=waiting.statements,
            reason=waiting.reason,
            state=WAITING,
            seen=waiting.seen,
        )

    async def _apply(
        self, mapped: MappedRelation, place: DdlPlace, message: DefinitionMessage
    ) -> None:
        known = await read_definition(self._target, mapped.relation_id)
        changes = []
        if known is not None:
            changes = difference(known, message.definition, computes_values=message.computes_values)
        filled = []
        if changes:
            filled = await self._change(mapped, place, message, changes)
        if known is None or changes:
            await self._store(mapped, message.definition, filled)
        mapped.plan = None

    async def _store(
        self, mapped: MappedRelation, definition: SourceDefinition, filled: Sequence[str]
    ) -> None:
        """Store the definition that the target has now, and request columns for existing rows."""
        mapping = mapped.mapping
        target = await read_relation(self._target, mapping.target)
        computed = {name for name, _ in mapping.rule.set}
        there = set() if target is None else target.columns.keys() - computed
        columns = {
            name: number if mapping.target_column(name) in there else -number
            for name, number in definition.numbers.items()
        }
        await store_definition(self._target, mapped.relation_id, definition)
        sid = mapped.source.sid if target is not None and target.has_sid else None
        if filled and not await holds_rows(self._target, mapping.target, sid):
            filled = []
        await store_known(self._target, mapped.relation_id, columns, filled)

    async def _change(
        self,
        mapped: MappedRelation,
        place: DdlPlace,
        message: DefinitionMessage,
        changes: list[ColumnChange],
    ) -> list[str]:
        """Make changes; return the columns of the target to bring for existing rows."""
        target = await read_relation(self._target, mapped.mapping.target)
        if target is None:
            raise TargetSchemaError(f'target table "{mapped.mapping.target}" does not exist')
        known = await read_decision(self._target, place)
        decision = None if known is None or known.state == WAITING else known
        words = [str(change) for change in changes]
        try:
            translation = await self._translate(mapped, target, changes, decision)
            stops = [c for c in changes if self._source.on_ddl[c.kind] is OnDdl.STOP]
            if stops and decision is None and translation.statements:
                tried = None if known is None else known.reason
                raise _undecided(stops, tried)
            await self._run(translation, mapped if decision and decision.statements else None)
        except StreamerError as exc:
            if exc.retry is Retry.TIMED:
                raise
            reason = exc.message
            statements = self._statements_of(mapped, target, changes)
            seen = None if decision is None else decision.state
            self.waiting = Waiting(place, message.query, words, statements, reason, seen)
            raise self._stop(mapped, message, reason, statements) from exc
        await put_ddl(
            self._target,
            place,
            query=message.query,
            changes=words,
            statements=translation.statements,
            reason=translation.reason,
            state="skipped" if decision is not None and decision.state == SKIP else "applied",
        )
        log.info(
            "definition changed",
            source=self._source.label,
            table=str(mapped.mapping.source),
            changes="; ".join(words),
            sql="; ".join(translation.statements),
        )
        failpoint("ddl.applied")
        return translation.filled

    async def _translate(
        self,
        mapped: MappedRelation,
        target: TargetRelation,
        changes: list[ColumnChange],
        decision: DdlDecision | None,
    ) -> Translation:
        if decision is not None and decision.statements is not None:
            return Translation(list(decision.statements))
        others = await read_others(self._target, mapped.relation_id) if target.has_sid else []
        translator = DefinitionTranslator(
            mapped.mapping, target, sid=mapped.source.sid, others=others
        )
        on_ddl = self._source.on_ddl
        ignored = [c for c in changes if on_ddl[c.kind] is OnDdl.IGNORE]
        if decision is not None and decision.state == SKIP:
            # Changes beside those for which the table stopped need no decision.
            stopped = [c for c in changes if on_ddl[c.kind] is OnDdl.STOP]
            ignored += stopped or [c for c in changes if c not in ignored]
        found = translator.translate([c for c in changes if c not in ignored])
        found.statements += translator.ignore(ignored).statements
        return found

    def _statements_of(
        self, mapped: MappedRelation, target: TargetRelation, changes: list[ColumnChange]
    ) -> list[str]:
        """Return the statements to show; none where the change cannot be translated."""
        translator = DefinitionTranslator(mapped.mapping, target, sid=mapped.source.sid)
        try:
            return translator.translate(changes).statements
        except TargetSchemaError:
            return []

    async def _run(self, translation: Translation, edited: MappedRelation | None) -> None:
        """Run statements; those that an operator has *edited* find tables without a schema."""
        path = await self._target.fetch_value("select pg_catalog.current_setting('search_path')")
        if edited is not None:
            namespace = quote_identifier(edited.mapping.target.namespace)
            await self._target.execute(f"set local search_path = {namespace}, public")
        for statement in translation.statements:
            await self._target.execute(statement)
        if edited is not None:
            await self._target.fetch_value(
                "select pg_catalog.set_config('search_path', $1, true)", path
            )

    def _stop(
        self,
        mapped: MappedRelation,
        message: DefinitionMessage,
        reason: str,
        statements: Sequence[str],
    ) -> DefinitionStopError:
        name, own = str(mapped.mapping.source), self._source
        apply, skip = (
            command(f"ddl {action}", name, database=own.database, sid=own.sid)
            for action in ("apply", "skip")
        )
        sql = "; ".join(statements) or "(none)"
        error = DefinitionStopError(
            f'table "{name}" waits for a decision: {reason}; the source ran: '
            f"{message.query.strip() or message.tag}",
            hint=f"at the target this would be: {sql}; continue with `{apply}`, or leave the "
            f"target as it is with `{skip}`",
        )
        error.subject = mapped
        return error


def _undecided(stops: Sequence[ColumnChange], tried: str | None) -> TargetSchemaError:
    """Say why a change waits. *tried*: the reason that is stored, as of a decision that failed."""
    listed = ", ".join(map(str, stops))
    return TargetSchemaError(tried or f"on_ddl is stop for {listed}")
