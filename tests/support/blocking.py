"""Makes calls of the program that block the event loop fail: files, sleeps and sockets."""

import contextlib
from collections.abc import Iterator

import pytest
from blockbuster import blockbuster_ctx

RUNNING = ("admin", "apply", "bookkeeping", "copy", "drain", "runtime", "schema_changes", "target")
"""The parts whose tasks share the event loop. Commands run in separate processes."""
MAY_BLOCK = (
    # asyncpg reads the files that libpq would read, at each connect.
    (
        "asyncpg/connect_utils.py",
        {"_parse_connect_dsn_and_args", "_dot_postgresql_path", "_read_password_file"},
    ),
    # The spool reads and writes the page cache and never syncs: a thread would cost more.
    (
        "streamer/apply/lanes/spool.py",
        {"__init__", "new_file", "append", "append_large", "_flush", "_write", "truncate", "read",
         "_read_bytes", "release", "replay", "close", "discard_open"},
    ),
    # A journal removes its files of 64 MB one by one, when the target has all changes of a file.
    ("streamer/source/journal/journal_files.py", {"trim"}),
    # The log prints a defect with a traceback, and reads the source code for that.
    ("structlog/dev.py", {"__call__"}),
    # Small files that the process reads once, before it streams.
    ("streamer/util/migrations.py", {"read_migrations"}),
    ("streamer/runtime/installation_id.py", {"_read"}),
)  # fmt: skip


@contextlib.contextmanager
def never_blocking() -> Iterator[None]:
    """Make a blocking call raise `BlockingError` if the program blocks an event loop."""
    with blockbuster_ctx([f"streamer.{part}" for part in RUNNING]) as blockbuster:
        for function in blockbuster.functions.values():
            for file, functions in MAY_BLOCK:
                function.can_block_in(file, functions)
        yield


@pytest.fixture
def loop_is_never_blocked() -> Iterator[None]:
    with never_blocking():
        yield
