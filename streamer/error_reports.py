"""Errors as the bookkeeping stores and views show them, with code and runbook. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self, final

from streamer.errors import RUNBOOKS, StreamerError


@final
@dataclass(frozen=True, slots=True)
class ErrorReport:
    """An error as the bookkeeping stores it, and as status, page, API and readiness show it.

    ``hint``: the part of ``text`` with the operator's next step, if known, without values of rows.
    """

    text: str
    code: str
    hint: str | None = None

    @property
    def log_fields(self) -> dict[str, str]:
        """As `StreamerError.log_fields`."""
        return {"code": self.code, "runbook": runbook_address(self.code) or ""}

    @classmethod
    def of(cls, error: StreamerError) -> Self:
        return cls(str(error), error.code, error.hint)

    @classmethod
    def with_notes(cls, error: StreamerError) -> Self:
        """Return the report of *error* with the places that callers added."""
        notes = getattr(error, "__notes__", [])
        return cls("; ".join([str(error), *notes]), error.code, error.hint)

    @classmethod
    def stored(cls, text: str | None, code: str | None) -> Self | None:
        """Return the report of two columns of the bookkeeping; None without an error."""
        return None if text is None else cls(text, code or StreamerError.code)


def classes_of_errors() -> Iterator[type[StreamerError]]:
    """Yield every class of errors of the imported modules, a class before those below it."""

    def below(error: type[StreamerError]) -> Iterator[type[StreamerError]]:
        yield error
        for inner in error.__subclasses__():
            yield from below(inner)

    return below(StreamerError)


def runbook_address(code: str | None) -> str | None:
    """Return where the page has the runbook of *code*; None for no code, or for an unknown one."""
    for error in classes_of_errors():
        if error.code == code:
            return f"{RUNBOOKS}/{error.runbook}"
    return None


def error_fields(report: ErrorReport | None) -> dict[str, str | None]:
    """Return an error as a part of a JSON object: text, code and address of its runbook."""
    if report is None:
        return {"error": None, "error_code": None, "runbook": None}
    return {
        "error": report.text,
        "error_code": report.code,
        "runbook": runbook_address(report.code),
    }
