"""The card of the target: its server, the work of this process, and the path of a change."""

import asyncio
from dataclasses import dataclass
from typing import Any, Final

from streamer.admin.live.events import Events
from streamer.admin.live.path_of_change import ChangePath, path_of
from streamer.admin.service.admin_service import AdminService
from streamer.errors.error_classes import StreamerError
from streamer.target.server_facts import ServerFacts

Row = dict[str, Any]

WAIT_SECONDS: Final = 1.0
"""The limit of a page's wait for the facts of the server. A later page shows late facts."""


@dataclass(frozen=True, slots=True)
class TargetView:
    """The card. ``target``: the state; ``server``: None before the first answer."""

    target: Row
    server: ServerFacts | None
    path: ChangePath

    @property
    def needs_operator(self) -> bool:
        """Whether the fleet overview shows the card before the sources."""
        return bool(self.target["error"]) or self.path.slow is not None


class TargetCard:
    """Builds the card about the target for the pages."""

    def __init__(self, service: AdminService, events: Events) -> None:
        self._service = service
        self._events = events
        self._server: ServerFacts | None = None

    async def view(self, held: tuple[int, int]) -> TargetView:
        """Return the card. *held*: the number of tables that hold changes, and the bytes."""
        target = self._events.target
        if not target["error"]:
            await self._read()
        return TargetView(target, self._server, path_of(self._events.path_facts(*held)))

    async def _read(self) -> None:
        """Read the server, unless a recent result exists; after a failure, keep the last result."""
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                self._server = await self._service.target_facts()
        except (StreamerError, TimeoutError):
            return
