"""Settings as forms, and back, without loss for any model."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.admin.live.problem_view import problems_for_operator
from streamer.admin.live.status_view import is_queued, rule_of, source_view, summary, with_own_state
from streamer.admin.mapping import api_models
from streamer.admin.page import number_text, settings_forms
from streamer.admin.page.manual_page import manual_page, reachable_address, to_html
from streamer.admin.page.mapping_page import as_given, shown_url
from streamer.admin.page.page_frame import own_path
from streamer.commands.check.findings import (
    SPARK,
    Place,
    at_source,
    at_target,
    error,
    in_words,
)
from streamer.errors.error_classes import InvalidError
from streamer.errors.error_reports import ErrorReport
from streamer.errors.remedies import CONTINUES, Remedy, Sql
from streamer.postgres.conninfo import parse_conninfo
from streamer.postgres.url_passwords import with_password
from streamer.report.problems import PAGE_OF, ProblemKind

NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20).filter(
    lambda name: name.strip() == name
)


@pytest.mark.parametrize("kind", ["database", "url", "table"])
def test_a_form_has_every_setting_and_gives_the_defaults_back(kind: str) -> None:
    fields = settings_forms.fields_of(kind)
    assert {field.name for field in fields} == set(api_models.default_settings(kind))
    row = api_models.default_settings(kind)
    assert settings_forms.read(fields, as_given(fields, row)) == row
    assert all(
        (field.label and field.kind != "yaml")
        or field.name in ("columns", "set", "on_ddl", "metadata", "history", "partition_by")
        for field in fields
    )


@given(
    st.dictionaries(NAMES, NAMES, min_size=1, max_size=4),
    st.lists(NAMES, max_size=4),
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1),
)
def test_the_settings_of_a_table_survive_their_form(
    columns: dict[str, str], exclude: list[str], condition: str
) -> None:
    fields = settings_forms.fields_of("table")
    row = api_models.default_settings("table") | {
        "columns": columns,
        "exclude": exclude,
        "filter": condition,
        "type": "append",
        "truncate_target": True,
    }
    sent = {name: value.replace("\n", "\r\n") for name, value in as_given(fields, row).items()}
    assert settings_forms.read(fields, sent) == row


@pytest.mark.parametrize("given", ["apply", "ignore", {"drop_column": "apply"}])
def test_on_ddl_survives_its_form_as_a_word_and_by_kind(given: Any) -> None:
    fields = settings_forms.fields_of("database")
    sent = as_given(fields, api_models.default_settings("database") | {"on_ddl": given})
    assert not isinstance(given, str) or sent["on_ddl"] == given
    assert (
        api_models.validate("database", {"name": "x", **settings_forms.read(fields, sent)})[
            "on_ddl"
        ]
        == given
    )


def test_numbers_may_be_sizes_and_faults_name_their_field() -> None:
    fields = settings_forms.fields_of("database")
    sent = as_given(fields, api_models.default_settings("database")) | {"max_retained_wal": "2GB"}
    values = api_models.validate("database", {"name": "x", **settings_forms.read(fields, sent)})
    assert values["max_retained_wal"] == 2 << 30
    for wrong in ("nan", "1e9", "a lot", "9" * 40):
        sent["max_retained_wal"] = wrong
        with pytest.raises(InvalidError, match="max_retained_wal") as error:
            api_models.validate("database", {"name": "x", **settings_forms.read(fields, sent)})
        assert settings_forms.faulty_field(error.value.message, sent) == "max_retained_wal"
    table = settings_forms.fields_of("table")
    with pytest.raises(InvalidError, match="columns"):
        settings_forms.read(table, {"columns": "a: ["})


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1))
def test_a_password_typed_beside_a_url_is_the_one_that_is_used(password: str) -> None:
    for url in (
        "postgresql://u@h/db",
        "postgresql://u:old@h/db?sslmode=require",
        "postgresql://h/db",
        "postgresql://h/db?password=old",
        "host=h user=u",
        "host=h password='old one' user=u",
        "host=h password=old user=u",
    ):
        joined = with_password(url, password)
        assert parse_conninfo(joined.replace("$${", "${"))["password"] == password, joined
        if "${" not in password:  # a reference is no secret
            assert shown_url(joined) == shown_url(with_password(url, "another"))


def test_a_reference_typed_as_password_stays_one() -> None:
    assert with_password("postgresql://u@h/db", "${PW}") == "postgresql://u:${PW}@h/db"
    assert with_password("host=h", "${PW}") == "host=h password=${PW}"


@pytest.mark.parametrize(
    "typed",
    [
        "postgres//u:secret@h",
        "postgresql://u:secret@h:x/db",
        "password=secret",
        "host = a password = 'secret",
    ],
)
def test_a_value_that_cannot_be_read_is_not_shown(typed: str) -> None:
    assert "secret" not in shown_url(typed)


@pytest.mark.parametrize(
    ("path", "wanted"),
    [("/a?b=c", "/a?b=c"), ("//h", "/"), ("/\\h", "/"), ("http://h", "/"), ("x", "/"), (None, "/"), ("/\n", "/"), ("///h", "/")],
)  # fmt: skip
def test_only_our_own_pages_follow_a_login(path: str | None, wanted: str) -> None:
    assert own_path(path) == wanted


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        (number_text.size(None), "\u2013"),
        (number_text.size(0), "0\u00a0B"),
        (number_text.size(1536), "1.5\u00a0kB"),
        (number_text.size(999 * 1024**3), "999\u00a0GB"),
        (number_text.size(5 * 1024**5), "5120\u00a0TB"),
        (number_text.duration(0.04), "0.0\u00a0s"),
        (number_text.duration(75), "75\u00a0s"),
        (number_text.duration(3600), "60\u00a0min"),
        (number_text.duration(7800), "2\u00a0h 10\u00a0min"),
        (number_text.duration(90000 * 3), "3\u00a0d 3\u00a0h"),
        (number_text.latency(0.0042), "4\u00a0ms"),
        (number_text.latency(4.2), "4.2\u00a0s"),
        (number_text.count(1234567), "1\u202f234\u202f567"),
        (number_text.grouped("12345 of 999"), "12\u202f345 of 999"),
        (number_text.rate(0.5), "0.5/s"),
        (number_text.plural(1, "row"), "1 row"),
    ],
)
def test_numbers_are_written_for_people(written: str, wanted: str) -> None:
    assert written == wanted


def table(source: str, **fields: Any) -> dict[str, Any]:
    usual = {"target": source, "type": "clone", "state": "ready", "error": None, "quarantined": 0}
    return {"source": source, "rows_copied": 0, "rows_total": None, **usual, **fields}


def test_a_source_with_many_tables_shows_those_first_that_need_somebody() -> None:
    tables = [table(f"public.t{n:04}") for n in range(1000)]
    tables[700] |= {"state": "error", "error": "broken"}
    tables[800] |= {"state": "copying", "rows_copied": 5, "rows_total": 10}
    tables[900] |= {"quarantined": 3}
    source = {
        "database": "shop", "sid": None, "state": "streaming", "error": None,
        "backlog": {"state": "over"}, "tables": tables,
    }  # fmt: skip
    shown = source_view(source)
    names = [each["source"] for each in shown["tables"]]
    assert {"public.t0700", "public.t0800", "public.t0900"} <= set(names)
    assert names[:3] == ["public.t0700", "public.t0900", "public.t0800"], "failing first"
    assert (len(names) < 100, shown["table_count"]) == (True, 1000)
    assert {each["progress"] for each in shown["tables"]} == {None, 0.5}
    assert len(source_view(source, is_whole=True)["tables"]) == 1000
    assert [item["place"] for item in problems_for_operator([source])] == [
        "shop", "shop public.t0700", "shop public.t0900",
    ]  # fmt: skip


def test_an_exact_rule_is_the_one_that_is_edited() -> None:
    rows = [
        {"schema": "public", "name": "*", "id": 1},
        {"schema": "public", "name": '"a.b"', "id": 2},
    ]
    exact, by_pattern = rule_of(rows, 'public."a.b"'), rule_of(rows, "public.c")
    assert exact is not None
    assert by_pattern is not None
    assert (exact["id"], by_pattern["id"], rule_of(rows, "x.y")) == (2, 1, None)


SHOP: dict[str, Any] = {
    "database": "shop",
    "sid": None,
    "state": "streaming",
    "error": None,
    "tables": [],
}
DOWN: dict[str, Any] = {"state": "unreachable", "error": "target: refused", "hint": "start it"}


def test_a_target_that_is_down_is_the_headline_and_the_first_problem() -> None:
    source = SHOP
    assert summary([source], DOWN).startswith("The target is unreachable")
    first = problems_for_operator([source], DOWN)[0]
    assert (first["place"], first["what"]) == ("Target", f"target: refused; start it; {CONTINUES}")
    assert not source_view(source, target=DOWN)["is_confirmed"]
    assert source_view(source, target=DOWN | {"error": None})["are_tables_confirmed"]


def test_sql_of_a_remedy_names_its_database() -> None:
    sides = Sql("target", ("select 1",)), Sql("source", ("select 2",))
    remedy = Remedy.of("run at the target: ", sides[0], "; ", sides[1])
    error = {"error": f"broken; {remedy}", "remedy": remedy.to_json()}
    (item,) = problems_for_operator(
        [SHOP | error], {"state": "reachable", "name": "dw at host:5432"}
    )
    parts = item["remedy"]
    named = [(before["at"], part["lines"]) for before, part in pairwise(parts) if part["lines"]]
    assert named == [("dw", "select 1;"), ("shop", "select 2;")]


def test_a_process_that_waits_for_another_says_so_beside_the_stored_state() -> None:
    source = SHOP
    known: dict[tuple[str, str | None], tuple[str, ErrorReport | None]]
    held = ErrorReport("process 1 on host runs this source", "slot_in_use")
    known = {("shop", None): ("waiting", held)}
    (shown,) = with_own_state([source], known)
    (item,) = problems_for_operator([shown])
    assert item["what"] == "this process is waiting: process 1 on host runs this source"
    assert item["runbook"] == "/help/runbooks/second-installation"
    (shown,) = with_own_state([source], {("shop", None): ("streaming", None)})
    assert problems_for_operator([shown]) == []


def test_every_problem_links_to_a_page_of_the_documentation() -> None:
    assert set(PAGE_OF) == set(ProblemKind)
    finding = error(SPARK, "is missing")
    sides = [at_source("x"), at_target("x"), in_words("x")]
    findings = [error(Place("shop", "public.t"), "is not ready", fix) for fix in sides]
    pages = [found.runbook for found in [*findings, error(Place("shop"), "is not ready"), finding]]
    for page in [*PAGE_OF.values(), *map(str, pages)]:
        assert manual_page(page.removeprefix("/help/")).title, page


def test_a_page_has_an_address_that_opens_with_or_without_a_process() -> None:
    page = "/help/runbooks/slot-lost"
    assert reachable_address(page, "0.0.0.0:80") == f"http://127.0.0.1:80{page}"
    assert reachable_address(page, "127.0.0.1:8000") == f"http://127.0.0.1:8000{page}"
    assert Path(reachable_address(page, None)).read_text().startswith("# ")


def test_the_manual_links_its_own_pages_and_nothing_else() -> None:
    unsafe = "<script>x</script> [a](javascript:alert(1)) [b](../x.md) [c](#d) [e](../f/g.md#h)"
    shown = to_html(unsafe, "guides/monitor", {"f/g"})
    assert "<script" not in shown
    assert re.findall(r'<a href="(.*?)"', shown) == ["#d", "/help/f/g#h"]


def test_a_copy_that_fails_again_and_again_needs_attention() -> None:
    table = {
        "source": "public.t", "state": "copying", "error": "no Java", "rows_copied": 0,
        "quarantined": 0,
    }  # fmt: skip
    (item,) = problems_for_operator([SHOP | {"tables": [table]}])
    what = f"no Java; remove the cause that the message names; {CONTINUES}"
    assert (item["what"], item["kind"]) == (what, "warning")
    assert not is_queued(table)
