"""The array types in streamer's statements, so that the driver need not query servers for these
types.
"""

from typing import Any, Final

OWN_ARRAYS: Final = {
    1000: ("bool", 16),
    1005: ("int2", 21),
    1007: ("int4", 23),
    1016: ("int8", 20),
    1021: ("float4", 700),
    1022: ("float8", 701),
    1185: ("timestamptz", 1184),
}
"""Arrays in streamer's statements, by OID: the name and OID of their element type. Every server has
the same OIDs (src/include/catalog/pg_type.dat).
"""


def own_array(oid: int) -> dict[str, Any]:
    """Return the fields that the driver's introspection would return for an array type."""
    name, element = OWN_ARRAYS[oid]
    fields: dict[str, Any] = {"oid": oid, "ns": "pg_catalog", "name": f"_{name}", "kind": b"b"}
    fields |= {"elemtype": element, "elemtype_name": name, "elemdelim": ","}
    return fields | dict.fromkeys(("basetype", "range_subtype", "attrtypoids", "attrnames"))
