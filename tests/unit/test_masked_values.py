"""An error for readers without credentials holds no values of rows, and keeps the next step."""

import httpx
import pytest
from fastapi import FastAPI

from streamer.apply.sql.set_statements import SEVERAL_ROWS
from streamer.observability.http_server import make_app
from streamer.postgres import session_settings
from streamer.postgres.row_values import hide_values, quote_unrecognized

SECRET = 'b\u00e4r(1) "x")=(b\u00e4r); run: b\u00e4r "b\u00e4r" )'
HINT = 'run at the target: alter table "public"."t" alter column "v" type character varying(9)'


def app(error: str, hint: str) -> FastAPI:
    async def render() -> bytes:
        return b""

    return make_app(render, lambda: [{"table": "t", "error": error, "hint": hint}])


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (
            f'violates unique constraint "t_pkey": Key (id, "n")=(5, {SECRET}) already exists',
            ['"t_pkey"', 'Key (id, "n")=(…)'],
        ),
        (f'invalid input syntax for type integer: "{SECRET}"', ["type integer"]),
        (f'value "{SECRET}" is out of range for type integer', ["out of range for type integer"]),
        (f'null value in column "v" of relation "t": Key (id)=({SECRET})', ['column "v"', '"t"']),
        (f'date/time field value out of range: "{SECRET}"', ["out of range"]),
        (f'invalid input syntax for type date: "{SECRET}": Key (id)=({SECRET})', ["type date"]),
        # The first line of a value of several lines has no closing quotation mark.
        ('invalid input syntax for type integer: "b\u00e4r', ["type integer"]),
        ('invalid byte sequence for encoding "UTF8": 0x62 0xe4', ['"UTF8"']),
    ],
)
def test_names_stay_and_values_go(error: str, left: list[str]) -> None:
    hidden = hide_values(error)
    assert "b\u00e4r" not in hidden
    assert "62" not in hidden
    for text in left:
        assert text in hidden


@pytest.mark.parametrize(
    "message",
    [
        "ung\u00fcltige Eingabesyntax f\u00fcr Typ integer: \u00bbb\u00e4r\u00ab",  # German
        "syntaxe en entr\u00e9e invalide pour le type integer : \u00ab b\u00e4r \u00bb",
        "la sintaxis de entrada no es v\u00e1lida para tipo integer: \u00abb\u00e4r\u00bb",
        "the balance of b\u00e4r is negative",  # a trigger of the target
        'invalid input syntax for type integer: "b\u00e4r',  # the first of several lines
    ],
)
def test_a_message_that_is_not_known_is_hidden_whole(message: str) -> None:
    quoted = quote_unrecognized(message, "22P02", None)
    assert message in quoted  # with a login, and in the log
    assert hide_values(f"target: {quoted}") == 'target: the server says: "…"'


@pytest.mark.parametrize(
    "message",
    [
        "value too long for type character varying(9)",
        'duplicate key value violates unique constraint "t_v_key"',
        'null value in column "v" of relation "t" violates not-null constraint',
        f'invalid input syntax for type integer: "{SECRET}"',
        "integer out of range",
    ],
)
def test_a_message_that_is_known_stays_as_it_is(message: str) -> None:
    assert quote_unrecognized(message, "22001", "COPY t, line 1") == message


def test_an_error_of_no_row_is_not_quoted() -> None:
    message = "la relation \u00ab t \u00bb n\u2019existe pas"
    assert quote_unrecognized(message, "42P01", None) == message
    assert quote_unrecognized("the connection was lost", None, None) == "the connection was lost"


@pytest.mark.parametrize(
    ("state", "context"),
    [
        ("42P01", 'COPY t, line 1, column v: "b\u00e4r"'),  # the input of regclass
        ("53100", "PL/pgSQL function f() line 1 at RAISE"),
        ("P0002", "PL/pgSQL function f() line 1 at RAISE"),
        ("42601", None),  # the input of tsquery, in an expression
        ("XX000", None),
    ],
)
def test_a_state_of_no_row_does_not_let_values_through(state: str, context: str | None) -> None:
    quoted = quote_unrecognized('what about b\u00e4r "b\u00e4r" b\u00e4r', state, context)
    assert hide_values(f"target: {quoted}") == 'target: the server says: "\u2026"'


@pytest.mark.parametrize(
    ("message", "state"),
    [
        ("canceling statement due to lock timeout", "55P03"),
        ('could not extend file "base/1/2": No space left on device', "53100"),
        ("permission denied for table t", "42501"),
        (SEVERAL_ROWS, "P0003"),
    ],
)
def test_the_state_of_the_server_is_shown_whichever_row_was_at_hand(
    message: str, state: str
) -> None:
    assert quote_unrecognized(message, state, "PL/pgSQL function f() line 1") == message


def test_an_error_without_values_stays_as_it_is() -> None:
    error = 'target: relation "public.t" does not exist; run: alter table "t" add column "v" text'
    assert hide_values(error) == error


@pytest.mark.parametrize("value", [SECRET, f"b\u00e4r; {HINT} b\u00e4r", f'b\u00e4r"; {HINT}"'])
@pytest.mark.parametrize("message", ['value "{}" is out of range', "t: Key (id)=({})"])
async def test_readiness_keeps_the_hint_behind_a_value(message: str, value: str) -> None:
    notes = "; while applying changes"
    error = f"{message.format(value)}; {HINT}{notes}"
    transport = httpx.ASGITransport(app(error, HINT))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        (reason,) = (await client.get("/readyz")).json()["reasons"]
    assert reason["hint"] == HINT
    assert reason["error"].endswith(f"; {HINT}{notes}")
    assert "b\u00e4r" not in str(reason)


def test_sessions_ask_for_messages_in_english_where_they_may() -> None:
    assert session_settings.PINNED["lc_messages"] == "C"
    assert "lc_messages" in session_settings.SUPERUSER
