"""The parameters of the target's url, which may be any url that libpq accepts. Pure.

streamer refuses the few parameters that asyncpg cannot honor, by name, and ignores none.
"""

from collections.abc import Mapping
from typing import Final

from streamer.errors.error_classes import SettingsError

# Parameters that asyncpg reads from a connection URI as libpq does.
_PASSED: Final = frozenset(
    [
        "host",
        "port",
        "user",
        "password",
        "dbname",
        "passfile",
        "sslmode",
        "sslcert",
        "sslkey",
        "sslrootcert",
        "sslcrl",
        "sslpassword",
        "sslnegotiation",
        "ssl_min_protocol_version",
        "ssl_max_protocol_version",
        "target_session_attrs",
        "krbsrvname",
        "gsslib",
        "service",
        "servicefile",
        "application_name",
        "options",
    ]
)
# Parameters whose listed values are asyncpg's behaviour anyway.
_HARMLESS: Final[dict[str, frozenset[str]]] = {
    "channel_binding": frozenset({"disable", "prefer"}),
    "gssencmode": frozenset({"disable", "prefer"}),
    "sslsni": frozenset({"1"}),
    "sslcompression": frozenset({"0", "1"}),
    "load_balance_hosts": frozenset({"disable"}),
    "sslcertmode": frozenset({"allow"}),
}
_SOCKET: Final = ("keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count")
_WRITABLE: Final = frozenset({"any", "primary", "read-write"})
_OTHERS: Final = frozenset(
    {
        *_SOCKET,
        "tcp_user_timeout",
        "connect_timeout",
        "fallback_application_name",
        "client_encoding",
    }
)


def passed(stated: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters that asyncpg reads itself. Raises SettingsError for other values."""
    for port in filter(None, stated.get("port", "").split(",")):
        if not port.isdecimal() or not 0 < int(port) < 65536:
            raise SettingsError(f'target.url: "{port}" is not a port')
    for name, value in stated.items():
        if name not in _PASSED and name not in _OTHERS and value not in _HARMLESS.get(name, ()):
            raise SettingsError(
                f'target.url: parameter "{name}" is not supported for the target',
                hint="leave it out; sources take every libpq parameter",
            )
    attributes = stated.get("target_session_attrs", "any")
    if attributes not in _WRITABLE:
        raise SettingsError(
            f"target.url: target_session_attrs={attributes} leads to a server that accepts no "
            "writes",
            hint="write target_session_attrs=read-write",
        )
    parameters = {k: v for k, v in stated.items() if k in _PASSED}
    if "fallback_application_name" in stated:
        parameters.setdefault("application_name", stated["fallback_application_name"])
    return parameters


def of_sockets(stated: Mapping[str, str]) -> dict[str, int]:
    return {k: int(v) for k, v in stated.items() if k in _SOCKET or k == "tcp_user_timeout"}
