"""Failpoints: armed by a variable, free otherwise."""

import os
import signal

import pytest

from streamer.errors.error_classes import StreamerError
from streamer.util import failpoints
from streamer.util.failpoints import failpoint


def arm(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(failpoints, "_armed", failpoints._parse(text))


def test_nothing_is_armed_by_default() -> None:
    assert failpoints._parse("") == {}
    for name in failpoints.NAMES:
        failpoint(name)


def test_several_are_armed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    arm(monkeypatch, "apply.write=error,sync.copied=error@2,")
    with pytest.raises(StreamerError, match=r"failpoint apply\.write"):
        failpoint("apply.write")
    failpoint("sync.copied")
    with pytest.raises(StreamerError, match=r"failpoint sync\.copied"):
        failpoint("sync.copied")
    failpoint("sync.drained")


def test_one_that_has_been_reached_often_enough_fails_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arm(monkeypatch, "apply.write=error@3")
    failpoint("apply.write")
    failpoint("apply.write")
    for _ in range(2):
        with pytest.raises(StreamerError):
            failpoint("apply.write")


def test_kill_is_sigkill(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    arm(monkeypatch, "apply.before_commit=kill@2")
    failpoint("apply.before_commit")
    assert killed == []
    failpoint("apply.before_commit")
    assert killed == [(os.getpid(), signal.SIGKILL)]


@pytest.mark.parametrize(
    "text",
    [
        "no.such=kill",
        "apply.write",
        "apply.write=",
        "apply.write=explode",
        "=kill",
        "apply.write=kill@x",
        "apply.write=error;sync.copied=error",
    ],
)
def test_an_unknown_failpoint_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"STREAMER_FAILPOINTS|invalid literal"):
        failpoints._parse(text)
