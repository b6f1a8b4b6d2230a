"""Allowing writes at the target, at the end of a cut-over."""

from typing import Final

from streamer.postgres.quoting import quote_identifier
from streamer.target.connection import TargetConnection

_READ_SQL: Final = """
select d.datname::text from pg_catalog.pg_database d
join pg_catalog.pg_db_role_setting s on s.setdatabase = d.oid and s.setrole = 0
where d.datname = pg_catalog.current_database()
  and exists (select from unnest(s.setconfig) o (option)
              where lower(o.option) in ('default_transaction_read_only=on',
                                        'default_transaction_read_only=true'))
"""


async def allow_writes(connection: TargetConnection) -> bool:
    """Take back the setting that makes later sessions of the database read-only, if it has that.

    Return whether it had. Raises TargetError.
    """
    database = await connection.fetch_value(_READ_SQL)
    if database is None:
        return False
    await connection.execute(
        f"alter database {quote_identifier(database)} reset default_transaction_read_only"
    )
    return True
