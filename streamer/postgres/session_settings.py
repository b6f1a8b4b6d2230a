"""The session settings of every connection, on both sides.

The text of a value must not depend on settings of server, database or role. If the sides printed
dates, intervals, floats or bytes differently, the target would get different data. A role's
timeouts must not end a long copy or a held transaction. Connections leave out settings that an
older server lacks. Pure.
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
    # Expressions of rules may depend on these settings.
    "lc_numeric": "C",
    "lc_time": "C",
    # Masking reads messages in English. Only a superuser may set this parameter.
    "lc_messages": "C",
    "timezone_abbreviations": "Default",
    "quote_all_identifiers": "off",
    # Users write types and functions outside pg_catalog with their schema.
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
    # streamer tries statements that a server may refuse, and goes on in the same session.
    "exit_on_error": "off",
    # A copy must fail where row level security would filter rows.
    "row_security": "off",
    "client_min_messages": "warning",
    "jit": "off",
}

KEEPALIVES: Final = {
    "keepalives_idle": 20,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
"""TCP settings of streamer's side of connections, by libpq's names: in seconds, except
``tcp_user_timeout``.

The settings detect a peer that vanished within about a minute. A connection string overrides them.
"""

# The settings of the server's side. By default a server keeps the session of a vanished client,
# with its locks, for two hours.
LIVENESS: Final[dict[str, str]] = {
    name if name.startswith("tcp_") else f"tcp_{name}": str(value)
    for name, value in KEEPALIVES.items()
}

INDEX_MEMORY_MB: Final = 512
"""``maintenance_work_mem`` of index builds. By default (64 MB) large sorts use temporary files."""


def memory_sql(setting: str, megabytes: int, *, is_local: bool) -> str:
    """Return SQL that raises a memory setting to *megabytes*, unless already higher. Pure."""
    return f"""
select case when pg_catalog.pg_size_bytes(m.setting) < {megabytes} * 1048576::bigint
            then pg_catalog.set_config('{setting}', '{megabytes}MB', {str(is_local).lower()}) end
from pg_catalog.current_setting('{setting}') as m (setting)
"""  # noqa: S608


SUPERUSER: Final = frozenset({"lc_messages"})
"""Pinned settings that only a superuser may set; ordinary roles keep the server's value."""

PINNED: Final = TEXT_FORMAT | TRANSACTION | LIVENESS

# SET calls neither functions nor operators, so no function of a foreign user in the role's
# search_path can run as this role. Later statements find names only in pg_catalog.
HIDE_SCHEMAS_SQL: Final = "set search_path to ''"

_SINCE: Final = {
    "jit": 11_00_00,
    "tcp_user_timeout": 12_00_00,
    "idle_session_timeout": 14_00_00,
    "transaction_timeout": 17_00_00,
}
"""The server_version_num that introduced a pinned setting."""

# Pins settings on an unknown server, for an unknown role. The view pg_settings would give the same
# information, but computing its 400 settings takes longer than the rest of a login.
_PIN_IF_POSSIBLE_SQL: Final = """
select pg_catalog.set_config(p.name, p.value, false)
from unnest(array[{names}], array[{values}]) as p (name, value)
where pg_catalog.current_setting(p.name, true) is not null
and (p.name not in ({superuser}) or pg_catalog.current_setting('is_superuser') = 'on')
"""

APPLY: Final[dict[str, str]] = {
    # A staging table has no statistics; without these settings PostgreSQL reads the whole target
    # for each batch.
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}


def pin_sql(
    settings: Mapping[str, str] = PINNED,
    *,
    version: int | None = None,
    is_superuser: str | None = None,
) -> str:
    """Return statements without parameters that pin *settings*: the first statements of every
    connection.

    The statements are a single simple query. PostgreSQL analyses each statement only after it has
    run the statement before. A walsender accepts them, too. The values are constants of this
    module.

    *version*: server_version_num. *is_superuser*: the parameter that the server reports at the
    start of a session; a pooler may leave it out. Without these arguments the server checks the
    settings that it may lack, or that the role may not set. This takes three times as long as SET.
    """
    sets, unsure = [HIDE_SCHEMAS_SQL], {}
    for name, value in settings.items():
        if name == "search_path":
            continue
        if (name in _SINCE and version is None) or (name in SUPERUSER and is_superuser is None):
            unsure[name] = value
        elif (version or 0) >= _SINCE.get(name, 0) and (
            is_superuser == "on" or name not in SUPERUSER
        ):
            sets.append(f"set {name} = '{value}'")
    if unsure:
        names = ", ".join(f"'{name}'" for name in unsure)
        superuser = ", ".join(f"'{name}'" for name in sorted(SUPERUSER))
        values = ", ".join(f"'{value}'" for value in unsure.values())
        sets.append(
            _PIN_IF_POSSIBLE_SQL.format(names=names, values=values, superuser=superuser).strip()
        )
    return "; ".join(sets)
