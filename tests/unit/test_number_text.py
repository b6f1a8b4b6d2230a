"""Times as ages, and code in messages."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from streamer.admin.page.number_text import NO_VALUE, ago, prose

NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-60, "just now"),
        (9, "just now"),
        (10, "10\u00a0s ago"),
        (300, "5\u00a0min ago"),
        (7800, "2\u00a0h 10\u00a0min ago"),
        (29 * 86400, "29\u00a0d ago"),
        (40 * 86400, "2026-01-23"),
    ],
)
def test_a_time_is_an_age_and_an_old_time_is_a_date(seconds: int, text: str) -> None:
    written = ago(NOW - timedelta(seconds=seconds), NOW)
    assert written.endswith(f">{text}</time>")


def test_the_exact_time_is_that_of_utc() -> None:
    exact = '<time datetime="2026-03-04T05:06:07+00:00" title="2026-03-04 05:06:07 UTC">'
    cet = NOW.astimezone(timezone(timedelta(hours=1)))
    for value in (NOW, NOW.isoformat(), cet, cet.isoformat(), "2026-03-04T05:06:07"):
        assert ago(value, NOW).startswith(exact), value
    assert ago(None, NOW) == NO_VALUE


@pytest.mark.parametrize(
    ("text", "markup"),
    [
        ("set `a` or `b`", "set <code>a</code> or <code>b</code>"),
        ("`<i>` <b>", "<code>&lt;i&gt;</code> &lt;b&gt;"),
        ('relation "a`b" <b>', "relation &#34;a`b&#34; &lt;b&gt;"),
        ("", ""),
    ],
)
def test_backticks_mark_code(text: str, markup: str) -> None:
    assert prose(text) == markup
