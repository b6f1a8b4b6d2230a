"""Definitions of tables in a test's databases, read as the program reads them."""

from psycopg.rows import dict_row

from streamer.postgres.quoting import quote_literal, quote_qualified
from streamer.schema.table_definition import TableDefinition
from streamer.schema_changes.read_definitions import definition_of, definitions_sql
from tests.support.postgres import Database


def read_definition(database: Database, table: str) -> TableDefinition:
    """Return the definition of *table*, given as SQL."""
    with database.connect() as connection:
        connection.execute("select set_config('search_path', '', false)")
        cursor = connection.cursor(row_factory=dict_row)
        cursor.execute(definitions_sql(f"array[{quote_literal(table)}::regclass::oid]").encode())
        (row,) = cursor.fetchall()
    return definition_of(row)


_KINDS = ("indexes", "constraints", "columns", "statistics", "comments")
_LINES = """
with t (id, number) as (select * from unnest(array[{tables}]::regclass[]::oid[]) with ordinality)
select 'indexes', number,
       pg_get_indexdef(indexrelid) || case when indisvalid then '' else ' INVALID' end
  from t join pg_index on indrelid = id
union all
select 'constraints', number, conname || ' ' || pg_get_constraintdef(oid)
  from t join pg_constraint on conrelid = id where contype <> 'n'
union all
select 'columns', number,
       concat_ws(' ', attname, coalesce(pg_get_expr(adbin, adrelid), '-'), attidentity::text,
                 coalesce(nullif(attstattarget, -1)::text, '-'))
  from t join pg_attribute on attrelid = id and attnum > 0 and not attisdropped
  left join pg_attrdef on adrelid = id and adnum = attnum
union all
select 'statistics', number,
       pg_get_statisticsobjdef(oid) || ' ' || coalesce(nullif(stxstattarget, -1)::text, '-')
       || coalesce(obj_description(oid, 'pg_statistic_ext'), '')
  from t join pg_statistic_ext on stxrelid = id
union all
select 'comments', number, description
  from (select 'pg_class'::regclass, id, number from t
        union all select 'pg_class'::regclass, indexrelid, number from t join pg_index on indrelid = id
        union all select 'pg_constraint'::regclass, oid, number from t join pg_constraint on conrelid = id
       ) o (class, object, number) join pg_description on classoid = class and objoid = object
"""


def described(database: Database, table: str) -> dict[str, list[str]]:
    """Return PostgreSQL's own definitions of a table's indexes, constraints, columns, comments."""
    return _each_described(database, [table])[0]


def _each_described(database: Database, tables: list[str]) -> list[dict[str, list[str]]]:
    each: list[dict[str, list[str]]] = [{kind: [] for kind in _KINDS} for _ in tables]
    sql = _LINES.format(tables=", ".join(map(quote_literal, tables)))
    for kind, number, line in _read(database, sql):
        each[int(str(number)) - 1][str(kind)].append(str(line))
    return [{kind: sorted(lines) for kind, lines in found.items()} for found in each]


def _read(database: Database, sql: str) -> list[tuple[object, ...]]:
    """Run a query in a session that stays open: tests poll, and PostgreSQL's functions for
    definitions make the first query of a session expensive.
    """
    return database.execute(f"set search_path to ''; {sql}")


_COLUMNS = """
select c.relname || '.' || a.attname || ' ' || format_type(a.atttypid, a.atttypmod)
       || case when a.attnotnull then ' not null' else '' end || ' ' || a.attgenerated::text
  from pg_attribute a join pg_class c on c.oid = a.attrelid
 where c.oid = any ({tables}) and a.attnum > 0 and not a.attisdropped
"""
_TYPES = """
select t.oid::regtype || ' ' || (select string_agg(enumlabel, ',' order by enumsortorder)
                                   from pg_enum e where e.enumtypid = t.oid)
  from pg_type t where t.typtype = 'e' and t.oid > 16384 and {is_own}
union all
select t.oid::regtype || ' ' || format_type(t.typbasetype, t.typtypmod) || ' ' || t.typnotnull
       || coalesce(pg_get_expr(t.typdefaultbin, 0), '-')
       || (select coalesce(string_agg(k.conname || pg_get_constraintdef(k.oid), ',' order by 1), '')
             from pg_constraint k where k.contypid = t.oid and k.contype = 'c')
  from pg_type t where t.typtype = 'd' and t.oid > 16384 and {is_own}
union all
select c.reltype::regtype || ' ' || (
           select string_agg(attname || ' ' || format_type(atttypid, atttypmod), ',' order by attnum)
             from pg_attribute where attrelid = c.oid and not attisdropped)
  from pg_class c join pg_type t on t.oid = c.reltype
 where c.relkind = 'c' and c.oid > 16384 and {is_own}
"""


def everything(database: Database, tables: list[str]) -> dict[str, list[str]]:
    """Return the definitions of tables of the database's schema and of all types, but for comments.

    In a schema of a test's own, the types are those of the schema.
    """
    schema = database.schema
    is_own = "true" if schema == "public" else f"t.typnamespace = '{schema}'::regnamespace"
    names = [quote_qualified(schema, table) for table in tables]
    definitions = {
        f"{kind} of {table}": lines
        for table, each in zip(tables, _each_described(database, names), strict=True)
        for kind, lines in each.items()
        if kind != "comments"
    }
    oids = f"array[{', '.join(map(quote_literal, names))}]::regclass[]::oid[]"
    for kind, sql in (
        ("columns", _COLUMNS.format(tables=oids)),
        ("types", _TYPES.format(is_own=is_own)),
    ):
        definitions[kind] = sorted(str(line) for (line,) in _read(database, sql))
    return definitions
