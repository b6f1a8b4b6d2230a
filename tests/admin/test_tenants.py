"""Tenants and conflicts over HTTP, with a real target."""

import html
from typing import Any

import httpx

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_schema import migrate
from streamer.commands.demo.embedded_servers import Server
from streamer.commands.tenants.purge_rows import purge
from streamer.postgres.secret import Secret
from streamer.target.connection import TargetAddress
from tests.support.admin import OpenAdmin
from tests.support.postgres import Database, database
from tests.support.waiting import until

LEFT = """
create table orders (sid text, id int, v text, primary key (sid, id));
insert into orders select sid, n, 'v' from generate_series(1, 100) n, unnest('{eu,old}'::text[]) sid;
create table parts (id int primary key);
create table alone (id int primary key);
create table late (id int primary key);
insert into streamer.purge (database, sid, target) values
  ('shop', 'old', 'public.orders'), ('shop', '', 'public.parts'), ('shop', '', 'public.alone');
insert into streamer.source (database, sid, slot, publication) values ('shop', 'x', 's', 'p');
insert into streamer.relation (source_id, source, target, type)
  select id, 'public.orders', 'public.orders', 'clone' from streamer.source;
insert into streamer.conflict
  (relation_id, kind, resolution, operation, key, lsn, commit_time, xid)
  select id, 'update_missing', 'inserted', 'update', '{"id": "<7>"}', '0/16B3748', now(), 7
  from streamer.relation;
insert into streamer.relation (source_id, source, target, type, disjoint)
  select id, t, t, 'clone', true from streamer.source, unnest('{public.parts,public.late}'::text[]) t
"""


async def tenants(client: httpx.AsyncClient) -> dict[str, Any]:
    items = (await client.get("/api/tenants")).json()["items"]
    return {item["sid"]: item for item in items}


async def test_tenants_are_added_compared_removed_and_purged_over_http(
    open_admin: OpenAdmin, shared_server: Server, source: Database, target: Database
) -> None:
    bookkeeping = Bookkeeping(TargetAddress.parse(Secret(target.url)))
    await migrate(bookkeeping)
    await bookkeeping.close()
    target.execute(LEFT)
    with database(shared_server, "source_us") as us:
        for db in (source, us):
            db.execute("create table orders (id int primary key, v text)")
        async with open_admin(target=target.url) as admin, admin.client() as client:

            async def post(path: str, **body: Any) -> httpx.Response:
                return await client.post(f"/api/{path}", json=body)

            await post("databases", name="shop")
            await post("urls", database_id=1, url=source.url, sid="eu")
            await post("tables", database_id=1, name="orders", initial="none")
            assert (await post("apply")).is_success

            answer = await post("tenants", database="shop", sid="us", url=us.url)
            assert answer.status_code == 201, answer.text
            assert answer.json()["next_step"] is None
            assert [s.label for s in admin.engine.applied[-1].sources] == ["shop:eu", "shop:us"]
            again = await post("tenants", database="shop", sid="us", url=us.url)
            assert again.status_code == 422, again.text
            assert (await tenants(client))["us"]["state"] == "not started"

            us.execute("alter table orders add note text")
            drift = (await client.get("/api/tenants/drift", params={"table": "orders"})).json()
            (note,) = [item for item in drift["items"] if item["name"] == "note"]
            assert note["deviating"] in ({"shop:us": "text"}, {"shop:eu": None})
            page = (await client.get("/tenants/drift")).text
            assert "column note" in page

            removed = await post("tenants/remove", database="shop", sid="us")
            assert removed.status_code == 200
            assert [s.label for s in admin.engine.applied[-1].sources] == ["shop:eu"]

            assert (await post("tenants/purge", database="shop", sid="eu")).status_code == 409
            assert (await tenants(client))["old"]["state"] == "removed"
            assert "shop:old" in (await client.get("/tenants")).text
            purged = {"database": "shop", "sid": "old"}
            with target.connect() as holder:
                holder.execute("begin; lock table orders in share mode")
                answer = await post("tenants/purge", **purged)
                pressed = await client.post("/tenants/purge", data=purged)
                holder.execute("rollback")
            assert answer.status_code == 202
            alone, parts = answer.json()["remaining"]
            why = 'rows of "shop:old" may remain in public.{}, because the table has no column sid'
            assert (alone["target"], alone["problem"]) == ("public.alone", why.format("alone"))
            assert (parts["target"], parts["problem"]) == ("public.parts", why.format("parts"))
            resync = "streamer resync public.parts --database shop --sid x"
            assert parts["steps"][-1]["command"] == resync
            page = html.unescape((await client.get(pressed.headers["location"])).text)
            for table in (alone, parts):
                assert f"{table['problem']}; {table['remedy']}" in page

            async def is_purged() -> bool:
                return "old" not in await tenants(client)

            await until(is_purged, seconds=60)
            assert target.value("select count(*) from orders where sid = 'old'") == 0
            assert target.value("select count(*) from orders where sid = 'eu'") == 100

            conflicts = (await client.get("/api/conflicts")).json()["items"]
            assert [(c["table"], c["kind"], c["key"]) for c in conflicts] == [
                ("public.orders", "update_missing", {"id": "<7>"})
            ]
            page = (await client.get("/conflicts")).text
            assert "update_missing" in page
            assert "<7>" not in page

            # A purge stores the tables of relations that the purge removes, for a repeated purge.
            address = TargetAddress.parse(Secret(target.url))
            for _ in range(2):
                outcome = await purge(address, admin.service.mapping, "shop", "x", actor="test")
                names = [left.target for left in outcome.remaining]
                assert names == ["public.alone", "public.late", "public.parts"]
