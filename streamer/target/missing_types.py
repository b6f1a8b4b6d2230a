"""Types that the target lacks. streamer creates such types, except types of extensions: an
administrator must install the extension, which the error names.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence

from streamer.errors.error_classes import TargetSchemaError
from streamer.errors.remedies import Remedy, at_target
from streamer.mapping.relation_names import RelationName
from streamer.postgres.quoting import quote_identifier
from streamer.schema.indexes_constraints_types import DefinedType
from streamer.target.connection import TargetConnection

ReadTypes = Callable[[Sequence[str]], Awaitable[Sequence[DefinedType]]]
"""Reads types of a source by the names that ``format_type`` returns."""

_ABSENT_SQL = """
select name from unnest($1::text[]) name where pg_catalog.to_regtype(name) is null order by 1
"""


def missing_type(name: RelationName, hint: str | Remedy | None) -> TargetSchemaError:
    """Return the error for a type that the target lacks and streamer cannot create."""
    return TargetSchemaError(f'the target has no type "{name}"', hint=hint)


def extension_sql(
    kind: DefinedType, namespaces: Collection[str], installed: Collection[str]
) -> list[str]:
    """Return the statements that create *kind* with its extension, in the schema of the source.

    *namespaces*, *installed*: the schemas and extensions of the target.
    """
    quoted = quote_identifier(kind.extension or "")
    namespace = quote_identifier(kind.namespace)
    exists = kind.namespace in namespaces
    return [
        *([] if exists else [f"create schema if not exists {namespace}"]),
        f"alter extension {quoted} set schema {namespace}"
        if kind.extension in installed
        else f"create extension {quoted} schema {namespace}",
    ]


async def refuse_missing(target: TargetConnection, kind: DefinedType) -> None:
    """Raise TargetSchemaError for a type that the target lacks, if streamer cannot create it."""
    if kind.can_be_created:
        return
    hint = None
    if kind.extension is not None:
        namespaces = await target.fetch("select nspname as name from pg_catalog.pg_namespace")
        installed = await target.fetch("select extname as name from pg_catalog.pg_extension")
        role = quote_identifier(await target.fetch_value("select current_user::text"))
        hint = Remedy.of(
            "run at the target: ",
            at_target(
                *extension_sql(
                    kind, {row["name"] for row in namespaces}, {row["name"] for row in installed}
                ),
                f"grant usage on schema {quote_identifier(kind.namespace)} to {role}",
            ),
        )
    raise missing_type(kind.full_name, hint)


async def refuse_missing_types(
    target: TargetConnection, names: Collection[str], read: ReadTypes
) -> None:
    """Raise TargetSchemaError if the target lacks a type of *names* that streamer cannot create.

    *names*: types that no statement of streamer creates.
    """
    # The names of built-in types have no schema. Before PostgreSQL 16 an empty name is an error.
    qualified = sorted(name for name in names if "." in name)
    if qualified and (rows := await target.fetch(_ABSENT_SQL, qualified)):
        for kind in await read([row["name"] for row in rows]):
            await refuse_missing(target, kind)
