"""SQL text of a block that applies staged changes in exact order.

`streamer.apply.sql.set_statements` describes the staged rows. A docstring such as "Insert the new
row" says what the returned SQL does. Pure.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Final

from streamer.apply.rows.apply_plan import Identity, PlanColumn
from streamer.apply.rows.copydata import Copy, RowLayout, encode_rows
from streamer.apply.sql.set_statements import (
    CONFLICT_STATE,
    NOTED,
    OP_DELETE,
    OP_INSERT,
    OP_TRUNCATE_RESTART,
    OP_UPDATE,
    REFUSED,
    SEVERAL_ROWS,
    RowPlace,
    SetStatements,
)
from streamer.decode.tuples import Row
from streamer.mapping.rule_options import TableType
from streamer.mapping.sid_and_history_columns import HISTORY_BEGIN, HISTORY_OPEN
from streamer.postgres.quoting import do_block, quote_identifier, quote_literal
from streamer.postgres.sqlstate import NOT_ROW_SPECIFIC

FOUND: Final = RowPlace("t.tableoid = streamer_relid and t.ctid = streamer_ctid")
"""The row that the search returned."""


@dataclass(frozen=True)
class Statements(SetStatements):
    """The statements for a plan.

    ``ended_at``: the time at which the source ended all versions that changes of a history table
    act on; None if the versions are open. These changes were in quarantine at that time.
    """

    ended_at: datetime | None = None

    @property
    def rows_max(self) -> int | None:
        """The largest number of rows to stage at a time, or None."""
        return None

    def batches(self, rows: Iterable[Row]) -> Iterator[tuple[int, Iterable[Row]]]:
        """Yield parts of *rows* to stage at a time, each after the number of the first row."""
        yield 0, rows

    def copies(self, rows: Iterable[Row], first: int = 0) -> Iterator[Copy]:
        """Yield the COPYs that stage *rows* of the changes from number *first* on."""
        columns = ["seq", "op", "mask", "at", *(name for name, _ in self.staged)]
        yield self._copy(self.stage, columns, rows, first)

    def _copy(self, table: str, columns: list[str], rows: Iterable[Row], first: int) -> Copy:
        binary = self.plan.binary
        chunks = encode_rows(rows, RowLayout(len(columns), binary))
        return Copy(table, columns, chunks, binary, first=first)

    @property
    def _end(self) -> str:
        """SQL of the end of the versions that changes act on."""
        if self.ended_at is None:
            return HISTORY_OPEN
        return f"{quote_literal(self.ended_at.isoformat())}::timestamptz"

    @property
    def _is_current(self) -> str:
        """SQL that finds the versions that changes act on."""
        if self.ended_at is None:
            return self.plan.history.is_open("t")
        start, end, deleted = self.plan.history.quoted("t")
        return f"{end} = greatest({start}, {self._end}) and {deleted}"

    def _times(self, begin: str) -> dict[str, str]:
        """Return the values of a version that begins at *begin*, by column."""
        values = (begin, HISTORY_OPEN, "false")
        if self.ended_at is not None:
            values = (begin, f"greatest({begin}, {self._end})", "true")
        return dict(zip(self.plan.history.names, values, strict=True))

    def ordered(self, *, partial: bool, notes: bool = True, cascades: bool = False) -> str:
        """Return a block that applies each staged change, in order of ``seq``.

        With *partial*, some rows have unchanged values. The data type field of an error names the
        ``seq`` at fault, because no constraint of a table uses this field. The table field contains
        JSON about the target's row with the same key.

        With *notes*, a change of a missing row goes to `NOTED`; otherwise the change ends the
        block. With *cascades*, a delete of a missing row has no effect, because foreign keys may
        remove rows.
        """
        return self._block(self._recording(notes, cascades), self._change(partial))

    @staticmethod
    def _recording(notes: bool, cascades: bool) -> str:
        return (
            f"\n    streamer_notes constant boolean := {str(notes).lower()};"
            f"\n    streamer_cascades constant boolean := {str(cascades).lower()};"
        )

    def _record(self, kind: str, name: Callable[[PlanColumn], str]) -> str:
        """Store a change of a missing row in `NOTED`, unless the rule makes missing rows normal."""
        if self.plan.may_lack_rows:
            return ""
        return (
            f"if streamer_notes then insert into pg_temp.{NOTED} "
            f"values (s.seq, {quote_literal(kind)}, {self._key_texts(name)}); "
            f"else raise exception using errcode = '{CONFLICT_STATE}', "
            "message = 'the row of a change is missing'; end if;\n"
        )

    def ordered_around(
        self,
        *,
        partial: bool,
        keys: Sequence[tuple[int, int]],
        key_count: int,
        immediate: bool,
        cascades: bool = False,
    ) -> str:
        """Return a block like `ordered` that continues after changes that the target refuses.

        `REFUSED` lists refused changes, and later changes of the same keys. *keys* contains two key
        numbers for every ``seq``, each from 1 to *key_count*, or 0 for no key. With *immediate*,
        the server checks deferred constraints at every change. An error that does not depend on a
        row ends the block. If a row already has the key, a session may have inserted the row after
        the search. So the block repeats the change, until the same row conflicts again.
        """
        first = ",".join(str(key) for key, _ in keys)
        second = ",".join(str(key) for _, key in keys)
        declarations = f"""{self._recording(True, cascades)}
    streamer_first constant integer[] := '{{{first}}}';
    streamer_second constant integer[] := '{{{second}}}';
    streamer_marked boolean[] := array_fill(false, array[{key_count + 1}], array[0]);
    streamer_a integer; streamer_b integer; streamer_met text;"""
        check = "set constraints all immediate; set constraints all deferred;" if immediate else ""
        classes = ", ".join(map(quote_literal, NOT_ROW_SPECIFIC))
        return self._block(
            declarations,
            f"""
        streamer_a := streamer_first[s.seq + 1]; streamer_b := streamer_second[s.seq + 1];
        if streamer_marked[streamer_a] or streamer_marked[streamer_b] then
            insert into pg_temp.{REFUSED} (seq) values (s.seq);
        else
            streamer_met := '';
            loop
                begin
                    {self._change(partial)}
                    {check}
                    continue streamer_changes;
                exception when others then
                    get stacked diagnostics streamer_state = returned_sqlstate,
                        streamer_message = message_text, streamer_detail = pg_exception_detail;
                    if left(streamer_state, 2) in ({classes}) then raise; end if;
                    {self._find_existing}
                end;
                exit when streamer_state <> '23505' or streamer_met is not distinct from
                    streamer_existing;
                streamer_met := streamer_existing;
            end loop;
            insert into pg_temp.{REFUSED} values
                (s.seq, streamer_state, streamer_message, streamer_detail, streamer_existing);
        end if;
        streamer_marked[streamer_a] := streamer_a > 0;
        streamer_marked[streamer_b] := streamer_b > 0;""",
        )

    def _block(self, declarations: str, change: str) -> str:
        body = f"""
