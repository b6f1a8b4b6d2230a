"""Hashed columns of a rule: streamer replaces their values before a lane gets the changes.

All later code sees a source whose column holds the hash. So sets, exact order, histories,
quarantine, lane spools and staging tables never hold the plain value. Pure.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast

from streamer.decode.large_values import pieces
from streamer.decode.pgoutput import DELETE, INSERT, UPDATE, Redefinition
from streamer.decode.tuples import KIND_BINARY, KIND_TEXT
from streamer.errors.error_classes import MappingError
from streamer.errors.remedies import Command, Remedy
from streamer.postgres.keyed_hash import HASH_CHARACTERS, KeyedHash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from streamer.apply.rows.apply_plan import PlanColumn
    from streamer.decode.pgoutput import Relation
    from streamer.decode.text_conversion import TextConversion
    from streamer.decode.transactions import Changes
    from streamer.mapping.rules import ColumnHash, RelationMapping

_TUPLES_AT: Final = 5  # the offset after kind and relid
TEXT_TYPES: Final = frozenset({25, 1042, 1043})
"""text, char and varchar: the binary form of a value is its text."""
INPUT_TYPES: Final = TEXT_TYPES | {
    16,  # boolean
    17,  # bytea
    20,  # bigint
    21,  # smallint
    23,  # integer
    869,  # inet
    1082,  # date
    1083,  # time
    1114,  # timestamp
    1184,  # timestamptz
    1186,  # interval
    1266,  # timetz
    1700,  # numeric
    2950,  # uuid
}
"""Types whose text depends only on the value, under the settings that streamer pins."""


def hashed_changes(
    changes: "Changes",
    hashes: "Sequence[ColumnHash]",
    conversion: "TextConversion | None" = None,
) -> "Changes":
    """Return *changes* with the values of hashed columns replaced.

    *conversion*: converts the source's text to UTF-8, if the source sends another encoding.
    """
    relation = changes.relation
    if isinstance(relation, Redefinition):
        return changes
    hash_states = {column_hash.column: column_hash.state for column_hash in hashes}
    states = {
        position: hash_states[column.name]
        for position, column in enumerate(relation.columns)
        if column.name in hash_states
    }
    return replace(
        changes,
        payloads=[hashed_message(payload, states, conversion) for payload in changes.payloads],
    )


def hashed_message(
    payload: bytes,
    states: Mapping[int, KeyedHash],
    conversion: "TextConversion | None" = None,
) -> bytes:
    """Return a message I, U or D with the values at the positions of *states* hashed.

    NULL and unchanged values stay. If UTF-8 lacks characters of a value, the first such character
    replaces the value, and the target refuses the character. The result for a memoryview is a
    memoryview. A malformed message loses all tuples, so decoding refuses the message, and the error
    contains no plain value.
    """
    if payload[0] not in (INSERT, UPDATE, DELETE):
        return payload
    view = memoryview(payload)
    parts: list[bytes | memoryview] = []
    copied, position = 0, _TUPLES_AT
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
                    made = _hashed(view[position + 4 : end], state, conversion)
                    parts += [view[copied:position], len(made).to_bytes(4, "big"), made]
                    copied = end
                position = end
    except IndexError:
        return payload[:_TUPLES_AT]
    if not parts:
        return payload
    message = b"".join([*parts, view[copied:]])
    return cast("bytes", memoryview(message)) if isinstance(payload, memoryview) else message


def _hashed(value: memoryview, state: KeyedHash, conversion: "TextConversion | None") -> bytes:
    if conversion is None:
        return state.digits(pieces(cast("bytes", value)))
    return conversion.missing(value) or state.digits(conversion.in_pieces(value))


def check_hashes(
    relation: "Relation",
    mapping: "RelationMapping",
    columns: "Sequence[PlanColumn]",
) -> None:
    """Raise MappingError for a hash that does not fit the table."""
    sent = {column.name: column for column in relation.columns}
    positions = {column.name: number for number, column in enumerate(relation.columns)}
    for column_hash in mapping.rule.hashes:
        place = f'`set` of table "{mapping.source}" hashes column "{column_hash.column}"'
        if column_hash.column not in sent:
            raise MappingError(
                f"{place}, which the source does not send",
                hint=f"correct the rule; its columns are: {', '.join(sent)}",
            )
        if sent[column_hash.column].type_oid not in INPUT_TYPES:
            raise MappingError(
                f"{place}, whose type has no text that depends on the value alone",
                hint="exclude the column, or change its type at the source, for example to text",
            )
        target_column = next(
            (c.target for c in columns if c.position == positions[column_hash.column]), None
        )
        if target_column is None or not _holds_hash(target_column.type):
            raise MappingError(
                f'{place}, and the target column "{column_hash.target}" cannot hold the hash',
                hint="make the target column text, or varchar of at least "
                f"{HASH_CHARACTERS} characters",
            )


def check_input_types(
    mapping: "RelationMapping", before: Mapping[str, str], now: Mapping[str, str], resync: Command
) -> None:
    """Raise MappingError if the type of a hashed column has changed since the copy.

    *before*, *now*: the source types by column, at the copy and at present. *resync*: the command
    that hashes all rows again.
    """
    for column_hash in mapping.rule.hashes:
        old, new = before.get(column_hash.column), now.get(column_hash.column)
        if old is not None and new is not None and _text_of(old) != _text_of(new):
            raise MappingError(
                f'column "{column_hash.column}" of table "{mapping.source}" changed its type from '
                f"{old} to {new} after the copy, so the target has hashes of the former text",
                hint=Remedy.of("run: ", resync),
            )


def _text_of(type_name: str) -> str:
    """Return the type's name; ``text`` for each type whose text is the value itself."""
    return "text" if type_name.startswith("character varying") else type_name


def _holds_hash(type_name: str) -> bool:
    name, _, modifier = type_name.partition("(")
    if name not in ("text", "character varying"):
        return False
    return not modifier or int(modifier.removesuffix(")")) >= HASH_CHARACTERS
