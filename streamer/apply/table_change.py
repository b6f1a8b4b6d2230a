"""Makes one change of a source table's definition at the target, as `on_ddl` says for its kinds.

A drainer makes the changes that the stream brings. A copy drops the messages in front of its
consistent point, and makes their changes itself. A change that has to wait for an operator ends the
transaction. A row of streamer.ddl then holds the statements.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

import structlog

from streamer.apply.kept_labels import missing_labels, read_kept_labels
from streamer.apply.lane import MappedRelation
from streamer.apply.object_changes import (
    Objects,
    Tables,
    lock_types,
    read_there,
    translate_types,
)
from streamer.apply.quarantine.follow_definitions import follow_changes
from streamer.apply.quarantine.removed_rows import LEFT, RemovalAtSource, end_partitions
from streamer.apply.sql.definition_changes import DefinitionTranslator, Translation
from streamer.apply.sql.generated import GeneratedFacts
from streamer.apply.sql.partitions import PartitionTranslator
from streamer.apply.sql.type_changes import TypeTranslation, columns_of
from streamer.definitions.missing_types import AskTypes, refuse_types_of_extensions
from streamer.errors import (
    DefinitionStopError,
    Retry,
    SharedTargetError,
    StreamerError,
    TargetContentionError,
    TargetSchemaError,
)
from streamer.failpoints import failpoint
from streamer.mapping.definition import (
    AnyChange,
    ColumnChange,
    SourceDefinition,
    all_differences,
    columns_after,
)
from streamer.mapping.definition_message import DefinitionMessage
from streamer.mapping.objects import ObjectChange, TypeChange, base_type
from streamer.mapping.options import DdlKind, OnDdl, TableType
from streamer.mapping.partitions import PartitionChange
from streamer.mapping.resync import after_loss
from streamer.mapping.rules import SourceMapping
from streamer.postgres.quoting import quote_identifier, quote_qualified
from streamer.progress.definition_changes import (
    MADE,
    SKIP,
    WAITING,
    DdlDecision,
    DdlPlace,
    forget_made,
    put_ddl,
    put_made,
    read_decision,
)
from streamer.progress.planned_definitions import hold_plans
from streamer.progress.relation_columns import read_unfilled, store_known
from streamer.progress.relation_definitions import (
    lock_definition,
    read_definition,
    read_others,
    read_unchanged,
    read_users,
    rename_unfilled,
    store_definition,
    store_former_labels,
)
from streamer.remedies import Remedy, run
from streamer.target.catalog import (
    TargetRelation,
    holds_rows,
    read_partitions,
    read_relation,
)
from streamer.target.connection import TargetConnection, transaction
from streamer.target.foreign_functions import ForeignCalls, is_refused
from streamer.target.former_types import drop_former_types

log = structlog.get_logger()


_KEEPS_VALUES: Final = frozenset({DdlKind.CREATE_TYPE, DdlKind.ADD_ENUM_VALUE})
"""Changes after which a type takes all values that it took before."""
_BRINGS_TYPES: Final = frozenset({DdlKind.ADD_COLUMN, DdlKind.CHANGE_TYPE, DdlKind.WIDEN_TYPE})
"""Changes after which a column has another type than before."""
_LEAVES_TYPES: Final = frozenset({DdlKind.CHANGE_TYPE, DdlKind.DROP_COLUMN})
"""Changes after which a column may no longer use a type."""
_MADE_FOR_ALL: Final = frozenset({DdlKind.CHANGE_TYPE, DdlKind.WIDEN_TYPE})
"""Changes of columns that one source makes for all, like all changes of types. A rename is none:
earlier rows of the transaction of another source may still have the former name.
"""


AskPresent = Callable[[], Awaitable[SourceDefinition | None]]
"""Asks a source for the definition that its table has now."""


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


class TableChange:
    """One change of the definition of *mapped*, in the transaction that *target* is in.

    *definition*: at the source, after *message*. *tables*: of the source. *at*: the source's time
    of the change. *told*: words for the cause, as in an error; None for the statement that the
    message has. *ask_types*, *ask_present*: ask the source.
    """

    def __init__(
        self,
        target: TargetConnection,
        source: SourceMapping,
        tables: Tables,
        mapped: MappedRelation,
        place: DdlPlace,
        message: DefinitionMessage,
        definition: SourceDefinition,
        at: str,
        ask_types: AskTypes,
        ask_present: AskPresent,
        told: str | None = None,
    ) -> None:
        self._target = target
        self._source = source
        self._tables = tables
        self._mapped = mapped
        self.place = place
        self._message = message
        self._definition = definition
        self._at = at
        self._ask_types = ask_types
        self._ask_present = ask_present
        self._made: Sequence[str] = ()
        self._is_last = False
        self._brings_rows = False
        ran = message.query.strip() or message.tag
        self._told = told or f"the source ran: {ran}"
        self._waiting: Waiting | None = None
        """Set when an operator has to decide."""
        self._before: Sequence[str] = ()
        self.quarantined = 0
        """By how much the number of changes in quarantine has grown."""

    async def make(
        self, changes: list[AnyChange], *, brings_rows: bool = False, is_late: bool = False
    ) -> None:
        """Make changes, and store the definition after them.

        Columns whose values existing rows lack are requested, unless a copy *brings_rows*. If the
        definition *is_late*, so are all new columns: another one may have had the name before.
        Raises DefinitionStopError if an operator has to decide. `after_rollback` is due then.
        """
        self._brings_rows = brings_rows
        filled = await self._change(changes) if changes and not self._message.is_made else []
        if is_late:
            target = await read_relation(self._target, self._mapped.mapping.target)
            there = {} if target is None else target.columns
            filled = [*filled, *(name for name in self._added(changes) if name in there)]
        await self._store(self._definition, [] if brings_rows else filled, changes)

    async def after_rollback(self) -> None:
        """Make the statements that have to come before, or store a command that waits."""
        for sql in self._before:
            await self._target.execute(sql)
            log.info("statement in front of a definition", sql=sql, source=self._source.label)
        if (waiting := self._waiting) is not None:
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

    def _added(self, changes: Sequence[AnyChange]) -> Iterator[str]:
        """Yield the target's names of new columns."""
        for change in changes:
            if change.kind is DdlKind.ADD_COLUMN and isinstance(change, ColumnChange):
                name = self._mapped.mapping.target_column(change.column)
                if name is not None:
                    yield name

    async def _store(
        self, definition: SourceDefinition, filled: Sequence[str], changes: Sequence[AnyChange]
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
        if renamed := _renamed_labels(changes):
            await store_former_labels(self._target, mapped.relation_id, renamed, definition)
        types = {
            c.name: c.type for c in definition.columns if mapping.target_column(c.name) in there
        }
        columns_changed = [change for change in changes if isinstance(change, ColumnChange)]
        await follow_changes(self._target, mapped.relation_id, columns_changed, types)
        moved = self._moved(columns_changed, there)
        await rename_unfilled(self._target, mapped.relation_id, moved)
        sid = mapped.source.sid if target is not None and target.has_sid else None
        if filled and not await holds_rows(self._target, mapping.target, sid):
            filled = []
        await store_known(self._target, mapped.relation_id, columns, filled)

    def _moved(self, changes: Sequence[ColumnChange], there: set[str]) -> dict[str, str | None]:
        """Return columns of the target by their former names; None for one that is gone."""
        moved: dict[str, str | None] = {}
        mapping = self._mapped.mapping
        for before, column in columns_after(changes).items():
            former = mapping.target_column(before)
            name = None if column is None else mapping.target_column(column.name)
            if former is not None and former != name:
                moved[former] = name if name in there else None
        return moved

    async def _change(self, changes: list[AnyChange]) -> list[str]:
        """Run the statements for changes, or raise DefinitionStopError."""
        mapped = self._mapped
        if mapped.source.sid is not None:
            await lock_definition(self._target, mapped.mapping.target)
        await hold_plans(self._target, mapped.mapping.target)
        uses_types = any(isinstance(c, TypeChange) or c.kind in _LEAVES_TYPES for c in changes)
        if uses_types:
            await lock_types(self._target)
        target = await read_relation(self._target, mapped.mapping.target)
        if target is None:
            raise TargetSchemaError(f'target table "{mapped.mapping.target}" does not exist')
        known = await read_decision(self._target, self.place)
        decision = None if known is None or known.state in (WAITING, MADE) else known
        self._made = () if known is None else known.made
        words = [str(change) for change in changes]
        shown: list[str] = []
        try:
            if known is not None:
                shown = await self._statements_of(target, changes)
                if decision is None and known.statements is not None:
                    raise TargetSchemaError(known.reason or "")  # the operator has others in mind
            translation = await self._translate(target, changes, decision)
            shown = shown or translation.sql
            stops = [c for c in changes if self._source.on_ddl[c.kind] is OnDdl.STOP]
            stops = [c for c in stops if c not in self._made_for_all(changes)]
            doubts = [doubt for _, doubt in translation.doubts]
            if decision is None and (doubts or (stops and translation.sql)):
                tried = None if known is None else known.reason
                raise _undecided(stops, doubts, tried)
            if translation.before:
                self._before = translation.before
                listed = "; ".join(translation.before)
                raise TargetContentionError(f"to be committed before the change: {listed}")
            is_edited = decision is not None and decision.statements is not None
            await refuse_types_of_extensions(
                self._target, translation.needed_types, self._ask_types
            )
            # The last of several tenants drops the former column, with its indexes and constraints.
            may_lose = target.has_sid and any(c.kind is DdlKind.RENAME_COLUMN for c in changes)
            names = await self._objects.read_names(target) if may_lose else frozenset()
            # The operator has read the expressions, and skipping makes other changes only.
            is_read = decision is not None and decision.state != SKIP
            calls = None if is_read else await self._calls(changes)
            if translation.leaving:
                removal = RemovalAtSource(LEFT, self.place.lsn, datetime.fromisoformat(self._at))
                self.quarantined = await end_partitions(
                    self._target, mapped, target, translation.leaving, removal
                )
            await self._run(translation, calls, is_edited=is_edited)
            if uses_types:
                translation.statements += await drop_former_types(self._target)
            await self._plan(translation, changes, names)
        except StreamerError as exc:
            if exc.retry is Retry.TIMED:
                raise
            reason, seen = exc.message, None if known is None else known.state
            if decision is not None and decision.statements is not None:
                reason = f"the statements of `ddl edit` failed: {reason}"
            self._waiting = Waiting(self.place, self._message.query, words, shown, reason, seen)
            way = await self._way_past(exc)
            raise self._stop(reason, shown, exc, way) from exc
        await put_ddl(
            self._target,
            self.place,
            query=self._message.query,
            changes=words,
            statements=translation.sql,
            reason=translation.reason,
            state="skipped" if decision is not None and decision.state == SKIP else "applied",
        )
        if target.has_sid:
            await forget_made(self._target, self.place)
        if self._is_last and not is_edited:
            await put_made(self._target, self.place, self._message.query, words)
        log.info(
            "definition changed",
            source=self._source.label,
            table=str(mapped.mapping.source),
            changes="; ".join(words),
            sql="; ".join(translation.sql),
        )
        failpoint("ddl.applied")
        return translation.filled

    async def _translate(
        self, target: TargetRelation, changes: list[AnyChange], decision: DdlDecision | None
    ) -> Translation:
        on_ddl = self._source.on_ddl
        ignored = [c for c in changes if on_ddl[c.kind] is OnDdl.IGNORE]
        if decision is not None and decision.statements is not None:
            parts = [c for c in changes if isinstance(c, PartitionChange) and c not in ignored]
            leaving = (await self._partitions(target)).leaving(parts)
            return Translation(list(decision.statements), leaving=leaving)
        if decision is not None and decision.state == SKIP:
            # Changes beside those for which the table stopped need no decision.
            doubted = await self._doubted(target, changes)
            stopped = [c for c in changes if on_ddl[c.kind] is OnDdl.STOP or c in doubted]
            stopped += await self._foreign(target, changes, [*ignored, *stopped])
            ignored += stopped or [c for c in changes if c not in ignored]
        return await self._translation(target, changes, ignored)

    async def _foreign(
        self, target: TargetRelation, changes: list[AnyChange], ignored: list[AnyChange]
    ) -> list[AnyChange]:
        """Return changes besides *ignored* whose expressions the target may not run.

        A trial of a change makes the harmless ones before it, too.
        """
        foreign: list[AnyChange] = []
        left = [change for change in changes if change not in ignored]
        if left and await self._is_refused(target, changes, ignored):
            for number, change in enumerate(left, 1):
                if await self._is_refused(target, changes, ignored + foreign + left[number:]):
                    foreign.append(change)
        return foreign

    async def _is_refused(
        self, target: TargetRelation, changes: list[AnyChange], ignored: Sequence[AnyChange]
    ) -> bool:
        async def make() -> None:
            translation = await self._translation(target, changes, ignored)
            await self._run(translation, await self._calls(changes), is_edited=False)

        try:
            return await is_refused(self._target, make)
        except StreamerError as exc:
            if exc.retry is Retry.TIMED:
                raise
            return False

    async def _doubted(self, target: TargetRelation, changes: list[AnyChange]) -> list[AnyChange]:
        """Return changes for which the table stopped although `on_ddl` applies them."""
        try:
            return [change for change, _ in (await self._translation(target, changes, [])).doubts]
        except StreamerError as exc:
            if exc.retry is Retry.TIMED:
                raise
            return []

    async def _translation(
        self, target: TargetRelation, changes: list[AnyChange], ignored: Sequence[AnyChange]
    ) -> Translation:
        """Return the statements for all changes but *ignored* ones.

        Dropped and renamed objects come first, then types, then columns, which may need either.
        """
        mapped = self._mapped
        others, unchanged = await self._read_others(target, changes)
        self._is_last = bool(others) and not unchanged and not ignored
        done = self._made_for_all(changes)
        made = [change for change in changes if change not in ignored and change not in done]
        of_columns = [c for c in made if isinstance(c, ColumnChange)]
        kept: dict[str, list[str]] = {}
        if mapped.mapping.type is TableType.HISTORY:
            types_now = self._definition.types or ()
            kept = await read_kept_labels(
                self._target, mapped.mapping, target, types_now, of_columns
            )
        typed = TypeTranslation()
        if types := [c for c in made if isinstance(c, TypeChange)]:
            typed = await self._translate_types(target, types, kept)
            await self._wait_for_others(types, typed)
        columns = DefinitionTranslator(
            mapped.mapping,
            target,
            sid=mapped.source.sid,
            others=others,
            unchanged=unchanged,
            unfilled=await read_unfilled(self._target, mapped.relation_id),
            generated=GeneratedFacts.of(
                [column.name for column in self._definition.columns],
                await read_there(self._target, target),
                self._target.server_version,
            ),
            renamed=typed.renamed,
        )
        translation = columns.translate(of_columns)
        for change in done:
            if isinstance(change, ColumnChange):
                columns.note_made(change, translation)
        left_out = [c for c in ignored if isinstance(c, ColumnChange)]
        translation.statements += columns.ignore(left_out).statements
        translation.statements[:0] = typed.statements
        missing = await missing_labels(self._target, kept, typed.created)
        translation.before = [*typed.before, *missing]
        translation.needed_types = self._needed_types(made)
        if self._brings_rows:
            translation.doubts += typed.doubts
        for name, reason in typed.rewritten.items():
            for column in columns_of(self._definition.columns, name):
                columns.fill(column, reason, translation)
        for name in sorted(typed.merged):
            for column in columns_of(self._definition.columns, name):
                columns.give_type(column, translation)
        if objects := [c for c in made if isinstance(c, ObjectChange)]:
            translator = await self._objects.translator(target, others, columns.columns)
            translation.objects = translator.translate(objects)
            translation.reasons += translation.objects.reasons
            translation.statements[:0] = translation.objects.statements
        if parts := [c for c in made if isinstance(c, PartitionChange)]:
            partitions = await self._partitions(target)
            translation.statements += partitions.translate(parts, brings_rows=self._brings_rows)
            translation.leaving = [] if self._brings_rows else partitions.leaving(parts)
        return translation

    async def _read_others(
        self, target: TargetRelation, changes: Sequence[AnyChange]
    ) -> tuple[list[SourceDefinition], list[SourceDefinition]]:
        """Return the definitions of other sources of *target*, and those that do not wait with the
        same *changes*.
        """
        if not target.has_sid:
            return [], []
        others = await read_others(self._target, self._mapped.relation_id)
        words = [str(change) for change in changes]
        unchanged = await read_unchanged(self._target, self.place, words) if others else []
        return others, unchanged

    def _made_for_all(self, changes: Sequence[AnyChange]) -> list[AnyChange]:
        """Return those of *changes* that another source has made for this one, too."""
        if list(self._made) != [str(change) for change in changes]:
            return []
        return [c for c in changes if isinstance(c, TypeChange) or c.kind in _MADE_FOR_ALL]

    async def _translate_types(
        self,
        target: TargetRelation,
        changes: Sequence[TypeChange],
        kept: Mapping[str, Sequence[str]],
    ) -> TypeTranslation:
        """Translate *changes*; a new type may be at the target as the source has the type now.

        Another source may have changed such a type before this one comes to its creation.
        """
        columns = self._definition.columns

        async def translate(changes: Sequence[TypeChange]) -> TypeTranslation:
            return await translate_types(
                self._target, self._mapped, target, columns, changes, self.place, kept
            )

        try:
            return await translate(changes)
        except TargetSchemaError:
            if not any(change.kind is DdlKind.CREATE_TYPE for change in changes):
                raise
            now = await self._ask_present()
            present = {each.oid: each for each in (now and now.types) or ()}
            newest = [
                replace(c, after=present.get(c.after.oid, c.after))
                if c.kind is DdlKind.CREATE_TYPE
                else c
                for c in changes
            ]
            if newest == changes:
                raise
            return await translate(newest)

    def _needed_types(self, changes: Sequence[AnyChange]) -> set[str]:
        """Return the types that *changes* need and do not create."""
        needed: set[str] = set()
        for change in changes:
            if isinstance(change, TypeChange):
                needed |= change.after.parts
            elif isinstance(change, ColumnChange) and change.kind in _BRINGS_TYPES:
                column = change.after
                if column is not None and self._mapped.mapping.target_column(column.name):
                    needed.add(base_type(column.type))
        return needed - {type_.quoted for type_ in self._definition.types or ()}

    async def _partitions(self, target: TargetRelation) -> PartitionTranslator:
        mapped = self._mapped
        return PartitionTranslator(
            mapped.mapping,
            target,
            sid=mapped.source.sid,
            source_columns=[column.name for column in self._definition.columns],
            there=await read_partitions(self._target, target),
            at=self._at,
            lsn=str(self.place.lsn),
        )

    async def _wait_for_others(
        self, types: Sequence[TypeChange], translated: TypeTranslation
    ) -> None:
        """See that no other table is to get values of a type as it was before.

        Raises TargetContentionError if one is, after which the lane tries again.
        """
        oids = set(translated.awaited)
        if translated.statements:
            oids |= {c.after.oid for c in types if c.kind not in _KEEPS_VALUES}
        for name in await read_users(self._target, self._mapped.relation_id, oids):
            if name != self._mapped.mapping.source and self._tables.is_behind(name, self.place.lsn):
                raise TargetContentionError(
                    f'table "{name}", which has a column of the type that changes, is behind'
                )

    @property
    def _objects(self) -> Objects:
        return Objects(self._target, self._tables, self._mapped, self._message)

    async def _plan(
        self, translation: Translation, changes: Sequence[AnyChange], names: frozenset[str]
    ) -> None:
        """Store what is made beside the stream, as it fits the columns that there are now.

        *names*: of indexes and constraints that a renamed column may have lost.
        """
        target = await read_relation(self._target, self._mapped.mapping.target)
        if target is None:
            return  # dropped by a statement of the operator
        if translation.objects is not None:
            await self._objects.store(translation.objects)
        if names:
            others = await read_others(self._target, self._mapped.relation_id)
            objects = self._definition.objects or ()
            await self._objects.plan_lost(target, others, objects, names)
        columns = [change for change in changes if isinstance(change, ColumnChange)]
        if columns:
            await self._objects.renew_plans(target)
            await self._objects.plan_columns(target, columns, translation.unfinished)

    async def _statements_of(self, target: TargetRelation, changes: list[AnyChange]) -> list[str]:
        """Return the statements to show; none where the change cannot be translated."""
        try:
            return (await self._translation(target, changes, [])).sql
        except StreamerError as exc:
            if exc.retry is Retry.TIMED:
                raise
            return []

    async def _calls(self, changes: Sequence[AnyChange]) -> ForeignCalls:
        name = self._mapped.mapping.target
        types = [c.after.full_name for c in changes if isinstance(c, TypeChange)]
        table = quote_qualified(name.namespace, name.name)
        return await ForeignCalls.before(self._target, [table], types)

    async def _run(
        self, translation: Translation, calls: ForeignCalls | None, *, is_edited: bool
    ) -> None:
        """Run statements; those that an operator has edited find tables without a schema.

        *calls*: what the statements must not bring; a later one may run an expression.
        """
        path = await self._target.fetch_value("select pg_catalog.current_setting('search_path')")
        if is_edited:
            namespace = quote_identifier(self._mapped.mapping.target.namespace)
            await self._target.execute(f"set local search_path = {namespace}, public")
        for number, statement in enumerate(translation.statements):
            if (substitute := translation.substitutes.get(statement)) is None:
                await self._target.execute(statement)
            elif not await self._does(statement):
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

    async def _does(self, statement: str) -> bool:
        """Run a statement that the target may refuse; return whether it did not."""
        try:
            async with transaction(self._target):
                await self._target.execute(statement)
        except StreamerError as exc:
            if exc.retry is Retry.TIMED or self._target.is_closed:
                raise
            return False
        return True

    async def _way_past(self, refusal: StreamerError) -> Remedy | None:
        """Return the way on for a source that is behind others, if a copy would be one.

        The source's table has a definition by now that the target can have. The stream has not.
        """
        if not isinstance(refusal, TargetSchemaError) or self._brings_rows:
            return None
        mapped, change = self._mapped, copy(self)
        try:
            target = await read_relation(self._target, mapped.mapping.target)
            if target is None or not target.has_sid:
                return None
            now = await self._ask_present()
            known = await read_definition(self._target, mapped.relation_id)
            if now is None or known is None:
                return None
            change._definition, change._made = now, ()
            await change._translation(target, all_differences(known, now), [])
        except StreamerError:  # also if the server has refused a statement of this transaction
            return None
        again = run(
            "resync",
            str(mapped.mapping.source),
            *after_loss([mapped.mapping.type]),
            database=self._source.database,
            sid=self._source.sid,
        )
        return Remedy.of("to copy the table with its present definition, run: ", again, "; ")

    def _stop(
        self,
        reason: str,
        statements: Sequence[str],
        refusal: StreamerError,
        way: Remedy | None,
    ) -> DefinitionStopError:
        """Return the error for the operator. *way*: past the other changes of the transaction."""
        cause = refusal.remedy
        name, own = str(self._mapped.mapping.source), self._source
        apply, skip, edit = (
            run(f"ddl {action}", name, *options, database=own.database, sid=own.sid)
            for action, options in (
                ("apply", ()),
                ("skip", ()),
                ("edit", ("--file", "change.sql")),
            )
        )
        # This source alone cannot make a change that concerns others.
        may_apply = not isinstance(refusal, SharedTargetError)
        error = DefinitionStopError(
            f'table "{name}" waits for a decision: {reason}; {self._told}',
            hint=Remedy.of(
                cause,
                "; " if cause else "",
                way,
                f"at the target this would be: {'; '.join(statements)}; " if statements else "",
                *(("continue with `", apply, "`, ") if may_apply else ()),
                "run other statements there with `",
                edit,
                "`, or leave the target as it is with `",
                skip,
                "`",
            ),
        )
        error.subject = self._mapped
        return error


def _renamed_labels(changes: Sequence[AnyChange]) -> dict[int, dict[str, str]]:
    """Return the new names of labels by the former ones, by the OID of their type."""
    renamed: dict[int, dict[str, str]] = {}
    for change in changes:
        if change.kind is DdlKind.RENAME_ENUM_VALUE and isinstance(change, TypeChange):
            former, now = change.part
            if former is not None and now is not None:
                renamed.setdefault(change.after.oid, {})[former] = now
    return renamed


def _undecided(
    stops: Sequence[AnyChange], doubts: Sequence[str], tried: str | None
) -> TargetSchemaError:
    """Say why a change waits. *tried*: the reason that is stored, as of a decision that failed."""
    listed = [f"on_ddl is stop for {', '.join(map(str, stops))}"] if stops else []
    return TargetSchemaError(tried or "; ".join([*listed, *doubts]))
