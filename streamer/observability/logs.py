"""Logs: one line per event, as text or as JSON.

Field names: ``source`` (database or database:sid) with its parts ``database`` and ``sid``,
``table``, ``lsn``, ``worker``, ``error``, ``code``. Supervisor and drainer bind these fields once,
so every line of their work carries them. Messages are lower case without a full stop. The
translation of drivers' errors removes connection strings; `redact` removes connection strings that
a library prints.
"""

import logging
import re
import sys
from collections.abc import Callable, MutableMapping
from datetime import datetime
from pathlib import PurePath
from typing import Any, Final, Literal

import structlog

from streamer.mapping.rules import SourceLabel

LogFormat = Literal["text", "json"]

_URL_PASSWORD: Final = re.compile(r"(postgres(?:ql)?://[^\s:/@]*):[^\s@]*@")
_WORD_PASSWORD: Final = re.compile(r"(password\s*=\s*)('[^']*'|\S+)", re.IGNORECASE)


_OF_STRUCTLOG: Final = frozenset(["_record", "_from_structlog", "exc_info", "positional_args"])
"""The parts of an event that structlog itself reads."""


def redact(text: str) -> str:
    """Blank the passwords of connection strings in *text*."""
    return _WORD_PASSWORD.sub(r"\1***", _URL_PASSWORD.sub(r"\1:***@", text))


def _name_source(
    logger: Any, name: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    source = event.get("source")
    if isinstance(source, SourceLabel):
        event["database"], event["sid"] = source.database, source.sid
    return event


def _redact_event(
    logger: Any, name: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = redact(value)
    return event


def _plain(value: Any) -> Any:
    """Return *value* as JSON has it: a path as its text, a set as a list."""
    match value:
        case PurePath():
            return str(value)
        case datetime():
            return value.isoformat()
        case dict():
            return {str(key): _plain(inner) for key, inner in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_plain(inner) for inner in value]
    return value


def _word(value: Any) -> Any:
    """Return a plain *value* as a word of a line of text, without Python's notation."""
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case dict():
            return ", ".join(f"{key}: {_word(inner)}" for key, inner in value.items())
        case list():
            return ", ".join(str(_word(inner)) for inner in value)
    return value


def _each_value(change: Callable[[Any], Any]) -> Any:
    """Return a processor that applies *change* to each value of an event."""

    def process(
        logger: Any, name: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        for key in event.keys() - _OF_STRUCTLOG:
            event[key] = change(event[key])
        return event

    return process


def configure(level: str, log_format: LogFormat) -> None:
    """Send every log line, also from libraries, to stderr in the same format."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _each_value(_plain),
        _redact_event,
    ]
    renderer: Any = structlog.processors.JSONRenderer(sort_keys=False)
    if log_format == "json":
        shared.insert(1, _name_source)
    else:
        shared.append(_each_value(_word))
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("asyncio", "httpcore", "httpx", "psycopg", "uvicorn.access", "py4j"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
