"""The types whose values may travel in PostgreSQL's send and receive format instead of text.

Binary transport is optional, and saves work where binary and text surely mean the same value. So a
column needs a type of the list below, and an equal type at the target. A column that the target
does not get may have any type. Pure.
"""

from collections.abc import Mapping
from typing import Final

from streamer.apply.rows.make_plan import match_columns
from streamer.decode.pgoutput import Relation
from streamer.mapping.rules import RelationMapping
from streamer.mapping.sid_and_history_columns import SID
from streamer.schema.target_relation import TargetColumn, TargetRelation

# From pg_type, with equal OIDs in versions 12 to 18 (multiranges: from 14 on). A type qualifies if
# PostgreSQL assigns a fixed OID, the send and receive functions are inverse, and values mean the
# same on every server. So the list lacks regclass and similar types (an OID of this database) and
# aclitem (no functions). The list also lacks pg_node_tree and statistics (no input), and int2vector
# and oidvector (for catalogs). A server sends an empty tsquery, but refuses to receive it. Types of
# extensions and users, and domains, have variable OIDs. An array carries the OID of the element
# type, and sends elements in the format of that type.
BINARY_TYPES: Final = {
    "bool": (16, 1000),
    "bytea": (17, 1001),
    "char": (18, 1002),
    "name": (19, 1003),
    "int8": (20, 1016),
    "int2": (21, 1005),
    "int4": (23, 1007),
    "text": (25, 1009),
    "oid": (26, 1028),
    "tid": (27, 1010),
    "xid": (28, 1011),
    "cid": (29, 1012),
    "json": (114, 199),
    "xml": (142, 143),
    "point": (600, 1017),
    "lseg": (601, 1018),
    "path": (602, 1019),
    "box": (603, 1020),
    "polygon": (604, 1027),
    "line": (628, 629),
    "cidr": (650, 651),
    "float4": (700, 1021),
    "float8": (701, 1022),
    "circle": (718, 719),
    "macaddr8": (774, 775),
    "money": (790, 791),
    "macaddr": (829, 1040),
    "inet": (869, 1041),
    "bpchar": (1042, 1014),
    "varchar": (1043, 1015),
    "date": (1082, 1182),
    "time": (1083, 1183),
    "timestamp": (1114, 1115),
    "timestamptz": (1184, 1185),
    "interval": (1186, 1187),
    "timetz": (1266, 1270),
    "bit": (1560, 1561),
    "varbit": (1562, 1563),
    "numeric": (1700, 1231),
    "refcursor": (1790, 2201),
    "uuid": (2950, 2951),
    "txid_snapshot": (2970, 2949),
    "pg_lsn": (3220, 3221),
    "tsvector": (3614, 3643),
    "jsonb": (3802, 3807),
    "int4range": (3904, 3905),
    "numrange": (3906, 3907),
    "tsrange": (3908, 3909),
    "tstzrange": (3910, 3911),
    "daterange": (3912, 3913),
    "int8range": (3926, 3927),
    "jsonpath": (4072, 4073),
    "int4multirange": (4451, 6150),
    "nummultirange": (4532, 6151),
    "tsmultirange": (4533, 6152),
    "tstzmultirange": (4534, 6153),
    "datemultirange": (4535, 6155),
    "int8multirange": (4536, 6157),
    "pg_snapshot": (5038, 5039),
    "xid8": (5069, 271),
}
"""OIDs of types and of array types, by name."""

INTERVALS: Final = frozenset(BINARY_TYPES["interval"])

BINARY_OIDS: Final = frozenset(oid for oids in BINARY_TYPES.values() for oid in oids)
TEXTUAL: Final = frozenset(BINARY_TYPES[name][0] for name in ("text", "bpchar", "varchar"))
"""Types that receive the bytes of a text: the possible types of ``sid``."""

VERSION_MIN: Final = 14_00_00
"""The oldest version of a source that can send binary values."""


def binary_types(source_version: int, target_version: int) -> frozenset[int]:
    """Return the OIDs of types whose values may travel in binary between two servers.

    From PostgreSQL 17 on, an interval may be infinite. An older server refuses the text of such an
    interval, but receives the binary form as a very long interval.
    """
    if source_version >= 17_00_00 > target_version:
        return BINARY_OIDS - INTERVALS
    return BINARY_OIDS


def binary_obstacle(
    relation: Relation,
    mapping: RelationMapping,
    target: TargetRelation | None,
    *,
    types: frozenset[int],
    type_names: Mapping[str, str],
) -> str | None:
    """Return the obstacle to binary transport for *relation*, or None.

    For a column or table that the target lacks, assume the source's definition.
    *type_names*: the source's types by column, as far as known.
    """
    table = str(mapping.source)
    if mapping.rule.filter is not None or mapping.rule.set:
        return f'table "{table}" has a filter or computed columns'
    by_name = {column.name: column for column in relation.columns}
    hashed = {column_hash.column for column_hash in mapping.rule.hashes}
    written: list[tuple[str, TargetColumn | None]]
    if target is None:
        written = [(name, None) for name in by_name if mapping.target_column(name) is not None]
    else:
        matched, missing = match_columns(relation, mapping, target)
        written = [(name, None) for name, _ in missing]
        written += [(relation.columns[c.position].name, c.target) for c in matched]
    for name, at_target in written:
        oid = by_name[name].type_oid
        kind = type_names.get(name, f"type {oid}")
        if name in hashed:
            if oid not in TEXTUAL:
                return f'column "{name}" of table "{table}" is {kind}, and streamer hashes its text'
            continue
        if oid not in types:
            return f'column "{name}" of table "{table}" is of {kind}, which is not safe in binary'
        if at_target is not None and at_target.type_oid != oid:
            return (
                f'column "{name}" of table "{table}" is {kind}, and {at_target.type} at the target'
            )
    if target is not None and target.has_sid and mapping.sid is not None:
        is_ours = all(at_target is None or at_target.name != SID for _, at_target in written)
        if is_ours and target.columns[SID].type_oid not in TEXTUAL:
            kind = target.columns[SID].type
            return f'column "{SID}" of target table "{mapping.target}" is {kind}, not text'
    return None
