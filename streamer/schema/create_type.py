"""The statements that create a source's type at the target. Pure."""

from typing import Final

from streamer.postgres.quoting import quote_identifier, quote_literal, quote_qualified
from streamer.schema.indexes_constraints_types import DefinedType

NOT_VALID: Final = " NOT VALID"
"""CREATE DOMAIN does not accept this clause."""


def create_type_sql(type_: DefinedType) -> list[str]:
    """Return the statements that create a type in a schema that the target has."""
    quoted = quote_qualified(type_.namespace, type_.name)
    match type_.kind:
        case "e":
            labels = ", ".join(quote_literal(text) for _, text in type_.labels)
            return [f"create type {quoted} as enum ({labels})"]
        case "d":
            named = [f"constraint {quote_identifier(n)} {text}" for _, n, text in type_.checks]
            checks = "".join(f" {clause}" for clause in named if not clause.endswith(NOT_VALID))
            later = [f"alter domain {quoted} add {e}" for e in named if e.endswith(NOT_VALID)]
            default = "" if type_.default is None else f" default {type_.default}"
            not_null = " not null" if type_.not_null else ""
            return [f"create domain {quoted} as {type_.base}{default}{not_null}{checks}", *later]
        case "c":
            listed = ", ".join(f"{quote_identifier(n)} {t}" for _, n, t in type_.attributes)
            return [f"create type {quoted} as ({listed})"]
        case _:
            options = [f"subtype = {type_.base}"]
            if type_.operator_class is not None:
                options.append(f"subtype_opclass = {type_.operator_class}")
            if type_.multirange not in (None, _usual_multirange(type_.name)):
                named_so = quote_qualified(type_.namespace, type_.multirange)
                options.append(f"multirange_type_name = {named_so}")
            return [f"create type {quoted} as range ({', '.join(options)})"]


def _usual_multirange(name: str) -> str:
    """Return the name that PostgreSQL 14 and later gives to the multirange of a range."""
    return name.replace("range", "multirange", 1) if "range" in name else f"{name}_multirange"
