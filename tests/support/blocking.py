"""Calls of the program that block its event loop fail: files, sleeps and sockets."""

import contextlib
from collections.abc import Iterator

import pytest
from blockbuster import blockbuster_ctx

RUNNING = ("admin", "apply", "progress", "runtime", "sync", "target")
"""The parts whose tasks share the event loop. Commands have their process to themselves."""
MAY_BLOCK = (
    # asyncpg reads the files that libpq would read, each time it connects.
    (
        "asyncpg/connect_utils.py",
        {"_parse_connect_dsn_and_args", "_dot_postgresql_path", "_read_password_file"},
    ),
    # The spool reads and writes the page cache and never syncs: a thread would cost more.
    (
        "streamer/apply/spool.py",
        {"__init__", "new_file", "append", "append_large", "_flush", "_write", "truncate", "read",
         "_read_bytes", "release", "replay", "close", "discard_open"},
    ),
    # A journal's files of 64 MB go one at a time, when the target has all that is in them.
    ("streamer/source/journal/files.py", {"trim"}),
    # The log shows a defect with its traceback, and reads the source for that.
    ("structlog/dev.py", {"__call__"}),
    # Small files that the process reads once, before it streams.
    ("streamer/migrations.py", {"read_migrations"}),
    ("streamer/runtime/installation_id.py", {"_read"}),
)  # fmt: skip


@contextlib.contextmanager
def never_blocking() -> Iterator[None]:
    """Let a blocking call raise `BlockingError` if the program makes it on an event loop."""
    with blockbuster_ctx([f"streamer.{part}" for part in RUNNING]) as blockbuster:
        for function in blockbuster.functions.values():
            for file, functions in MAY_BLOCK:
                function.can_block_in(file, functions)
        yield


@pytest.fixture
def loop_is_never_blocked() -> Iterator[None]:
    with never_blocking():
        yield
