"""Plan, discover and status, with real servers."""

from typing import Any

import httpx
import pytest

from streamer.admin.mapping.plan_of_change import make_plan
from streamer.config import static_mapping
from streamer.mapping.rules import Mapping
from tests.support.admin import Admin, OpenAdmin
from tests.support.postgres import Database
from tests.support.streamer import MakeStreamer


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    response = await client.post(f"/api/{path}", json=body)
    assert response.is_success, response.text
    answer: dict[str, Any] = response.json()
    return answer


SOURCE = """
create table orders (id int primary key, note text);
insert into orders select n, 'x' from generate_series(1, 1000) n;
create table nokey (v text);
create table "odd.name*" (id int primary key);
create schema audit;
create table audit.events (id int primary key);
create unlogged table scratch (id int primary key);
create view looks as select * from orders;
create table parts (id int primary key) partition by range (id);
create table parts_1 partition of parts for values from (0) to (10);
analyze
"""


async def test_discover_shows_every_table_and_its_obstacles(
    open_admin: OpenAdmin, source: Database
) -> None:
    source.execute(SOURCE)
    source.parameters = "password=hidden-of-the-source"
    async with open_admin() as admin, admin.client() as client:
        await post(client, "databases", name="shop")
        url = await post(client, "urls", database_id=1, url=source.url)
        await post(client, "tables", database_id=1, name="audit.*")

        answer = await client.get("/api/discover", params={"url_id": url["id"]})
        assert "hidden" not in answer.text
        found = answer.json()
        tables = {(table["schema"], table["name"]): table for table in found["tables"]}
        assert set(tables) == {
            ("public", "orders"),
            ("public", "nokey"),
            ("public", '"odd.name*"'),
            ("audit", "events"),
            ("public", "scratch"),
            ("public", "looks"),
            ("public", "parts"),
        }
        orders = tables["public", "orders"]
        assert (orders["rows"], orders["key"], orders["obstacle"]) == (1000, ["id"], None)
        assert orders["size_bytes"] > 8192
        assert tables["public", "scratch"]["obstacle"] == "unlogged"
        assert tables["public", "looks"]["obstacle"] == "a view"
        assert "no primary key" in str(tables["public", "nokey"]["findings"])
        assert [n for n, table in tables.items() if table["mapped"]] == [("audit", "events")]
        assert found["server"]["wal_level"]

        # The publications have names only once the tables are chosen.
        assert "streamer_" not in answer.text
        source.execute("alter table orders replica identity full")
        again = (await post(client, "discover", url=source.url))["tables"]
        assert [t["key"] for t in again if t["name"] == "orders"] == [["id"]]

        # The next request may contain its names unchanged.
        odd = tables["public", '"odd.name*"']
        row = await post(client, "tables", database_id=1, schema=odd["schema"], name=odd["name"])
        assert row["name"] == '"odd.name*"'

        tried = await post(client, "discover", url=source.url)
        assert len(tried["tables"]) == len(found["tables"])

        source.execute("alter extension plpgsql add table nokey")
        await client.patch("/api/databases/1", json={"exclude_tables": ["audit.ev*"]})
        answer = await client.get("/api/discover", params={"url_id": url["id"]})
        tables = {(table["schema"], table["name"]): table for table in answer.json()["tables"]}
        assert not tables["audit", "events"]["mapped"]
        assert tables["public", "nokey"]["obstacle"] == "part of the extension plpgsql"


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("host=127.0.0.1 port=1 password=hunter2", "source_down"),
        ("host=${NOT_SET}", "invalid"),
        ("host=h password=***", "invalid"),
    ],
)
async def test_a_database_that_cannot_be_looked_at(
    open_admin: OpenAdmin, url: str, code: str
) -> None:
    async with open_admin() as admin, admin.client() as client:
        response = await client.post("/api/discover", json={"url": url})
        assert response.status_code == 422, response.text
        assert response.json()["error"]["code"] == code
        assert "hunter2" not in response.text
        for body in ({}, {"url": "host=h", "url_id": 1}):
            assert (await client.post("/api/discover", json=body)).status_code == 422


