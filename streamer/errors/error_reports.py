"""Errors and waits in the bookkeeping and in views. Pure."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Self, final

from streamer.errors.error_classes import RUNBOOKS, Retry, StreamerError
from streamer.errors.remedies import Remedy


@final
@dataclass(frozen=True, slots=True)
class ErrorReport:
    """An error in the bookkeeping, status, page, API and readiness.

    ``remedy``: the operator's next step, if known, which is a part of ``text`` without values of
    rows.
    """

    text: str
    code: str
    remedy: Remedy | None = None

    @property
    def hint(self) -> str | None:
        return None if self.remedy is None else str(self.remedy)

    @property
    def message(self) -> str:
        """``text`` without the remedy."""
        message, separator, notes = self.text.rpartition(f"; {self.hint}")
        return message + notes if self.remedy is not None and separator else self.text

    def __str__(self) -> str:
        return self.text

    @property
    def log_fields(self) -> dict[str, str]:
        """The fields of `StreamerError.log_fields`."""
        return {"code": self.code, "runbook": runbook_address(self.code) or ""}

    @property
    def stored_remedy(self) -> str | None:
        """The remedy as text for a JSON column."""
        return None if self.remedy is None else json.dumps(self.remedy.to_json())

    @classmethod
    def of(cls, error: StreamerError) -> Self:
        return cls(str(error), error.code, error.remedy)

    @classmethod
    def with_notes(cls, error: StreamerError) -> Self:
        """Return the report of *error*: its message, the places that callers added, and the
        remedy.
        """
        parts = [error.message, *getattr(error, "__notes__", [])]
        if error.hint:
            parts.append(error.hint)
        return cls("; ".join(parts), error.code, error.remedy)

    @classmethod
    def stored(cls, text: str | None, code: str | None, remedy: str | None = None) -> Self | None:
        """Return the report of three columns of the bookkeeping; None without an error."""
        if text is None:
            return None
        parsed = None if remedy is None else Remedy.from_json(json.loads(remedy))
        return cls(text, code or StreamerError.code, parsed)


@final
@dataclass(frozen=True, slots=True)
class TableWait:
    """The reason why a table waits. ``is_automatic``: the wait ends without an operator.

    The bookkeeping stores ``is_automatic`` as ``is_turn``.
    """

    text: str
    remedy: Remedy | None = None
    is_automatic: bool = False

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}" if self.remedy is not None else self.text

    @property
    def stored(self) -> str:
        return json.dumps(self.to_json())

    def to_json(self) -> dict[str, Any]:
        remedy = None if self.remedy is None else self.remedy.to_json()
        return {"text": self.text, "remedy": remedy, "is_turn": self.is_automatic}

    @classmethod
    def from_json(cls, stored: Any) -> "TableWait | None":
        if not stored:
            return None
        return cls(stored["text"], Remedy.from_json(stored["remedy"]), bool(stored["is_turn"]))


def classes_of_errors() -> Iterator[type[StreamerError]]:
    """Yield every class of errors of the imported modules, a class before its subclasses."""

    def below(error: type[StreamerError]) -> Iterator[type[StreamerError]]:
        yield error
        for inner in error.__subclasses__():
            yield from below(inner)

    return below(StreamerError)


_RUNBOOK_ADDRESSES: Final[dict[str, str]] = {}
"""The paths of runbooks by code, for the classes of errors that were imported so far."""


def runbook_address(code: str | None) -> str | None:
    """Return the path of *code*'s runbook on the page; None for a missing or unknown code."""
    if code is None:  # each of many thousand tables may have a problem without a code
        return None
    if code not in _RUNBOOK_ADDRESSES:
        for error in classes_of_errors():  # modules of further classes may be imported later
            _RUNBOOK_ADDRESSES.setdefault(error.code, f"{RUNBOOKS}/{error.runbook}")
    return _RUNBOOK_ADDRESSES.get(code)


@cache
def is_retried(code: str | None) -> bool:
    """Whether streamer tries again after each error with *code*, without a restart."""
    classes = [error for error in classes_of_errors() if error.code == code]
    return all(error.retry is not Retry.NEVER for error in classes)


def error_fields(report: ErrorReport | None) -> dict[str, Any]:
    """Return the fields of an error in a JSON object: text, code, runbook and remedy."""
    if report is None:
        return {"error": None, "error_code": None, "runbook": None, "remedy": None}
    return {
        "error": report.text,
        "error_code": report.code,
        "runbook": runbook_address(report.code),
        "remedy": None if report.remedy is None else report.remedy.to_json(),
    }
