"""Reads the target's sequences, and sets the values of the sequences.

``setval`` is not transactional, so a value stays set after a rollback. Such a value does no harm:
`set_ahead` only moves a sequence forward, and a repeated step calls `set_exact` again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from streamer.mapping.relation_names import RelationName
from streamer.mapping.sequence_places import SequencePlace, SequenceRange
from streamer.postgres.named_relations import NAMED_RELATION
from streamer.postgres.quoting import grants_on_sequence
from streamer.target.connection import TargetConnection


@dataclass(frozen=True, slots=True)
class TargetSequence:
    """A sequence of the target.

    ``range``: None where the role may not read the sequence. ``grants``: the SQL that lets the role
    read and set the sequence, if necessary.
    """

    oid: int
    name: RelationName
    range: SequenceRange | None
    grants: tuple[str, ...] = ()


_FIND_SQL: Final = f"""
with wanted as (
    select * from unnest($1::int4[], $2::text[], $3::text[], $4::text[])
             w (number, namespace, name, "column")
), found as (
    select w.number, c.oid from wanted w
    cross join {NAMED_RELATION} c
    where w.column is null and c.relkind = 'S'
    union all
    select w.number, c.oid from wanted w
    cross join {NAMED_RELATION} t
    join pg_catalog.pg_attribute a on a.attrelid = t.oid and a.attname = w.column
     and not a.attisdropped
    join pg_catalog.pg_depend d on d.refobjid = t.oid and d.refobjsubid = a.attnum
     and d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass
     and d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass
     and d.deptype = case a.attidentity when '' then 'a' else 'i' end
    join pg_catalog.pg_class c on c.oid = d.objid and c.relkind = 'S'
)
select f.number, c.oid::int8 as oid, n.nspname::text as namespace, c.relname::text as name,
       s.seqincrement as increment, s.seqmin as minimum, s.seqmax as maximum,
       u.has_usage, p.may_read, p.may_set, current_user::text as role,
       case when p.may_read then pg_catalog.pg_sequence_last_value(c.oid) end as last_value
from found f
join pg_catalog.pg_sequence s on s.seqrelid = f.oid
join pg_catalog.pg_class c on c.oid = f.oid
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
cross join lateral (
    select pg_catalog.has_schema_privilege(n.oid, 'usage') as has_usage) u
cross join lateral (
    select u.has_usage
             and pg_catalog.has_sequence_privilege(c.oid, 'usage, select') as may_read,
           u.has_usage
             and pg_catalog.has_sequence_privilege(c.oid, 'update') as may_set) p
"""

# Another source may have moved the sequence since the read, so only set the sequence forward.
_SET_SQL: Final = """
select pg_catalog.setval($1::int8::oid::pg_catalog.regclass, $2::int8, true)
where coalesce(case when $3 then pg_catalog.pg_sequence_last_value($1::int8::oid) < $2
                    else pg_catalog.pg_sequence_last_value($1::int8::oid) > $2 end, true)
"""


async def find_sequences(
    connection: TargetConnection, places: Mapping[RelationName, SequencePlace]
) -> dict[RelationName, TargetSequence]:
    """Return the existing target sequences of *places*, by the names of the source's sequences.

    Raises TargetError.
    """
    names = list(places)
    rows = await connection.fetch(
        _FIND_SQL,
        list(range(len(names))),
        [place.name.namespace for place in places.values()],
        [place.name.name for place in places.values()],
        [place.column for place in places.values()],
    )
    return {
        names[row["number"]]: TargetSequence(
            row["oid"],
            RelationName(row["namespace"], row["name"]),
            SequenceRange(row["increment"], row["minimum"], row["maximum"], row["last_value"])
            if row["may_read"]
            else None,
            ()
            if row["may_read"] and row["may_set"]
            else grants_on_sequence(
                "select, update",
                *(row["namespace"], row["name"], row["role"]),
                has_usage=row["has_usage"],
            ),
        )
        for row in rows
    }


async def set_ahead(connection: TargetConnection, sequence: TargetSequence, value: int) -> None:
    """Set *sequence* to *value*, unless it is already past *value*. Raises TargetError."""
    assert sequence.range is not None
    await connection.fetch_value(_SET_SQL, sequence.oid, value, sequence.range.increment > 0)


async def set_exact(
    connection: TargetConnection, sequence: TargetSequence, value: int, *, is_called: bool
) -> None:
    """Set *sequence* so that its next value comes after *value*, or is *value* itself. Raises
    TargetError.
    """
    await connection.fetch_value(
        "select pg_catalog.setval($1::int8::oid::pg_catalog.regclass, $2::int8, $3)",
        sequence.oid,
        value,
        is_called,
    )
