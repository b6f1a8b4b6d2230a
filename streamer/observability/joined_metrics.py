"""Joins the metrics of several processes into a single answer.

The series of each process carry the label ``replica``. A sum over processes would fall when a
process ends, and Prometheus would take the fall for a reset of all counters. Families about the
whole fleet come from the process that answers.
"""

import asyncio
import http.client
import re
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

FLEET_FAMILIES: Final = frozenset(
    {"streamer_fleet_sources", "streamer_replica_sources", "streamer_source_process"}
)
QUERY_SECONDS: Final = 5.0

_FAMILY: Final = re.compile(r"^# HELP (\S+) .*\n# TYPE .*\n", re.MULTILINE)


class _LocalConnection(http.client.HTTPConnection):
    """A connection to a socket of this machine."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=QUERY_SECONDS)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def query_process(path: Path, resource: str) -> bytes | None:
    """Return the answer of the process at *path*; None unless the process answers with 200."""
    connection = _LocalConnection(path)
    try:
        connection.request("GET", resource)
        answer = connection.getresponse()
        content = answer.read()
    except (OSError, http.client.HTTPException):
        return None  # the process is starting or stopping
    else:
        return content if answer.status == 200 else None
    finally:
        connection.close()


async def render_all(
    answering: int,
    render: Callable[[], Awaitable[bytes]],
    siblings: Callable[[], Mapping[int, Path]],
) -> bytes:
    """Return the metrics of process *answering* and of its *siblings*."""
    paths = siblings()
    queries = [asyncio.to_thread(query_process, path, "/metrics") for path in paths.values()]
    rendered, answers = await asyncio.gather(render(), asyncio.gather(*queries))
    texts = {answering: rendered.decode()}
    for number, answer in zip(paths, answers, strict=True):
        if answer is not None:
            texts[number] = answer.decode()
    return (await asyncio.to_thread(join_metrics, texts)).encode()


def join_metrics(texts: Mapping[int, str]) -> str:
    """Return the metrics of several processes as one text.

    *texts*: the metrics by number of the process, the answering process first. The help of a family
    appears once.
    """
    heads: dict[str, str] = {}
    samples: dict[str, list[str]] = {}
    for place, (number, text) in enumerate(texts.items()):
        families = list(_FAMILY.finditer(text))
        ends = [match.start() for match in families[1:]] + [len(text)]
        for family, end in zip(families, ends, strict=True):
            name = family[1]
            if name in FLEET_FAMILIES and place:
                continue
            heads.setdefault(name, family[0])
            lines = text[family.end() : end]
            if name not in FLEET_FAMILIES:
                lines = _label(lines, number)
            samples.setdefault(name, []).append(lines)
    return "".join(head + "".join(samples[name]) for name, head in heads.items())


def _label(lines: str, number: int) -> str:
    """Add the label ``replica``. Values of labels may contain any character but a line feed."""
    label = f'replica="{number}"'
    labelled = []
    for line in lines.split("\n"):
        name = re.match(r"[^{\s]+", line)
        if name is None:
            continue
        tail = line[name.end() :]
        inner = f"{{{label},{tail[1:]}" if tail.startswith("{") else f"{{{label}}}{tail}"
        labelled.append(f"{name[0]}{inner}\n")
    return "".join(labelled)
