"""SQL that hashes a text to two independent 64-bit numbers, which are equal on both servers. Pure.

``hashtextextended`` takes a seventh of the time of md5. PostgreSQL keeps its values stable for hash
partitions, but not between two machines, and the function hashes bytes in the server's encoding. So
a comparison uses the function only if both servers give the same answers for `PROBE_SQL`. Otherwise
the comparison uses md5 of the text in UTF-8.
"""

import enum
from typing import Final

_SECOND_SEED: Final = -7046029254386353131
_BUCKET_SEED: Final = 1442695040888963407

PROBE_SQL: Final = f"""
select pg_catalog.array_agg(h::text order by n, seed)
from (select n, s.seed, pg_catalog.hashtextextended(
          pg_catalog.repeat('streamer ', n) collate "C", s.seed) as h
      from pg_catalog.generate_series(0, 9) n,
           (values (0), ({_SECOND_SEED}), ({_BUCKET_SEED})) s (seed)) p
"""
"""Test values of the hash. Two servers with the same values compute the same hashes."""


class HashKind(enum.StrEnum):
    """The function that hashes rows."""

    LOOKUP = "lookup"
    MD5 = "md5"


def choose_hash(
    encodings: tuple[str, str], probes: tuple[list[str] | None, list[str] | None]
) -> HashKind:
    """Return the fastest function for which both servers compute the same values.

    *encodings*: the encodings of both servers. Text of a server with SQL_ASCII is UTF-8, or could
    not be in the target.
    """
    source, target = encodings
    has_same_bytes = source == target or {source, target} <= {"UTF8", "SQL_ASCII"}
    is_same = probes[0] is not None and probes[0] == probes[1]
    return HashKind.LOOKUP if has_same_bytes and is_same else HashKind.MD5


def pair_sql(kind: HashKind, text: str) -> tuple[str, str]:
    """Return the two hashes of *text*, a column or an expression that is cheap to repeat."""
    if kind is HashKind.LOOKUP:
        return (
            f"pg_catalog.hashtextextended({text}, 0)",
            f"pg_catalog.hashtextextended({text}, {_SECOND_SEED})",
        )
    return tuple(  # type: ignore[return-value]
        f"('x' || pg_catalog.substr({text}, {start}, 16))::bit(64)::int8" for start in (1, 17)
    )


def prepared_sql(kind: HashKind, text: str) -> str:
    """Return the input of `pair_sql` for *text*, which a query computes once for each row."""
    if kind is HashKind.LOOKUP:
        return f'{text} collate "C"'
    return f"pg_catalog.md5(pg_catalog.convert_to({text}, 'UTF8'))"


def name_sql(kind: HashKind, text: str) -> str:
    """Return a 128-bit hash of *text*, as text: for a row that is sent, or has no key."""
    return f"pg_catalog.md5({text})" if kind is HashKind.LOOKUP else prepared_sql(kind, text)


def value_sql(kind: HashKind, text: str) -> str:
    """Return a hash of *text*, as text."""
    if kind is HashKind.LOOKUP:
        return f'pg_catalog.hashtextextended({text} collate "C", 0)::text'
    return prepared_sql(kind, text)


def bucket_sql(kind: HashKind, text: str, count: int) -> str:
    """Return the number of the bucket of *text* among *count* buckets; *count* is a power of
    two.
    """
    if kind is HashKind.LOOKUP:
        number = f'pg_catalog.hashtextextended({text} collate "C", {_BUCKET_SEED})'
    else:
        number = pair_sql(kind, prepared_sql(kind, text))[0]
    return f"(({number}) & {count - 1})::int4"
