"""``streamer health``: asks the process of a configuration whether it works.

The health check of the image runs this command. So the check asks the address that the process
listens on, whether a file, a variable or the default sets the address.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from http.client import HTTPException
from typing import Final
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

from streamer.util.listen_address import local_url

SECONDS_MAX: Final = 5.0


@dataclass(frozen=True, slots=True)
class HealthAnswer:
    """The answer of a process.

    ``listen``: the address that the process listens on; empty if HTTP is off. ``healthy``: None if
    HTTP is off, because the process then answers no client. ``problem``: the reason if the process
    is not healthy.
    """

    listen: str
    healthy: bool | None
    problem: str | None = None

    def __str__(self) -> str:
        if self.healthy is None:
            return "http.listen is empty, so no client can check the process"
        return self.problem or f"healthy: {self.listen}"


def find_page(addresses: Iterable[str], listen: str) -> str | None:
    """Return the address of a page on this machine; None if no process answers.

    *addresses*: the addresses in the bookkeeping. *listen*: the configured address, which the
    function checks if the bookkeeping has no address.
    """
    address = next(iter(addresses), None)
    if address is None and ask_health(listen).healthy:
        return listen
    return address


def ask_health(listen: str) -> HealthAnswer:
    """Ask the process that listens on *listen*, without a proxy: the process is on this machine."""
    if not listen:
        return HealthAnswer(listen, None)
    url = f"{local_url(listen)}/healthz"
    try:
        with build_opener(ProxyHandler({})).open(url, timeout=SECONDS_MAX):
            return HealthAnswer(listen, True)
    except HTTPError as exc:
        exc.close()
        return HealthAnswer(listen, False, f"{url} answers {exc.code}")
    except (OSError, HTTPException) as exc:
        reason = getattr(exc, "reason", None) or exc
        return HealthAnswer(listen, False, f"no answer from {url}: {reason}")
