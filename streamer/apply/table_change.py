"""Makes one change of a source table's definition at the target, as `on_ddl` says for its kinds.

A drainer makes the changes that the stream brings. A copy drops the messages in front of its
consistent point, and makes their changes itself. A change that has to wait for an operator ends the
transaction. A row of streamer.ddl then holds the statements.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from streamer.apply.lane import MappedRelation
from streamer.apply.quarantine.definition_changes import follow_changes
from streamer.apply.sql.definition import DefinitionTranslator, Translation
from streamer.errors import DefinitionStopError, Retry, StreamerError, TargetSchemaError
from streamer.failpoints import failpoint
from streamer.hints import command
from streamer.mapping.definition import ColumnChange, SourceDefinition
from streamer.mapping.rules import OnDdl, SourceMapping
from streamer.postgres.quoting import quote_identifier
from streamer.progress.ddl import (
    SKIP,
    WAITING,
    DdlDecision,
    DdlPlace,
    put_ddl,
    read_decision,
    read_others,
    rename_unfilled,
    store_definition,
)
from streamer.target.add_columns import store_known
from streamer.target.catalog import TargetRelation, holds_rows, read_relation
from streamer.target.connection import TargetConnection

log = structlog.get_logger()


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


async def store_waiting(target: TargetConnection, waiting: Waiting) -> None:
    """Store a command for which a decision is due, after the rollback."""
    await put_ddl(
        target,
        waiting.place,
        query=waiting.query,
        changes=waiting.changes,
        statements=waiting.statements,
        reason=waiting.reason,
        state=WAITING,
        seen=waiting.seen,
    )


class TableChange:
    """One change of the definition of *mapped*, in the transaction that *target* is in.

    *query*: the statement at the source. *told*: words for the cause, as in an error.
    """

    def __init__(
        self,
        target: TargetConnection,
        source: SourceMapping,
        mapped: MappedRelation,
        place: DdlPlace,
        *,
        query: str,
        told: str,
    ) -> None:
        self._target = target
        self._source = source
        self._mapped = mapped
        self._place = place
        self._query = query
        self._told = told
        self.waiting: Waiting | None = None
        """Set when an operator has to decide."""

    async def make(
        self, changes: list[ColumnChange], after: SourceDefinition, *, brings_rows: bool = False
    ) -> None:
        """Make changes and store the definition *after* them.

        Columns whose values existing rows lack are requested, unless a copy *brings_rows*. Raises
        DefinitionStopError if an operator has to decide, after which `store_waiting` is due.
        """
        filled = await self._change(changes) if changes else []
        await self._store(after, [] if brings_rows else filled, changes)

    async def _store(
        self, definition: SourceDefinition, filled: Sequence[str], changes: Sequence[ColumnChange]
    ) -> None:
        """Store the definition that the target has now, and request columns for existing rows."""
        mapped, mapping = self._mapped, self._mapped.mapping
        target = await read_relation(self._target, mapping.target)
        computed = {name for name, _ in mapping.rule.set}
        there = set() if target is None else target.columns.keys() - computed
        columns = {
            name: number if mapping.target_column(name) in there else -number
            for name, number in definition.numbers.items()
        }
        await store_definition(self._target, mapped.relation_id, definition)
        types = {
            c.name: c.type for c in definition.columns if mapping.target_column(c.name) in there
        }
        await follow_changes(self._target, mapped.relation_id, changes, types)
        await rename_unfilled(self._target, mapped.relation_id, self._moved(changes, there))
        sid = mapped.source.sid if target is not None and target.has_sid else None
        if filled and not await holds_rows(self._target, mapping.target, sid):
            filled = []
        await store_known(self._target, mapped.relation_id, columns, filled)

    def _moved(self, changes: Sequence[ColumnChange], there: set[str]) -> dict[str, str | None]:
        """Return columns of the target by their former names; None for one that is gone."""
        moved: dict[str, str | None] = {}
        for change in changes:
            if change.before is None:
                continue
            former = self._mapped.mapping.target_column(change.before.name)
            if former is None or (change.after is not None and change.after.name == former):
                continue
            name = None
            if change.after is not None:
                name = self._mapped.mapping.target_column(change.after.name)
            if former != name and former not in moved:
                moved[former] = name if name in there else None
        return moved

    async def _change(self, changes: list[ColumnChange]) -> list[str]:
        """Run the statements for changes, or raise DefinitionStopError."""
        mapped = self._mapped
        target = await read_relation(self._target, mapped.mapping.target)
        if target is None:
            raise TargetSchemaError(f'target table "{mapped.mapping.target}" does not exist')
        known = await read_decision(self._target, self._place)
        decision = None if known is None or known.state == WAITING else known
        words = [str(change) for change in changes]
        try:
            translation = await self._translate(target, changes, decision)
            stops = [c for c in changes if self._source.on_ddl[c.kind] is OnDdl.STOP]
            if stops and decision is None and translation.statements:
                tried = None if known is None else known.reason
                raise _undecided(stops, tried)
            is_edited = decision is not None and decision.statements is not None
            await self._run(translation, is_edited=is_edited)
        except StreamerError as exc:
            if exc.retry is Retry.TIMED:
                raise
            reason = exc.message
            statements = self._statements_of(target, changes)
            seen = None if decision is None else decision.state
            self.waiting = Waiting(self._place, self._query, words, statements, reason, seen)
            raise self._stop(reason, statements) from exc
        await put_ddl(
            self._target,
            self._place,
            query=self._query,
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
        self, target: TargetRelation, changes: list[ColumnChange], decision: DdlDecision | None
    ) -> Translation:
        mapped = self._mapped
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

    def _statements_of(self, target: TargetRelation, changes: list[ColumnChange]) -> list[str]:
        """Return the statements to show; none where the change cannot be translated."""
        mapped = self._mapped
        translator = DefinitionTranslator(mapped.mapping, target, sid=mapped.source.sid)
        try:
            return translator.translate(changes).statements
        except TargetSchemaError:
            return []

    async def _run(self, translation: Translation, *, is_edited: bool) -> None:
        """Run statements; those that an operator has edited find tables without a schema."""
        path = await self._target.fetch_value("select pg_catalog.current_setting('search_path')")
        if is_edited:
            namespace = quote_identifier(self._mapped.mapping.target.namespace)
            await self._target.execute(f"set local search_path = {namespace}, public")
        for statement in translation.statements:
            await self._target.execute(statement)
        if is_edited:
            await self._target.fetch_value(
                "select pg_catalog.set_config('search_path', $1, true)", path
            )

    def _stop(self, reason: str, statements: Sequence[str]) -> DefinitionStopError:
        name, own = str(self._mapped.mapping.source), self._source
        apply, skip, edit = (
            command(f"ddl {action}", name, *options, database=own.database, sid=own.sid)
            for action, options in (
                ("apply", ()),
                ("skip", ()),
                ("edit", ("--file", "change.sql")),
            )
        )
        sql = "; ".join(statements) or "(none)"
        error = DefinitionStopError(
            f'table "{name}" waits for a decision: {reason}; {self._told}',
            hint=f"at the target this would be: {sql}; continue with `{apply}`, run other "
            f"statements there with `{edit}`, or leave the target as it is with `{skip}`",
        )
        error.subject = self._mapped
        return error


def _undecided(stops: Sequence[ColumnChange], tried: str | None) -> TargetSchemaError:
    """Say why a change waits. *tried*: the reason that is stored, as of a decision that failed."""
    listed = ", ".join(map(str, stops))
    return TargetSchemaError(tried or f"on_ddl is stop for {listed}")
