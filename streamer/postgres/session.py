"""Session settings that are the same on every connection, on both sides.

A value must read the same under any setting of server, database or role. Two sides that print
dates, intervals, floats or bytes differently would write different data. A role's timeouts must not
end a long copy or a held transaction. Settings that an older server lacks are left out. Pure.
"""

from collections.abc import Mapping
from typing import Final

TEXT_FORMAT: Final[dict[str, str]] = {
    "client_encoding": "UTF8",
    "datestyle": "ISO, YMD",
    "intervalstyle": "postgres",
    "timezone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "xmloption": "content",
    "array_nulls": "on",
    "standard_conforming_strings": "on",
    "transform_null_equals": "off",
    # Expressions of rules may depend on these.
    "lc_numeric": "C",
    "lc_time": "C",
    # Masking reads messages in English. Only a superuser may set this.
    "lc_messages": "C",
    "timezone_abbreviations": "Default",
    "quote_all_identifiers": "off",
    # Types and functions outside pg_catalog are written with their schema.
    "search_path": "",
}

TRANSACTION: Final[dict[str, str]] = {
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "transaction_timeout": "0",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "default_transaction_deferrable": "off",
    # A copy that row level security would filter fails instead.
    "row_security": "off",
    "client_min_messages": "warning",
    "jit": "off",
}

# A server whose client is gone without a word learns of it in a minute; by default it keeps the
# session, and its locks, for two hours.
LIVENESS: Final[dict[str, str]] = {
    "tcp_keepalives_idle": "20",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "60000",
}

PINNED: Final = TEXT_FORMAT | TRANSACTION | LIVENESS

# SET looks up neither a function nor an operator. So nothing that a stranger put into a schema of
# the role's search_path runs as this role, and everything after it finds names in pg_catalog only.
HIDE_SCHEMAS_SQL: Final = "set search_path to ''"

# pg_settings has the settings that this server's version knows. A role without the privilege for
# one keeps the server's value.
_PIN_SQL: Final = """
select pg_catalog.set_config(s.name, p.value, false)
from unnest(array[{names}], array[{values}]) as p (name, value)
join pg_catalog.pg_settings s on pg_catalog.lower(s.name) = pg_catalog.lower(p.name)
where s.context <> 'superuser' or pg_catalog.current_setting('is_superuser') = 'on'
"""

APPLY: Final[dict[str, str]] = {
    # A staging table has no statistics; without these PostgreSQL reads the whole target for each
    # batch.
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}


def pin_sql(settings: Mapping[str, str] = PINNED) -> str:
    """Return statements without parameters that pin *settings*: the first of every connection.

    They are one simple query, and PostgreSQL analyses each statement after the one before it has
    run. A walsender takes them too. The values are constants of this module.
    """
    names = ", ".join(f"'{name}'" for name in settings)
    values = ", ".join(f"'{value}'" for value in settings.values())
    return f"{HIDE_SCHEMAS_SQL}; {_PIN_SQL.format(names=names, values=values)}"
