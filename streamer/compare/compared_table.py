"""The SQL that reads a table on both sides as text. Pure.

Both servers write rows with the columns of the target, in the same order
(`streamer.compare.build_compared_table`). Sessions pin the settings that the form of a value
depends on (`streamer.postgres.session_settings`).
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Final, NamedTuple, Self

from streamer.compare.cut_ranges import TID_RANGES_MIN, count_page_parts
from streamer.compare.row_hashes import (
    HashKind,
    bucket_sql,
    digested_sql,
    name_sql,
    pair_sql,
    value_sql,
)
from streamer.postgres.key_ranges import KeyRange, range_sql
from streamer.postgres.quoting import quote_literal


class Pages(NamedTuple):
    """Pages of a table from ``first`` up to, but not including, ``end``; None for the end of the
    table.

    ``lists_places``: the condition lists the ctid of each possible row. Before PostgreSQL 14 a
    server reads the whole table for a range of ctids.
    """

    first: int = 0
    end: int | None = None
    lists_places: bool = False


ALL_PAGES: Final = Pages()


def cut_pages(
    pages: int, size_bytes: int, version: int, rows: int, rate: float | None
) -> list[Pages]:
    """Cut the *pages* of a table for statements of bounded time. The last part has no end, because
    the table may grow meanwhile.

    *size_bytes*: the size, including values outside of the pages. *version*: the version of the
    server. *rows*: the approximate number of rows. *rate*: rows per second.
    """
    lists = version < TID_RANGES_MIN
    count = count_page_parts(pages, size_bytes, rows, rate, lists_places=lists)
    if count == 1:
        return [ALL_PAGES]
    bounds = [number * pages // count for number in range(count + 1)]
    parts = [Pages(first, end, lists) for first, end in pairwise(bounds)]
    return parts if lists else [*parts[:-1], parts[-1]._replace(end=None)]


Sums = dict[int, tuple[int, int, int]]
"""The number of rows and two sums over their hashes, by bucket."""


def add(sums: Sums, more: Sums) -> None:
    """Add the sums of further rows to *sums*."""
    for bucket, (count, first, second) in more.items():
        n, n_first, n_second = sums.get(bucket, (0, 0, 0))
        sums[bucket] = n + count, n_first + first, n_second + second


def differing_buckets(
    source: Sums, target: Sums, *, keeps_more: bool
) -> dict[int, tuple[int, int]]:
    """Return the numbers of rows on both sides of the buckets that differ.

    *keeps_more*: a bucket that only the target has does not differ.
    """
    none = (0, 0, 0)
    pairs = {n: (source.get(n, none), target.get(n, none)) for n in sorted(source.keys() | target)}
    return {
        bucket: (source_sum[0], target_sum[0])
        for bucket, (source_sum, target_sum) in pairs.items()
        if source_sum != target_sum and (source_sum[0] or not keeps_more)
    }


_PLACE: Final = "t.tableoid::text || ' ' || t.ctid::text || ' ' || t.xmin::text as place"


@dataclass(frozen=True, slots=True)
class Side:
    """The table of a server. ``values``: the SQL of the values to compare. ``where``: the SQL of
    the condition for rows, or empty. Both may call the table t.

    ``since``: an earlier comparison has found that rows of transactions below this xid are equal.
    The xid has 64 bits, with the epoch.
    """

    table: str
    values: tuple[str, ...]
    where: str
    since: int | None = None

    def rows(self, clause: str = "", *, pages: Pages = ALL_PAGES) -> str:
        """Return a query of the rows, in parentheses and with the alias that all queries use.

        The columns are the values v1, v2 …, and place: table, ctid and xmin of the row. *clause*
        comes after the table. With ``since``, the column known marks rows that were equal.
        """
        listed = ", ".join(f"{value} as v{n + 1}" for n, value in enumerate(self.values))
        known_sql = "" if self.since is None else f"{_known_sql(self.since)} as known, "
        within = _pages_sql(pages)
        where = self.where or ("where true" if within else "")
        where = " and ".join(filter(None, (where, within)))
        return f"(select {_PLACE}, {known_sql}{listed} from {self.table} t {clause} {where}) b"


def _pages_sql(pages: Pages) -> str:
    first, end, lists_places = pages
    if lists_places:
        rows = (
            "(pg_catalog.current_setting('block_size')::int4 - 24) / 28"  # a header, and 28 bytes
        )
        return (
            "t.ctid = any (array(select ('(' || p || ',' || n || ')')::tid"
            f" from pg_catalog.generate_series({first}, {end} - 1) p,"
            f" pg_catalog.generate_series(1, {rows}) n))"
        )
    lower = f"t.ctid >= '({first},0)'::tid" if first else ""
    upper = "" if end is None else f"t.ctid < '({end},0)'::tid"
    return " and ".join(filter(None, (lower, upper)))


def _known_sql(since: int) -> str:
    """Return the condition for a row that no transaction from *since* on has written. Pure.

    The row shows 32 bits of xmin, also if frozen. The transaction is later if its xid is between
    *since* and the server's next xid, modulo 2³². An old row whose bits happen to be in that range
    counts as changed.
    """
    return (
        f"((t.xmin::text::int8 - {since}) & 4294967295) >= (select"
        f" pg_catalog.txid_snapshot_xmax(pg_catalog.txid_current_snapshot()) - {since})"
    )


@dataclass(frozen=True, slots=True)
class ComparedTable:
    """A table to compare, free of secrets.

    ``columns``: the target's columns to compare. ``texts``: for each column, whether the text needs
    the output function of ``char(n)``. ``sent_types``: for each column, the type whose binary form
    goes into a digest; empty for the text. ``key``: positions in ``columns``; empty for a table
    without a key, whose rows are a multiset. ``key_types``: the types of the key columns, for index
    look-ups; empty if streamer finds rows by a hash of the key's text. ``is_ordered``: both sides
    sort the key in the same order and have an index of the key. Otherwise a hash of the key assigns
    rows to ``buckets``. ``row_sid``: the sid of the target's rows, if any. ``is_disjoint``: the
    target contains rows of other tables, too, which only their keys distinguish. ``has_char``: a
    column of type ``"char"`` is compared as a number.
    """

    relation_id: int
    source_id: int
    database: str
    sid: str | None
    source_name: str
    target_name: str
    type: str
    columns: tuple[str, ...]
    texts: tuple[bool, ...]
    sent_types: tuple[str, ...]
    key: tuple[int, ...]
    key_types: tuple[str, ...]
    is_ordered: bool
    buckets: int
    hash: HashKind
    row_sid: str | None
    is_disjoint: bool
    has_char: bool
    source: Side
    target: Side

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        lists = ("columns", "texts", "sent_types", "key", "key_types")
        sides = {name: fields[name] for name in ("source", "target")}
        return cls(
            **fields
            | {name: tuple(fields[name]) for name in lists}
            | {"hash": HashKind(fields["hash"])}
            | {
                name: Side(**side | {"values": tuple(side["values"])})
                for name, side in sides.items()
            }
        )

    def since(self, of_source: int | None = None, of_target: int | None = None) -> "ComparedTable":
        """Return the table with the first transactions that may have changed rows since an earlier
        comparison.
        """
        return replace(
            self,
            source=replace(self.source, since=of_source),
            target=replace(self.target, since=of_target),
        )

    def side(self, number: int) -> Side:
        """Return the source for 0, the target for 1."""
        return self.target if number else self.source

    @property
    def keeps_more(self) -> bool:
        """Whether the comparison ignores rows that only the target has."""
        return self.type == "append" or self.is_disjoint

    @property
    def is_named_by_hash(self) -> bool:
        """Whether a hash of the text names a key, because no index finds the text, which may be a
        whole row.
        """
        return not self.key_types

    @property
    def key_columns(self) -> tuple[str, ...]:
        """The columns that identify a row: the key, or all columns."""
        return tuple(self.columns[i] for i in self.key) if self.key else self.columns

    # ---- expressions over the base -------------------------------------------------------------

    @property
    def _values(self) -> list[str]:
        return [f"b.v{i + 1}" for i in range(len(self.columns))]

    def _text(self, position: int, values: Sequence[str]) -> str:
        value = values[position]
        if self.texts[position]:
            return f"pg_catalog.textin(pg_catalog.bpcharout({value}))"
        return f"{value}::text"

    @property
    def _key_text(self) -> str:
        return self._key_text_of(self._values)

    def _key_text_of(self, values: Sequence[str]) -> str:
        positions = self.key or tuple(range(len(self.columns)))
        texts = ", ".join(self._text(i, values) for i in positions)
        return f"pg_catalog.array_to_json(array[{texts}]::text[])::text"

    @property
    def _name(self) -> str:
        text = self._key_text
        return name_sql(self.hash, text) if self.is_named_by_hash else text

    def _in_buckets(self, values: Sequence[str], count: int, numbers: Iterable[int]) -> str:
        bucket = bucket_sql(self.hash, self._key_text_of(values), count)
        return f"{bucket} = any (array[{', '.join(map(str, numbers))}]::int4[])"

    def _digested(self, side: Side) -> str:
        """Return the row as it goes into a digest.

        For a row that an earlier comparison found equal, only the key goes into the digest. If the
        keys of such rows differ, so do the digests, and the comparison fetches the entire rows.
        """
        row = self._digested_row(range(len(self.columns)))
        if side.since is None or not self.key:
            return row
        return f"(case when b.known then {self._digested_row(self.key)} else {row} end)"

    def _digested_row(self, positions: Sequence[int]) -> str:
        values = self._values
        sent = [
            f"{values[i]}::{self.sent_types[i]}" if self.sent_types[i] else self._text(i, values)
            for i in positions
        ]
        texts = f"row({', '.join(values[i] for i in positions)})::text"
        return digested_sql(self.hash, f"row({', '.join(sent)})", texts)

    def _where(self, unit: KeyRange) -> str:
        names = [f"b.v{i + 1}" for i in self.key]
        return range_sql(unit, names, self.key_types)

    # ---- conditions over a table ---------------------------------------------------------------

    def ranges_condition(self, side: Side, ranges: Iterable[KeyRange]) -> str:
        """Return the condition for rows of *side* in any of the ranges."""
        names = [side.values[i] for i in self.key]
        conditions = [range_sql(unit, names, self.key_types) for unit in ranges]
        return " or ".join(f"({condition})" for condition in conditions) or "false"

    def buckets_condition(self, side: Side, count: int, numbers: Iterable[int]) -> str:
        """Return the condition for rows of *side* in *numbers* of *count* buckets."""
        return self._in_buckets(side.values, count, numbers)

    # ---- queries -------------------------------------------------------------------------------

    def digest_sql(
        self,
        side: Side,
        parts: Sequence[KeyRange],
        rows_per_second: float | None = None,
        *,
        pages: Pages = ALL_PAGES,
    ) -> str:
        """Return a query of rows (bucket, count, sum of first hashes, sum of second hashes).

        An ordered table yields a row for each of *parts* with rows, and the bucket is the number of
        the part. An unordered table has a single part, and yields a row per bucket in use. Sums
        count equal rows, and do not depend on their order. *rows_per_second*: the server sleeps
        after rows whose hash ends in zeros, about once a second. *pages*: the pages to read; None
        for all.
        """
        return " union all ".join(
            self._part_digest_sql(side, number, part, rows_per_second, pages)
            for number, part in enumerate(parts)
        )

    def _part_digest_sql(
        self,
        side: Side,
        number: int,
        part: KeyRange,
        rows_per_second: float | None,
        pages: Pages,
    ) -> str:
        first, second = pair_sql(self.hash, "r.r")
        bucket = (
            f"{number}" if self.is_ordered else bucket_sql(self.hash, self._key_text, self.buckets)
        )
        # OFFSET keeps PostgreSQL from computing a row twice.
        rows = (
            f"select {self._digested(side)} as r, {bucket} as bucket from {side.rows(pages=pages)}"
            f" where {self._where(part)} offset 0"
        )
        groups = f"{number} as bucket" if self.is_ordered else "h.bucket"
        return (
            f"select {groups}, count(*), sum(h.h1)::text, sum(h.h2)::text"
            f" from (select r.bucket, {first} as h1, {second} as h2 from ({rows}) r) h"
            f"{_pause_sql(rows_per_second)}"
            f" {'having count(*) > 0' if self.is_ordered else 'group by h.bucket'}"
        )

    def size_sql(self, side: Side) -> str:
        """Return a query of a table's size: all pages, pages of the largest heap, and all bytes.

        Further columns are the version of the server, and the files of the table.
        """
        name = f"{quote_literal(side.table.removeprefix('only '))}::regclass"
        return f"""
