"""Makes one change of a source table's definition at the target, as `on_ddl` says for its kinds.

A drainer makes the changes in the stream. A copy drops the messages before its
consistent point, and makes these changes itself. A change that must wait for an operator ends the
transaction. A row of streamer.ddl then holds the statements.
"""

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Final, TypeVar

import structlog

from streamer.apply.quarantine.removed_rows import LEFT, RemovalAtSource, end_partitions
from streamer.bookkeeping.ddl_records import (
    APPLY,
    SKIP,
    WAITING,
    DdlDecision,
    delete_made,
    mark_made_for_peers,
    put_ddl,
    read_decision,
)
from streamer.bookkeeping.planned_definitions import lock_plans
from streamer.bookkeeping.relation_definitions import lock_definition, read_others
from streamer.errors.error_classes import (
    Retry,
    StreamerError,
    TargetContentionError,
    TargetSchemaError,
)
from streamer.mapping.rule_options import DdlKind, OnDdl
from streamer.postgres.quoting import quote_identifier, quote_qualified
from streamer.schema.indexes_constraints_types import TypeChange
from streamer.schema.partitions import PartitionChange
from streamer.schema.source_definition import AnyChange, ColumnChange
from streamer.schema.target_relation import TargetRelation
from streamer.schema_changes.changed_table import ChangedTable, SourceCommand
from streamer.schema_changes.changes_with_facts import (
    of_class,
    partition_translator,
    translate_changes,
)
from streamer.schema_changes.definition_stop import stop_error, undecided
from streamer.schema_changes.object_changes import Objects
from streamer.schema_changes.shared_changes import made_for_all
from streamer.schema_changes.store_new_definition import store_new_definition
from streamer.schema_changes.translate.definition_translator import Translation
from streamer.schema_changes.types_with_facts import lock_types
from streamer.target.catalog import read_relation
from streamer.target.connection import transaction
from streamer.target.foreign_functions import ForeignCalls, is_refused
from streamer.target.former_types import drop_former_types
from streamer.target.missing_types import refuse_missing_types
from streamer.util.failpoints import failpoint

log = structlog.get_logger()

_LEAVES_TYPES: Final = frozenset({DdlKind.CHANGE_TYPE, DdlKind.DROP_COLUMN})
"""Changes after which a column may no longer use a type."""
T = TypeVar("T")


