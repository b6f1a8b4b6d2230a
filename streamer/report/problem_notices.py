"""Finds the changes of problems that an external receiver does not know yet. Pure.

streamer notifies the receiver of the beginning of a problem, of a change of severity or code, and
of the end. The decision compares the present problems with the problems already notified.
So an undelivered notice is due again, and streamer needs no queue.
"""

import enum
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, final

from streamer.postgres.row_values import hide_values
from streamer.report.problems import Problem, ProblemKind, Severity, Subject

Key = tuple[ProblemKind, Subject]

_LINES_MAX: Final = 20
_LINE_CHARACTERS: Final = 500


class Event(enum.StrEnum):
    """The kinds of notices about a problem."""

    BEGUN = "begun"
    CHANGED = "changed"
    ENDED = "ended"


@final
@dataclass(frozen=True, slots=True)
class NotifiedProblem:
    """A problem already notified. ``since``: the first check that found the problem."""

    kind: ProblemKind
    subject: Subject
    severity: Severity
    code: str | None
    since: datetime

    @property
    def key(self) -> Key:
        return self.kind, self.subject

    @classmethod
    def of(cls, problem: Problem, since: datetime) -> "NotifiedProblem":
        return cls(problem.kind, problem.subject, problem.severity, problem.code, since)


@final
@dataclass(frozen=True, slots=True)
class Notice:
    """A change of a problem. ``problem``: the present problem, None after its end; ``state``: the
    last known state.
    """

    event: Event
    state: NotifiedProblem
    problem: Problem | None = None

    @property
    def line(self) -> str:
        """The notice as a line of text, without the values of rows."""
        problem, subject, kind = self.problem, self.state.subject, self.state.kind.value
        if problem is None:
            return f"ended: {subject}: {kind}, since {self.state.since:%Y-%m-%d %H:%M} UTC"
        remedy = "" if problem.remedy is None else f"; {problem.remedy}"
        line = f"{problem.severity.value}: {subject}: {hide_values(problem.text)}{remedy}"
        return line if len(line) <= _LINE_CHARACTERS else f"{line[: _LINE_CHARACTERS - 1]}…"

    def to_json(self) -> dict[str, Any]:
        state = self.state
        fields = {
            "event": self.event.value,
            "since": state.since.isoformat(timespec="seconds"),
            "subject": str(state.subject),
        }
        if self.problem is None:
            parts = {name: getattr(state.subject, name) for name in _SUBJECT}
            severity = {"kind": state.kind.value, "severity": state.severity.value}
            return {**fields, **parts, **severity, "code": state.code}
        return {**fields, **self.problem.to_json(), "problem": hide_values(self.problem.text)}


_SUBJECT: Final = ("database", "sid", "table", "sequence")


def find_notices(
    problems: Iterable[Problem],
    since: Mapping[Key, datetime],
    notified: Mapping[Key, NotifiedProblem],
    ended: Collection[Key],
    on: Iterable[Severity | ProblemKind],
) -> list[Notice]:
    """Return the notices that are due, the worst problems first.

    *since*: the beginning of each problem. *notified*: the problems already notified, of which
    *ended* have ended. *on*: the severities and kinds of problems to report.
    """
    reported, worst = frozenset(on), list(Severity)
    current = {problem.key: problem for problem in reversed(list(problems))}
    notices = []
    for key, problem in sorted(current.items(), key=lambda item: worst.index(item[1].severity)):
        former = notified.get(key)
        if former is None:
            if reported & {problem.kind, problem.severity}:
                notices.append(
                    Notice(Event.BEGUN, NotifiedProblem.of(problem, since[key]), problem)
                )
        elif (former.severity, former.code) != (problem.severity, problem.code):
            state = NotifiedProblem.of(problem, former.since)
            notices.append(Notice(Event.CHANGED, state, problem))
    return notices + [Notice(Event.ENDED, notified[key]) for key in notified if key in ended]


def notified_after(
    notified: Mapping[Key, NotifiedProblem], notices: Iterable[Notice]
) -> dict[Key, NotifiedProblem]:
    """Return the notified problems after *notices*."""
    remaining = dict(notified)
    for notice in notices:
        if notice.event is Event.ENDED:
            remaining.pop(notice.state.key, None)
        else:
            remaining[notice.state.key] = notice.state
    return remaining


def message(notices: Sequence[Notice]) -> dict[str, Any]:
    """Return a message with *notices* as a JSON object. Chat tools show the field ``text``."""
    lines = [notice.line for notice in notices[:_LINES_MAX]]
    if len(notices) > _LINES_MAX:
        lines.append(f"… and {len(notices) - _LINES_MAX} more")
    return {
        "text": "\n".join(f"streamer: {line}" for line in lines),
        "problems": [notice.to_json() for notice in notices],
    }


def message_id(notices: Sequence[Notice]) -> str:
    """Return the id of the message with *notices*; each attempt to deliver repeats the id."""
    facts = [[*map(str, notice.state.key), notice.event, notice.state.severity, notice.state.code,
             notice.state.since.isoformat()] for notice in notices]  # fmt: skip
    return f"msg_{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]}"
