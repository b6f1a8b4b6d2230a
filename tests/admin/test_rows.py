"""Databases, urls and tables: edited rightly, and wrongly."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.admin import OpenAdmin

PASSWORD = "s3cr%40t-pass"


async def made(client: httpx.AsyncClient, path: str, **fields: Any) -> dict[str, Any]:
    response = await client.post(f"/api/{path}", json=fields)
    assert response.status_code == 201, response.text
    row: dict[str, Any] = response.json()
    assert response.headers["location"] == f"/api/{path}/{row['id']}"
    return row


async def test_the_life_of_a_row(open_admin: OpenAdmin) -> None:
    async with open_admin() as admin, admin.client() as client:
        database = await made(client, "databases", name="shop")
        assert database["streaming"] is True
        url = await made(
            client, "urls", database_id=database["id"], url="host=h dbname=shop", sid="eu"
        )
        table = await made(
            client, "tables", database_id=database["id"], name="audit.events", type="append"
        )
        assert (table["schema"], table["name"], table["database"]) == ("audit", "events", "shop")

        path = f"/api/tables/{table['id']}"
        changed = (await client.patch(path, json={"exclude": ["payload"]})).json()
        assert (changed["type"], changed["exclude"]) == ("append", ["payload"])
        whole = {"database_id": database["id"], "schema": "audit", "name": "events"}
        replaced = (await client.put(path, json=whole)).json()
        assert (replaced["type"], replaced["exclude"]) == ("clone", [])
        given_back = {k: v for k, v in replaced.items() if k not in ("id", "database")}
        assert (await client.put(path, json=given_back)).json() == replaced

        assert (await client.delete(f"/api/databases/{database['id']}")).status_code == 204
        assert (await client.get(path)).status_code == 404
        assert (await client.get(f"/api/urls/{url['id']}")).status_code == 404

        audit = (await client.get("/api/audit")).json()["items"]
        assert [(entry["action"], entry["object"]) for entry in audit] == [
            ("delete", "database"),
            ("change", "table"),
            ("change", "table"),
            ("create", "table"),
            ("create", "url"),
            ("create", "database"),
        ]
        assert audit[2]["before"]["exclude"] == []
        assert audit[2]["after"]["exclude"] == ["payload"]
        assert {entry["actor"] for entry in audit} == {"token"}


async def test_lists_are_paged_sorted_filtered_and_counted(open_admin: OpenAdmin) -> None:
    async with open_admin() as admin, admin.client() as client:
        for name in ("shop", "Bank"):
            database = await made(client, "databases", name=name)
            for number in range(7):
                kind = "append" if number % 2 else "clone"
                await made(
                    client, "tables", database_id=database["id"], name=f"t{number}", type=kind
                )

        async def listed(**query: Any) -> tuple[list[str], int]:
            answer = (await client.get("/api/tables", params=query)).json()
            names = [f"{row['database']}.{row['name']}" for row in answer["items"]]
            return names, answer["total"]

        assert await listed(per_page=2, page=2) == (["shop.t2", "shop.t3"], 14)
        assert await listed(per_page=2, sort="name", order="desc") == (["shop.t6", "Bank.t6"], 14)
        assert await listed(database="Bank", type="append") == (
            ["Bank.t1", "Bank.t3", "Bank.t5"],
            3,
        )
        assert await listed(q="BANK", per_page=1) == (["Bank.t0"], 7)
        assert await listed(page=99) == ([], 14)
        assert await listed(q="%") == ([], 0)
        assert (await client.get("/api/tables")).headers["x-total-count"] == "14"


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("databases", {}, 422, "name"),
        ("databases", {"name": ""}, 422, "name"),
        ("databases", {"name": "a\0b"}, 422, "name"),
        ("databases", {"name": 1}, 422, "name"),
        ("databases", {"name": "x", "nothing": 1}, 422, "nothing"),
        ("databases", {"name": "shop"}, 409, "name"),
        ("databases", [], 422, ""),
        ("urls", {"database_id": 1, "url": "postgresql://u:hunter2@x@h/db"}, 422, "url"),
        ("urls", {"database_id": 1, "url": "postgresql://h/db?nothing=hunter2"}, 422, "url"),
        ("urls", {"database_id": 99, "url": "host=h"}, 422, "database_id"),
        ("urls", {"database_id": 1, "url": "host=other", "sid": "eu"}, 409, "sid"),
        ("urls", {"database_id": 1, "url": "host=h password=***"}, 422, "url"),
        ("urls", {"database_id": 1, "url": "host=h", "sid": ""}, 422, "sid"),
        ("tables", {"database_id": 1, "name": "a.b.c"}, 422, "name"),
        ("tables", {"database_id": 1, "name": '"a'}, 422, "name"),
        ("tables", {"database_id": 1, "name": "x" * 64}, 422, "name"),
        ("tables", {"database_id": 1, "name": "t"}, 409, "name"),
        ("tables", {"database_id": 1, "name": "log.*", "target": "one"}, 422, "target"),
        ("tables", {"database_id": 1, "name": "x", "target": "a.b.c"}, 422, "target"),
        ("tables", {"database_id": 1, "name": "x", "type": "copy"}, 422, "type"),
        ("tables", {"database_id": 1, "name": "x", "columns": {"a": "c", "b": "c"}}, 422, "columns"),
        ("tables", {"database_id": 2**63, "name": "x"}, 422, "database_id"),
    ],
)  # fmt: skip
async def test_an_invalid_field_is_named_and_its_value_not_repeated(
    open_admin: OpenAdmin, path: str, body: Any, status: int, field: str
) -> None:
    async with open_admin() as admin, admin.client() as client:
        await made(client, "databases", name="shop")
        await made(client, "urls", database_id=1, url="host=h", sid="eu")
        await made(client, "tables", database_id=1, name="t")
        before = await admin.service.store.content()

        response = await client.post(f"/api/{path}", json=body)

        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert error["message"].startswith(field), error
        assert "hunter2" not in response.text
        assert await admin.service.store.content() == before


async def test_a_name_means_what_postgresql_stores(open_admin: OpenAdmin) -> None:
    async with open_admin() as admin, admin.client() as client:
        await made(client, "databases", name="shop")
        row = await made(client, "tables", database_id=1, schema="my.schema", name="Some.Table")
        assert (row["schema"], row["name"]) == ('"my.schema"', '"Some.Table"')
        await made(client, "urls", database_id=1, url="host=h")
        mapping = await admin.service.build(await admin.service.store.content())
        (rule,) = mapping.sources[0].rules
        assert (rule.pattern.namespace, rule.pattern.name) == ("my.schema", "Some.Table")
        same = await client.put(
            f"/api/tables/{row['id']}",
            json={"database_id": 1, "schema": row["schema"], "name": row["name"]},
        )
        assert same.json() == row


async def test_a_password_never_comes_back_and_is_encrypted_at_rest(
    open_admin: OpenAdmin, tmp_path: Path
) -> None:
    url = f"postgresql://streamer:{PASSWORD}@h/shop"
    async with open_admin() as admin, admin.client() as client:
        await made(client, "databases", name="shop")
        texts = [(await client.post("/api/urls", json={"database_id": 1, "url": url})).text]
        assert '"postgresql://streamer:***@h/shop"' in texts[0]
        row = (await client.get("/api/urls/1")).json()
        path = "/api/urls/1"
        texts += [
            (await client.patch(path, json={"sid": "eu"})).text,
            (await client.put(path, json={"database_id": 1, "url": row["url"], "sid": "eu"})).text,
            (await client.patch(path, json={"url": "postgresql://streamer:***@evil/shop"})).text,
            (await client.get("/api/urls")).text,
            (await client.get("/api/audit")).text,
            (await client.get("/api/export")).text,
        ]
        assert "enter the password again" in texts[3]
        content = await admin.service.store.content()
        assert await admin.service.store.reveal(content) == {1: url}
        await client.patch(path, json={"url": "postgresql://streamer:other@h/shop"})
        assert (await client.get("/api/audit")).json()["items"][0]["action"] == "change password"
    for text in texts:
        assert PASSWORD not in text
        assert "s3cr" not in text
    assert_hidden(tmp_path, b"s3cr")


def assert_hidden(directory: Path, secret: bytes) -> None:
    """No file holds *secret*, and those beside the configuration are for their owner alone."""
    for file in directory.iterdir():
        assert secret not in file.read_bytes(), file
        assert file.name == "config.yaml" or file.stat().st_mode & 0o077 == 0, file
