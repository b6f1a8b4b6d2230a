"""The threads of page and API, separate so that busy pages delay no stream.

asyncio's default threads resolve server names, and a source that reconnects waits for a free
thread.
"""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_AT_ONCE: Final = 4
_threads: Final = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="admin")


async def in_admin_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call for a request, as `asyncio.to_thread` does."""
    call = partial(contextvars.copy_context().run, function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_threads, call)
