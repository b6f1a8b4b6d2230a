"""Finds tables whose rows ALTER TABLE rewrote, which no change in the stream shows.

The stream lacks rows that a session writes between SET UNLOGGED and SET LOGGED. The stream also
lacks values that ALTER COLUMN TYPE with USING computes without a change of the type. VACUUM FULL,
CLUSTER and TRUNCATE give a table a new file, too. Two signs distinguish ALTER TABLE from these
commands:

- ALTER TABLE creates a new TOAST table; the other commands only swap the files of table and TOAST
  table.
- ALTER TABLE writes all rows, and then the row in pg_class, in one transaction. VACUUM FULL and
  CLUSTER keep the transactions of rows, and a session inserts rows after a TRUNCATE. The check
  reads the first pages.

A new definition of columns is not such a sign, because the stream sends new columns. A cast to a
different type may change values, see `Storage.has_other_columns`.

The check also finds tables that a session attached to a root and detached again. A publication that
contains the root sends the changes in between as changes of the root. DETACH writes the rows of all
columns in pg_attribute in one transaction.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

import psycopg

from streamer.mapping.relation_names import RelationName
from streamer.postgres.describing import IS_ATTACHED
from streamer.postgres.named_relations import NAMED_RELATION
from streamer.postgres.quoting import quote_literal, quote_qualified
from streamer.source.connection import Connection, fetch_all

PAGES_MAX: Final = 16
"""The number of pages to check."""
_LOST: Final = 0
_FORMER: Final = -1
"""In place of the unknown OID of a former TOAST table."""

STORAGE_SQL: Final = """
pg_catalog.jsonb_build_array(c.reltoastrelid::int8, c.relfilenode::int8, (
    select pg_catalog.md5(pg_catalog.string_agg(
        a.attnum::text || ' ' || a.atttypid::int8 || ' ' || a.atttypmod, ',' order by a.attnum))
      || ' ' || case
        when not c.relispartition and pg_catalog.count(distinct a.xmin::text) = 1
          and pg_catalog.min(a.xmin::text) <> (
            select s.xmin::text from pg_catalog.pg_attribute s
            where s.attrelid = c.oid and s.attnum = -1)
        then pg_catalog.min(a.xmin::text) else '' end
    from pg_catalog.pg_attribute a
    where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped))
"""
"""The storage of table *c* of pg_class, for `Storage.of`."""


@dataclass(frozen=True, slots=True)
class Storage:
    """``toast``: the OID of a table's TOAST table, or 0. ``columns``: a digest of the types.

    ``rewritten_by``: the transaction that wrote all columns in pg_attribute after CREATE TABLE, as
    DETACH does. The text is empty without such a transaction, and None if unknown.
    """

    toast: int
    file: int
    columns: str | None
    rewritten_by: str | None = None

    @classmethod
    def of(cls, stored: list[object]) -> Self:
        """Return the storage from a row of STORAGE_SQL or the form of `stored`."""
        toast, file, described = stored
        if described is None:
            return cls(int(str(toast)), int(str(file)), None)
        columns, is_known, rewritten_by = str(described).partition(" ")
        return cls(int(str(toast)), int(str(file)), columns, rewritten_by if is_known else None)

    @property
    def stored(self) -> list[object]:
        """The form for the bookkeeping."""
        suffix = "" if self.rewritten_by is None else f" {self.rewritten_by}"
        return [self.toast, self.file, None if self.columns is None else self.columns + suffix]

    @property
    def lost(self) -> Self:
        """The storage to record for a table whose rows the stream lacks, until its next copy."""
        return replace(self, file=_LOST)

    @property
    def is_lost(self) -> bool:
        return self.file == _LOST

    def has_other_columns(self, former: "Storage") -> bool:
        """Whether both the file and the columns differ from *former*."""
        return not former.is_lost and self.file != former.file and self.columns != former.columns

    def was_detached(self, former: "Storage") -> bool:
        """Whether a session may have attached the table and detached the table since *former*."""
        return bool(self.rewritten_by) and former.rewritten_by not in (None, self.rewritten_by)

    def has_new_toast(self, former: "Storage") -> bool:
        """Whether the table had a different TOAST table in *former*."""
        return bool(self.toast and former.toast) and self.toast != former.toast


@dataclass(frozen=True, slots=True)
class StoredTable:
    """A table or a partition that stores rows."""

    oid: int
    name: RelationName
    storage: Storage
    may_read: bool
    has_first_toast: bool
    """Whether CREATE TABLE created the TOAST table, or the table has none."""

    @property
    def created(self) -> Storage:
        """The storage that CREATE TABLE gave the table: the name of the first file is the OID."""
        toast = self.storage.toast if self.has_first_toast else _FORMER
        return Storage(toast, self.oid, self.storage.columns)


_TABLES_SQL: Final = f"""
with recursive tree as (
    select w.namespace, w.name, c.oid, c.relkind
    from unnest(%s::text[], %s::text[]) w (namespace, name)
    cross join {NAMED_RELATION} c
    union all
    select t.namespace, t.name, c.oid, c.relkind
    from tree t
    join pg_catalog.pg_inherits i on i.inhparent = t.oid
    join pg_catalog.pg_class c on c.oid = i.inhrelid
    where t.relkind = 'p' and {IS_ATTACHED}
)
select t.namespace, t.name, c.oid::int8 as oid, n.nspname as own_namespace, c.relname as own_name,
       {STORAGE_SQL} as storage,
       pg_catalog.has_table_privilege(c.oid, 'select')
         and pg_catalog.has_schema_privilege(n.oid, 'usage')
         and not pg_catalog.row_security_active(c.oid) as may_read,
       not exists (select from pg_catalog.pg_attribute a, pg_catalog.pg_attribute u
                    where a.attrelid = c.oid and a.attnum = -1
                      and u.attrelid = c.reltoastrelid and u.attnum = -1
                      and a.xmin <> u.xmin) as has_first_toast
