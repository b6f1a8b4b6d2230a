"""Types into which not every value of the source fits, and findings without passwords."""

import json

import pytest

from streamer.commands.check.findings import Place, at_source, warning
from streamer.commands.check.type_conversion import type_risk


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("bigint", "integer"),
        ("integer", "numeric(5,0)"),
        ("numeric", "double precision"),
        ("numeric(12,3)", "bigint"),
        ("double precision", "real"),
        ("text", "character varying(10)"),
        ("character varying(12)", "character varying(2)"),
        ("character varying(2)", "character(3)"),
        ("timestamp with time zone", "timestamp without time zone"),
        ("timestamp without time zone", "timestamp(0) without time zone"),
        ("timestamp without time zone", "date"),
        ("json", "jsonb"),
        ("text", "uuid"),
        ("text", "public.mood"),
        ("integer[]", "integer"),
        ("bigint[]", "integer[]"),
    ],
)
def test_types_that_are_at_risk(source: str, target: str) -> None:
    assert type_risk(source, target)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("integer", "bigint"),
        ("integer", "text"),
        ("public.mood", "text"),
        ("character varying(2)", "character varying(12)"),
        ("numeric(12,3)", "numeric(20,3)"),
        ("smallint", "real"),
        ("real", "double precision"),
        ("date", "timestamp without time zone"),
        ("jsonb", "json"),
        ("integer[]", "bigint[]"),
    ],
)
def test_types_that_are_safe(source: str, target: str) -> None:
    assert type_risk(source, target) is None


def test_a_password_in_text_is_blanked() -> None:
    url = "postgresql://me:hunter2@host/db"
    finding = warning(Place("shop", "a\nb"), f"cannot use {url}", at_source(f"connect {url}"))
    for text in (str(finding), json.dumps(finding.to_json())):
        assert "hunter2" not in text
    assert str(finding).startswith("warning shop a\\nb: cannot use")
