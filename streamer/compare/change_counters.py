"""A server's facts about changes of its tables since an earlier moment.

A cut-over compares all rows while programs write, and again after the end of writes. For rows that
no transaction has changed in between, the second comparison relies on the first. The proof must not
come from the stream, because the comparison checks its work:

- The statistics of both servers count the rows that were inserted, updated and deleted. A table
  with the same counts and the same files has not changed (PostgreSQL documentation, "The Cumulative
  Statistics System"). Before version 15 the server may lose counts, so counts prove no equality.
- ``xmin`` of a row is the transaction that wrote this row version. Each transaction below the
  oldest transaction that ran at the first reading of the facts had ended by then. So the first
  comparison saw the current version of each row whose ``xmin`` is below that transaction.

The facts are valid only until a restart of the server. After a restart, the time of the start
differs, and each table is compared as a whole.
"""

import enum
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import RelationMapping
from streamer.postgres.quoting import quote_literal, quote_qualified

COUNTS_MIN: Final = 15_00_00
"""From this version on the statistics are in shared memory; older servers send them by UDP."""
LATE_SECONDS: Final = 15
"""An idle session has reported its counts after ten seconds (PGSTAT_IDLE_INTERVAL in pgstat.c)."""

SERVER_SQL: Final = """
select pg_catalog.pg_postmaster_start_time()::text as started,
       pg_catalog.txid_snapshot_xmin(pg_catalog.txid_current_snapshot()) as horizon,
       case when pg_catalog.current_setting('server_version_num')::int4 >= {version}
                 and pg_catalog.current_setting('track_counts')::bool
            then (select coalesce(s.stats_reset::text, 'never')
                    from pg_catalog.pg_stat_database s
                   where s.datname = pg_catalog.current_database()) end as counts_since,
       (select pg_catalog.md5(coalesce(pg_catalog.string_agg(k.part, ',' order by k.part), ''))
          from (select pg_catalog.concat_ws(' ', e.enumtypid, e.enumsortorder, e.enumlabel)
                  from pg_catalog.pg_enum e
                union all
                select pg_catalog.concat_ws(' ', a.attrelid, a.attnum, a.attname, a.atttypid,
                                            a.atttypmod, a.attisdropped)
                  from pg_catalog.pg_attribute a
                  join pg_catalog.pg_class c on c.oid = a.attrelid and c.relkind = 'c'
               ) k (part)) as types
"""
"""Includes types, because a change of a type alters the text of stored values without writing
rows.
"""

_TABLES_SQL: Final = """
with recursive leaf (number, oid) as (
    select n.number, pg_catalog.to_regclass(n.name)::oid
      from pg_catalog.unnest(array[{names}]::text[]) with ordinality n (name, number)
    union all
    select l.number, i.inhrelid from leaf l join pg_catalog.pg_inherits i on i.inhparent = l.oid
)
select l.number::int4 as number,
       pg_catalog.md5(pg_catalog.string_agg(pg_catalog.concat_ws(' ', l.oid, (
           select pg_catalog.string_agg(pg_catalog.concat_ws(' ', a.attnum, a.attname, a.atttypid,
                                        a.atttypmod, a.attisdropped), ',' order by a.attnum)
             from pg_catalog.pg_attribute a where a.attrelid = l.oid and a.attnum > 0
       )), ',' order by l.oid)) as definition,
       pg_catalog.md5(pg_catalog.string_agg(pg_catalog.concat_ws(' ', l.oid,
           (select c.relfilenode from pg_catalog.pg_class c where c.oid = l.oid),
           pg_catalog.pg_stat_get_tuples_inserted(l.oid),
           pg_catalog.pg_stat_get_tuples_updated(l.oid),
           pg_catalog.pg_stat_get_tuples_deleted(l.oid)), ',' order by l.oid)) as changes,
       pg_catalog.md5(pg_catalog.string_agg(pg_catalog.concat_ws(' ', l.oid,
           (select c.relfilenode from pg_catalog.pg_class c where c.oid = l.oid)
       ), ',' order by l.oid)) as files
from leaf l where l.oid is not null group by l.number
"""
# Leave out sessions of streamer: they do not write at a source, and the positions of tables show
# their changes at the target. Sessions that began after the stop of writes cannot write.
_LATE_SQL: Final = f"""
select exists (
    select from pg_catalog.pg_stat_activity a
     where a.datname = pg_catalog.current_database() and a.backend_type = 'client backend'
       and a.pid <> pg_catalog.pg_backend_pid() and a.application_name not like 'streamer%'
       and ({{stopped_at}}::timestamptz is null or a.backend_start < {{stopped_at}}::timestamptz)
       and (a.state is distinct from 'idle'
            or a.state_change > pg_catalog.clock_timestamp() - interval '{LATE_SECONDS} s')) as late
"""


