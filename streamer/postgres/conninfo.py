"""Parses connection strings; the errors quote no part of a string.

libpq quotes the faulty part of a string in its message, and that part may be the password. Pure.
"""

import re
import shlex
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from streamer.errors.remedies import Command, Remedy

_QUOTED: Final = re.compile(r'"[^"]*"')
_PORTS: Final = re.compile(r"\d*(,\d*)*")
_NO_FILE: Final = "/dev/null/passfile"
"""libpq ignores a password file that cannot exist."""
_CACHED: Final = 1024
"""The number of cached connection strings: enough for the sources of a large fleet."""


def parse_conninfo(text: str) -> dict[str, str]:
    """Return the parameters of a URL or key=value string. Raises a ValueError that quotes no
    part.
    """
    return dict(_parse(text))


@lru_cache(maxsize=_CACHED)
def _parse(text: str) -> dict[str, str]:
    # Cached, because each new connection looks up the state of its password by these parameters.
    try:
        parameters = {k: str(v) for k, v in conninfo_to_dict(text).items() if v is not None}
    except UnicodeDecodeError:
        raise ValueError("its percent-encoded text is not UTF-8") from None
    except ProgrammingError as exc:
        message = str(exc).strip()
        if not message.startswith("invalid URI query parameter"):
            message = _QUOTED.sub("…", message)
        raise ValueError(message) from None
    # A password with an unescaped special character ends too early, and its rest looks like a host.
    if "@" in parameters.get("host", "").lstrip("@") or not _PORTS.fullmatch(
        parameters.get("port", "")
    ):
        raise ValueError(
            "user or password has a special character of URLs; write %40 for @, %3A for :, "
            "%2F for / and %25 for %"
        )
    return parameters


def with_password_of(environment: Mapping[str, str], url: str) -> str:
    """Return *url* with the password that libpq would take from *environment* for this url.

    A service file's password has priority over the environment's, so such a url stays unchanged.
    """
    parameters = parse_conninfo(url)
    password = environment.get("PGPASSWORD")
    if not password or {"password", "service"} & parameters.keys() or environment.get("PGSERVICE"):
        return url
    return add_password(url, password)


def add_password(url: str, password: str) -> str:
    """Return *url* with *password*."""
    return make_conninfo(url, password=password)


def without_stored_passwords(url: str) -> str:
    """Return *url* so that libpq takes no password from this machine.

    Otherwise a url without a password would get a password from PGPASSWORD, PGPASSFILE, ~/.pgpass
    or PGSERVICE. The url's author could send this password to any server. A `passfile` in *url*
    stays.
    """
    try:
        parameters = parse_conninfo(url)
    except ValueError:  # a later connection reports the fault
        return url
    if parameters.get("password"):
        return url
    return make_conninfo(**{"passfile": _NO_FILE, **parameters, "password": ""})


def server_name(url: str) -> str:
    """Return database, host and port of a connection string, without role and password."""
    host, port, database = _parts(url)
    return f"{database or 'the default database'} at {host or 'the local socket'}:{port}"


SERVER_PARAMETERS: Final[tuple[str, ...]] = ("host", "hostaddr", "port")


def database_parameters(url: str) -> dict[str, str]:
    """Return the parameters of *url* that lead to its database, without role and password.

    Of several hosts, the parameters choose the primary.
    """
    parameters = parse_conninfo(url)
    names = (*SERVER_PARAMETERS, "dbname")
    place: dict[str, str] = {name: parameters[name] for name in names if name in parameters}
    if "," in parameters.get("host", ""):
        place["target_session_attrs"] = "read-write"
    return place


def join_parameters(parameters: Mapping[str, str]) -> str:
    """Return a key=value string with *parameters*."""
    return make_conninfo("", **parameters)


def several_hosts(parameters: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the hosts and ports among *parameters* of a connection string, if there are several.

    A port is empty where the string has none. Raises ValueError.
    """
    hosts, ports = parameters.get("host", "").split(","), parameters.get("port", "").split(",")
    if len(hosts) < 2:
        return []
    if len(ports) not in (1, len(hosts)):
        raise ValueError(f"{len(ports)} ports do not fit {len(hosts)} hosts")
    return list(zip(hosts, ports if len(ports) > 1 else ports * len(hosts), strict=True))


def has_several_hosts(url: str) -> bool:
    """Return whether a connection string lists more than one host."""
    try:
        parameters = parse_conninfo(url)
    except ValueError:
        return False
    return "," in (parameters.get("host") or parameters.get("hostaddr", ""))


def with_host_first(url: str, first: tuple[str, str]) -> str:
    """Return *url* with *first*, a pair of host and port, as first host, if *url* lists *first*."""
    hosts = hosts_of(url)
    if first not in hosts:
        return url
    names, ports = zip(first, *(pair for pair in hosts if pair != first), strict=True)
    return make_conninfo(url, host=",".join(names), port=",".join(ports))


def hosts_of(url: str) -> list[tuple[str, str]]:
    """Return the hosts and ports of a connection string, if there are several.

    The list is empty for a connection string with `hostaddr`.
    """
    try:
        parameters = parse_conninfo(url)
        return [] if "hostaddr" in parameters else several_hosts(parameters)
    except ValueError:
        return []


TLS_WORDS: Final = ("SSL", "TLS", "certificate")
"""Words in the message of libpq or OpenSSL about an encrypted connection."""
TLS_HINT: Final = (
    "check sslmode, sslrootcert, sslcert and sslkey in the url, and the dates and host names in "
    "the certificates of both sides"
)


def probe_command(url: str) -> str:
    """Return the command that tests whether a server accepts connections.

    Like streamer, `pg_isready` reads parameters that are missing in *url* from PGPORT and similar
    variables.
    """
    try:
        parameters = parse_conninfo(url)
    except ValueError:
        parameters = {}
    options = {"-h": "host", "-p": "port", "-d": "dbname"}
    pairs = [(option, parameters[name]) for option, name in options.items() if parameters.get(name)]
    return shlex.join(["pg_isready", *(word for pair in pairs for word in pair)])


def reach_hint(url: str) -> Remedy:
    """Return the remedy for a server that does not answer."""
    return Remedy.of(
        "start its server or restore the network, and test with: ",
        Command(probe_command(url)),
    )


def _parts(url: str) -> tuple[str, str, str]:
    try:
        parameters = parse_conninfo(url)
    except ValueError:
        parameters = {}
    return parameters.get("host", ""), parameters.get("port", "5432"), parameters.get("dbname", "")