from tree t
join pg_catalog.pg_class c on c.oid = t.oid
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where t.relkind = 'r'
"""

# The command that rewrites rows has no higher id than the command that then writes pg_class. A
# TRUNCATE creates new files for the indexes before an INSERT of its transaction; ALTER TABLE
# creates them after its rows.
_SIGN_SQL: Final = f"""
select exists (select from only {{relation}} r
                where r.ctid < '({PAGES_MAX},0)' and r.xmin = c.xmin
                  and r.cmin::text::int8 <= c.cmin::text::int8
                  and not exists (
                    select from pg_catalog.pg_index i, pg_catalog.pg_class x
                    where i.indrelid = c.oid and x.oid = i.indexrelid and x.xmin = c.xmin
                      and x.cmin::text::int8 < r.cmin::text::int8)) as are_rewritten,
       exists (select from pg_catalog.pg_attribute a
                where a.attrelid = c.oid and a.attnum > 0 and a.xmin = c.xmin) as has_column
from pg_catalog.pg_class c where c.oid = {{oid}}::oid and c.oid = pg_catalog.to_regclass({{name}})
"""
_LOCK_TIMEOUT_SQL: Final = "set local lock_timeout = '100ms'"


async def read_stored_tables(
    connection: Connection, names: Iterable[RelationName]
) -> dict[RelationName, list[StoredTable]]:
    """Return the tables that store the rows of the existing relations among *names*. No lock on
    a table delays the query.
    """
    listed = list(names)
    rows = await fetch_all(
        connection,
        _TABLES_SQL,
        [name.namespace for name in listed],
        [name.name for name in listed],
    )
    tables: dict[RelationName, list[StoredTable]] = defaultdict(list)
    for row in rows:
        tables[RelationName(row["namespace"], row["name"])].append(
            StoredTable(
                row["oid"],
                RelationName(row["own_namespace"], row["own_name"]),
                Storage.of(row["storage"]),
                row["may_read"],
                row["has_first_toast"],
            )
        )
    return tables


def former_storage(
    table: StoredTable, tables: Iterable[StoredTable], stored: Mapping[int, Storage] | None
) -> Storage:
    """Return the storage of *table*, one of the *tables* of a relation, at the last check. Pure.

    *stored*: the storage of the relation's tables by OID. ``None`` if a copy with `initial: none`
    copied no row, so the present storage counts.
    """
    if stored is None:
        return table.storage
    if table.oid in stored:
        return stored[table.oid]
    # A session created the partition since the last check. If the relation has new types, these
    # explain the rewrite.
    siblings = (other for other in tables if other.oid in stored)
    if any(other.storage.has_other_columns(stored[other.oid]) for other in siblings):
        return replace(table.created, columns=None)
    return table.created


async def is_rewritten(
    connection: Connection, table: StoredTable, former: Storage, *, captures: bool
) -> bool | None:
    """Return whether ALTER TABLE rewrote a table since *former* without a change of columns. Return
    None if the table is locked, renamed or dropped.

    *captures*: the source's capture reports rewrites of columns, which also write pg_attribute. The
    present rows come from the last rewrite, so their transaction shows the kind of that rewrite.
    """
    now = table.storage
    if former.is_lost:
        return True
    if now.file == former.file or now.columns != former.columns:
        return False
    if now.has_new_toast(former) and not captures:
        return True
    if not table.may_read:
        return False
    relation = quote_qualified(table.name.namespace, table.name.name)
    sign = _SIGN_SQL.format(relation=relation, name=quote_literal(relation), oid=int(table.oid))
    # One message, and so one transaction: parallel tasks use the connection between messages.
    try:
        cursor = await connection.execute(f"{_LOCK_TIMEOUT_SQL}; {sign}".encode())
        cursor.nextset()
        row = await cursor.fetchone()
    except (psycopg.errors.LockNotAvailable, psycopg.errors.UndefinedTable):
        return None
    if row is None:
        return None
    return bool(row["are_rewritten"]) and not (captures and row["has_column"])
