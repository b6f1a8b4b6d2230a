"""Draft, apply and discard, with an engine that only remembers and servers that are out of
reach.
"""

from pathlib import Path
from typing import Any

import httpx
import pytest

from streamer.config import static_mapping
from streamer.errors.error_classes import MappingError, SettingsError, SourceConnectionError
from tests.support.admin import CREDENTIALS, Admin, OpenAdmin

FORCE = {"force": True}
"""No server answers here; that alone would keep a draft from being applied."""


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    response = await client.post(f"/api/{path}", json=body)
    assert response.is_success, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def make_shop(client: httpx.AsyncClient) -> None:
    await post(client, "databases", name="shop")
    await post(
        client, "urls", database_id=1, url="postgresql://u:hidden@127.0.0.1:1/shop", sid="eu"
    )
    await post(
        client, "tables", database_id=1, name="orders", type="history", target="sales.orders"
    )


async def refused(admin: Admin, client: httpx.AsyncClient, status: int, *words: str) -> None:
    """Check that streamer refuses to apply, in these words, without a change."""
    before = (await admin.service.store.latest(), admin.service.mapping, list(admin.engine.applied))
    response = await client.post("/api/apply", json=FORCE)
    assert response.status_code == status, response.text
    for word in words:
        assert word in response.json()["error"]["message"]
    after = (await admin.service.store.latest(), admin.service.mapping, admin.engine.applied)
    assert after == before


async def test_edits_do_nothing_until_they_are_applied(open_admin: OpenAdmin) -> None:
    async with open_admin() as admin, admin.client() as client:
        await make_shop(client)
        assert admin.engine.applied == []
        assert (await client.get("/api/draft")).json()["changed"] is True

        answer = await post(client, "apply", **FORCE)

        assert answer["revision"] == 1
        (mapping,) = admin.engine.applied
        (source,) = mapping.sources
        assert (source.label, source.url.reveal()) == (
            "shop:eu",
            "postgresql://u:hidden@127.0.0.1:1/shop",
        )
        (rule,) = source.rules
        assert (str(rule.pattern), str(rule.target), rule.type) == (
            "public.orders",
            "sales.orders",
            "history",
        )
        assert (await client.get("/api/draft")).json()["changed"] is False
    async with open_admin() as admin:
        assert admin.service.mapping == mapping


async def test_it_is_not_applied_where_a_server_does_not_answer(open_admin: OpenAdmin) -> None:
    async with open_admin() as admin, admin.client() as client:
        await make_shop(client)
        response = await client.post("/api/apply")
        assert response.status_code == 409
        assert response.json()["error"]["code"] == "unready"
        assert admin.engine.applied == []
        assert await admin.service.store.latest() is None
        plan = (await client.get("/api/plan")).json()
        assert plan["ready"] is False
        assert "hidden" not in str(plan)