async def test_a_plan_names_the_effects_of_an_apply(
    open_admin: OpenAdmin, source: Database, target: Database
) -> None:
    source.execute(SOURCE)
    target.execute("create table wrong (other int primary key)")
    async with open_admin(target=target.url) as admin, admin.client() as client:
        await post(client, "databases", name="shop")
        await post(client, "urls", database_id=1, url=source.url, sid="eu")
        await post(client, "tables", database_id=1, name="orders")
        await post(client, "tables", database_id=1, name="nokey", type="append", initial="none")

        plan = (await client.get("/api/plan")).json()

        (planned,) = plan["sources"]
        assert planned["role"] == "primary"
        assert (planned["action"], planned["slot"], planned["slot_action"]) == (
            "add",
            "streamer_shop_eu",
            "create",
        )
        assert [sql.split(" for ")[0] for sql in planned["publication_sql"]] == [
            'create publication "streamer_shop_eu"',
            'create publication "streamer_shop_eu_ins"',
        ]
        actions = {table["source"]: table["action"] for table in planned["tables"]}
        assert actions == {"public.orders": "copy", "public.nokey": "stream"}
        estimate = plan["estimate"]
        assert (estimate["tables"], estimate["rows"], estimate["basis"]) == (1, 1000, "assumed")
        assert source.value("select count(*) from pg_publication") == 0

        # A finding that would stop a changed table is refused; with the exact way out.
        await post(client, "tables", database_id=1, name="audit.events", target="wrong")
        refused = await client.post("/api/apply")
        assert refused.status_code == 409
        assert "wrong" in refused.text
        assert admin.engine.applied == []
        assert (await post(client, "apply", force=True))["revision"] == 1


async def test_a_plan_compares_with_the_streamed_tables(
    open_admin: OpenAdmin, stream: MakeStreamer, source: Database, target: Database
) -> None:
    for db in (source, target):
        db.execute(
            "create table t (id int primary key, v text); create table u (id int primary key)"
        )
    tables = "t: {initial: none}\nu: {initial: none}"
    async with stream(tables) as streamer:
        await streamer.caught_up()
        settings, mapping = static_mapping.load(streamer.path)
        same = await make_plan(settings, mapping, None)
        assert not same.has_changes
        assert not same.obstacles

        gone = (await make_plan(settings, Mapping((), "public"), None)).to_json()
        (removed,) = gone["sources"]
        assert (removed["action"], removed["slot_action"]) == ("remove", "drop")
        assert {table["action"] for table in removed["tables"]} == {"remove"}

        streamer.path.write_text(
            streamer.path.read_text()
            .replace("t: {initial: none}", "t: {type: append}")
            .replace("u: {initial: none}", "")
        )
        settings, changed = static_mapping.load(streamer.path)
        (planned,) = (await make_plan(settings, changed, mapping)).to_json()["sources"]
        assert planned["action"] == "change"
        assert {t["source"]: t["action"] for t in planned["tables"]} == {
            "public.t": "copy",
            "public.u": "remove",
        }
        assert 'drop table only "public"."u"' in " ".join(planned["publication_sql"])


async def test_status_and_requests(
    open_admin: OpenAdmin, stream: MakeStreamer, source: Database, target: Database
) -> None:
    for db in (source, target):
        db.execute("create table t (id int primary key); create table tt (id int primary key)")
    async with (
        stream("t: {initial: none}\ntt: {initial: none}") as streamer,
        open_admin(target=target.url, is_alone=False) as admin,
        admin.client() as client,
    ):
        await streamer.caught_up()
        await as_streamed(admin, client, source)
        status = (await client.get("/api/status")).json()
        assert status["mode"] == "admin"
        assert [t["state"] for t in status["sources"][0]["tables"]] == ["ready", "ready"]

        # A pattern covers the tables without an exact rule.
        answer = await post(client, "tables/2/pause")
        assert answer["tables"] == ["shop public.tt"]
        await streamer.table_state("public.tt", "paused")
        assert (await streamer.table("public.t"))["state"] == "ready"
        await post(client, "tables/2/resume")
        await streamer.table_state("public.tt", "ready")
        assert (await client.post("/api/tables/1/pause", json={"sid": "eu"})).status_code == 409

        # Tables of several sources at once; streamer does not stream the second source.
        both = [{"database": "shop"}, {"database": "shop", "sid": "gone"}]
        answer = await post(client, "sources/pause", sources=both, tables=["tt", "nothing*"])
        assert (answer["tables"], answer["failed"]) == (1, 1)
        assert [each["sid"] for each in answer["sources"]] == ["gone", None]
        await streamer.table_state("public.tt", "paused")
        assert (await post(client, "sources/pause", sources=both[:1]))["tables"] == 1
        await streamer.table_state("public.t", "paused")
        answer = await post(client, "sources/resume", sources=both[:1], state="paused")
        assert answer["tables"] == 2
        for name in ("public.t", "public.tt"):
            await streamer.table_state(name, "ready")
        acts = (await client.get("/api/audit")).json()["items"][:2]
        assert {(act["action"], act["actor"]) for act in acts} == {("resume", "token")}
        assert (await client.post("/api/tables/99/pause")).status_code == 404
        assert (await client.get("/api/quarantine")).json() == {"items": [], "total": 0}
        assert (await client.post("/api/quarantine/drop", json={})).status_code == 422
        assert (await client.post("/api/quarantine/retry", json={"ids": [7]})).status_code == 409


