"""Domains and composite types of tenants whose schemas each have types of their own.

The column of a shared table has the type of the first tenant. Values pass as text, and a composite
value has no names. So a value of another composite type could change its meaning, and a domain
with another base type could round a value. A tenant whose type differs therefore stops.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from streamer.errors.error_classes import TargetSchemaError
from streamer.errors.remedies import Remedy, run
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import Named, RelationMapping
from streamer.schema.indexes_constraints_types import DefinedType, base_type, quoted_type
from streamer.schema.source_definition import SourceDefinition
from streamer.schema.target_relation import TargetRelation
from streamer.schema_changes.read_definitions import read_target_types
from streamer.target.connection import TargetConnection


@dataclass(frozen=True, slots=True)
class UnlikeTypes:
    """The type of a tenant's *column*, and the type of the target's column, which differs."""

    column: str
    own: DefinedType
    target: DefinedType

    def problem(self, source: RelationName, target: RelationName) -> str:
        """Name the types of the tables *source* and *target*."""
        return (
            f'column "{self.column}" of "{source}" has type "{self.own.full_name}", which is '
            f'defined differently from "{self.target.full_name}" of target table "{target}", the '
            "type of another tenant"
        )

    @property
    def advice(self) -> str:
        return (
            f'give both types the same definition, or exclude column "{self.column}", or give '
            "this table a `target` of its own"
        )


def find_unlike_types(
    definition: SourceDefinition,
    mapping: RelationMapping,
    target: TargetRelation,
    target_types: Iterable[DefinedType],
) -> Iterator[UnlikeTypes]:
    """Yield the domains and composite types whose values the column of *target* may change.

    *target_types*: the types of the target's columns, and their parts. Pure.
    """
    own_types = {type_.quoted: type_ for type_ in definition.types or ()}
    types = {type_.quoted: type_ for type_ in target_types}
    for column in definition.columns:
        name = mapping.target_column(column.name)
        if name is None or name not in target.columns or mapping.is_computed(name):
            continue
        pairs = [(base_type(column.type), base_type(target.columns[name].type))]
        for own_name, target_name in pairs:  # the loop adds the types of parts
            type_, present = own_types.get(own_name), types.get(target_name)
            if type_ is None or present is None or type_.quoted == present.quoted:
                continue
            if type_.kind in "dc" and present.kind in "dc":
                if not _takes_all(present, _in_schema_of(type_, present)):
                    yield UnlikeTypes(column.name, type_, present)
                    break
                pairs += zip(_parts(type_), _parts(present), strict=True)


def _parts(type_: DefinedType) -> list[str]:
    if type_.kind == "d":
        return [base_type(type_.base or "")]
    return [base_type(kind) for _, _, kind in type_.attributes]


def _in_schema_of(own: DefinedType, target: DefinedType) -> DefinedType:
    """Return *own* as if the types of its parts were in the schema of *target*."""
    former, new = (
        quoted_type(RelationName(type_.namespace, "t")).removesuffix("t") for type_ in (own, target)
    )

    def moved(kind: str) -> str:
        return new + kind.removeprefix(former) if kind.startswith(former) else kind

    attributes = tuple((number, name, moved(kind)) for number, name, kind in own.attributes)
    return replace(own, base=own.base and moved(own.base), attributes=attributes)


def _takes_all(target: DefinedType, own: DefinedType) -> bool:
    if own.kind == "d":
        return target.takes_all(own)
    return target.content == own.content


async def refuse_unlike_types(
    session: TargetConnection,
    definition: SourceDefinition,
    mapping: RelationMapping,
    target: TargetRelation,
    source: Named,
) -> None:
    """Refuse a tenant whose types differ from those of the shared *target*.

    Raises TargetSchemaError.
    """
    if mapping.rule.sid is None or not definition.types:
        return
    types = await read_target_types(session, target)
    for unlike in find_unlike_types(definition, mapping, target, types):
        ids = {"database": source.database, "sid": source.sid}
        raise TargetSchemaError(
            unlike.problem(mapping.source, target.name),
            hint=Remedy.of(
                f"{unlike.advice}; then run: ", run("resume", str(mapping.source), **ids)
            ),
        )
