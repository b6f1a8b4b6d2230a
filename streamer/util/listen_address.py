"""The address at which a client on the same machine reaches an HTTP server. Pure."""

from typing import Final

_ALL_ADDRESSES: Final = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def local_url(listen: str) -> str:
    """Return the URL of a server that listens on ``host:port``, for a client on its machine.

    Some systems refuse a connection to the address that stands for all addresses of the machine.
    """
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    host = _ALL_ADDRESSES.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
