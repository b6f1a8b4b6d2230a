"""Findings for people: each statement and command has its own line, ready to paste."""

from streamer.admin.service.edit_draft import plan_lines
from streamer.commands.check.findings import Fix, Place, at_source, error, in_words, run_here
from streamer.errors import remedies
from streamer.errors.command_lines import need_resync
from streamer.errors.remedies import Remedy

PLACE = Place("shop", "public.t")


def test_each_statement_has_its_line_and_its_end() -> None:
    fix = at_source("alter table t add x int", "grant select on t to s", words="and restart it")
    assert error(PLACE, "is not ready", fix).lines() == [
        "error   shop public.t: is not ready",
        "  run at the source:",
        "    alter table t add x int;",
        "    grant select on t to s;",
        "  and restart it",
    ]


def test_a_command_has_no_semicolon_and_words_alone_stay_in_the_line() -> None:
    assert error(PLACE, "stopped", run_here("streamer run")).lines()[1:] == [
        "  run here:",
        "    streamer run",
    ]
    assert error(PLACE, "stopped", in_words("wait")).lines() == [
        "error   shop public.t: stopped; wait"
    ]


def test_a_remedy_keeps_the_text_before_its_statement() -> None:
    create = remedies.at_source("create database d")
    lead = (
        "correct the database in `url`, or have an administrator run at the source, in database p"
    )
    fix = Fix.of(Remedy.of(f"{lead}: ", create, "; then wait"))
    finding = error(PLACE, "cannot connect", fix)
    assert finding.lines()[1:] == [f"  {lead}:", "    create database d;", "  then wait"]
    assert str(fix) == f"{lead}: create database d; then wait"
    assert finding.to_json()["introduction"] == lead

    # The usual words before a statement are those that a finding prints anyway.
    usual = Fix.of(Remedy.of("run at the source: ", create))
    assert (usual, usual.introduction) == (at_source("create database d"), None)


def test_a_name_with_a_line_break_does_not_break_a_line_and_no_password_is_printed() -> None:
    fix = at_source('drop table "a\nb"')
    lines = error(PLACE, "postgresql://u:hunter2@h/d", fix).lines()
    assert lines[2] == '    drop table U&"a\\000Ab";'
    assert "hunter2" not in lines[0]


def test_a_plan_prints_statements_in_the_same_way() -> None:
    finding = error(PLACE, "is not ready", at_source("one", "two")).to_json()
    source = {
        "database": "shop", "sid": None, "action": "add", "slot": "s", "slot_action": "create",
        "role": "standby",
        "tables": [], "publication_sql": ["create publication p"],
    }  # fmt: skip
    plan = {"sources": [source], "findings": [finding], "notes": [], "copies": [], "sources_at_once": 4, "estimate": {"tables": 0},
            "changes": True}  # fmt: skip
    assert list(plan_lines(plan)) == [
        "shop: add; slot s: create, from a standby",
        "  streamer runs at the source:",
        "    create publication p;",
        "error   shop public.t: is not ready",
        "  run at the source:",
        "    one;",
        "    two;",
    ]


def test_a_plan_leaves_the_objects_of_a_removed_source_to_the_operator() -> None:
    source = {
        "database": "shop", "sid": "eu", "action": "forgotten", "slot": "s",
        "slot_action": "drop it by hand", "role": None, "tables": [],
        "publication_sql": ["drop publication p"],
    }  # fmt: skip
    plan = {"sources": [source], "findings": [], "notes": [], "copies": [], "sources_at_once": 4, "estimate": {"tables": 0},
            "changes": True}  # fmt: skip
    assert list(plan_lines(plan)) == [
        "shop:eu: already removed; slot s: drop it by hand",
        "  run at the source:",
        "    drop publication p;",
    ]


def test_a_long_list_of_tables_ends_with_their_number() -> None:
    tables = [f"public.t{number}" for number in range(150)]
    assert need_resync(tables[:2]) == "these tables need a resync: public.t0, public.t1"
    assert need_resync(tables).endswith("public.t3, public.t4 and 145 more")
