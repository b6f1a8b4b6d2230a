"""Readiness is open to every client, and shows no value of a row, for any SQLSTATE."""

import functools
import json

import httpx

from streamer.observability.http_server import make_app
from tests.support.postgres import Database
from tests.support.streamer import MakeStreamer

SECRET = "sesame"
REFUSED_BY_TYPE = {
    "tsquery": f"{SECRET} & (",  # a syntax error, class 42
    "regclass": SECRET,  # a missing relation, class 42
    "regtype": SECRET,
}
RAISED = ("0A000", "25001", "42501", "55000", "P0001", "P0002", "XX000")
DYNAMIC = "execute 'select ' || new.v || '(1)';"  # a missing function, named by the value


def _answer(answer: bool, _: object) -> bool:
    return answer


def trigger(name: str, body: str) -> str:
    return (
        f"create table {name} (id int primary key, v text);"
        f"create function refuse_{name}() returns trigger language plpgsql as"
        f" $$ begin {body} return new; end $$;"
        f"create trigger refuse before insert on {name} for each row execute function"
        f" refuse_{name}(); alter table {name} enable always trigger refuse"
    )


async def test_no_error_that_a_row_causes_shows_its_values_without_a_login(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    values = {f"of_{kind}": value for kind, value in REFUSED_BY_TYPE.items()}
    for kind in REFUSED_BY_TYPE:
        target.execute(f"create table of_{kind} (id int primary key, v {kind})")
    for state in RAISED:
        name = f"raises_{state.lower()}"
        values[name] = SECRET
        target.execute(trigger(name, f"raise 'no %', new.v using errcode = '{state}';"))
    values["dynamic"] = SECRET
    target.execute(trigger("dynamic", DYNAMIC))
    for name in values:
        source.execute(f"create table {name} (id int primary key, v text)")

    rules = "\n".join(f"{name}: {{initial: none}}" for name in values)
    async with stream(rules) as streamer:
        await streamer.caught_up()
        for name, value in values.items():
            source.execute(f"insert into {name} values (1, '{value}')")
        for name in values:
            await streamer.table_state(f"public.{name}", "error", 60)
        assert streamer.engine is not None
        engine = streamer.engine
        for sees_values in (False, True):
            may_see_values = functools.partial(_answer, sees_values)
            app = make_app(engine.metrics.render, engine.readiness, may_see_values=may_see_values)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                reasons = (await client.get("/readyz")).json()["reasons"]
                metrics = (await client.get("/metrics")).text
            shown = {reason["table"].removeprefix("public."): reason for reason in reasons}
            assert set(shown) == set(values)
            leaks = {name for name, reason in shown.items() if SECRET in json.dumps(reason)}
            assert leaks == (set(values) if sees_values else set()), shown
            assert SECRET not in metrics
