"""Hashed columns of a rule: streamer replaces their values before a lane gets the changes.

All code behind it sees a source whose column holds the hash. So sets, exact order, histories,
quarantine, lane spools and staging tables never hold the plain value. Pure.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast

from streamer.decode.large import pieces
from streamer.decode.pgoutput import DELETE, INSERT, UPDATE, Redefinition
from streamer.decode.tuples import KIND_BINARY, KIND_TEXT
from streamer.errors import MappingError
from streamer.postgres.keyed_hash import HASH_CHARACTERS, KeyedHash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from streamer.apply.plan import PlanColumn
    from streamer.decode.pgoutput import Relation
    from streamer.decode.transactions import Changes
    from streamer.mapping.rules import ColumnHash, RelationMapping

_TUPLES_AT: Final = 5  # behind kind and relid
_LENGTH: Final = HASH_CHARACTERS.to_bytes(4, "big")
INPUT_TYPES: Final = frozenset({25, 1043})
"""text and varchar: the binary form of a value is its text."""


def hashed_changes(changes: "Changes", hashes: "Sequence[ColumnHash]") -> "Changes":
    """Return *changes* with the values of hashed columns replaced."""
    relation = changes.relation
    if isinstance(relation, Redefinition):
        return changes
    wanted = {each.column: each.state for each in hashes}
    states = {
        position: wanted[column.name]
        for position, column in enumerate(relation.columns)
        if column.name in wanted
    }
    return replace(
        changes, payloads=[hashed_message(payload, states) for payload in changes.payloads]
    )


def hashed_message(payload: bytes, states: Mapping[int, KeyedHash]) -> bytes:
    """Return a message I, U or D with the values at the positions of *states* hashed.

    NULL and unchanged values stay. A message that is a memoryview stays one. A malformed message
    loses its tuples, so that decoding refuses it without a plain value.
    """
    if payload[0] not in (INSERT, UPDATE, DELETE):
        return payload
    view = memoryview(payload)
    parts: list[bytes | memoryview] = []
    kept, position = 0, _TUPLES_AT
    try:
        while position < len(view):
            count = view[position + 1] << 8 | view[position + 2]
            position += 3
            for number in range(count):
                kind = view[position]
                position += 1
                if kind not in (KIND_TEXT, KIND_BINARY):
                    continue
                end = position + 4 + int.from_bytes(view[position : position + 4], "big")
                if end > len(view):
                    return payload[:_TUPLES_AT]
                if (state := states.get(number)) is not None:
                    value = cast("bytes", view[position + 4 : end])
                    parts += [view[kept:position], _LENGTH, state.digits(pieces(value))]
                    kept = end
                position = end
    except IndexError:
        return payload[:_TUPLES_AT]
    if not parts:
        return payload
    made = b"".join([*parts, view[kept:]])
    return cast("bytes", memoryview(made)) if isinstance(payload, memoryview) else made


def check_hashes(
    relation: "Relation",
    mapping: "RelationMapping",
    columns: "Sequence[PlanColumn]",
    key: "Sequence[PlanColumn]",
    primary_key: "Sequence[str]",
) -> None:
    """Raise MappingError for a hash that does not fit the table.

    *key*: the columns by which the plan finds rows. *primary_key*: the source's.
    """
    in_key = {*primary_key, *(relation.columns[c.position].name for c in key if c.position >= 0)}
    sent = {column.name: column for column in relation.columns}
    positions = {column.name: number for number, column in enumerate(relation.columns)}
    for each in mapping.rule.hashes:
        place = f'`set` of table "{mapping.source}" hashes column "{each.column}"'
        if each.column not in sent:
            raise MappingError(
                f"{place}, which the source does not send",
                hint=f"correct the rule; its columns are: {', '.join(sent)}",
            )
        if sent[each.column].type_oid not in INPUT_TYPES:
            raise MappingError(
                f"{place}, whose type is neither text nor varchar",
                hint="exclude the column, or change its type at the source",
            )
        if each.column in in_key:
            raise MappingError(
                f"{place}, which is part of the key of its rows",
                hint="take it out of `set`, or choose another replica identity",
            )
        there = next((c.target for c in columns if c.position == positions[each.column]), None)
        if there is None or not _holds_hash(there.type):
            raise MappingError(
                f'{place}, and the target column "{each.target}" cannot hold the hash',
                hint=f"make it text, or varchar of at least {HASH_CHARACTERS} characters",
            )


def _holds_hash(type_name: str) -> bool:
    name, _, rest = type_name.partition("(")
    if name not in ("text", "character varying"):
        return False
    return not rest or int(rest.removesuffix(")")) >= HASH_CHARACTERS
