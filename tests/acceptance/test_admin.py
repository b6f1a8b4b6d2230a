"""`streamer run` with a mapping database, empty at first, over HTTP and the command line."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.postgres import Database, assert_same
from tests.support.process import Process, caught_up, command
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TOKEN = "the-token-of-an-acceptance-test"
PASSWORD = "hunter2-of-the-source"


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
        return found


@pytest.fixture
def config(tmp_path: Path, source: Database, target: Database, port: int) -> Path:
    for db in (source, target):
        db.execute("create table t (id int primary key, v text)")
        db.execute("create table u (id int primary key, v text)")
    source.parameters = f"password={PASSWORD}"
    path = tmp_path / "config.yaml"
    path.write_text(
        f"""
target: {{url: "{target.url}"}}
http: {{listen: "127.0.0.1:{port}"}}
spool: {{directory: {tmp_path / "spool"}}}
admin: {{token: "${{TOKEN}}"}}
mapping_database: {tmp_path / "mapping.sqlite"}
"""
    )
    return path


@pytest.fixture
def client(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    monkeypatch.setenv("TOKEN", TOKEN)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(
        base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60
    ) as connected:
        yield connected


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/healthz").status_code == 200
    except httpx.TransportError:
        return False


def post(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = client.post(f"/api/{path}", json=body)
    assert response.is_success, response.text
    assert PASSWORD not in response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_from_an_empty_database_to_a_stream_and_its_export(
    tmp_path: Path, config: Path, client: httpx.Client, source: Database, target: Database
) -> None:
    with Process(config) as process:
        # The page says that no source exists yet.
        eventually(lambda: answers(client), what=process.output)
        ready = eventually(
            lambda: (
                (r := client.get("/readyz").json())["reasons"] == [{"state": "no sources"}] and r
            )
        )
        assert ready["ready"] is False
        assert client.get("/api/status", headers={"Authorization": ""}).status_code == 401

        # A source and a table are added and applied.
        database = post(client, "databases", name="shop")["id"]
        url = post(client, "urls", database_id=database, url=source.url, sid="eu")
        assert PASSWORD not in json.dumps(url)
        found = client.get("/api/discover", params={"url_id": url["id"]}).json()
        assert {table["name"] for table in found["tables"]} == {"t", "u"}
        first = post(client, "tables", database_id=database, name="t", initial="none")
        planned = client.get("/api/plan").json()
        assert [(s["action"], s["slot_action"]) for s in planned["sources"]] == [("add", "create")]
        assert planned["ready"], planned["findings"]
        assert client.get("/readyz").json()["reasons"] == [{"state": "no sources"}]
        assert post(client, "apply")["revision"] == 1
        eventually(lambda: client.get("/readyz").status_code == 200, what=process.output)
        source.execute("insert into t values (1, 'one')")
        eventually(lambda: target.value("select count(*) from t") == 1, what=process.output)

        # A bad draft has no effect; the command line speaks to the process.
        post(client, "tables", database_id=database, name="nowhere")
        refused = client.post("/api/apply", json={})
        assert refused.status_code == 409
        assert "nowhere" in refused.json()["error"]["message"]
        listed = command(config, "tables", "list", "--json")
        assert [row["name"] for row in json.loads(listed.stdout)] == ["t", "nowhere"]
        assert command(config, "tables", "remove", "shop", "nowhere").returncode == 0
        added = command(config, "tables", "add", "shop", "u", "--setting", "initial=none")
        assert added.returncode == 0, added.stderr
        actors = {entry["actor"] for entry in client.get("/api/audit").json()["items"]}
        assert actors == {"token"}
        assert command(config, "apply").returncode == 0
        source.execute("insert into u values (1, 'one')")
        eventually(lambda: target.value("select count(*) from u") == 1, what=process.output)

        # An operator's requests, and the events in the stream.
        with client.stream("GET", "/api/events") as events:
            lines = events.iter_lines()
            assert next(lines) == "event: snapshot"
            post(client, f"tables/{first['id']}/pause")
            told = next(line for line in lines if '"paused"' in line)
            assert json.loads(told.removeprefix("data: "))["table"] == "public.t"
            post(client, f"tables/{first['id']}/resume")
            assert process.terminate() == 0
        assert PASSWORD not in process.output
        assert TOKEN not in process.output

    # All settings survive a restart, without an operator.
    with Process(config) as process:
        source.execute("insert into t values (2, 'two')")
        caught_up(process)
        process.kill()

    # And without admin mode: the exported file is a configuration. No process runs, so the command
    # reads the file.
    exported = command(config, "export")
    assert exported.returncode == 0, exported.stderr
    assert PASSWORD not in exported.stdout + exported.stderr
    assert "SHOP_EU_PASSWORD" in exported.stderr
    plain = tmp_path / "exported" / "config.yaml"
    plain.parent.mkdir()
    plain.write_text(exported.stdout)
    assert yaml.safe_load(exported.stdout)["sources"][0]["database"] == "shop"
    with Process(plain, environment={"SHOP_EU_PASSWORD": PASSWORD}) as process:
        source.execute("insert into u values (2, 'two')")
        eventually(lambda: target.value("select count(*) from u") == 2, what=process.output)
    assert_same(source, target, "t")
    assert_same(source, target, "u")
    for file in tmp_path.glob("**/*"):
        if file.is_file():
            assert PASSWORD.encode() not in file.read_bytes(), file


def test_the_network_is_not_served_without_credentials(
    config: Path, port: int, client: httpx.Client
) -> None:
    text = config.read_text().replace('listen: "127.0.0.1:', 'listen: "0.0.0.0:')
    config.write_text(text)
    with Process(config) as process:
        eventually(lambda: answers(client), what=process.output)
    config.write_text(text.replace('admin: {token: "${TOKEN}"}', ""))

    result = command(config, "run")

    assert result.returncode == 2
    assert "admin.token" in result.stderr


def test_sources_beside_a_mapping_database_are_refused_and_imported(
    config: Path, source: Database, client: httpx.Client
) -> None:
    assert client.headers
    with config.open("a") as file:
        file.write(
            f'sources: [{{database: shop, urls: [{{url: "{source.url}"}}], tables: {{t: }}}}]\n'
        )
    refused = command(config, "run")
    assert refused.returncode == 2
    assert "streamer import" in refused.stderr

    assert command(config, "import", str(config)).returncode == 0

    config.write_text(config.read_text().rsplit("sources:", 1)[0])
    listed = command(config, "sources", "list", "--json")
    (row,) = json.loads(listed.stdout)
    assert PASSWORD not in listed.stdout
    assert (row["database"], row["sid"]) == ("shop", None)