#variable_conflict use_column
declare
    s record;
    streamer_relid oid;
    streamer_ctid tid;
    streamer_since timestamptz;
    streamer_count bigint;
    streamer_state text; streamer_message text; streamer_detail text; streamer_constraint text;
    streamer_column text; streamer_existing text;
    {self._MORE_DECLARED}{declarations}
begin
    {self._each_staged(change)}
exception when others then
    get stacked diagnostics streamer_state = returned_sqlstate, streamer_message = message_text,
        streamer_detail = pg_exception_detail, streamer_constraint = constraint_name,
        streamer_column = column_name;
    {self._find_existing}
    raise exception using errcode = streamer_state, message = streamer_message,
        detail = streamer_detail, constraint = streamer_constraint, column = streamer_column,
        hint = coalesce({self._change_key}, ''), datatype = s.seq::text,
        table = coalesce(streamer_existing, '');
end"""
        return do_block(body)

    @property
    def _find_existing(self) -> str:
        """SQL that reads facts about the target's row with the key, for the log of conflicts."""
        if self.plan.identity is not Identity.KEY:
            return ""
        return f"""streamer_existing := null;
    if streamer_state = '23505' then
        select json_build_object('xmin', t.xmin::text, 'committed_at',
            case when current_setting('track_commit_timestamp')::boolean
                then pg_xact_commit_timestamp(t.xmin) end)::text
        from {self.rows} t where {self.matches_new_key} limit 1 into streamer_existing;
    end if;"""

    @property
    def _change_key(self) -> str:
        """The key of the current change, for an error."""
        if self.plan.identity is not Identity.KEY:
            return "null::text"
        new, old = self._key_text("s", self.new), self._key_text("s", self.old)
        return f"'Key ' || case when s.op = {OP_INSERT} then {new} else {old} end"

    def _change(self, partial: bool) -> str:
        return f"""
        if s.op = {OP_INSERT} then
            {self._refuse_partial(partial)}{self._ordered_insert()}
        elsif s.op = {OP_UPDATE} then
            {self._ordered_update(partial)}
        elsif s.op = {OP_DELETE} then
            {self._ordered_delete()}
        else
            {self._ordered_truncate()}
        end if;"""

    def _each_staged(self, change: str) -> str:
        """Return the loop that runs the statements *change* for each staged row, in order."""
        return f"""<<streamer_changes>>
    for s in select * from pg_temp.{self.stage} order by seq loop
        {change}
    end loop;"""

    _MORE_DECLARED: ClassVar[str] = ""

    def _refuse_partial(self, partial: bool) -> str:
        """Refuse an INSERT without unchanged (TOAST) values.

        The source sends such an INSERT for an UPDATE whose row enters a publication's row filter.
        """
        if not partial:
            return ""
        complain = self._missing("the row to insert lacks its unchanged (TOAST) values")
        return f"if s.op = {OP_INSERT} and s.mask is not null then {complain} end if;\n"

    def _search(self) -> str:
        """Select tableoid and ctid of the row to change into streamer_relid and streamer_ctid."""
        is_history = self.plan.type is TableType.HISTORY
        still_open = f" and {self._is_current}" if is_history else self._is_unmarked
        if self.plan.identity is Identity.KEY:
            find = self._lock_first(f"{self._matches_old_key}{still_open}")
            return f"{find}{self._refuse_several(still_open)}"
        return self._find_by_row(still_open)

    def _lock_first(self, condition: str) -> str:
        """Lock a row that meets *condition*, if such a row exists.

        While the query waited, a session may have deleted the row and inserted it again. The next
        query sees the new row.
        """
        rows = f"from {self.rows} t where {condition}"
        return f"""loop
    select t.tableoid, t.ctid into streamer_relid, streamer_ctid {rows} limit 1 for update;
    exit when streamer_ctid is not null;
    exit when not exists (select {rows});
end loop;"""

    def _refuse_several(self, condition: str) -> str:
        """Refuse the row that the search returned if a second row has the key and no index forbids
        equal keys.
        """
        if self.plan.key_is_indexed or self.plan.type is TableType.HISTORY:
            return ""
        return (
            f"\nif streamer_ctid is not null and exists (select from {self.rows} t "
            f"where {self._matches_old_key}{condition} and not ({FOUND.condition})) "
            f"then {self._raise_several(self.old)} end if;"
        )

    def _raise_several(self, name: Callable[[PlanColumn], str]) -> str:
        return (
            "raise exception using errcode = 'too_many_rows', "
            f"message = {quote_literal(SEVERAL_ROWS)}, "
            f"detail = 'Key ' || {self._key_text('s', name)};"
        )

    def _clear(self) -> str:
        """Delete the row with the key of the new row, in a table that ignores deletes."""
        rows = f"from {self.rows} t where {self.matches_new_key}"
        delete = self.delete_rows(RowPlace(self.matches_new_key))
        if self.plan.key_is_indexed:
            return f"{delete};"
        # No index refuses the new row if a session inserted the old row again meanwhile.
        complain = self._raise_several(self.new)
        return f"""loop
    {delete};
    get diagnostics streamer_count = row_count;
    if streamer_count > 1 then {complain} end if;
    exit when streamer_count > 0;
    exit when not exists (select {rows});
end loop;"""

    def _find_by_row(self, condition: str) -> str:
        # Texts of two values can differ although the type's = returns true (1.0 and 1.00, circles
        # of equal area).
        comparison = " and ".join(
            f"t.{quote_identifier(c.name)}::text is not distinct from {self.old_value(c)}::text"
            for c in self.plan.key
        )
        where = f"{comparison or 'true'}{self._sid_matches('t')}{condition}"
        for column in self.plan.key:
            if column.name in self.plan.target.leading_index_columns:
                name = quote_identifier(column.name)
                old = self.old_value(column)
                absent = self._lock_first(f"{where} and t.{name} is null")
                equal = self._lock_first(f"{where} and t.{name} {column.target.equality} {old}")
                return f"if {old} is null then {absent} else {equal} end if;"
        return self._lock_first(where)

    def _missing(self, problem: str) -> str:
        return (
            f"raise exception using errcode = 'no_data_found', message = {quote_literal(problem)}, "
            f"detail = 'Key ' || {self._key_text('s', self.old)};"
        )

    def _ordered_insert(self) -> str:
        if self.plan.type is TableType.HISTORY:
            return f"{self._close_outlived()}{self._write_new()}"
        if not self.plan.may_outlive or self.plan.identity is not Identity.KEY:
            return self._write_new()
        # A row that outlived a delete or a TRUNCATE may still hold the key.
        return f"{self._clear()}\n{self._write_new()}"

    def _close_outlived(self) -> str:
        """End the open version of the new row's key that outlived a delete or a TRUNCATE."""
        if not self.plan.may_outlive or not self.plan.version_key:
            return ""
        at = RowPlace(f"{self._matches_version_key()} and {self._is_current}")
        return self.update_rows(self.plan.history.end_sql("s.at", table="t"), at) + ";\n"

    @property
    def _last_end(self) -> str:
        """The end of the last closed version of a key, which may be later than the change. A
        source's clock may go back, and a copy closes versions at an approximate time.
        """
        end = self.plan.history.quoted("t")[1]
        return f"max({end}) filter (where {end} < {self._end})"

    def _matches_version_key(self) -> str:
        return self._matches((c, f"s.{self.new(c)}") for c in self.plan.version_key)

    def _write_new(self) -> str:
        """Insert the new row; in a history table, as a version."""
        row = self.row_of(self._values())
        if self.plan.type is not TableType.HISTORY:
            return self.insert(row) + ";"
        if not self.plan.version_key:
            return self.insert(row | self._times(HISTORY_BEGIN)) + ";"
        same_key = self._matches_version_key()
        prelude = (
            f"select case when count(*) = 0 then {HISTORY_BEGIN} else "
            f"greatest(s.at, {self._last_end}) end "
            f"from {self.rows} t where {same_key} into streamer_since;\n"
        )
        # Only a key with a deferred check may occur twice, and then the target checks the key.
        if self.plan.identity is Identity.KEY:
            prelude += (
                f"if exists (select from {self.rows} t where {same_key} "
                f"and {self._is_current}) then raise exception using "
                "errcode = 'unique_violation', "
                "message = 'the target already has an open version of this key', "
                f"detail = 'Key ' || {self._key_text('s', self.new)}; end if;\n"
            )
        return f"{prelude}{self.insert(row | self._times('streamer_since'))};"

    def _ordered_update(self, partial: bool) -> str:
        if self.plan.identity is Identity.NONE:
            return self._missing_identity()
        return (
            f"{self._clear_new_key()}{self._search()}\n"
            f"{self._refuse_partial_old()}"
            f"if streamer_ctid is null then {self._write_missing(partial)} end if;\n"
            f"if streamer_ctid is not null then {self._write_found(partial)} end if;"
        )

    def _clear_new_key(self) -> str:
        """Return SQL that removes a row with the new key, which the target may have kept after a
        delete.
        """
        is_history = self.plan.type is TableType.HISTORY
        if is_history or not self.plan.may_outlive or self.plan.identity is not Identity.KEY:
            return ""
        return f"if not ({self._same_key()}) then {self._clear()} end if;\n"

    def _write_missing(self, partial: bool) -> str:
        """Return SQL that writes a whole row that the target lacks."""
        insert = self._record("update_missing", self.old) + self._write_new()
        if not partial:
            return insert
        complain = self._missing("the row to update is missing, so its unchanged values are lost")
        return f"if {self._IS_PARTIAL} then {complain} end if;\n{insert}"

    _IS_PARTIAL: ClassVar[str] = "s.mask is not null"

    def _write_found(self, partial: bool) -> str:
        """Change the row that the search returned."""
        if self.plan.type is TableType.HISTORY:
            return self._open_next_version(partial)
        masked = frozenset(range(self.plan.row_width)) if partial else frozenset()
        fixed = [column for column in self.plan.columns if column.target.identity_always]
        assignments = self._assignments(fixed, frozenset(), masked)
        update = f"{self.update_rows(assignments, FOUND)};" if assignments else "null;"
        if not fixed:
            return update
        values = self._present(masked)
        is_equal = " and ".join(
            f"t.{quote_identifier(column.name)} = {value}"
            for column, value in zip(self.plan.columns, values, strict=True)
            if column in fixed
        )
        return (
            f"if exists (select from {self.rows} t where {FOUND.condition} and {is_equal}) "
            f"then {update} else {self._replace_found(fixed[0], values)} end if;"
        )

    def _replace_found(self, fixed: PlanColumn, values: Sequence[str]) -> str:
        """Replace the row that the search returned, to change *fixed*, which is GENERATED ALWAYS.

        PostgreSQL refuses an UPDATE of such a column. A foreign key with an action would treat the
        DELETE as the end of the row.
        """
        refuse = ""
        if self.plan.target.delete_acts:
            name, table = quote_identifier(fixed.name), self.plan.table
            message = (
                f"column {name} of the target table is GENERATED ALWAYS AS IDENTITY, so no UPDATE "
                f"changes it; run at the target: alter table {table} alter column "
                f"{name} set generated by default"
            )
            refuse = (
                "if streamer_cascades then raise exception using errcode = 'generated_always', "
                f"message = {quote_literal(message)}; end if;\n"
            )
        insert = self.insert(self.replacement(values), "from streamer_old t")
        delete = self.delete_rows(FOUND)
        return f"{refuse}with streamer_old as ({delete} returning t.*) {insert};"

    def _same_key(self) -> str:
        return " and ".join(
            f"s.{self.old(column)} {column.target.equality} s.{self.new(column)}"
            for column in self.plan.version_key
        )

    def _missing_identity(self) -> str:
        return (
            "raise exception using errcode = 'no_data_found', "
            "message = 'an update or delete came for a table without replica identity';"
        )

    def _open_next_version(self, partial: bool) -> str:
        rows = self.rows
        deleted, later = "false", ""
        if self.plan.version_key:
            deleted = f"not ({self._same_key()})"
            # The new version must not overlap earlier versions of the new key.
            later = (
                f"\nif {deleted} then select greatest(streamer_since, {self._last_end}) "
                f"from {rows} t where {self._matches_version_key()} into streamer_since; end if;"
            )
        close = (
            f"{self.end_versions(deleted, self._found_version)} "
            f"returning {self.plan.history.quoted('t')[1]}, t.tableoid, t.ctid "
            "into streamer_since, streamer_relid, streamer_ctid;"
        )
        version = self.row_of(self._values(partial=partial)) | self._times("streamer_since")
        reopen = self.insert(version, f"from {rows} t where {FOUND.condition}")
        return f"{close}{later}\n{reopen};"

    @property
    def _found_version(self) -> RowPlace:
        """The version that the search returned. The condition on its end selects the partition."""
        return RowPlace(f"{FOUND.condition} and {self._is_current}")

    def _ordered_delete(self) -> str:
        if self.plan.identity is Identity.NONE:
            return self._missing_identity()
        if self.plan.type is TableType.APPEND:
            return "null;"
        is_history = self.plan.type is TableType.HISTORY
        remove = self.remove_rows(self._found_version if is_history else FOUND)
        return (
            f"{self._search()}\n{self._refuse_partial_old()}"
            f"if streamer_ctid is not null then {remove};{self._record_delete} end if;"
        )

    @property
    def _record_delete(self) -> str:
        """Store a delete of a missing row, unless the rule makes missing rows normal."""
        note = "" if self.plan.may_outlive else self._record("delete_missing", self.old)
        return f" elsif not streamer_cascades then {note}" if note else ""

    def _refuse_partial_old(self) -> str:
        """Refuse an old row that contains only the key of a partition, and NULL for other values.

        Only a matching row of the target proves that a NULL is a value.
        """
        if self.plan.identity is not Identity.ROW or not self.plan.is_partitioned:
            return ""
        nulls = " or ".join(f"s.{self.old(c)} is null" for c in self.plan.staged_key)
        complain = self._missing(
            "no row matches the old row; give every partition of the source table the replica "
            "identity of the table, and resync the table"
        )
        return f"if streamer_ctid is null and ({nulls or 'false'}) then {complain} end if;\n"

    def _ordered_truncate(self) -> str:
        if self.plan.ignores_truncate:
            return "null;"
        sid, deleted_at = self._sid_matches("t"), self.plan.mapping.rule.deleted_at
        if self.plan.type is TableType.HISTORY:
            return self.remove_rows(RowPlace(f"{self._is_current}{sid}")) + ";"
        truncate = self.truncate
        if deleted_at is not None:
            truncate = self.remove_rows(RowPlace(f"t.{quote_identifier(deleted_at)} is null{sid}"))
        if not self.restart:
            return truncate + ";"
        return f"{truncate};\nif s.op = {OP_TRUNCATE_RESTART} then {self.restart}; end if;"
