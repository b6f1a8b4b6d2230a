"""SQL that swaps the rows of a target table for the rows of a staging table.

One transaction compares or replaces the rows, so readers see either the old rows or the new rows.
The transaction takes only row locks: there is no TRUNCATE, and no new table under the old name.
Indexes, grants, views and foreign keys stay untouched.

The comparison uses the text of the values. The text shows differences that a type's ``=`` ignores
(1.0 and 1.00), and exists for types without an operator ``=``. With a key, the swap pairs the rows
of each key and updates differing rows. Without a key, the swap counts equal rows: if the target has
three equal rows and the staging table two, it deletes one.

In the statements, t is the target and s the staging table. Pure.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from streamer.mapping.sid_and_history_columns import (
    HISTORY_BEGIN,
    HISTORY_OPEN,
    SID,
    HistoryColumns,
)
from streamer.postgres.quoting import quote_columns, quote_identifier, quote_literal


class WriteMode(enum.Enum):
    """How a copy writes rows."""

    DIRECT = "direct"
    """Write directly to a table without rows of this source."""
    REPLACE = "replace"
    """Write every row again."""
    DIFFERENCE = "difference"
    """Write only the rows that differ."""
    INSERT = "insert"
    """Insert every row; a row with the same key refuses the copy."""
    KEEP = "keep"
    """Write only the rows that differ, and keep rows that only the target has."""


@dataclass(frozen=True, slots=True)
class RowSwap:
    """The swap of a table's rows.

    ``rows``: the table in statements about its rows, see `TargetRelation.rows`. ``columns``: the
    columns that a copy writes, including the sid and the columns of a history table. ``key``:
    columns that identify rows, with the equality operator; may be empty. ``fixed``: columns that no
    UPDATE may set. ``scope``: the condition for rows of the target that the swap may remove. The
    staging table contains the rows of the source in that scope, and possibly more. ``fills``: if
    given, set only these columns, in rows that both sides have. ``stamps``: columns that the swap
    writes, but does not compare. ``mark``: the column that marks a deleted row, quoted, and the
    assignments that mark the row; only for a table with a key. ``history``: the columns of
    versions; the swap compares only open versions. ``at``: the source's clock just before the
    snapshot; versions begin and end at this time.
    """

    table: str
    rows: str
    stage: str
    columns: tuple[str, ...]
    key: tuple[tuple[str, str], ...]
    fixed: frozenset[str]
    sid: str | None
    history: HistoryColumns | None
    at: str
    scope: str = "true"
    fills: tuple[str, ...] | None = None
    stamps: frozenset[str] = frozenset()
    mark: tuple[str, str] | None = None

    # ---- pieces --------------------------------------------------------------------------------

    @property
    def _values(self) -> list[str]:
        """The columns whose values come from the source's rows."""
        ours = {SID} if self.sid is not None else set()
        if self.history is not None:
            ours |= set(self.history.names)
        return [name for name in self.columns if name not in ours]

    def _row(self, table: str) -> str:
        names = self._values if self.fills is None else self.fills
        names = [name for name in names if name not in self.stamps]
        values = ", ".join(f"{table}.{quote_identifier(name)}" for name in names)
        return f'row({values})::text collate "C"'

    @property
    def _differs(self) -> str:
        return f"{self._row('t')} <> {self._row('s')}"

    @property
    def _owned(self) -> str:
        """The condition for rows of this source, in all versions."""
        if self.sid is None:
            return "true"
        return f"t.{quote_identifier(SID)} = {quote_literal(self.sid)}"

    @property
    def _current(self) -> str:
        """The condition for rows of this source that the swap compares."""
        if self.history is None:
            return self._owned
        return f"{self._owned} and {self.history.is_open('t')}"

    @property
    def _same_key(self) -> str:
        return " and ".join(
            f"t.{quote_identifier(name)} {equality} s.{quote_identifier(name)}"
            for name, equality in self.key
        )

    def _counted(self) -> str:
        """Return both sides as ``here`` and ``there``: a hash of each row, and a number for each
        equal row.
        """
        digest = "sha256(convert_to({}, 'UTF8')) as streamer_hash"
        number = "row_number() over (partition by streamer_hash) as streamer_number"
        target_digest = digest.format(self._row("t"))
        staged = digest.format(self._row("s"))
        stage = f"select s.ctid as streamer_ctid, {staged} from {self.stage} s"
        return (
            f"with here as (select streamer_relid, streamer_ctid, streamer_hash, {number} "
            f"from (select t.tableoid as streamer_relid, t.ctid as streamer_ctid, {target_digest} "
            f"from {self.rows} t where {self._current} and {self.scope}) r), "
            f"there as (select streamer_ctid, streamer_hash, {number} from ({stage}) r)"
        )

    def _also(self, alias: str, twin: str) -> str:
        return (
            f"exists (select from {twin} where {twin}.streamer_hash = {alias}.streamer_hash "
            f"and {twin}.streamer_number = {alias}.streamer_number)"
        )

    _AT_PLACE = "t.tableoid = here.streamer_relid and t.ctid = here.streamer_ctid"

    def orphan_keys_sql(self) -> str:
        """Return a query of the keys, as text, of rows in the scope that are not staged."""
        keys = ", ".join(f"t.{quote_identifier(name)}::text" for name, _ in self.key)
        return f"select array[{keys}] as k from {self.rows} t where {self._is_gone}"

    # ---- whole tables --------------------------------------------------------------------------

    def statements(self, mode: WriteMode, *, by_update: bool = True) -> list[str]:
        """Return the statements to run, in order.

        Without *by_update* the statements delete and insert differing rows, because another unique
        constraint may reject updates.
        """
        if self.fills is not None:
            return list(self._fill())
        if mode is WriteMode.INSERT:
            return [self._insert("true")]
        if mode is WriteMode.REPLACE and self.mark is None:
            delete = f"delete from {self.rows} t where {self._owned} and {self.scope}"
            return [delete, self._insert("true")]
        deletes = mode is not WriteMode.KEEP
        if self.history is not None:
            return list(self._history(self.history, deletes))
        if not self.key:
            return list(self._by_count(deletes))
        return list(self._by_key(deletes, by_update))

    def _fill(self) -> Iterator[str]:
        """Set the filled columns; the open versions of a history keep start and end."""
        assignments = ", ".join(
            f"{quote_identifier(name)} = s.{quote_identifier(name)}" for name in self.fills or ()
        )
        if assignments:
            yield (
                f"update {self.rows} t set {assignments} from {self.stage} s "
                f"where {self._same_key} and {self._current} and {self._differs}"
            )

    def _insert(self, condition: str) -> str:
        if not self.columns:
            return f"insert into {self.table} select from {self.stage} s where {condition}"
        names = quote_columns(self.columns)
        values = ", ".join(f"s.{quote_identifier(name)}" for name in self.columns)
        return (
            f"insert into {self.table} ({names}) overriding system value "
            f"select {values} from {self.stage} s where {condition}"
        )

    @property
    def _is_gone(self) -> str:
        """The condition for rows that the source no longer has."""
        lost = f"not exists (select from {self.stage} s where {self._same_key})"
        lives = "" if self.mark is None else f" and t.{self.mark[0]} is null"
        return f"{self._current} and {self.scope} and {lost}{lives}"

    def _by_key(self, deletes: bool, by_update: bool) -> Iterator[str]:
        if deletes and self.mark is not None:
            yield f"update {self.rows} t set {self.mark[1]} where {self._is_gone}"
        elif deletes:
            yield f"delete from {self.rows} t where {self._is_gone}"
        differs = self._differs
        if self.mark is not None:  # the row returns, so remove its mark
            differs = f"({differs} or t.{self.mark[0]} is not null)"
        changed = f"{self._same_key} and {self._current} and {differs}"
        assignments = ", ".join(
            f"{quote_identifier(name)} = s.{quote_identifier(name)}"
            for name in self._values
            if name not in self.fixed
        )
        if not by_update:
            yield f"delete from {self.rows} t using {self.stage} s where {changed}"
        elif assignments:
            yield f"update {self.rows} t set {assignments} from {self.stage} s where {changed}"
        yield self._insert(
            f"not exists (select from {self.rows} t where {self._same_key} and {self._current})"
        )

    def _by_count(self, deletes: bool) -> Iterator[str]:
        if deletes:
            yield (
                f"{self._counted()} delete from {self.rows} t using here "
                f"where {self._AT_PLACE} and not {self._also('here', 'there')}"
            )
        missing = f"select streamer_ctid from there where not {self._also('there', 'here')}"
        yield f"{self._counted()} {self._insert(f's.ctid in ({missing})')}"

    # ---- history -------------------------------------------------------------------------------

    @property
    def _at(self) -> str:
        return f"{quote_literal(self.at)}::timestamptz"

    def _open(self, history: HistoryColumns, rows: str, since: str) -> str:
        """Open versions with the values of the staged rows s in *rows*."""
        sid = [quote_literal(self.sid)] if self.sid is not None else []
        names = ([SID] if self.sid is not None else []) + self._values
        values = [*sid, *(f"s.{quote_identifier(name)}" for name in self._values)]
        return (
            f"insert into {self.table} ({quote_columns([*names, *history.names])}) "
            f"overriding system value "
            f"select {', '.join([*values, since, HISTORY_OPEN, 'false'])} {rows}"
        )

    def _history(self, history: HistoryColumns, deletes: bool) -> Iterator[str]:
        """Close deleted and differing versions at the source's time, and open new versions."""
        ends, deleted = (history.end_sql(self._at, mark, "t") for mark in (None, "true"))
        end = history.quoted("t")[1]
        if not self.key:
            if deletes:
                yield (
                    f"{self._counted()} update {self.rows} t set {deleted} "
                    f"from here where {self._AT_PLACE} and not {self._also('here', 'there')}"
                )
            missing = f"select streamer_ctid from there where not {self._also('there', 'here')}"
            rows = f"from {self.stage} s where s.ctid in ({missing})"
            yield f"{self._counted()} {self._open(history, rows, HISTORY_BEGIN)}"
            return
        if deletes:
            yield f"update {self.rows} t set {deleted} where {self._is_gone}"
        closed = (
            f"update {self.rows} t set {ends} from {self.stage} s "
            f"where {self._same_key} and {self._current} and {self._differs} "
            f"returning s.ctid as streamer_ctid, {end} as streamer_since"
        )
        rows = f"from closed join {self.stage} s on s.ctid = closed.streamer_ctid"
        yield f"with closed as ({closed}) {self._open(history, rows, 'closed.streamer_since')}"
        # If a key returns, the new version begins no earlier than the end of the last version.
        since = (
            f"(select case when max({end}) is null then {HISTORY_BEGIN} "
            f"else greatest({self._at}, max({end})) end "
            f"from {self.rows} t where {self._same_key} and {self._owned})"
        )
        rows = (
            f"from {self.stage} s where not exists "
            f"(select from {self.rows} t where {self._same_key} and {self._current})"
        )
        yield self._open(history, rows, since)