class Extent(enum.StrEnum):
    """The part of a table that the second comparison must read."""

    NOTHING = "nothing"
    CHANGES = "changes"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """A server at a moment. ``horizon``: all transactions below this xid had ended.
    ``counts_since``: the last reset of the statistics; None if counts prove no equality.
    """

    started: str
    horizon: int
    counts_since: str | None
    types: str


@dataclass(frozen=True, slots=True)
class TableCounters:
    """A table and its target at a moment. ``rule``: a hash of the mapping. ``position``: the
    position of the stream. Definitions and changes are hashes, of the source and of the target.
    """

    rule: str
    position: str
    definitions: tuple[str, str]
    changes: tuple[str, str]


@dataclass(frozen=True, slots=True)
class ChangeCounters:
    """All tables of a source at a moment, by name. ``is_settled``: no session can have made changes
    that the statistics do not count yet.
    """

    source: ServerCounters
    target: ServerCounters
    tables: dict[str, TableCounters]
    is_settled: bool = True

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        tables = {
            name: TableCounters(
                **table | {key: tuple(table[key]) for key in ("definitions", "changes")}
            )
            for name, table in fields["tables"].items()
        }
        servers = {name: ServerCounters(**fields[name]) for name in ("source", "target")}
        return cls(tables=tables, is_settled=fields["is_settled"], **servers)


def server_sql() -> str:
    """Return the query of a `ServerCounters`. Pure."""
    return SERVER_SQL.format(version=COUNTS_MIN)


def tables_sql(names: Sequence[RelationName]) -> str:
    """Return a query with a row for each table: the number in *names*, from 1, and digests of
    definition, change counters and files. Pure.

    A missing table has no row.
    """
    listed = (quote_literal(quote_qualified(name.namespace, name.name)) for name in names)
    return _TABLES_SQL.format(names=", ".join(listed))


def late_sql(stopped_at: str | None) -> str:
    """Return a query that tells whether sessions may have made changes that the server has not
    counted.

    *stopped_at*: a time from which new sessions cannot write, or None. Pure.
    """
    quoted = "null" if stopped_at is None else quote_literal(stopped_at)
    return _LATE_SQL.format(stopped_at=quoted)


def table_counters(
    mappings: Sequence[RelationMapping],
    positions: dict[str, str],
    of_source: Iterable[tuple[int, str, str]],
    of_target: Iterable[tuple[int, str, str]],
) -> dict[str, TableCounters]:
    """Combine the answers of both servers to `tables_sql`. Pure.

    A table that is missing on a side gets no counters.
    """
    sources = {number: facts for number, *facts in of_source}
    targets = {number: facts for number, *facts in of_target}
    counters = {}
    for number, mapping in enumerate(mappings, 1):
        if number not in sources or number not in targets:
            continue
        pairs = tuple(zip(sources[number], targets[number], strict=True))
        written = repr((mapping.rows, mapping.rule))
        rule = hashlib.sha256(written.encode()).hexdigest()[:16]
        name = str(mapping.source)
        counters[name] = TableCounters(rule, positions.get(name, ""), *pairs)
    return counters


def extent_of(name: str, former: ChangeCounters, now: ChangeCounters) -> Extent:
    """Return the part of a table that may have changed between two readings. Pure."""
    pairs = ((former.source, now.source), (former.target, now.target))
    if any(old.started != new.started or old.types != new.types for old, new in pairs):
        return Extent.WHOLE
    old, new = former.tables.get(name), now.tables.get(name)
    if old is None or new is None:
        return Extent.WHOLE
    if (old.rule, old.definitions) != (new.rule, new.definitions):
        return Extent.WHOLE
    has_counts = all(a.counts_since and a.counts_since == b.counts_since for a, b in pairs)
    is_same = (old.position, old.changes) == (new.position, new.changes)
    if has_counts and now.is_settled and is_same:
        return Extent.NOTHING
    return Extent.CHANGES
