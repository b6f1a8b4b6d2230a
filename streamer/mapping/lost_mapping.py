"""Detects a lost mapping: an empty mapping although the bookkeeping has sources. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamer.errors.command_lines import some_of
from streamer.errors.error_classes import StoreError
from streamer.errors.error_reports import ErrorReport, error_fields
from streamer.errors.remedies import Command, Remedy, run


@dataclass(frozen=True, slots=True)
class MappingProblem:
    """A fault of the mapping as a whole, and the operator's next step."""

    error: str
    remedy: Remedy

    @property
    def hint(self) -> str:
        return str(self.remedy)

    @property
    def report(self) -> ErrorReport:
        return ErrorReport(self.error, StoreError.code, self.remedy)

    def to_json(self) -> dict[str, Any]:
        return error_fields(self.report) | {"hint": self.hint}


def save_mapping() -> Command:
    """Return the command that saves the mapping of a running process."""
    return Command("streamer export > backup.yaml")


def find_lost_mapping(
    mapped: int, labels: Sequence[str], missing: Path | None = None
) -> MappingProblem | None:
    """Return the problem if *mapped* sources are missing although the bookkeeping contains sources
    with *labels*.

    *missing*: the mapping database, if the file does not exist.
    """
    if mapped or not labels:
        return None
    names = some_of(f'"{label}"' for label in sorted(labels))
    state = "the mapping is empty" if missing is None else f"there is no {missing}"
    first = None
    if missing is not None:
        words = "if streamer run still runs, save its mapping first: "
        first = Remedy.of(words, save_mapping(), "; then ")
    return MappingProblem(
        f"{state}, but the target holds the progress of {names}; "
        "streamer keeps progress and slots, and streams no table",
        Remedy.of(
            first,
            "restore the mapping database with its .key file and restart, or run: ",
            run("import", "BACKUP.yaml"),
            ", then ",
            run("apply"),
            "; streaming continues where it stopped. "
            "If you no longer want the sources, import them and run streamer teardown",
        ),
    )
