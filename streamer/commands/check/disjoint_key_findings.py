"""Whether the keys of tables that share a target by `keys: disjoint` can collide.

The values of integer keys, and the steps of their sequences, can prove that keys differ. Keys of
other types give no such proof, so only the target's unique key detects a collision.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import psycopg

from streamer.commands.check.findings import Finding, Place, in_words, warning
from streamer.mapping.relation_names import RelationName
from streamer.postgres.quoting import quote_identifier, quote_literal, quote_qualified
from streamer.source.catalog import SourceRelation
from streamer.source.connection import Connection, fetch_one

INTEGERS: Final = ("smallint", "integer", "bigint")
LOCK_SECONDS: Final = 2
# For an empty table, the last value of the sequence, or else its start value, counts as the key.
_RANGE_SQL: Final = """
select coalesce(k.first, s.value) as first, coalesce(k.last, s.value) as last,
       s.step, s.value
from (select pg_catalog.min({column})::int8 as first, pg_catalog.max({column})::int8 as last
      from {table}) k
left join (
    select q.seqincrement as step,
           coalesce(pg_catalog.pg_sequence_last_value(q.seqrelid), q.seqstart) as value
    from pg_catalog.pg_sequence q
    where q.seqrelid = pg_catalog.pg_get_serial_sequence({name}, {column_name})::regclass
      and pg_catalog.has_sequence_privilege(q.seqrelid, 'select')) s on true
"""


@dataclass(frozen=True, slots=True)
class IntegerKeys:
    """The least and the greatest key of a table; ``step`` and ``value`` of its sequence, if any."""

    first: int
    last: int
    step: int | None = None
    value: int | None = None

    @property
    def remainder(self) -> int | None:
        """The remainder that all keys have when divided by the step, as far as known."""
        if self.step is None or self.value is None or abs(self.step) < 2:
            return None
        remainders = {key % abs(self.step) for key in (self.first, self.last, self.value)}
        return remainders.pop() if len(remainders) == 1 else None

    def may_meet(self, other: "IntegerKeys") -> bool:
        """Whether both tables may have equal keys, judged by ranges and remainders."""
        if self.last < other.first or other.last < self.first:
            return False
        is_stepped = self.remainder is not None and other.remainder is not None
        return not (is_stepped and self.step == other.step and self.remainder != other.remainder)


@dataclass(frozen=True, slots=True)
class KeyOfTable:
    """The keys of a source's table."""

    label: str
    source: RelationName
    keys: IntegerKeys

    def __str__(self) -> str:
        return f'"{self.source}" of source "{self.label}" ({self.keys.first} to {self.keys.last})'


async def read_key_range(plain: Connection, relation: SourceRelation) -> IntegerKeys | None:
    """Return the range of the only integer column of the key; None without such a key."""
    types = {column.name: column.type for column in relation.columns}
    if len(relation.key) != 1 or types[relation.key[0]] not in INTEGERS:
        return None
    column, name = relation.key[0], relation.name
    table = quote_qualified(name.namespace, name.name)
    sql = _RANGE_SQL.format(
        column=quote_identifier(column),
        table=table,
        name=quote_literal(table),
        column_name=quote_literal(column),
    )
    try:
        async with plain.transaction():
            await plain.execute(f"set local lock_timeout = '{LOCK_SECONDS}s'".encode())
            row = await fetch_one(plain, sql)
    except (psycopg.errors.LockNotAvailable, psycopg.errors.InsufficientPrivilege):
        return None
    return None if row["first"] is None else IntegerKeys(**row)


def check_key_ranges(target: RelationName, tables: Sequence[KeyOfTable]) -> Iterable[Finding]:
    """Warn about each table whose keys may equal keys of an earlier table."""
    warned = set()
    for earlier, later in combinations(tables, 2):
        if later in warned or not earlier.keys.may_meet(later.keys):
            continue
        warned.add(later)
        yield warning(
            Place(later.label, str(later.source)),
            f"the keys of {earlier} and {later} overlap in target table {target}, although the "
            "rule says `keys: disjoint`: an equal key would stop the table whose row arrives "
            "second",
            in_words(
                "give their sequences different ranges, or the same step and different starts; or "
                "give their rows a sid"
            ),
        )
