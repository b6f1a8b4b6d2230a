"""Reading a connection string without ever repeating it.

libpq's messages about one it cannot read quote what is wrong with it, which may be the password.
Pure.
"""

import re
from collections.abc import Mapping
from typing import Final

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict, make_conninfo

_QUOTED: Final = re.compile(r'"[^"]*"')
_PORTS: Final = re.compile(r"\d*(,\d*)*")


def parse_conninfo(text: str) -> dict[str, str]:
    """Return what a URL or a key=value string says. Raises ValueError, which quotes none of it."""
    try:
        given = {k: str(v) for k, v in conninfo_to_dict(text).items() if v is not None}
    except UnicodeDecodeError:
        raise ValueError("what its percent signs stand for is not UTF-8") from None
    except ProgrammingError as exc:
        message = str(exc).strip()
        if not message.startswith("invalid URI query parameter"):
            message = _QUOTED.sub("…", message)
        raise ValueError(message) from None
    # A password with one of these in it ends too early, and its rest would be shown as a host.
    if "@" in given.get("host", "").lstrip("@") or not _PORTS.fullmatch(given.get("port", "")):
        raise ValueError(
            "user or password has a character that means something else in a URL: "
            "write %40 for @, %3A for :, %2F for /, %25 for %"
        )
    return given


def with_password_of(environment: Mapping[str, str], url: str) -> str:
    """Return *url* with the password that libpq would take from *environment* for it.

    A service file's password goes before the environment's, so such a url stays as it is.
    """
    given = parse_conninfo(url)
    password = environment.get("PGPASSWORD")
    if not password or {"password", "service"} & given.keys() or environment.get("PGSERVICE"):
        return url
    return make_conninfo(url, password=password)
