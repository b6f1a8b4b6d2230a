"""Writes changes around those that the target rejects: these go into quarantine, in the same target
transaction, and the rest of the table continues.

A window is first written as any other, without the changes that follow one in quarantine. If the
target rejects it, the writer writes changes one by one, each in a subtransaction at the server. The
server lists the rejected changes there, and all later ones of their keys. A value that cannot even
be staged ends its COPY, which begins again behind that change.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog

from streamer.apply.binary import TEXTUAL
from streamer.apply.fold import OrderedChange, read_changes
from streamer.apply.lane import LaneWindow, MappedRelation
from streamer.apply.lane_transaction import LaneTransaction
from streamer.apply.plan import ApplyPlan, PlanColumn
from streamer.apply.quarantine.changes import (
    FOLLOWS,
    TRUNCATED,
    BlockedKeys,
    Emptied,
    Keys,
    Quarantined,
    binary_text,
    from_json,
    key_names,
    keys_of_change,
    keys_of_values,
    quarantined,
    to_json,
)
from streamer.apply.sql.copydata import constant
from streamer.apply.sql.staged import OrderedRun, commit_time_value
from streamer.apply.sql.statements import CREATE_REFUSED, REFUSED, Statements
from streamer.apply.sql.wide_rows import PART_COLUMNS_MAX, SplitStatements
from streamer.apply.transaction import TargetTransaction
from streamer.apply.writer import Writer
from streamer.decode.pgoutput import TRUNCATE, to_datetime
from streamer.decode.transactions import Transaction
from streamer.decode.tuples import NULL, UNCHANGED, Row
from streamer.errors import StreamerError, UntranslatableTextError
from streamer.mapping.rules import OnError, SourceLabel, TableType
from streamer.observability.metrics import Metrics
from streamer.postgres.sqlstate import is_row_specific
from streamer.target.connection import TargetAddress, TargetConnection

log = structlog.get_logger()

STAGED_MAX: Final = 4000
"""Changes in one COPY while it is not known whether all of them can be staged."""
READ_ROWS: Final = 500
INSERT_ROWS_MAX: Final = 1000
INSERT_BYTES_MAX: Final = 4 * 1024 * 1024

_INSERT_SQL: Final = """
insert into streamer.quarantine
       (relation_id, operation, key, old, new, definition, lsn, commit_time, xid, error, code)
select $1, c.operation, c.key::json, c.old::json, c.new::json, c.definition::json, c.lsn::pg_lsn,
       c.commit_time, c.xid, c.error, c.code
from unnest($2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[],
            $8::timestamptz[], $9::int8[], $10::text[], $11::text[]) with ordinality
     c (operation, key, old, new, definition, lsn, commit_time, xid, error, code, n)
order by c.n
"""
_EMPTY_SQL: Final = """
insert into streamer.quarantine
       (relation_id, operation, key, old, new, definition, lsn, commit_time, xid, error, code)
select distinct on (q.key::text) q.relation_id, 'delete', q.key, q.key, null, q.definition,
       $2::text::pg_lsn, $3, $4, $5, null
