"""Runs `streamer.compare.local_program` in a separate process of about 50 MB.

In `run`, a thread would share the interpreter with the streams, and no call could end it in the
middle of a statement. Spark's JVM needs 330 MB, and seconds to start.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import Any, Final

import structlog

from streamer.copy.spark.security import choose_environment
from streamer.errors.error_classes import ComparisonError

log = structlog.get_logger()

PROGRAM: Final = "streamer.compare.local_program"
STOP_SECONDS: Final = 2.0


class LocalProcess:
    """Runs the jobs of comparisons, like `streamer.copy.spark.launcher.SparkLauncher`.

    *is_background*: jobs have a low priority, and end at a number of differing rows.
    """

    def __init__(self, *, is_background: bool = False) -> None:
        self._is_background = is_background
        self._prepared: asyncio.Task[asyncio.subprocess.Process] | None = None

    def prepare(self) -> None:
        """Start the process of the next job in the background. `close` ends an unused process."""
        self._prepared = asyncio.create_task(_start(), name="comparison process")

    async def close(self) -> None:
        """End a prepared process that has no job."""
        if self._prepared is not None:
            await _end(await self._take())

    async def _take(self) -> asyncio.subprocess.Process:
        """Return the prepared process, or a new process."""
        prepared, self._prepared = self._prepared, None
        return await (_start() if prepared is None else prepared)

    async def submit(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        """Run *job* to the end. A cancellation ends the process and the process's statements.

        Raises ComparisonError when the process ends without a result.
        """
        process = await self._take()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            handed = job | {"is_background": self._is_background}
            process.stdin.write(json.dumps(handed).encode() + b"\n")
            with contextlib.suppress(ConnectionError):  # the answer names the cause
                await process.stdin.drain()
            line = await process.stdout.read()
            await _wait(process)
        finally:
            await _end(process)
        answer: dict[str, Any] = {"error": "its process ended"}
        with contextlib.suppress(ValueError):  # a killed process writes no whole answer
            answer = json.loads(line)
        if "error" in answer:
            if (frames := answer.get("traceback")) is not None:
                log.error("defect in a comparison", error=answer["error"], traceback=frames)
            raise ComparisonError(f"the comparison stopped: {answer['error']}")
        result: list[dict[str, Any]] = answer["result"]
        return result


async def _start() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", PROGRAM),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
        env=choose_environment(os.environ),
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the process: first by a cancellation of statements, and after a while by a kill."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        await _wait(process)


async def _wait(process: asyncio.subprocess.Process) -> None:
    """Wait a while for the end of the process."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
