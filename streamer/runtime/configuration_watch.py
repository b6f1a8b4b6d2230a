"""Watches the configuration file, for `streamer run --watch-config`.

Kubernetes replaces a mounted file some time after a change of its ConfigMap, and sends no signal.
The task compares contents, because the replaced part is a link in the path of the file.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

INTERVAL_SECONDS: Final = 2.0


@asynccontextmanager
async def watching(
    path: Path, on_change: Callable[[], None], seconds: float = INTERVAL_SECONDS
) -> AsyncIterator[None]:
    """Call *on_change* whenever the content of the file at *path* differs, during a block."""
    content = await asyncio.to_thread(_read, path)
    watch = _watch(path, content, on_change, seconds)
    task = asyncio.create_task(watch, name="configuration watch")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _watch(
    path: Path, content: bytes | None, on_change: Callable[[], None], seconds: float
) -> None:
    while True:
        await asyncio.sleep(seconds)
        present = await asyncio.to_thread(_read, path)
        # A file that an editor is about to replace may be missing for a moment.
        if present is not None and present != content:
            content = present
            on_change()


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
