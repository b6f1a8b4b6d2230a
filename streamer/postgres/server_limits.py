"""Advice for SQLSTATE 53400 and 53200: a setting of the server limits a resource. Pure."""

import re
from typing import Final

_ADVICE: Final = {
    "max_replication_slots": "raise max_replication_slots on that server, and restart it",
    "max_active_replication_origins": "raise max_active_replication_origins on that server, and "
    "restart it",
    "max_locks_per_transaction": "raise max_locks_per_transaction on that server, until this "
    "number times max_connections exceeds the number of replicated tables, and restart it",
    "temp_file_limit": "have an administrator of that server raise temp_file_limit for streamer's "
    "role",
}
_NAME: Final = re.compile("|".join(map(re.escape, _ADVICE)))


def limit_hint(text: str) -> str | None:
    """Return the advice for the setting that *text*, a message and its hint, names.

    The server does not translate names of settings.
    """
    name = _NAME.search(text)
    return None if name is None else _ADVICE[name[0]]