select coalesce(sum(p.pages), 0)::int8 as pages, coalesce(max(p.pages), 0)::int8 as heap_pages,
       coalesce(sum(p.bytes), 0)::int8 as bytes,
       pg_catalog.current_setting('server_version_num')::int4 as version,
       pg_catalog.string_agg(p.file, ' ' order by p.file) as files
  from (select pg_catalog.pg_relation_filenode(l.oid)::text as file,
               pg_catalog.pg_relation_size(l.oid)
               / pg_catalog.current_setting('block_size')::int8 as pages,
               pg_catalog.pg_table_size(l.oid) as bytes
          from (select {name}::oid
                union select relid from pg_catalog.pg_partition_tree({name})) l (oid)) p
"""

    def cut_sql(self, side: Side, unit: KeyRange, count: int, *, clause: str = "") -> str:
        """Return a query of the keys that cut a range into *count* parts of the same size."""
        names = [f"b.v{i + 1}" for i in self.key]
        texts = ", ".join(self._text(i, self._values) for i in self.key)
        order = ", ".join(names)
        return (
            f"select c.k from (select array[{texts}]::text[] as k,"
            f" pg_catalog.row_number() over (order by {order}) - 1 as n,"
            f" count(*) over () as total from {side.rows(clause)} where {self._where(unit)}) c"
            f" where c.n > 0 and c.n * {count} / c.total > (c.n - 1) * {count} / c.total"
            " order by c.n"
        )

    def sample_sql(self, side: Side, percent: float, count: int) -> str:
        """Return a query like `cut_sql` for the whole table, which reads *percent* of the pages."""
        clause = f"tablesample system ({percent:.6f}) repeatable (0)"
        return self.cut_sql(side, KeyRange(), count, clause=clause)

    def fetch_sql(
        self, side: Side, unit: KeyRange, buckets: Sequence[int], *, pages: Pages = ALL_PAGES
    ) -> str:
        """Return a query of rows (name of the key, two hashes of the row); without a key, the
        hashes are 0.
        """
        within = self._where(unit)
        if not self.is_ordered and buckets:
            within = self._in_buckets(self._values, self.buckets, buckets)
        rows = f"from {side.rows(pages=pages)} where {within}"
        if not self.key:
            return f"select {self._name}, 0::int8, 0::int8 {rows}"
        first, second = pair_sql(self.hash, "r.r")
        row = self._digested_row(range(len(self.columns)))
        # OFFSET keeps PostgreSQL from computing a row twice.
        return (
            f"select r.name, {first}, {second}"
            f" from (select {self._name} as name, {row} as r {rows} offset 0) r"
        )

    def read_sql(self, side: Side) -> str:
        """Return a query of rows (number of the key, place, hashes of the values) for keys.

        The parameters are as in `read_parameters`.
        """
        # The text of a row with a single value distinguishes NULL from an empty string.
        texts = [f"row(b.v{i + 1})::text" for i in range(len(self.columns))]
        hashes = ", ".join(value_sql(self.hash, text) for text in texts)
        return f"select k.n, b.place, array[{hashes}]::text[] from {self._found_sql(side)}"

    def show_sql(self, side: Side, *, with_values: bool) -> str:
        """Return a query of rows (number and text of the key, values or NULL) with the same
        parameters, in the order of the numbers.
        """
        if not with_values:
            shown_sql = f"{self._key_text}, null::text[] from {self._found_sql(side)}"
            return f"select distinct on (k.n) k.n, {shown_sql} order by k.n"
        # format() calls the output function of every type.
        names = [f"b.v{i + 1}" for i in range(len(self.columns))]
        shown = ", ".join(
            f"case when {n} is distinct from null then pg_catalog.format('%%s', {n}) end"
            for n in names
        )
        shown_sql = f"array[{shown}]::text[] from {self._found_sql(side)}"
        return f"select k.n, {self._key_text}, {shown_sql} order by k.n"

    def _found_sql(self, side: Side) -> str:
        """Return the join of keys k, which are parameters, and rows b."""
        rows = side.rows()
        names = [f"k{j + 1}" for j in range(len(self.key_types))]
        if not self.is_named_by_hash:
            condition = " and ".join(
                f"b.v{i + 1} = k.{name}::{kind}"
                for i, name, kind in zip(self.key, names, self.key_types, strict=True)
            )
        else:
            names, condition = ["k"], 'b.name collate "C" = k.k collate "C"'
            # OFFSET keeps PostgreSQL from computing the name of a row for each key.
            rows = f"(select b.*, {self._name} as name from {rows} offset 0) b"
        arrays = "pg_catalog.unnest(%s::int4[])" + ", pg_catalog.unnest(%s::text[])" * len(names)
        keys = f"rows from ({arrays}) as k (n, {', '.join(names)})"
        # psycopg reads % as the start of a parameter.
        return f"{keys} join {rows.replace('%', '%%')} on {condition}"

    def read_parameters(self, keys: dict[int, str]) -> list[Any]:
        """Return the parameters of `read_sql`. *keys*: the names of keys by number."""
        if self.is_named_by_hash:
            return [list(keys), list(keys.values())]
        parts = [json.loads(text) for text in keys.values()]
        columns = ([part[j] for part in parts] for j in range(len(self.key_types)))
        return [list(keys), *columns]


def _pause_sql(rows_per_second: float | None) -> str:
    if rows_per_second is None:
        return ""
    rows = 1 << (max(1, int(rows_per_second)).bit_length() - 1)
    seconds = rows / rows_per_second
    return f" where h.h1 & {rows - 1} <> 0 or pg_catalog.pg_sleep({seconds:.6f}) is not null"
