"""Allows writes at the target, at the end of a cut-over."""

from typing import Final

from streamer.errors.remedies import Remedy, at_target
from streamer.postgres.quoting import quote_identifier
from streamer.target.connection import TargetConnection

_READ_SQL: Final = """
select d.datname::text as name, pg_catalog.pg_has_role(d.datdba, 'usage') as may_alter,
       current_user::text as role
from pg_catalog.pg_database d
join pg_catalog.pg_db_role_setting s on s.setdatabase = d.oid and s.setrole = 0
where d.datname = pg_catalog.current_database()
  and exists (select from unnest(s.setconfig) o (option)
              where lower(o.option) in ('default_transaction_read_only=on',
                                        'default_transaction_read_only=true'))
"""


async def allow_writes(connection: TargetConnection) -> bool:
    """Remove the setting that makes later sessions of the database read-only, if set.

    Return whether the setting was set. Raises TargetError.
    """
    rows = await connection.fetch(_READ_SQL)
    if not rows:
        return False
    await connection.execute(_allow_sql(rows[0]["name"]))
    return True


async def find_obstacles(connection: TargetConnection) -> list[tuple[str, Remedy]]:
    """Return why the role may not remove that setting, with the SQL. Raises TargetError."""
    problems = []
    for row in await connection.fetch(_READ_SQL):
        if not row["may_alter"]:
            role = quote_identifier(row["role"])
            owns = f"alter database {quote_identifier(row['name'])} owner to {role}"
            text = f"the target is read-only, and role {role} does not own its database"
            problems.append((text, Remedy.of("run at the target: ", at_target(owns))))
    return problems


def _allow_sql(database: str) -> str:
    return f"alter database {quote_identifier(database)} reset default_transaction_read_only"
