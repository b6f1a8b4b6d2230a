"""A user of the page names few variables and files of the machine, and the audit has each login."""

import asyncio
import contextlib
import struct
from pathlib import Path
from typing import Any

import pytest

from streamer.admin.service import admin_service as service_module
from streamer.commands.check.source_facts import SourceFacts
from streamer.config.allowed_names import AllowedNames, NotAllowedError
from streamer.config.settings import AdminSettings
from streamer.errors.error_classes import SourceConnectionError
from streamer.mapping.rules import SourceMapping
from tests.support.admin import CREDENTIALS, OpenAdmin

PLACE = "host=127.0.0.1 port=1 dbname=shop"


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[SourceMapping]:
    """The sources to which a connection would begin."""
    asked: list[SourceMapping] = []

    async def read(source: SourceMapping, *_: Any) -> SourceFacts:
        asked.append(source)
        raise SourceConnectionError("no server")

    monkeypatch.setattr(service_module, "read_source", read)
    return asked


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        (f"{PLACE} password=${{SECRET_OF_THE_MACHINE}}", "is not in admin.variables"),
        ("host=${SHOP_HOST} port=1", "only a password may be a variable"),
        ("postgresql://u@h${SHOP_HOST}/shop", "only a password may be a variable"),
        ("postgresql://${SHOP_HOST}:p@h/shop", "only a password may be a variable"),
        ("postgresql://u:p@h/${SHOP_HOST}", "only a password may be a variable"),
        ("${SHOP_URL}", "only a password may be a variable"),
        (f"{PLACE} passfile=/etc/passwd", "/etc/passwd is not in admin.secrets_directory"),
        (f"{PLACE} sslkey=/etc/passwd", "/etc/passwd is not in admin.secrets_directory"),
        (f"{PLACE} hostaddr=192.0.2.1", "hostaddr beside host"),
        ("service=shop port=1", "the parameter service may hold a stored password"),
        (f"{PLACE} sslkeylogfile=/tmp/keys", "the parameter sslkeylogfile writes a file"),
        (f"{PLACE} gssdelegation=1", "passes on a login of the machine"),
    ],
)
async def test_a_url_cannot_take_a_secret_of_the_machine_elsewhere(
    open_admin: OpenAdmin,
    url: str,
    problem: str,
    sent: list[SourceMapping],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SECRET_OF_THE_MACHINE", "SHOP_HOST", "SHOP_URL"):
        monkeypatch.setenv(name, "unseen")
    settings = CREDENTIALS.replace("{token", '{variables: ["SHOP_*"], token')
    async with open_admin(settings) as admin, admin.client() as client:
        answers = [await client.post("/api/discover", json={"url": url})]
        await client.post("/api/databases", json={"name": "shop"})
        made = await client.post("/api/urls", json={"database_id": 1, "url": url})
        answers.append(await client.get("/api/discover", params={"url_id": made.json()["id"]}))
        for answer in answers:
            assert answer.status_code == 422
            assert problem in answer.json()["error"]["message"]
            assert "unseen" not in answer.text
        assert sent == []
        # The mapping does not use the url, either.
        await client.post("/api/tables", json={"database_id": 1, "name": "t"})
        answer = await client.get("/api/plan")
        assert answer.status_code == 422
        assert problem in answer.json()["error"]["message"]
        assert "admin.variables of the configuration file" in answer.json()["error"]["hint"]


async def test_the_configuration_lists_variables_and_the_place_of_files(
    open_admin: OpenAdmin,
    tmp_path: Path,
    sent: list[SourceMapping],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHOP_PASSWORD", "from the environment")
    (secrets := tmp_path / "secrets").mkdir()
    (secrets / "shop").write_text("from the file")
    (secrets / "link").symlink_to("/etc/hostname")
    names = f'{{variables: ["SHOP_*"], secrets_directory: "{secrets}", token'
    async with open_admin(CREDENTIALS.replace("{token", names)) as admin, admin.client() as client:
        await client.post("/api/discover", json={"url": f"{PLACE} password=${{SHOP_PASSWORD}}"})
        assert "from the environment" in sent[0].url.reveal()
        await client.post("/api/databases", json={"name": "shop"})
        for number, (file, is_sent) in enumerate(
            [("shop", True), ("link", False), ("../config.yaml", False)], 1
        ):
            body = {"database_id": 1, "url": PLACE, "sid": f"s{number}"}
            body["password_file"] = f"{secrets}/{file}"
            made = (await client.post("/api/urls", json=body)).json()
            answer = await client.get("/api/discover", params={"url_id": made["id"]})
            assert ("is not in admin.secrets_directory" in answer.text) is not is_sent
        assert len(sent) == 2
        body = {"database_id": 1, "name": "t", "filter": "v = '${PATH}'"}
        answer = await client.post("/api/tables", json=body)
        assert answer.status_code == 422
        assert "environment variable PATH is not in admin.variables" in answer.text


@pytest.mark.parametrize("place", ["PGPASSWORD", "PGPASSFILE", "HOME", "PGSERVICE"])
async def test_a_server_that_a_user_names_gets_no_password_of_the_machine(
    place: str,
    open_admin: OpenAdmin,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (passwords := tmp_path / ".pgpass").write_text("*:*:*:*:unseen")
    passwords.chmod(0o600)
    (services := tmp_path / "services").write_text("[shop]\npassword=unseen\n")
    monkeypatch.setenv("PGSERVICEFILE", str(services))
    values = {"PGPASSWORD": "unseen", "PGPASSFILE": str(passwords), "PGSERVICE": "shop"}
    monkeypatch.setenv(place, values.get(place, str(tmp_path)))
    logins: list[bytes] = []

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Ask for a password as PostgreSQL does, and note the answer."""
        with contextlib.closing(writer):
            await reader.read(1000)
            writer.write(struct.pack("!cii", b"R", 8, 3))
            logins.append(await reader.read(1000))

    server = await asyncio.start_server(ask, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    url = f"host=127.0.0.1 port={port} user=u dbname=shop sslmode=disable gssencmode=disable"
    async with server, open_admin() as admin, admin.client() as client:
        await client.post("/api/discover", json={"url": url})
        await client.post("/api/databases", json={"name": "shop"})
        made = await client.post("/api/urls", json={"database_id": 1, "url": url})
        await client.get("/api/discover", params={"url_id": made.json()["id"]})
        await client.post("/api/tables", json={"database_id": 1, "name": "t"})
        answer = await client.get("/api/plan")
        assert "no password supplied" in answer.text
    assert len(logins) >= 3
    assert set(logins) == {b""}


async def test_the_audit_names_user_and_server_of_a_discovery(
    open_admin: OpenAdmin, sent: list[SourceMapping]
) -> None:
    async with open_admin() as admin, admin.client() as client:
        await client.post("/api/discover", json={"url": f"{PLACE} password=unseen"})
        answer = await client.get("/api/audit")
    (entry,) = answer.json()["items"]
    assert (entry["action"], entry["actor"]) == ("discover", "token")
    assert entry["label"] == "shop at 127.0.0.1:1"
    assert "unseen" not in answer.text
    assert len(sent) == 1


def test_without_settings_the_page_names_nothing() -> None:
    allowed = AllowedNames(AdminSettings())
    with pytest.raises(NotAllowedError):
        allowed.check_file("/etc/hostname")
    with pytest.raises(NotAllowedError):
        allowed.check_variable("HOME")
    allowed.check_url("postgresql://u:p$${x}@db/shop?sslmode=verify-full&sslrootcert=/ca.pem")
