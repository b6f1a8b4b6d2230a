"""SQL that hashes rows and texts to two 64-bit numbers, which are equal on both servers. Pure.

PostgreSQL keeps its hash functions stable for hash partitions, but not between two machines, and
hashes bytes in the server's encoding. So a comparison uses these functions only if both servers
return the same values for `PROBE_SQL`. Otherwise the comparison uses md5 of the text in UTF-8,
which takes seven times as long.

Two servers in UTF-8 hash the form in which they send rows to a client (`record_send`). To hash the
text of a row takes twice as long. SQL can hash bytes only as the element of an array. NaN has
several binary forms; if these differ, the comparison fetches the rows and compares their texts.
"""

import enum
from typing import Final

_SECOND_SEED: Final = -7046029254386353131
_BUCKET_SEED: Final = 1442695040888963407

PROBE_SQL: Final = f"""
select pg_catalog.array_agg(a.h::text order by n, seed, kind)
from pg_catalog.generate_series(0, 9) n,
     (values (0), ({_SECOND_SEED}), ({_BUCKET_SEED})) s (seed),
     lateral (values
         (0, pg_catalog.hashtextextended(pg_catalog.repeat('streamer ', n) collate "C", s.seed)),
         (1, pg_catalog.hash_array_extended(array[pg_catalog.record_send(
             row(n::int4, pg_catalog.repeat('streamer ', n), n::numeric, null::int8))], s.seed))
     ) a (kind, h)
"""
"""Test values of the hash. Two servers with the same values compute the same hashes."""


class HashKind(enum.StrEnum):
    """The function that hashes rows."""

    BINARY = "binary"
    LOOKUP = "lookup"
    MD5 = "md5"


def choose_hash(
    encodings: tuple[str, str], probes: tuple[list[str] | None, list[str] | None]
) -> HashKind:
    """Return the fastest function for which both servers compute the same values.

    *encodings*: the encodings of both servers. Text of a server with SQL_ASCII counts as UTF-8,
    because a target in UTF-8 rejects any other text.
    """
    if probes[0] is None or probes[0] != probes[1]:
        return HashKind.MD5
    if set(encodings) == {"UTF8"}:
        return HashKind.BINARY
    has_same_bytes = len(set(encodings)) == 1 or set(encodings) == {"UTF8", "SQL_ASCII"}
    return HashKind.LOOKUP if has_same_bytes else HashKind.MD5


def digested_sql(kind: HashKind, sent: str, text: str) -> str:
    """Return the input of `pair_sql` for a row, which a query computes once.

    *sent* and *text*: the row as a record for `record_send`, and as text.
    """
    if kind is HashKind.BINARY:
        return f"array[pg_catalog.record_send({sent})]"
    return prepared_sql(kind, text)


def pair_sql(kind: HashKind, text: str) -> tuple[str, str]:
    """Return the two hashes of *text*, a column or an expression that is cheap to repeat."""
    if kind is not HashKind.MD5:
        name = "hash_array_extended" if kind is HashKind.BINARY else "hashtextextended"
        return f"pg_catalog.{name}({text}, 0)", f"pg_catalog.{name}({text}, {_SECOND_SEED})"
    return tuple(  # type: ignore[return-value]
        f"('x' || pg_catalog.substr({text}, {start}, 16))::bit(64)::int8" for start in (1, 17)
    )


def prepared_sql(kind: HashKind, text: str) -> str:
    """Return the input of `pair_sql` for *text*, which a query computes once for each row."""
    if kind is not HashKind.MD5:
        return f'{text} collate "C"'
    return f"pg_catalog.md5(pg_catalog.convert_to({text}, 'UTF8'))"


def name_sql(kind: HashKind, text: str) -> str:
    """Return a 128-bit hash of *text*, as text: for a row, or for a key without an index."""
    return f"pg_catalog.md5({text})" if kind is not HashKind.MD5 else prepared_sql(kind, text)


def value_sql(kind: HashKind, text: str) -> str:
    """Return a hash of *text*, as text."""
    if kind is not HashKind.MD5:
        return f'pg_catalog.hashtextextended({text} collate "C", 0)::text'
    return prepared_sql(kind, text)


def bucket_sql(kind: HashKind, text: str, count: int) -> str:
    """Return the number of the bucket of *text* among *count* buckets; *count* is a power of
    two.
    """
    if kind is not HashKind.MD5:
        number = f'pg_catalog.hashtextextended({text} collate "C", {_BUCKET_SEED})'
    else:
        number = pair_sql(kind, prepared_sql(kind, text))[0]
    return f"(({number}) & {count - 1})::int4"
