"""Which changes of problems become notices, and what a notice says."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import patch

import pytest

from streamer.config import static_mapping
from streamer.errors.error_classes import SettingsError
from streamer.errors.remedies import Remedy
from streamer.observability import webhook
from streamer.observability.webhook import UndeliveredError, Webhook, sign
from streamer.postgres.secret import Secret
from streamer.report.notice_duty import NoticeDuty
from streamer.report.problem_notices import (
    Key,
    Notice,
    NotifiedProblem,
    find_notices,
    message,
    message_id,
    notified_after,
)
from streamer.report.problems import Problem, ProblemKind, Severity, Subject
from tests.support.receiver import receiving

SINCE = datetime(2026, 1, 1, 12, tzinfo=UTC)
ON = (Severity.ERROR, Severity.WARNING)


def problem(
    kind: ProblemKind = ProblemKind.TABLE,
    severity: Severity = Severity.ERROR,
    text: str = "the table stopped",
    *,
    source: str = "shop",
    table: str = "public.t",
    code: str | None = None,
) -> Problem:
    subject = Subject(source, table=table)
    return Problem(kind, subject, severity, text, Remedy.of("resume it"), "/help", code=code)


def notices(
    problems: list[Problem],
    notified: dict[Key, NotifiedProblem],
    ended: list[Key] | None = None,
    on: tuple[Severity | ProblemKind, ...] = ON,
) -> list[Notice]:
    since = {each.key: SINCE for each in problems}
    return find_notices(problems, since, notified, ended or [], on)


def test_notices_report_the_beginning_each_change_and_the_end_of_a_problem_once() -> None:
    told: list[tuple[str, str]] = []
    known: dict[Key, NotifiedProblem] = {}
    begun, changed = problem(code="a"), problem(code="b", text="another error")
    for problems, ended in [
        ([begun], []),
        ([replace(begun, text="the same, with other figures")], []),
        ([changed], []),
        ([replace(changed, severity=Severity.WARNING)], []),
        ([], []),  # the absence is not an end yet
        ([], [begun.key]),
        ([], []),
    ]:
        due = notices(problems, known, ended)
        told += [(each.event.value, each.state.severity.value) for each in due]
        known = notified_after(known, due)
    assert told == [
        *(("begun", "error"), ("changed", "error"), ("changed", "warning")),
        ("ended", "warning"),
    ]
    assert known == {}


@pytest.mark.parametrize(
    ("on", "kinds"),
    [
        (ON, ["table", "paused"]),
        ((Severity.ERROR,), ["table"]),
        ((ProblemKind.PAUSED, ProblemKind.COPYING), ["paused", "copying"]),
        ((Severity.INFO,), ["copying"]),
    ],
)
def test_on_names_severities_and_kinds(
    on: tuple[Severity | ProblemKind, ...], kinds: list[str]
) -> None:
    problems = [
        problem(ProblemKind.COPYING, Severity.INFO),
        problem(ProblemKind.PAUSED, Severity.WARNING),
        problem(),
    ]
    assert [each.state.kind.value for each in notices(problems, {}, on=on)] == kinds


def test_a_notice_has_a_text_for_people_and_fields_for_programs_without_values() -> None:
    text = 'duplicate key value violates unique constraint "t_pkey": Key (name)=(Jane) exists'
    (notice,) = notices([problem(text=text, code="target")], {})
    told = message([notice])
    assert told["text"].startswith("streamer: error: shop public.t: duplicate key value")
    assert told["text"].endswith("; resume it")
    (fields,) = told["problems"]
    assert {name: fields[name] for name in ("event", "kind", "database", "table", "code")} == {
        "event": "begun", "kind": "table", "database": "shop", "table": "public.t",
        "code": "target",
    }  # fmt: skip
    assert "Jane" not in str(told)
    (end,) = notices([], notified_after({}, [notice]), [notice.state.key])
    assert (
        message([end])["text"]
        == "streamer: ended: shop public.t: table, since 2026-01-01 12:00 UTC"
    )


def test_many_notices_are_a_short_text() -> None:
    many = notices([problem(table=f"public.t{number}") for number in range(60)], {})
    told = message(many)
    assert told["text"].splitlines()[-1] == "streamer: … and 40 more"
    assert len(told["problems"]) == 60


def test_a_second_attempt_has_the_id_of_the_first() -> None:
    first, second = notices([problem()], {}), notices([problem(text="other figures")], {})
    assert message_id(first) == message_id(second)
    assert message_id(notices([problem(code="b")], {})) != message_id(first)


OWN = NoticeDuty(
    leads=False,
    reports_removed=False,
    own={"shop": True, "new": False},
    peers=frozenset({"crm"}),
)


@pytest.mark.parametrize(
    ("duty", "subject", "covers", "may_end"),
    [
        (OWN, Subject("shop", table="public.t"), True, True),
        (OWN, Subject("new"), True, False),
        (OWN, Subject("crm"), False, False),
        (OWN, Subject(other="target dw"), False, False),
        (replace(OWN, leads=True), Subject("crm"), False, False),
        (replace(OWN, leads=True), Subject("removed"), False, False),
        (replace(OWN, reports_removed=True), Subject("removed"), True, True),
        (replace(OWN, reports_removed=True), Subject("crm"), False, False),
        (replace(OWN, reports_removed=True), Subject(other="target dw"), False, False),
        (replace(OWN, leads=True), Subject(other="target dw"), True, True),
        (replace(OWN, leads=True, is_target_well=False), Subject(other="mapping"), True, False),
        (replace(OWN, is_target_well=False), Subject("shop"), True, False),
    ],
)
def test_one_replica_reports_a_problem_and_only_a_whole_mapping_reports_its_end(
    duty: NoticeDuty, subject: Subject, covers: bool, may_end: bool
) -> None:
    assert duty.covers(subject) is covers
    assert duty.may_end((ProblemKind.TABLE, subject)) is may_end


def test_a_signature_is_that_of_standard_webhooks() -> None:
    """The values are the example of their documentation."""
    key = Secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    with patch("time.time", lambda: 1614265330.4):
        headers = sign(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", b'{"test": 2432232314}')
    assert headers == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


@pytest.mark.parametrize(
    ("status", "reason"),
    [(404, "answers 404"), (302, "answers 302"), (500, "answers 500"), (None, "no answer for")],
)
async def test_a_refused_notice_is_undelivered_and_names_no_secret(
    status: int | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with receiving() as receiver:
        receiver.status = status
        if status is None:
            monkeypatch.setattr(webhook, "SECONDS_MAX", 0.5)
        hook = Webhook(Secret(f"{receiver.url}/secret-path?token=hidden"))
        with pytest.raises(UndeliveredError, match=reason) as caught:
            await hook.send("msg_1", {})
    assert receiver.url in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(hook)
    with pytest.raises(UndeliveredError, match="no connection"):
        await hook.send("msg_1", {})


@pytest.mark.parametrize("proxy", ["socks5://u:hidden@127.0.0.1:1", "h:hidden@127.0.0.1:x"])
async def test_a_bad_proxy_is_an_undelivered_message_without_the_text_of_the_error(
    proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(
        UndeliveredError, match=r"https://receiver: the connection failed \("
    ) as bad:
        await Webhook(Secret("https://receiver/secret")).send("msg_1", {})
    assert "hidden" not in str(bad.value)


async def test_a_key_in_a_file_is_read_for_each_message(tmp_path: Path) -> None:
    file = tmp_path / "key"
    async with receiving() as receiver:
        hook = Webhook(Secret(receiver.url), key_file=str(file))
        with pytest.raises(UndeliveredError, match="No such file"):
            await hook.send("msg_1", {})
        for key in ("first", "second"):
            file.write_text(f"{key}\n")
            await hook.send("msg_1", {"n": 1})
            *_, delivery = receiver.accepted
            moment = int(delivery.headers["webhook-timestamp"])
            with patch("time.time", lambda moment=moment: moment):
                headers = sign(Secret(key), "msg_1", delivery.body)
            assert delivery.headers["webhook-signature"] == headers["webhook-signature"]


@pytest.mark.parametrize(
    ("section", "fault"),
    [
        ("{on: [errors]}", "notify.on.0.: expected one of: error, warning, info, target"),
        ("{webhook: ftp://a}", "notify: webhook: expected a URL"),
        # Errors would name a part of the password as the port.
        ("{webhook: 'https://me:pass/word@a'}", "notify: webhook: expected a URL"),
        ("{webhook: 'https://a', key: a, key_file: b}", "cannot be used together"),
        ("{webhook: 'https://a', key: whsec_ftp}", "notify: key: the text after whsec_ is not"),
        ("{on: []}", "notify.on: list should have at least 1"),
    ],
)
def test_a_fault_in_the_section_is_named_without_the_url(
    tmp_path: Path, section: str, fault: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"target: {{url: 'postgresql://nowhere/dw'}}\nnotify: {section}\nsources: []\n")
    with pytest.raises(SettingsError, match=fault) as caught:
        static_mapping.load(path)
    assert "ftp" not in str(caught.value)