class TableChange:
    """One change of the definition of a table, in the transaction of the table's session."""

    def __init__(self, table: ChangedTable, command: SourceCommand) -> None:
        self._table = table
        self._command = command
        self._target = table.session
        self._objects = Objects(table, command.message)
        self._put = partial(put_ddl, table.session, command.place, query=command.message.query)
        self._decision = DdlDecision()
        self._done: list[AnyChange] = []
        """Changes that a peer source has already made for all sources."""
        self._shown: list[str] = []
        """The statements to show to an operator; empty if streamer cannot translate the change."""
        self._after: Callable[[], Awaitable[None]] | None = None
        self.quarantined = 0
        """The number of changes that were added to quarantine."""

    async def make(self, changes: list[AnyChange]) -> None:
        """Make changes, and store the new definition.

        Request a copy of the columns whose values existing rows lack. Raises DefinitionStopError if
        an operator must decide. The caller must then call `after_rollback`.
        """
        filled: Sequence[str] = ()
        if changes and not self._command.message.is_made:
            filled = await self._change(changes)
        await store_new_definition(self._table, self._command, changes, filled)

    async def after_rollback(self) -> None:
        """Run the statements that must precede the change, or store a command that waits."""
        if self._after is not None:
            await self._after()

    async def _run_before(self, statements: Sequence[str]) -> None:
        for sql in statements:
            await self._target.execute(sql)
            source = self._table.source.label
            log.info("changing a definition at the target", sql=sql, source=source)

    async def _change(self, changes: list[AnyChange]) -> list[str]:
        """Run the statements for changes, or raise DefinitionStopError."""
        target = await self._lock(changes)
        decision = self._decision = await read_decision(self._target, self._command.place)
        self._done = made_for_all(changes, decision.made)
        words = [str(change) for change in changes]
        try:
            translation = await self._decide(target, changes)
            await self._run_all(target, changes, translation)
        except StreamerError as exc:
            if exc.retry is Retry.TIMED:
                raise
            edits, shown = decision.is_edited, self._shown
            reason = f"the statements of `ddl edit` failed: {exc.message}" if edits else exc.message
            waiting = partial(self._put, changes=words, statements=shown, reason=reason)
            self._after = partial(waiting, state=WAITING, former_state=decision.state)
            raise await stop_error(self._table, self._command, reason, shown, exc) from exc
        await self._record(target, words, translation)
        failpoint("ddl.applied")
        return translation.filled

    async def _lock(self, changes: Sequence[AnyChange]) -> TargetRelation:
        """Return the target's table, and lock the table's definition against all sessions."""
        name = self._table.mapped.mapping.target
        mapping = self._table.mapped.mapping
        if mapping.sid is not None or mapping.rule.is_disjoint:
            await lock_definition(self._target, name)
        await lock_plans(self._target, name)
        if _uses_types(changes):
            await lock_types(self._target)
        target = await read_relation(self._target, name)
        if target is None:
            raise TargetSchemaError(f'target table "{name}" does not exist')
        return target

    # ---- which statements ----------------------------------------------------------------------

    async def _decide(self, target: TargetRelation, changes: list[AnyChange]) -> Translation:
        """Return the statements to run. Raises TargetSchemaError if an operator must decide."""
        decision, plain = self._decision, Translation()
        ignored = self._with_reaction(changes, OnDdl.IGNORE)
        if decision.state is not None:
            plain = await _unless_refused(self._translate(target, changes), plain)
            self._shown = plain.sql
        if decision.statements is not None:
            if not decision.is_edited:
                raise TargetSchemaError(decision.reason or "")
            self._shown = self._shown or list(decision.statements)
            parts = [c for c in of_class(changes, PartitionChange) if c not in ignored]
            partitions = await partition_translator(self._table, self._command, target)
            return Translation(list(decision.statements), leaving=partitions.leaving(parts))
        if decision.state == SKIP:
            doubted = [change for change, _ in plain.doubts]
            ignored += await self._skipped(target, changes, ignored, doubted)
        translation = await self._translate(target, changes, ignored)
        self._shown = self._shown or translation.sql
        stops = [c for c in self._with_reaction(changes, OnDdl.STOP) if c not in self._done]
        doubts = [doubt for _, doubt in translation.doubts]
        if not decision.is_decided and (doubts or (stops and translation.sql)):
            raise undecided(stops, doubts, decision.reason)
        if translation.before:
            self._after = partial(self._run_before, translation.before)
            listed = "; ".join(translation.before)
            raise TargetContentionError(f"streamer first commits these statements: {listed}")
        return translation

    def _with_reaction(self, changes: Sequence[AnyChange], reaction: OnDdl) -> list[AnyChange]:
        return [c for c in changes if self._table.source.on_ddl[c.kind] is reaction]

    async def _translate(
        self,
        target: TargetRelation,
        changes: Sequence[AnyChange],
        ignored: Sequence[AnyChange] = (),
    ) -> Translation:
        return await translate_changes(
            self._table, self._command, target, changes, ignored, self._done
        )

    async def _skipped(
        self,
        target: TargetRelation,
        changes: list[AnyChange],
        ignored: list[AnyChange],
        doubted: list[AnyChange],
    ) -> list[AnyChange]:
        """Return the changes that `ddl skip` leaves out: the changes that stopped the table.

        If the table stopped for a different reason, `ddl skip` leaves out all changes.
        """
        stops = self._with_reaction(changes, OnDdl.STOP)
        stopped = [c for c in changes if c in stops or c in doubted]
        stopped += await self._foreign(target, changes, [*ignored, *stopped])
        return stopped or [c for c in changes if c not in ignored]

    async def _foreign(
        self, target: TargetRelation, changes: list[AnyChange], ignored: list[AnyChange]
    ) -> list[AnyChange]:
        """Return the changes, except *ignored*, whose expressions the target may not run.

        To try a change, the method first makes the harmless changes before it.
        """

        async def make(ignored: Sequence[AnyChange]) -> None:
            translation = await self._translate(target, changes, ignored)
            await self._run(translation, await self._calls(changes), is_edited=False)

        async def refuses(ignored: Sequence[AnyChange]) -> bool:
            return await _unless_refused(
                is_refused(self._target, lambda: make(ignored)), default=False
            )

        foreign: list[AnyChange] = []
        remaining = [change for change in changes if change not in ignored]
        if remaining and await refuses(ignored):
            for number, change in enumerate(remaining, 1):
                if await refuses(ignored + foreign + remaining[number:]):
                    foreign.append(change)
        return foreign

    # ---- running -------------------------------------------------------------------------------

    async def _run_all(
        self,
        target: TargetRelation,
        changes: Sequence[AnyChange],
        translation: Translation,
    ) -> None:
        """Run the statements, and store the plans."""
        await refuse_missing_types(self._target, translation.needed_types, self._table.read_types)
        # The last of several tenants drops the former column together with its indexes and
        # constraints.
        is_shared = target.is_shared(self._table.mapped.mapping)
        may_lose = is_shared and any(c.kind is DdlKind.RENAME_COLUMN for c in changes)
        names = target.object_names if may_lose else frozenset()
        # The operator has read the expressions. With `ddl skip`, only the remaining changes are
        # made.
        calls = None if self._decision.state == APPLY else await self._calls(changes)
        if translation.leaving:
            removed_at = datetime.fromisoformat(self._command.at)
            removal = RemovalAtSource(LEFT, self._command.place.lsn, removed_at)
            self.quarantined = await end_partitions(
                self._target, self._table.mapped, target, translation.leaving, removal
            )
        await self._run(translation, calls, is_edited=self._decision.is_edited)
        if _uses_types(changes):
            translation.statements += await drop_former_types(self._target)
        await self._plan(translation, changes, names)

    async def _run(
        self, translation: Translation, calls: ForeignCalls | None, *, is_edited: bool
    ) -> None:
        """Run statements; statements that an operator edited may omit schemas of tables.

        *calls*: finds expressions with foreign functions, which a later statement may run.
        """
        path = await self._target.fetch_value("select pg_catalog.current_setting('search_path')")
        if is_edited:
            namespace = quote_identifier(self._table.mapped.mapping.target.namespace)
            await self._target.execute(f"set local search_path = {namespace}, public")
        for number, statement in enumerate(translation.statements):
            if (substitute := translation.substitutes.get(statement)) is None:
                await self._target.execute(statement)
            elif not await self._try_statement(statement):
                translation.statements[number], column = substitute
                await self._target.execute(translation.statements[number])
                if column not in translation.unfinished:
                    translation.unfinished.append(column)
            if calls is not None:
                await calls.refuse()
        if is_edited:
            await self._target.fetch_value(
                "select pg_catalog.set_config('search_path', $1, true)", path
            )

    async def _try_statement(self, statement: str) -> bool:
        """Run *statement* in a savepoint; return False if the target rejects it."""
        try:
            async with transaction(self._target):
                await self._target.execute(statement)
        except StreamerError as exc:
            if exc.retry is Retry.TIMED or self._target.is_closed:
                raise
            return False
        return True

    async def _calls(self, changes: Sequence[AnyChange]) -> ForeignCalls:
        name = self._table.mapped.mapping.target
        types = [change.after.full_name for change in of_class(changes, TypeChange)]
        table = quote_qualified(name.namespace, name.name)
        return await ForeignCalls.before(self._target, [table], types)

    async def _plan(
        self, translation: Translation, changes: Sequence[AnyChange], names: frozenset[str]
    ) -> None:
        """Store plans for the objects that the builder makes on the present columns.

        *names*: the names of indexes and constraints that a renamed column may have lost.
        """
        mapped = self._table.mapped
        target = await read_relation(self._target, mapped.mapping.target)
        if target is None:
            return  # dropped by a statement of the operator
        if translation.objects is not None:
            await self._objects.store(translation.objects)
        if names:
            peers = await read_others(self._target, mapped.relation_id)
            objects = self._command.definition.objects or ()
            await self._objects.plan_lost(target, peers, objects, names)
        if columns := of_class(changes, ColumnChange):
            await self._objects.renew_plans(target)
            await self._objects.plan_columns(target, columns, translation.unfinished)

    async def _record(
        self, target: TargetRelation, words: Sequence[str], translation: Translation
    ) -> None:
        """Record the change, also for the peers that wait to make the same change."""
        await self._put(
            changes=words,
            statements=translation.sql,
            reason=translation.reason,
            state="skipped" if self._decision.state == SKIP else "applied",
        )
        place = self._command.place
        if target.is_shared(self._table.mapped.mapping):
            await delete_made(self._target, place)
        if translation.is_for_all:
            await mark_made_for_peers(self._target, place, self._command.message.query, words)
        log.info(
            "definition changed",
            source=self._table.source.label,
            table=str(self._table.mapped.mapping.source),
            changes="; ".join(words),
            sql="; ".join(translation.sql),
        )


def _uses_types(changes: Sequence[AnyChange]) -> bool:
    """Whether *changes* may change a type, or end its use."""
    return any(isinstance(c, TypeChange) or c.kind in _LEAVES_TYPES for c in changes)


async def _unless_refused(attempt: Awaitable[T], default: T) -> T:
    """Return the result of *attempt*; *default* after a permanent error."""
    try:
        return await attempt
    except StreamerError as exc:
        if exc.retry is Retry.TIMED:
            raise
        return default
