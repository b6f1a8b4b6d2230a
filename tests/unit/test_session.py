"""The pinned settings of every connection."""

from typing import Any

import pytest

from streamer.postgres import session_settings


@pytest.mark.parametrize(
    "name",
    [
        "client_encoding",
        "datestyle",
        "intervalstyle",
        "timezone",
        "extra_float_digits",
        "bytea_output",
    ],
)
def test_everything_that_changes_how_values_are_written_is_pinned(name: str) -> None:
    assert session_settings.PINNED[name] == session_settings.TEXT_FORMAT[name]


def test_no_name_is_found_through_a_search_path() -> None:
    assert session_settings.PINNED["search_path"] == ""


def test_the_first_statement_of_a_connection_looks_nothing_up() -> None:
    first, _, _ = session_settings.pin_sql().partition(";")
    assert first == "set search_path to ''"


def test_a_server_is_asked_for_nothing_that_is_known_of_it() -> None:
    def names(**known: Any) -> str:
        sql = session_settings.pin_sql(version=13_00_05, **known)
        assert sql.count(";") == sql.count("set ") - 1, "each statement is a SET"
        return sql

    own = names(is_superuser="on")
    assert "set lc_messages = 'C'" in own
    assert "tcp_user_timeout" in own
    assert "idle_session_timeout" not in own, "which came with PostgreSQL 14"
    assert "lc_messages" not in names(is_superuser="off")
    silent = session_settings.pin_sql(version=13_00_05, is_superuser=None)
    assert "current_setting(p.name, true)" in silent, "a pooler may not report the rank of the role"


def test_no_time_out_of_the_server_ends_a_copy() -> None:
    pinned = session_settings.TEXT_FORMAT | session_settings.TRANSACTION
    assert {value for name, value in pinned.items() if name.endswith("_timeout")} == {"0"}


def test_row_security_makes_a_copy_fail_rather_than_filter() -> None:
    assert session_settings.PINNED["row_security"] == "off"


def test_names_are_written_as_pg_settings_would_match_them() -> None:
    names = [*session_settings.PINNED, *session_settings.APPLY]
    assert all(name == name.lower() for name in names)
    assert not session_settings.PINNED.keys() & session_settings.APPLY.keys()
