"""SQL that runs an operator's script inside a transaction of streamer's.

The script is the argument of EXECUTE in a block of PL/pgSQL. So the server itself rejects BEGIN,
COMMIT and ROLLBACK in the script, before they run, and the statements of a script take effect
together. Commands that no transaction can contain (VACUUM, CREATE INDEX CONCURRENTLY) also fail.
Pure.
"""

from typing import Final

from streamer.postgres.quoting import quote_literal
from streamer.postgres.session_settings import APPLY, TEXT_FORMAT

_NOT_RESET: Final = ("client_encoding", "lc_messages")
_SETTINGS: Final = (*TEXT_FORMAT, *APPLY, "row_security", "jit", "session_replication_role")

# streamer's sessions pin settings, but a script expects the settings of its role and database.
_RESET_SQL: Final = """
select pg_catalog.set_config(s.name, s.reset_val, true) from pg_catalog.pg_settings s
where pg_catalog.lower(s.name) = any (array[{names}]) and s.setting <> s.reset_val
  and (s.context <> 'superuser' or pg_catalog.current_setting('is_superuser') = 'on'
       or s.name = 'session_replication_role')
"""
# The script may have changed settings that later statements and COMMIT rely on.
AFTER_SCRIPT_SQL: Final = "set local search_path to ''; set constraints all immediate"


def script_sql(script: str) -> str:
    """Return statements that run *script* under the settings of its role and database.

    The statements need an open transaction. `AFTER_SCRIPT_SQL` must follow.
    """
    names = ", ".join(f"'{name.lower()}'" for name in _SETTINGS if name not in _NOT_RESET)
    block = f"begin execute {quote_literal(script)}; end"
    return f"{_RESET_SQL.format(names=names)}; do language plpgsql {_quoted(block)}"


def _quoted(block: str) -> str:
    number = 0
    while (tag := f"$streamer_{number}$") in block:
        number += 1
    return f"{tag}{block}{tag}"


def line_of(script: str, position: int) -> int:
    """Return the line of a *script* with the character at *position*, counted from 1."""
    return script.count("\n", 0, max(position - 1, 0)) + 1
