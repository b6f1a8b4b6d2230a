"""Runs `streamer.compare.local_program` in a process of its own, which costs 50 MB while it runs.

A thread would share the interpreter with the streams, and nothing could end it in the middle of a
statement. Spark's JVM would take 500 MB and seconds to start, and its tasks would compete with the
copies.
"""

import asyncio
import contextlib
import json
import os
import sys
from typing import Any, Final

import structlog

from streamer.errors import ComparisonError

log = structlog.get_logger()

PROGRAM: Final = "streamer.compare.local_program"
STOP_SECONDS: Final = 2.0
_LINE_BYTES_MAX: Final = 16 * 1024 * 1024


class LocalProcess:
    """Takes the jobs of comparisons, like `streamer.sync.launcher.SparkLauncher`."""

    async def submit(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        """Run *job* to its end. Cancelled, this ends the process and its statements.

        Raises ComparisonError when the process ends without a result.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", PROGRAM),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            limit=_LINE_BYTES_MAX,
            env=dict(os.environ),
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(job).encode() + b"\n")
            with contextlib.suppress(ConnectionError):  # its answer says why
                await process.stdin.drain()
            line = await process.stdout.readline()
        finally:
            await _end(process)
        answer: dict[str, Any] = json.loads(line or b'{"error": "its process ended"}')
        if "error" in answer:
            if (frames := answer.get("traceback")) is not None:
                log.error("defect in a comparison", error=answer["error"], traceback=frames)
            raise ComparisonError(f"the comparison stopped: {answer['error']}")
        result: list[dict[str, Any]] = answer["result"]
        return result


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the process: with its statements, and if that takes long, at once."""
    for end in (process.terminate, process.kill):
        with contextlib.suppress(ProcessLookupError):
            end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
                return