from streamer.quarantine q where q.relation_id = $1 and q.key is not null
order by q.key::text, q.id desc
"""
_READ_SQL: Final = """
select id, old::text as old, new::text as new from streamer.quarantine
where relation_id = $1 and id > $2 and id < $3 order by id limit $4
"""
_PLAIN_TYPES_SQL: Final = """
select pg_catalog.format_type(t.oid::oid, -1) as kind
from unnest($1::int8[]) with ordinality t (oid, n) order by n
"""
_REFUSED_SQL: Final = f"select seq, state, message, detail from pg_temp.{REFUSED} order by seq"
_LAST_ID: Final = 2**63 - 1


@dataclass(slots=True)
class _Item:
    """A change on its way. ``text``: the same in text transport."""

    place: tuple[int, int]
    transaction: Transaction
    change: OrderedChange
    text: OrderedChange
    keys: Keys


class QuarantineWriter:
    """Writes windows, and puts changes that the target refuses into quarantine.

    It has a transaction and a writer of its own. Only drainers use one: it serves one lane at a
    time, and needs the outcome of each transaction before the next begins.
    """

    def __init__(
        self, address: TargetAddress, name: str, metrics: Metrics, *, lock_seconds: float
    ) -> None:
        self.transaction = TargetTransaction(
            address,
            name,
            metrics,
            lock_seconds=lock_seconds,
            on_committed=self._keep_committed,
        )
        """For what does not concern quarantine: the rest has a method here."""
        self._writer = Writer(self.transaction, self._write_ordered)
        self._blocked: dict[MappedRelation, BlockedKeys] = {}
        """The state as of this transaction's writes."""
        self._ahead: dict[MappedRelation, BlockedKeys] = {}
        """As of the window that is going to be written as sets."""
        self._at_savepoint: dict[MappedRelation, BlockedKeys] = {}
        self._changed: set[MappedRelation] = set()
        self._is_begun = False
        self._diverts = False
        self._is_immediate = False
        self._retried_before: int | None = None
        """In a retry, the number of the row where it is."""

    @property
    def target(self) -> TargetConnection:
        """The connection. Raises TargetConnectionError if there is none."""
        return self.transaction.target

    def take_changed(self) -> set[MappedRelation]:
        """Return the relations that have had another number of rows in quarantine since asked."""
        changed, self._changed = self._changed, set()
        return changed

    # ---- the transaction -----------------------------------------------------------------------

    def start_window(self) -> None:
        """A window is about to be planned: `follow` its shares."""
        self._ahead.clear()
        if not self._is_begun:
            self._blocked.clear()

    def disconnect(self) -> None:
        self.transaction.disconnect()
        self._is_begun = False

    async def begin(self) -> None:
        await self.transaction.begin()
        self._blocked.clear()
        self._is_begun = True

    async def rollback(self) -> None:
        self._blocked.clear()
        self._ahead.clear()
        self._is_begun = False
        await self.transaction.rollback()

    async def savepoint(self) -> None:
        await self.transaction.savepoint()
        self._at_savepoint = {m: blocked.copy() for m, blocked in self._blocked.items()}

    async def rollback_to_savepoint(self) -> None:
        self._blocked = {m: blocked.copy() for m, blocked in self._at_savepoint.items()}
        self._ahead.clear()
        await self.transaction.rollback_to_savepoint()

    def _keep_committed(self) -> None:
        """The transaction is committed, and with it the keys that it blocked."""
        self._is_begun = False
        for mapped, blocked in self._blocked.items():
            was_empty = mapped.quarantine.count == 0
            blocked.commit_to(mapped.quarantine)
            if blocked.change_count or blocked.is_cleared:
                self._changed.add(mapped)
            if was_empty and mapped.quarantine.count and blocked.reason is not None:
                log.warning(
                    "rows are in quarantine",
                    source=SourceLabel(mapped.source.database, mapped.source.sid),
                    table=str(mapped.mapping.source),
                    rows=mapped.quarantine.count,
                    error=blocked.reason.error,
                )
        self._blocked.clear()

    # ---- later changes of the same rows ---------------------------------------------------------

    async def follow(
        self, share: LaneTransaction, plans: Sequence[ApplyPlan | None]
    ) -> list[list[bytes]] | None:
        """Remove the changes that follow rows in quarantine from the next lane transaction.

        Returns the remaining payloads of each of its changes; None if all remain.
        """
        if not any(self.is_followed(mapped) for mapped, _ in share.changes):
            return None
        kept: list[list[bytes]] = []
        for (mapped, changes), plan in zip(share.changes, plans, strict=True):
            if plan is None or mapped.has(share.transaction) or not self.is_followed(mapped):
                kept.append(changes.payloads)
                continue
            blocked = self._ahead.get(mapped)
            if blocked is None:
                blocked = self._blocked.get(mapped, BlockedKeys()).copy()
                self._ahead[mapped] = blocked
            await self._use(mapped, blocked, plan)
            items = await self._items(plan, share.transaction, 0, changes.payloads)
            left = []
            for item, payload in zip(items, changes.payloads, strict=True):
                if item.change.kind == TRUNCATE:
                    blocked.truncate(plan, share.transaction)
                elif blocked.follows(item.keys):
                    blocked.add(item.keys)
                    blocked.put(_quarantined(plan, item, FOLLOWS, None))
                    continue
                left.append(payload)
            kept.append(left)
        return kept

    def orders_by_keys(self, window: LaneWindow) -> bool:
        """Return whether foreign keys fire between relations of *window*."""
        return self._writer.orders_by_keys(window)

    def is_followed(self, mapped: MappedRelation) -> bool:
        """Return whether changes of *mapped* may have to follow others into quarantine."""
        known = self._ahead.get(mapped) or self._blocked.get(mapped)
        return known is not None or mapped.quarantine.count > 0

    async def _use(self, mapped: MappedRelation, blocked: BlockedKeys, plan: ApplyPlan) -> None:
        """Make *blocked* know the keys of *plan*."""
        names, quarantine = key_names(plan), mapped.quarantine
        if blocked.names == names:
            return
        is_first = blocked.names is None and self._retried_before is None
        if not names or blocked.is_to_clear or (is_first and not quarantine.count):
            blocked.use(names, set())
        elif is_first and not blocked.is_cleared:
            if quarantine.names != names:
                quarantine.keys = await self._read_keys(mapped, names)
                quarantine.names = names
            blocked.use(names, quarantine.keys)
        else:
            blocked.use(names, await self._read_keys(mapped, names))

    async def _read_keys(self, mapped: MappedRelation, names: tuple[str, ...]) -> set[bytes]:
        keys: set[bytes] = set()
        last = 0
        before = _LAST_ID if self._retried_before is None else self._retried_before
        while rows := await self.target.fetch(
            _READ_SQL, mapped.relation_id, last, before, READ_ROWS
        ):
            for row in rows:
                keys.update(keys_of_values(names, from_json(row["old"]), from_json(row["new"])))
            last = rows[-1]["id"]
        return keys

    # ---- writing -------------------------------------------------------------------------------

    async def write(self, window: LaneWindow) -> None:
        await self._writer.write(window)
        for mapped, blocked in self._ahead.items():
            relation = window.relations.get(mapped)
            if relation is not None and relation.is_set:
                self._blocked[mapped] = blocked
        self._ahead.clear()
        await self._flush()

    async def write_in_order(
        self,
        window: LaneWindow,
        start: int,
        stop: int,
        *,
        reverse: bool = False,
        immediate: bool = False,
    ) -> None:
        """Write in exact order; rejected changes go into quarantine if the rule of their table says
        so.

        With *immediate*, deferred constraints are checked at every change of such a table.
        """
        self._ahead.clear()
        self._diverts, self._is_immediate = True, immediate
        try:
            await self._writer.write_in_order(window, start, stop, reverse=reverse)
        finally:
            self._diverts = self._is_immediate = False
        await self._flush()

    async def write_again(
        self, window: LaneWindow, mapped: MappedRelation, before: int, *, immediate: bool
    ) -> list[Quarantined]:
        """Write changes that were in quarantine; return those that stay there.

        *before*: the number of the first of them. They stay also if an earlier one stays that has
        the same key, in this call or in one before it in this transaction.
        """
        self._retried_before = before
        self._diverts, self._is_immediate = True, immediate
        try:
            blocked = self._blocked.setdefault(mapped, BlockedKeys())
            await self._write_ordered(window, mapped, 0, len(window.shares))
            left = [change for change in blocked.pending if isinstance(change, Quarantined)]
            blocked.pending.clear()
            return left
        finally:
            self._retried_before = None
            self._diverts = self._is_immediate = False

    async def _write_ordered(
        self, window: LaneWindow, mapped: MappedRelation, start: int, stop: int
    ) -> None:
        is_diverted = self._diverts and (
            mapped.mapping.rule.on_error is OnError.QUARANTINE or self._retried_before is not None
        )
        if not is_diverted and mapped not in self._blocked and not mapped.quarantine.count:
            await self._writer.write_ordered(window, mapped, start, stop)
            return
        blocked = self._blocked.setdefault(mapped, BlockedKeys())
        segment: list[_Item] = []
        former: ApplyPlan | None = None
        for number in range(start, stop):
            transaction = window.shares[number].transaction
            for owner, changes, plan in window.parts[number]:
                if owner is not mapped:
                    continue
                if former is not plan:
                    if former is not None:
                        await self._write_segment(mapped, former, blocked, segment, is_diverted)
                    segment, former = [], plan
                    await self._use(mapped, blocked, plan)
                for item in await self._items(plan, transaction, number, changes.payloads):
                    if item.change.kind != TRUNCATE:
                        segment.append(item)
                    elif plan.type is not TableType.APPEND:
                        await self._write_segment(mapped, plan, blocked, segment, is_diverted)
                        await self._write_segment(mapped, plan, blocked, [item], False)
                        blocked.truncate(plan, transaction)
                        segment = []
        if former is not None:
            await self._write_segment(mapped, former, blocked, segment, is_diverted)

    async def _write_segment(
        self,
        mapped: MappedRelation,
        plan: ApplyPlan,
        blocked: BlockedKeys,
        items: list[_Item],
        is_diverted: bool,
    ) -> None:
        """Write changes of one definition of a relation, those it takes; the others are put in
        *blocked*.
        """
        statements = mapped.statements(plan).in_order
        size = statements.rows_max if isinstance(statements, SplitStatements) else len(items)
        for start in range(0, len(items), max(1, size)):
            segment = _ItemRun(plan, blocked, items[start : start + size], {}, [])
            async with self._writer.planned_for(mapped, plan):
                await self._write_some(statements, segment, is_diverted)

    async def _write_some(
        self, statements: Statements, segment: "_ItemRun", is_diverted: bool
    ) -> None:
        plan, blocked, items = segment.plan, segment.blocked, segment.items
        await self.transaction.stage(statements)
        run = OrderedRun(plan)
        await self._stage_segment(statements, segment, run, is_diverted)
        if segment.staged:
            try:
                if is_diverted:
                    await self._run_around(statements, segment, run.is_partial)
                else:
                    await self.target.execute(statements.ordered(partial=run.is_partial))
            except StreamerError as exc:
                if exc.change_number is not None:
                    exc.share_number = items[segment.staged[exc.change_number]].place[0]
                raise
        for index in sorted(segment.outcomes):
            error, code = segment.outcomes[index]
            blocked.put(_quarantined(plan, items[index], error, code))

    async def _stage_segment(
        self, statements: Statements, segment: "_ItemRun", run: OrderedRun, is_diverted: bool
    ) -> None:
        """Stage all that can be. Begins small behind a value that cannot, for more may come."""
        items, blocked = segment.items, segment.blocked
        position, size = 0, STAGED_MAX if is_diverted else len(items)
        fault: tuple[int, StreamerError] | None = None
        while position < len(items):
            begin, key_count = position, len(blocked.added)
            stop = len(items) if fault is None else fault[0]
            chunk: list[int] = []
            following: list[int] = []
            while position < stop and len(chunk) < size:
                if blocked.follows(items[position].keys):
                    blocked.add(items[position].keys)
                    following.append(position)
                else:
                    chunk.append(position)
                position += 1
            try:
                await self._stage_chunk(statements, segment, run, chunk, is_diverted)
            except StreamerError as exc:
                number = exc.change_number
                if number is None or number >= len(chunk):
                    raise
                exc.share_number = items[chunk[number]].place[0]
                if not is_diverted or fault is not None or not _is_of_a_row(exc):
                    raise
                # Once more, up to there.
                blocked.undo(key_count)
                position, fault = begin, (chunk[number], exc)
                continue
            segment.staged += chunk
            segment.outcomes.update((index, (FOLLOWS, None)) for index in following)
            size = min(2 * size, STAGED_MAX) if is_diverted else size
            if fault is not None and position == fault[0]:
                blocked.add(items[position].keys)
                segment.outcomes[position] = (fault[1].message, _sqlstate(fault[1]))
                position, size, fault = position + 1, 1, None

    async def _stage_chunk(
        self,
        statements: Statements,
        segment: "_ItemRun",
        run: OrderedRun,
        chunk: list[int],
        is_diverted: bool,
    ) -> None:
        if not chunk:
            return
        plan = segment.plan
        rows = [
            run.row(
                len(segment.staged) + n,
                commit_time_value(segment.items[index].transaction.commit_time, plan.binary),
                segment.items[index].change,
            )
            for n, index in enumerate(chunk)
        ]
        if is_diverted:
            await self.target.execute("savepoint streamer_stage")
        try:
            await self._writer.copy_staged(statements, rows)
        except StreamerError as exc:
            if is_diverted and exc.change_number is not None:
                await self.target.execute("rollback to savepoint streamer_stage")
            raise
        if is_diverted:
            await self.target.execute("release savepoint streamer_stage")

    async def _run_around(
        self, statements: Statements, segment: "_ItemRun", is_partial: bool
    ) -> None:
        """Write the staged changes; record the rejected ones, and their followers."""
        items, blocked = segment.items, segment.blocked
        numbers: dict[bytes, int] = {}
        keys: list[tuple[int, int]] = []
        for index in segment.staged:
            found = [numbers.setdefault(key, len(numbers) + 1) for key in items[index].keys]
            keys.append((found[0] if found else 0, found[-1] if found else 0))
        await self.target.execute(CREATE_REFUSED)
        await self.target.execute(
            statements.ordered_around(
                partial=is_partial,
                keys=keys,
                key_count=len(numbers),
                immediate=self._is_immediate,
            )
        )
        for row in await self.target.fetch(_REFUSED_SQL):
            index = segment.staged[row["seq"]]
            blocked.add(items[index].keys)
            error, code = FOLLOWS, None
            if row["state"] is not None:
                error, code = _message(row["message"], row["detail"]), row["state"]
            segment.outcomes[index] = (error, code)

    # ---- values --------------------------------------------------------------------------------

    async def _items(
        self, plan: ApplyPlan, transaction: Transaction, number: int, payloads: list[bytes]
    ) -> list[_Item]:
        changes = list(read_changes(plan, payloads))
        texts = await self._texts(plan, changes, number) if plan.binary else changes
        return [
            _Item((number, n), transaction, change, text, keys_of_change(plan, text))
            for n, (change, text) in enumerate(zip(changes, texts, strict=True))
        ]

    async def _texts(
        self, plan: ApplyPlan, changes: list[OrderedChange], number: int
    ) -> list[OrderedChange]:
        """Let the server convert binary values to text.

        Text is the same in both transports, and the server's encoding may be the cause of the
        rejection.
        """
        rows = [row for change in changes for row in (change.old, change.new) if row is not None]
        texts: list[Row] = [[NULL] * len(row) for row in rows]
        others = []
        for column in plan.columns:
            if column.target.type_oid in TEXTUAL:
                for row, text in zip(rows, texts, strict=True):
                    text[column.position] = binary_text(row[column.position])
            else:
                others.append(column)
        try:
            for start in range(0, len(others) if rows else 0, PART_COLUMNS_MAX):
                some = others[start : start + PART_COLUMNS_MAX]
                for column, values in zip(some, await self._columns(rows, some), strict=True):
                    for row, text, value in zip(rows, texts, values, strict=True):
                        if row[column.position] is UNCHANGED:
                            text[column.position] = UNCHANGED
                        elif value is not None:
                            text[column.position] = value.encode()
        except StreamerError as exc:
            exc.share_number = number
            raise
        following = iter(texts)
        return [
            OrderedChange(
                change.kind,
                None if change.old is None else next(following),
                None if change.new is None else next(following),
            )
            for change in changes
        ]

    async def _columns(
        self, rows: list[Row], columns: Sequence[PlanColumn]
    ) -> list[Sequence[str | None]]:
        """Return the text of some columns of binary *rows*, column by column."""
        # Types without modifiers, because the modifier may be the reason of a rejection.
        oids = [column.target.type_oid for column in columns]
        kinds = await self.target.fetch(_PLAIN_TYPES_SQL, oids)
        names = [f"c_{n}" for n in range(len(columns))]
        listed = ", ".join(f"{n} {row['kind']}" for n, row in zip(names, kinds, strict=True))
        await self.target.execute(
            "drop table if exists pg_temp.streamer_text; "
            f"create temporary table streamer_text ({listed})"
        )
        null = constant(None, binary=True)
        items = (
            [null if row[c.position] is UNCHANGED else row[c.position] for c in columns]
            for row in rows
        )
        await self._writer.copy_rows("streamer_text", names, items, binary=True)
        texts = ", ".join(f"{name}::text" for name in names)
        # In the order they came: nothing else has touched this table.
        found = await self.target.fetch(f"select {texts} from pg_temp.streamer_text order by ctid")
        await self.target.execute("drop table pg_temp.streamer_text")
        return list(zip(*(row.values() for row in found), strict=True))

    # ---- the table -----------------------------------------------------------------------------

    async def _flush(self) -> None:
        """Write the quarantined changes to the table."""
        for mapped, blocked in self._blocked.items():
            if blocked.is_to_clear:
                blocked.change_count -= await self.target.execute(
                    "delete from streamer.quarantine where relation_id = $1", mapped.relation_id
                )
                blocked.is_to_clear = False
            batch: list[Quarantined] = []
            for change in blocked.pending:
                if isinstance(change, Quarantined):
                    batch.append(change)
                    continue
                await self._insert(mapped, batch)
                blocked.change_count += len(batch)
                batch = []
                blocked.change_count += await self._empty(mapped, change)
            await self._insert(mapped, batch)
            blocked.change_count += len(batch)
            blocked.pending.clear()

    async def _insert(self, mapped: MappedRelation, changes: list[Quarantined]) -> None:
        rows: list[tuple[Any, ...]] = []
        size = 0
        for change in changes:
            row = (
                change.operation,
                to_json(change.key),
                to_json(change.old),
                to_json(change.new),
                change.definition.to_json(),
                str(change.transaction.final_lsn),
                to_datetime(change.transaction.commit_time),
                change.transaction.xid,
                change.error,
                change.code,
            )
            rows.append(row)
            size += sum(len(item) for item in row if isinstance(item, str))
            if len(rows) >= INSERT_ROWS_MAX or size >= INSERT_BYTES_MAX:
                await self._insert_rows(mapped, rows)
                rows, size = [], 0
        if rows:
            await self._insert_rows(mapped, rows)

    async def _insert_rows(self, mapped: MappedRelation, rows: list[tuple[Any, ...]]) -> None:
        columns = map(list, zip(*rows, strict=True))
        await self.target.execute(_INSERT_SQL, mapped.relation_id, *columns)

    async def _empty(self, mapped: MappedRelation, emptied: Emptied) -> int:
        return await self.target.execute(
            _EMPTY_SQL,
            mapped.relation_id,
            str(emptied.transaction.final_lsn),
            to_datetime(emptied.transaction.commit_time),
            emptied.transaction.xid,
            TRUNCATED,
        )


@dataclass(slots=True)
class _ItemRun:
    """Changes of a relation under one definition, none of them a TRUNCATE, or that alone.

    ``outcomes``: of those that go into quarantine, error and SQLSTATE, by number; ``staged``: the
    numbers of the others, in order.
    """

    plan: ApplyPlan
    blocked: BlockedKeys
    items: list[_Item]
    outcomes: dict[int, tuple[str, str | None]]
    staged: list[int]


def _quarantined(plan: ApplyPlan, item: _Item, error: str, code: str | None) -> Quarantined:
    return quarantined(plan, item.text, item.transaction, item.place, error, code)


def _message(message: str, detail: str | None) -> str:
    # As in errors elsewhere: this detail names the row, others show all of it.
    if detail and detail.startswith("Key ("):
        return f"{message}: {detail.rstrip('.')}"
    return message


def _sqlstate(error: StreamerError) -> str | None:
    raised_by = error if isinstance(error, UntranslatableTextError) else error.__cause__
    return getattr(raised_by, "sqlstate", None)


def _is_of_a_row(error: StreamerError) -> bool:
    state = _sqlstate(error)
    return state is not None and is_row_specific(state)
