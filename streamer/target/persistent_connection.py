"""Keeps a connection to the target open between uses, and opens it again after a loss."""

from dataclasses import replace

from streamer.errors.error_classes import (
    TargetMovedError,
)
from streamer.target.connection import TargetAddress, TargetConnection
from streamer.target.fencing_token import FencingToken


class PersistentConnection:
    """A connection that stays open between uses, and opens again after a failure.

    The owner ensures that a single task at a time uses the connection.
    """

    def __init__(self, address: TargetAddress, name: str) -> None:
        self._address = address
        self._name = name
        self._connection: TargetConnection | None = None

    async def get(self, fence: FencingToken | None = None) -> TargetConnection:
        """Return a connection to the server of *fence*, whose token is still valid.

        Raises TargetConnectionError, TargetRejectedError.
        """
        connection = self._connection
        if connection is not None and not connection.is_closed and connection.is_outdated:
            await connection.close()
        if connection is not None and not connection.is_closed and fence is not None:
            try:
                await connection.verify_fence(fence, again=True)
            except TargetMovedError:
                connection.terminate()
        if connection is None or connection.is_closed:
            address = self._address if fence is None else replace(self._address, fence=fence)
            connection = await TargetConnection.connect(address, self._name)
            self._connection = connection
        return connection

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    def terminate(self) -> None:
        """Close the connection without waiting for the server."""
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None
