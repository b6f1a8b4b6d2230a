"""Finds relations and types by schema and name.

A join of names with ``pg_class`` and ``pg_namespace`` may first match the names alone. If 2,000
schemas have tables with equal names, such a join has 2,000 rows for each name.
"""

from typing import Final


def _named(catalog: str, prefix: str) -> str:
    """Return a lateral subquery, which reads an index entry for each row of ``w``."""
    return f"""lateral (
    select named.* from pg_catalog.{catalog} named
     where named.{prefix}name = w.name
       and named.{prefix}namespace = (select schema.oid from pg_catalog.pg_namespace schema
                                       where schema.nspname = w.namespace)
    offset 0)"""  # noqa: S608


NAMED_RELATION: Final = _named("pg_class", "rel")
"""The row of ``pg_class`` for ``w``, which has the columns *namespace* and *name*."""

NAMED_TYPE: Final = _named("pg_type", "typ")
"""The row of ``pg_type`` for ``w``, which has the columns *namespace* and *name*."""
