"""SQL text of a block that applies staged changes one by one, in exact order.

`streamer.apply.sql.set_statements` describes the staged rows. Pure.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Final

from streamer.apply.rows.apply_plan import Identity, PlanColumn
from streamer.apply.sql.set_statements import (
    CONFLICT_STATE,
    NOTED,
    OP_DELETE,
    OP_INSERT,
    OP_TRUNCATE_RESTART,
    OP_UPDATE,
    REFUSED,
    SEVERAL_ROWS,
    SetStatements,
)
from streamer.mapping.rule_options import TableType
from streamer.mapping.sid_and_history_columns import HISTORY_BEGIN, HISTORY_OPEN
from streamer.postgres.quoting import do_block, quote_identifier, quote_literal
from streamer.postgres.sqlstate import NOT_ROW_SPECIFIC


@dataclass(frozen=True)
class Statements(SetStatements):
    """The statements for one plan.

    ``ended_at``: when the source ended, as a set, the versions that changes of a history table act
    on. The changes come out of quarantine, where they were at that time.
    """

    ended_at: datetime | None = None

    @property
    def _end(self) -> str:
        """SQL of ``kvsz_end`` of the versions that changes act on."""
        if self.ended_at is None:
            return HISTORY_OPEN
        return f"{quote_literal(self.ended_at.isoformat())}::timestamptz"

    @property
    def _is_current(self) -> str:
        """SQL that finds the versions that changes act on."""
        if self.ended_at is None:
            return f"t.kvsz_end = {HISTORY_OPEN}"
        return f"t.kvsz_end = greatest(t.kvsz_start, {self._end}) and t.kvsz_deleted"

    def _times(self, begin: str) -> dict[str, str]:
        """Return the values of a version that begins at *begin*, by column."""
        if self.ended_at is None:
            return {"kvsz_start": begin, "kvsz_end": HISTORY_OPEN, "kvsz_deleted": "false"}
        end = f"greatest({begin}, {self._end})"
        return {"kvsz_start": begin, "kvsz_end": end, "kvsz_deleted": "true"}

    def ordered(self, *, partial: bool, notes: bool = True, cascades: bool = False) -> str:
        """Return a block that applies the staged changes one by one, in order of ``seq``.

        With *partial*, some rows have unchanged values. An error names the ``seq`` at fault in its
        data type field, the one field of an error that no constraint of a table uses. Its table
        field has JSON about the target's row that has the key already.

        *notes*: a change whose row is missing goes to `NOTED`; else it ends the block. *cascades*:
        a missing row is no reason for either in a delete, because foreign keys may remove rows.
        """
        return self._block(self._how_to_note(notes, cascades), self._change(partial))

    @staticmethod
    def _how_to_note(notes: bool, cascades: bool) -> str:
        return (
            f"\n    streamer_notes constant boolean := {str(notes).lower()};"
            f"\n    streamer_cascades constant boolean := {str(cascades).lower()};"
        )

    def _note(self, kind: str, name: Callable[[PlanColumn], str]) -> str:
        """Note that the row of a change is missing. With a filter that is no conflict."""
        if self.plan.filter is not None:
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

        `REFUSED` lists them, and later changes of their keys. *keys* has two numbers, from 1 to
        *key_count*, for every ``seq``, or 0. With *immediate*, the server checks deferred
        constraints at every change. An error that does not depend on a row ends the block. If a
        row has the key already, the block writes the change again, until it meets that very row
        again. Another session may have inserted the row behind the search of the change.
        """
        first = ",".join(str(key) for key, _ in keys)
        second = ",".join(str(key) for _, key in keys)
        declarations = f"""{self._how_to_note(True, cascades)}
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

    def _block(self, declarations: str, each: str) -> str:
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
    {self._each_staged(each)}
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
        """Describe the target's row that has the key already, for the log of conflicts."""
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
        """The key of the change at hand, for an error."""
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
        """Do *change* for each staged row."""
        return f"""<<streamer_changes>>
    for s in select * from pg_temp.{self.stage} order by seq loop
        {change}
    end loop;"""

    _MORE_DECLARED: ClassVar[str] = ""

    def _refuse_partial(self, partial: bool) -> str:
        """A row that a publication's own filter lets in may come without its unchanged values."""
        if not partial:
            return ""
        complain = self._missing("the row to insert came without its unchanged values")
        return f"if s.op = {OP_INSERT} and s.mask is not null then {complain} end if;\n"

    def _insert_row(self, values: Sequence[str], extra: dict[str, str] | None = None) -> str:
        extra = extra or {}
        sid = [quote_literal(self.plan.sid)] if self.plan.sid is not None else []
        names = [*self.insert_columns, *extra]
        listed = ", ".join(map(quote_identifier, names))
        written = ", ".join([*sid, *values, *extra.values()])
        if not names:
            return f"insert into {self.plan.table} default values"
        return (
            f"insert into {self.plan.table} ({listed}) overriding system value values ({written})"
        )

    def _search(self) -> str:
        """Find the row to change into streamer_relid and streamer_ctid."""
        is_history = self.plan.type is TableType.HISTORY
        still_open = f" and {self._is_current}" if is_history else self._is_unmarked
        if self.plan.identity is Identity.KEY:
            find = self._lock_first(f"{self._matches_old_key}{still_open}")
            return f"{find}{self._refuse_several(still_open)}"
        return self._find_by_row(still_open)

    def _lock_first(self, condition: str) -> str:
        """Lock a row that meets *condition*, if there is one.

        A session may have deleted and inserted the row again while the query waited for the row.
        The next query sees that.
        """
        rows = f"from {self.rows} t where {condition}"
        return f"""loop
    select t.tableoid, t.ctid into streamer_relid, streamer_ctid {rows} limit 1 for update;
    exit when streamer_ctid is not null;
    exit when not exists (select {rows});
end loop;"""

    def _refuse_several(self, condition: str) -> str:
        """Refuse the found row if another one has its key and no index forbids that."""
        if self.plan.key_is_indexed or self.plan.type is TableType.HISTORY:
            return ""
        return (
            f"\nif streamer_ctid is not null and exists (select from {self.rows} t "
            f"where {self._matches_old_key}{condition} and not ({self._AT_FOUND})) "
            f"then {self._complain_of_several(self.old)} end if;"
        )

    def _complain_of_several(self, name: Callable[[PlanColumn], str]) -> str:
        return (
            "raise exception using errcode = 'too_many_rows', "
            f"message = {quote_literal(SEVERAL_ROWS)}, "
            f"detail = 'Key ' || {self._key_text('s', name)};"
        )

    def _clear(self) -> str:
        """Delete the row that has the key of the new one, in a table that ignores deletes."""
        rows = f"from {self.rows} t where {self.matches_new_key}"
        if self.plan.key_is_indexed:
            return f"delete {rows};"
        # No index refuses the new row if a session has inserted the old one again meanwhile.
        complain = self._complain_of_several(self.new)
        return f"""loop
    delete {rows};
    get diagnostics streamer_count = row_count;
    if streamer_count > 1 then {complain} end if;
    exit when streamer_count > 0;
    exit when not exists (select {rows});
end loop;"""

    def _find_by_row(self, condition: str) -> str:
        # The text of two values can differ although their type's = finds them equal (1.0 and 1.00,
        # circles of equal area).
        same = " and ".join(
            f"t.{quote_identifier(c.name)}::text is not distinct from {self.old_value(c)}::text"
            for c in self.plan.key
        )
        where = f"{same or 'true'}{self._sid_matches('t')}{condition}"
        for column in self.plan.key:
            if column.name in self.plan.target.leading_index_columns:
                name = quote_identifier(column.name)
                old = self.old_value(column)
                absent = self._lock_first(f"{where} and t.{name} is null")
                equal = self._lock_first(f"{where} and t.{name} {column.target.equality} {old}")
                return f"if {old} is null then {absent} else {equal} end if;"
        return self._lock_first(where)

    _AT_FOUND: Final = "t.tableoid = streamer_relid and t.ctid = streamer_ctid"

    def _missing(self, what: str) -> str:
        return (
            f"raise exception using errcode = 'no_data_found', message = {quote_literal(what)}, "
            f"detail = 'Key ' || {self._key_text('s', self.old)};"
        )

    def _ordered_insert(self) -> str:
        values = self._values(False, "")
        if self.plan.type is TableType.HISTORY:
            return (
                f"{self._close_outlived()}{self._open_version('s.at', first=True, values=values)}"
            )
        if not self.plan.may_outlive or self.plan.identity is not Identity.KEY:
            return self._insert_row(values) + ";"
        # A row that outlived its delete or a TRUNCATE may still hold the key.
        return f"{self._clear()}\n{self._insert_row(values)};"

    def _close_outlived(self) -> str:
        """End the open version of the new row's key, which outlived its delete or a TRUNCATE."""
        if not self.plan.may_outlive or not self.plan.version_key:
            return ""
        return (
            f"update {self.rows} t set kvsz_end = greatest(t.kvsz_start, s.at) "
            f"where {self._matches_version_key()} and {self._is_current};\n"
        )

    @property
    def _last_end(self) -> str:
        """Where the last closed version of a key ends. A source's clock may have been set back, and
        a copy closes versions at a time that is near the right one.
        """
        return f"max(t.kvsz_end) filter (where t.kvsz_end < {self._end})"

    def _matches_version_key(self) -> str:
        return self._matches((c, f"s.{self.new(c)}") for c in self.plan.version_key)

    def _open_version(self, since: str, *, first: bool, values: list[str]) -> str:
        begin = since
        prelude = ""
        if first and self.plan.version_key:
            same_key = self._matches_version_key()
            prelude = (
                f"select case when count(*) = 0 then {HISTORY_BEGIN} else "
                f"greatest({since}, {self._last_end}) end "
                f"from {self.rows} t where {same_key} into streamer_since;\n"
            )
            # Only a key with a deferred check may occur twice, and then the target checks it.
            if self.plan.identity is Identity.KEY:
                prelude += (
                    f"if exists (select from {self.rows} t where {same_key} "
                    f"and {self._is_current}) then raise exception using "
                    "errcode = 'unique_violation', "
                    "message = 'an open version of this key is already there', "
                    f"detail = 'Key ' || {self._key_text('s', self.new)}; end if;\n"
                )
            begin = "streamer_since"
        elif first:
            begin = HISTORY_BEGIN
        return prelude + self._insert_row(values, self._times(begin)) + ";"

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
        """Remove rows that may still hold the new key of a row, if the table ignores deletes."""
        is_history = self.plan.type is TableType.HISTORY
        if is_history or not self.plan.may_outlive or self.plan.identity is not Identity.KEY:
            return ""
        return f"if not ({self._same_key()}) then {self._clear()} end if;\n"

    def _write_missing(self, partial: bool) -> str:
        """Write a row that should be at the target and is not, if it is whole."""
        values = self._values(False, "")
        if self.plan.type is TableType.HISTORY:
            insert = self._open_version("s.at", first=True, values=values)
        else:
            insert = self._insert_row(values) + ";"
        insert = self._note("update_missing", self.old) + insert
        if not partial:
            return insert
        complain = self._missing("the row to update is missing, and its unchanged values with it")
        return f"if {self._IS_PARTIAL} then {complain} end if;\n{insert}"

    _IS_PARTIAL: ClassVar[str] = "s.mask is not null"

    def _write_found(self, partial: bool) -> str:
        """Change the found row."""
        if self.plan.type is TableType.HISTORY:
            return self._open_next_version(partial)
        values = self._values(partial, "t")
        assigned = list(zip(self.plan.columns, values, strict=True))
        fixed = [(c, value) for c, value in assigned if c.target.identity_always]
        others = ", ".join(
            f"{quote_identifier(c.name)} = {value}"
            for c, value in assigned
            if not c.target.identity_always
        )
        update = f"update {self.rows} t set {others} where {self._AT_FOUND};" if others else "null;"
        if not fixed:
            return update
        same = " and ".join(f"t.{quote_identifier(c.name)} = {value}" for c, value in fixed)
        return (
            f"if exists (select from {self.rows} t where {self._AT_FOUND} and {same}) "
            f"then {update} else {self._replace_found(fixed[0][0], values)} end if;"
        )

    def _replace_found(self, fixed: PlanColumn, values: Sequence[str]) -> str:
        """Replace the found row by one with another value in *fixed*, which is GENERATED ALWAYS.

        No UPDATE writes such a column. A foreign key may take the DELETE for the end of the row.
        """
        refuse = ""
        if self.plan.target.delete_acts:
            name, table = quote_identifier(fixed.name), self.plan.table
            message = (
                f"column {name} of the target table is GENERATED ALWAYS AS IDENTITY, so no UPDATE "
                f"changes it; run there: alter table {table} alter column {name} "
                "set generated by default"
            )
            refuse = (
                "if streamer_cascades then raise exception using errcode = 'generated_always', "
                f"message = {quote_literal(message)}; end if;\n"
            )
        return (
            f"{refuse}with streamer_old as (delete from {self.rows} t where {self._AT_FOUND} "
            f"returning t.*) {self.insert_replacement(values)} from streamer_old t;"
        )

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
            # The new key may have versions of its own, and this one must not overlap them.
            later = (
                f"\nif {deleted} then select greatest(streamer_since, {self._last_end}) "
                f"from {rows} t where {self._matches_version_key()} into streamer_since; end if;"
            )
        close = (
            f"update {rows} t "
            f"set kvsz_end = greatest(t.kvsz_start, s.at), kvsz_deleted = {deleted} "
            f"where {self._AT_FOUND} returning t.kvsz_end, t.tableoid, t.ctid "
            "into streamer_since, streamer_relid, streamer_ctid;"
        )
        extra = self._times("streamer_since")
        names = ", ".join(map(quote_identifier, [*self.insert_columns, *extra]))
        sid = [quote_literal(self.plan.sid)] if self.plan.sid is not None else []
        written = ", ".join([*sid, *self._values(partial, "t"), *extra.values()])
        reopen = (
            f"insert into {self.plan.table} ({names}) overriding system value "
            f"select {written} from {rows} t where {self._AT_FOUND};"
        )
        return f"{close}{later}\n{reopen}"

    def _ordered_delete(self) -> str:
        if self.plan.identity is Identity.NONE:
            return self._missing_identity()
        if self.plan.type is TableType.APPEND:
            return "null;"
        if self.plan.marks:
            mark = f"update {self.rows} t set {self._mark} where {self._AT_FOUND};"
            return f"{self._search()}\nif streamer_ctid is not null then {mark} end if;"
        return (
            f"{self._search()}\n{self._refuse_partial_old()}"
            f"if streamer_ctid is not null then {self._remove_found()}{self._note_delete} end if;"
        )

    @property
    def _note_delete(self) -> str:
        """Note a delete without a row, unless rows that stay make that normal."""
        note = "" if self.plan.may_outlive else self._note("delete_missing", self.old)
        return f" elsif not streamer_cascades then {note}" if note else ""

    @property
    def _mark(self) -> str:
        """The assignments that mark a row as deleted."""
        return ", ".join(
            f"{quote_identifier(column.name)} = s.{self.new(column)}"
            for column in self.plan.metadata_columns
        )

    def _refuse_partial_old(self) -> str:
        """A partition with a key of its own sends that key, and NULL for the rest of the old row.

        Only the target can tell whether a NULL is a value: it has such a row or it has not.
        """
        if self.plan.identity is not Identity.ROW or not self.plan.is_partitioned:
            return ""
        nulls = " or ".join(f"s.{self.old(c)} is null" for c in self.plan.staged_key)
        complain = self._missing(
            "no row matches the old row; give every partition of the source table the replica "
            "identity of the table, and resync the table"
        )
        return f"if streamer_ctid is null and ({nulls or 'false'}) then {complain} end if;\n"

    def _remove_found(self) -> str:
        """Remove the found row, or end its version."""
        if self.plan.type is TableType.HISTORY:
            return (
                f"update {self.rows} t set kvsz_end = greatest(t.kvsz_start, s.at), "
                f"kvsz_deleted = true where {self._AT_FOUND};"
            )
        return f"delete from {self.rows} t where {self._AT_FOUND};"

    def _ordered_truncate(self) -> str:
        if self.plan.ignores_truncate:
            return "null;"
        if self.plan.type is TableType.HISTORY:
            return (
                f"update {self.rows} t set kvsz_end = greatest(t.kvsz_start, s.at), "
                f"kvsz_deleted = true where {self._is_current}{self._sid_matches('t')};"
            )
        truncate = self.truncate
        if (deleted_at := self.plan.mapping.rule.deleted_at) is not None:
            truncate = (
                f"update {self.rows} t set {self._mark} "
                f"where t.{quote_identifier(deleted_at)} is null{self._sid_matches('t')}"
            )
        if not self.restart:
            return truncate + ";"
        return f"{truncate};\nif s.op = {OP_TRUNCATE_RESTART} then {self.restart}; end if;"
