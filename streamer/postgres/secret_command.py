"""Runs a command that prints a secret, with a time limit for the command and all its processes.

Tasks of Spark import this module too.
"""

import os
import select
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

COMMAND_SECONDS: Final = 10.0
OUTPUT_BYTES_MAX: Final = 65536
"""A cloud token has up to 2 kB, so longer output is not a secret."""
_LOOK_MILLISECONDS: Final = 20


class CommandError(Exception):
    """A command printed no secret. The message has neither the command nor its output."""


def run_secret_command(
    command: str, variables: Mapping[str, str], abandoned: threading.Event | None = None
) -> bytes:
    """Return the output of a command, which runs without a shell. Blocks.

    *variables*: environment variables to add to those of streamer. *abandoned*: set by a caller
    that no longer waits. The output has at most one byte more than `OUTPUT_BYTES_MAX`. Raises
    CommandError.
    """
    try:
        process = subprocess.Popen(
            shlex.split(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # error messages may repeat a secret
            env=os.environ | variables,
            start_new_session=True,
        )
    except OSError as exc:
        raise CommandError(str(exc.strerror)) from None
    with process:
        try:
            output = _read_output(process, abandoned)
        finally:
            # A child can hold the output open, or wait at a prompt. The process is not reaped yet,
            # so no second group can have this number.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    if len(output) <= OUTPUT_BYTES_MAX and process.returncode != 0:
        raise CommandError(f"it ended with exit status {process.returncode}")
    return output


def _read_output(process: "subprocess.Popen[bytes]", abandoned: threading.Event | None) -> bytes:
    """Read until the process ends, or has printed too much for a secret."""
    assert process.stdout is not None
    output, source = b"", process.stdout.fileno()
    os.set_blocking(source, False)
    waiting = select.poll()
    waiting.register(source, select.POLLIN)
    deadline = time.monotonic() + COMMAND_SECONDS
    while len(output) <= OUTPUT_BYTES_MAX:
        if time.monotonic() >= deadline or (abandoned is not None and abandoned.is_set()):
            raise CommandError(f"streamer ended it after {COMMAND_SECONDS:g} s")
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        has_ended = os.waitid(os.P_PID, process.pid, options) is not None
        waiting.poll(0 if has_ended else _LOOK_MILLISECONDS)
        try:
            piece = os.read(source, OUTPUT_BYTES_MAX + 1 - len(output))
        except BlockingIOError:
            piece = None
        if piece:
            output += piece
        elif has_ended:
            break
        elif piece is not None:  # the process has closed its output, and may still fail
            with suppress(KeyError):
                waiting.unregister(source)
    return output
