"""Poolers between streamer and a server.

A pooler in session mode does no harm. In transaction mode, a pooler assigns each transaction any
free session of the server. But streamer's settings, locks, temporary tables and prepared statements
belong to a session. The process numbers of a pooler differ from the server's, which reveals the
pooler. In transaction mode, a second connection can get the session of an open connection, which
reveals the mode.
"""

import re
from collections.abc import Awaitable, Callable
from typing import Any, Final

from streamer.postgres.secret import Secret

PID_SQL: Final = "select pg_catalog.pg_backend_pid() as pid"
POOLED: Final = "the url leads to a pooler in transaction mode, and streamer needs session mode"
HINT: Final = (
    "name the server itself in the url, or set pool_mode = session for this database at the pooler"
)

_in_session_mode: Final[set[Secret]] = set()
"""The urls that lead to a pooler in session mode."""
_STATEMENT_OF_ASYNCPG: Final = re.compile(r"prepared statement \S*__asyncpg_")

Query = Callable[[str], Awaitable[Any]]


def is_lost_statement(state: str, message: str) -> bool:
    """Whether a driver's prepared statement is missing, or belongs to a different client."""
    return state in ("42P05", "26000") and _STATEMENT_OF_ASYNCPG.search(message) is not None


def needs_mode_check(url: Secret, number: int, pid: int) -> bool:
    """Whether the mode of a pooler is unknown. For a direct connection, *number* is the server
    process's *pid*.
    """
    return number != pid and url not in _in_session_mode


async def shares_sessions(
    url: Secret, pid: int, query: Query, query_second: Query, begin: Query
) -> bool:
    """Whether a pooler at *url* may change sessions between two transactions.

    *query* returns the value of a query over the connection whose process was *pid*. *query_second*
    and *begin* run statements over a second connection.
    """
    await begin("begin")
    if await query_second(PID_SQL) == pid or await query(PID_SQL) != pid:
        return True
    _in_session_mode.add(url)
    return False