async def test_a_draft_that_cannot_be_changes_nothing(
    open_admin: OpenAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_admin() as admin, admin.client() as client:
        await make_shop(client)
        await post(client, "apply", **FORCE)

        second = await post(client, "urls", database_id=1, url="host=127.0.0.1 port=1")
        await refused(admin, client, 422, "same rows", "url 2")
        await client.patch(
            f"/api/urls/{second['id']}", json={"sid": "us", "url": "host=${NO_SUCH_HOST}"}
        )
        plan = (await client.get("/api/plan")).json()
        problems = [finding["problem"] for finding in plan["findings"]]
        assert plan["ready"] is False
        assert any('url 2 "shop:us": url: ' in p and "NO_SUCH_HOST" in p for p in problems)
        monkeypatch.setenv("NO_SUCH_HOST", "127.0.0.1 port=1")
        await post(client, "databases", name="Shop")
        await post(client, "urls", database_id=2, url="host=127.0.0.1 port=1", sid="eu")
        await post(client, "tables", database_id=2, name="t")
        await refused(admin, client, 422, "share the name streamer_shop_eu", "Shop:eu")
        await client.patch("/api/databases/2", json={"name": "bank"})
        await client.patch("/api/tables/2", json={"name": "o", "target": "sales.orders"})
        await refused(admin, client, 422, "same rows")
        await client.delete("/api/databases/2")
        answer = await client.patch("/api/tables/1", json={"filter": "pg_read_file('x') is null"})
        assert answer.status_code == 422
        assert "pg_read_file()" in answer.text

        admin.engine.refusal = MappingError("no table matches")
        await refused(admin, client, 422, "no table matches")
        admin.engine.refusal = None
        assert (await post(client, "apply", **FORCE))["revision"] == 3
        actions = [e["action"] for e in (await client.get("/api/audit")).json()["items"][:3]]
        assert actions == ["apply", "refused", "apply"]


async def test_trouble_of_one_source_does_not_undo_the_others(open_admin: OpenAdmin) -> None:
    async with open_admin() as admin, admin.client() as client:
        await make_shop(client)
        admin.engine.refusal = SourceConnectionError("postgresql://u:hidden@h is away")
        answer = await post(client, "apply", **FORCE)
        assert "is away" in answer["warning"]
        assert "hidden" not in answer["warning"]
        assert (await client.get("/api/draft")).json()["changed"] is False


async def test_unfinished_databases_are_left_out_and_named(open_admin: OpenAdmin) -> None:
    async with open_admin() as admin, admin.client() as client:
        await make_shop(client)
        await post(client, "databases", name="empty")
        await post(client, "databases", name="tables only")
        await post(client, "tables", database_id=3, name="t")
        answer = await post(client, "apply", **FORCE)
        assert [source.database for source in admin.engine.applied[0].sources] == ["shop"]
        notes = answer["plan"]["notes"]
        assert notes == [
            'database "empty" has no url yet, so streamer leaves it out',
            'database "tables only" has no url yet, so streamer leaves it out',
        ]


async def test_a_discarded_draft_equals_the_applied_mapping(open_admin: OpenAdmin) -> None:
    async with open_admin() as admin, admin.client() as client:
        await make_shop(client)
        await client.patch("/api/settings", json={"on_error": "quarantine"})
        await post(client, "apply", **FORCE)
        before = await admin.service.store.content()
        assert {rule.on_error for rule in admin.engine.applied[0].sources[0].rules} == {
            "quarantine"
        }

        await client.delete("/api/tables/1")
        await client.patch("/api/urls/1", json={"url": "postgresql://u:other@127.0.0.1:1/shop"})
        await client.patch("/api/settings", json={"on_error": None, "target_schema": "x"})
        await post(client, "databases", name="more")
        assert (await client.delete("/api/draft")).status_code == 204

        assert await admin.service.store.content() == before
        assert (await client.get("/api/draft")).json()["changed"] is False


async def test_the_start_reports_a_lost_key(open_admin: OpenAdmin, tmp_path: Path) -> None:
    async with open_admin() as admin, admin.client() as client:
        await make_shop(client)
        await post(client, "apply", **FORCE)
    (tmp_path / "mapping.sqlite.key").unlink()
    with pytest.raises(SettingsError, match="restore the key file"):
        async with open_admin():
            pass


async def test_a_lost_key_or_variable_is_the_fault_of_its_source(
    open_admin: OpenAdmin, tmp_path: Path
) -> None:
    settings = CREDENTIALS.replace("{token", '{variables: ["NO_SUCH_*"], token')
    async with open_admin(settings) as admin, admin.client() as client:
        await make_shop(client)
        for sid, password in (("us", ""), ("cn", "password=${NO_SUCH_PASSWORD}")):
            url = f"host=127.0.0.1 port=1 {password}"
            await post(client, "urls", database_id=1, url=url, sid=sid)
        await post(client, "apply", **FORCE)
    (tmp_path / "mapping.sqlite.key").unlink()
    async with open_admin(settings) as admin:
        faults = {source.label: source.fault for source in admin.service.mapping.sources}
    assert faults["shop:us"] is None
    assert faults["shop:eu"] is not None
    assert "the key of stored passwords" in faults["shop:eu"].problem
    assert faults["shop:cn"] is not None
    assert faults["shop:cn"].problem == (
        'url 3 "shop:cn": url: environment variable NO_SUCH_PASSWORD is not set'
    )


YAML = """
target: {url: "host=127.0.0.1 port=1 password=targets-own", schema: dw}
workers: 2
sources:
- database: shop
  urls:
  - {url: "postgresql://u:${SHOP_EU}@127.0.0.1:1/shop", sid: eu}
  - {url: "postgresql://u:hidden@127.0.0.1:1/shop", sid: us}
  streaming: false
  on_ddl: apply
  tables:
    orders: {type: history, columns: {id: order_id}, exclude: [note]}
    customers:
    '"my.schema"."a.b"':
    "log.*": {type: append, target: "log.*"}
"""


async def test_export_import_export_gives_the_same_file(
    open_admin: OpenAdmin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_admin() as admin, admin.client() as client:
        await post(client, "import", yaml=YAML)
        urls = await admin.service.store.reveal(await admin.service.store.content())
        answer = await client.get("/api/export")
        first = answer.text
        assert "hidden" not in first
        assert "target-password" not in first
        assert answer.headers["x-streamer-variables"] == "TARGET_PASSWORD, SHOP_US_PASSWORD"
        assert "schema: dw" in first

        await post(client, "import", yaml=first)
        assert (await client.get("/api/export")).text == first
        # The placeholder for the stored password in an export is recognised again.
        assert await admin.service.store.reveal(await admin.service.store.content()) == urls
        assert set(urls.values()) == {
            "postgresql://u:${SHOP_EU}@127.0.0.1:1/shop",
            "postgresql://u:hidden@127.0.0.1:1/shop",
        }
    other = tmp_path / "other"
    other.mkdir()
    from tests.support.admin import admin as opened

    async with opened(other, CREDENTIALS) as admin, admin.client() as client:
        await post(client, "import", yaml=first)
        second = (await client.get("/api/export")).text
        assert second.split("sources:")[1] == first.split("sources:")[1]

    for name in ("TARGET_PASSWORD", "SHOP_US_PASSWORD", "SHOP_EU"):
        monkeypatch.setenv(name, "x")
    (tmp_path / "exported.yaml").write_text(first)
    (tmp_path / "imported.yaml").write_text(YAML)
    _, exported = static_mapping.load(tmp_path / "exported.yaml")
    _, imported = static_mapping.load(tmp_path / "imported.yaml")
    assert [s.label for s in exported.sources] == [s.label for s in imported.sources]
    assert {r for s in exported.sources for r in s.rules} == {
        r for s in imported.sources for r in s.rules
    }


KUVASZ = """# a comment
- database: db1
  urls:
  - url: postgres://kuvasz:hidden@127.0.0.1:1/db1?replication=database&application_name=repl_db1
    sid: 12
  tables:
    t1:
    t2:
      target: rt2
    t3:
      type: append
    audit.t4:
      type: history
    t5:
      partitions_regex: t5_.*
- database: db2
  urls: [{url: "postgres://kuvasz:hidden@127.0.0.1:1/db2?replication=database"}]
  tables: {s1: {type: clone, filter: ""}}
"""


async def test_a_map_of_kuvasz_streamer_is_imported(open_admin: OpenAdmin) -> None:
    async with open_admin() as admin, admin.client() as client:
        answer = await post(client, "import", yaml=KUVASZ)
        assert len(answer["notes"]) == 1
        assert "line 14" in answer["notes"][0]
        assert "partitions_regex" in answer["notes"][0]
        mapping = await admin.service.build(await admin.service.store.content())
        assert [source.label for source in mapping.sources] == ["db1:12", "db2"]
        assert mapping.sources[0].url.reveal().endswith("/db1?application_name=repl_db1")
        assert mapping.sources[1].url.reveal().endswith("/db2")
        rules = {str(rule.pattern): rule for rule in mapping.sources[0].rules}
        assert set(rules) == {"public.t1", "public.t2", "public.t3", "audit.t4", "public.t5"}
        assert str(rules["public.t2"].target) == "public.rt2"


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        ("- database: d\n  urls: [{url: 'host=h'}]\n  tables:\n    t: {filter: 'a > 1'}\n", ["line 4", "CEL"]),
        ("sources:\n- {database: d, urls: [{url: 'host=h'}], tables: {t: {filter: 'pg_sleep(9) is null'}}}\n", ["filter", "pg_sleep()"]),
        ("- database: d\n  urls: [{url: 'host=h'}]\n  tables:\n    t: {type: archive}\n", ["line 4", "type"]),
        ("sources:\n- database: d\n  urls: [{url: 'host=h'}]\n", ["line 2", "tables"]),
        ("sources:\n- {database: d, urls: [{url: 'host=h'}], tables: {t: {nothing: 1}}}\n", ["line 2", "nothing"]),
        ("sources:\n- {database: d, urls: [{url: 'u:hunter2@h'}], tables: {t: }}\n", ["line 2", "url"]),
        ("sources:\n- {database: d, urls: [{url: 'host=h'}], tables: {'a.b.c': }}\n", ["line 2", "a.b.c"]),
        ("sources:\n- {database: d, urls: [{url: 'host=h'}], tables: {t: , public.t: }}\n", ["line 2", "twice"]),
        ("sources:\n- {database: d, urls: [{url: 'host=h', sid: 1}], tables: {t: }}\n", ["line 2", "sid"]),
        ("target: {}\n", ["no `sources`"]),
        ("", ["no `sources`"]),
        ("a: [", ["line", "YAML"]),
        ("'just text'", ["line 1"]),
        ("- 1\n- 2\n", ["line 1"]),
    ],
)  # fmt: skip
async def test_a_file_that_cannot_be_is_refused_with_its_line(
    open_admin: OpenAdmin, yaml: str, words: list[str]
) -> None:
    async with open_admin() as admin, admin.client() as client:
        await make_shop(client)
        before = await admin.service.store.content()
        response = await client.post("/api/import", json={"yaml": yaml})
        assert response.status_code == 422, response.text
        for word in words:
            assert word in response.json()["error"]["message"]
        assert "hunter2" not in response.text
        assert await admin.service.store.content() == before


async def test_an_import_replaces_the_whole_mapping_and_keeps_numbers_and_passwords(
    open_admin: OpenAdmin,
) -> None:
    async with open_admin() as admin, admin.client() as client:
        await make_shop(client)
        await post(client, "databases", name="other")
        yaml = (await client.get("/api/export")).text
        await post(client, "import", yaml=yaml.replace("type: history", "type: append"))
        rows = (await client.get("/api/databases")).json()["items"]
        assert [(row["id"], row["name"]) for row in rows] == [(1, "shop")]
        (table,) = (await client.get("/api/tables")).json()["items"]
        assert (table["id"], table["type"]) == (1, "append")
        audit = (await client.get("/api/audit")).json()["items"]
        assert [(e["action"], e["label"]) for e in audit[:2]] == [
            ("delete", "other"),
            ("change", "shop public.orders"),
        ]
