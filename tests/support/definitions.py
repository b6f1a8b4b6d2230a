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


def described(database: Database, table: str) -> dict[str, list[str]]:
    """Return PostgreSQL's own definitions of a table's indexes, constraints, columns, comments."""
    oid = f"{quote_literal(table)}::regclass"
    queries = {
        "indexes": f"select pg_get_indexdef(indexrelid) || case when indisvalid then '' else ' INVALID' end from pg_index where indrelid = {oid}",
        "constraints": f"select conname || ' ' || pg_get_constraintdef(oid) from pg_constraint where conrelid = {oid} and contype <> 'n'",
        "columns": f"select attname || ' ' || coalesce(pg_get_expr(adbin, adrelid), '-') || ' ' || attidentity::text || ' ' || coalesce(nullif(attstattarget, -1)::text, '-') from pg_attribute left join pg_attrdef on adrelid = attrelid and adnum = attnum where attrelid = {oid} and attnum > 0 and not attisdropped",
        "statistics": f"select pg_get_statisticsobjdef(oid) || ' ' || coalesce(nullif(stxstattarget, -1)::text, '-') || coalesce(obj_description(oid, 'pg_statistic_ext'), '') from pg_statistic_ext where stxrelid = {oid}",
        "comments": f"select description from pg_description where (classoid, objoid) in (select 'pg_class'::regclass, {oid}::oid union all select 'pg_class'::regclass, indexrelid from pg_index where indrelid = {oid} union all select 'pg_constraint'::regclass, oid from pg_constraint where conrelid = {oid})",
    }
    with database.connect() as connection:
        connection.execute("select set_config('search_path', '', false)")
        return {
            name: sorted(str(text) for (text,) in connection.execute(sql.encode()).fetchall())
            for name, sql in queries.items()
        }


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
    definitions = {}
    for table in tables:
        for name, lines in described(database, quote_qualified(schema, table)).items():
            if name != "comments":
                definitions[f"{name} of {table}"] = lines
    oids = ", ".join(
        f"{quote_literal(quote_qualified(schema, table))}::regclass" for table in tables
    )
    with database.connect() as connection:
        connection.execute("select set_config('search_path', '', false)")
        for name, sql in (
            ("columns", _COLUMNS.format(tables=f"array[{oids}]::oid[]")),
            ("types", _TYPES.format(is_own=is_own)),
        ):
            rows = connection.execute(sql.encode()).fetchall()
            definitions[name] = sorted(str(text) for (text,) in rows)
    return definitions