@pytest.mark.usefixtures("without_spark")
async def test_a_resync_of_some_rows_or_columns_is_requested_as_on_the_command_line(
    open_admin: OpenAdmin, stream: MakeStreamer, source: Database, target: Database
) -> None:
    source.execute("create table t (id int primary key, v text)")
    source.execute("insert into t select g, 'v' from generate_series(1, 9) g")
    wrong = "select id from t where v <> 'v' order by id"
    async with (
        stream("t:") as streamer,
        open_admin(target=target.url, is_alone=False) as admin,
        admin.client() as client,
    ):
        await streamer.caught_up()
        await as_streamed(admin, client, source)
        target.execute("update t set v = 'wrong' where id in (3, 4, 5, 6)")
        answer = await post(client, "tables/1/resync", where="id = 3")
        assert answer == {"action": "resync", "tables": ["shop public.t"]}
        await streamer.caught_up()
        assert target.execute(wrong) == [(4,), (5,), (6,)]
        form = {"database": "shop", "name": "public.t", "action": "resync", "mode": "diff"}
        acted = await client.post("/table/act", data=form | {"where": " id = 4 "})
        assert acted.status_code == 303
        await streamer.caught_up()
        assert target.execute(wrong) == [(5,), (6,)]
        target.execute("delete from t where id = 5")
        assert (await client.post("/table/act", data=form | {"columns": "v"})).status_code == 303
        await streamer.caught_up()
        assert target.value("select count(*) from t where v = 'v'") == 8, "no row comes or goes"
        await post(client, "tables/1/resync", mode="diff")
        await streamer.caught_up()
        assert target.execute("select * from t order by id") == (
            source.execute("select * from t order by id")
        )
        for given, fault in (
            ({"where": "id ="}, "where: not an SQL expression"),
            ({"where": ""}, "where: empty"),
            ({"where": "id = 1", "columns": ["v"]}, "where: a resync is limited to rows or to"),
            ({"columns": []}, "columns: "),
            ({"where": "x" * 20_000}, "where: "),
        ):
            refused = await client.post("/api/tables/1/resync", json=given)
            assert refused.status_code == 422, refused.text
            assert refused.json()["error"]["message"].startswith(fault)
        for fields in ({"where": "id ="}, {"where": "id = 1", "columns": "v"}, {"columns": ","}):
            assert (await client.post("/table/act", data=form | fields)).status_code == 422
        refused = await client.post("/api/tables/1/resync", json={"columns": ["w"]})
        assert refused.status_code == 409
        assert 'no column "w"' in refused.json()["error"]["message"]


async def as_streamed(admin: Admin, client: httpx.AsyncClient, source: Database) -> None:
    """Give the mapping to the engine beside."""
    await post(client, "databases", name="shop")
    await post(client, "urls", database_id=1, url=source.url)
    await post(client, "tables", database_id=1, name="t", initial="none")
    await post(client, "tables", database_id=1, name="t*", initial="none")
    await post(client, "apply", force=True)
    assert len(admin.engine.applied) == 1
