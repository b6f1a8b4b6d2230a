"""A process of ``processes: N``: the commands of its parent, its directories, and its port."""

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from streamer.config.settings import Settings

STOP: Final = "stop"
RELOAD: Final = "reload"
SERVE: Final = "serve"
"""Accept the connections of the common port."""
FIRST: Final = 1


@dataclass(frozen=True, slots=True)
class Membership:
    """The number of a process, and the sockets that it shares.

    *number*: the number of the process, from 1. *port*: the descriptor of the common listening
    socket. *directory*: the directory of the sockets over which the processes answer requests of
    their siblings.
    """

    number: int
    port: int | None
    directory: Path

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text that `str` returns. Raises ValueError."""
        number, port, directory = text.split(":", 2)
        return cls(int(number), int(port) if port else None, Path(directory))

    def __str__(self) -> str:
        return f"{self.number}:{'' if self.port is None else self.port}:{self.directory}"

    @property
    def own_socket(self) -> Path:
        return self.directory / str(self.number)

    def siblings(self) -> dict[int, Path]:
        """Return the sockets of the sibling processes by number, whether or not they run."""
        sockets = {int(path.name): path for path in self.directory.iterdir() if path.name.isdigit()}
        return {number: sockets[number] for number in sorted(sockets) if number != self.number}

    def own_settings(self, settings: Settings) -> Settings:
        """Return *settings* with a spool directory of this process.

        The first process uses the configured directory, so that it continues the journals of a
        former single process.
        """
        spool = settings.spool
        if spool.directory is None or self.number == FIRST:
            return settings
        process_spool = spool.model_copy(
            update={"directory": process_directory(spool.directory, self.number)}
        )
        return settings.model_copy(update={"spool": process_spool})

    def listen(self) -> socket.socket:
        """Return the socket of this process, newly created."""
        self.own_socket.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(str(self.own_socket))
        return listening


def process_directory(directory: Path, number: int) -> Path:
    """Return the spool directory of process *number* in the configured *directory*."""
    return directory / f"process-{number}"


async def read_commands() -> asyncio.StreamReader:
    """Return the commands of the parent, which arrive on the standard input."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    return reader


async def obey(
    commands: asyncio.StreamReader,
    act: Callable[[str], None],
    exit_now: Callable[[int], None] = os._exit,
) -> None:
    """Pass each command to *act*. The end of the parent is a `STOP`.

    A parent that ends after a `STOP` got a second signal, so the process exits at once.
    """
    is_stopping = False
    while line := await commands.readline():
        command = line.decode().strip()
        is_stopping |= command == STOP
        act(command)
    if is_stopping:
        exit_now(1)
    act(STOP)
