"""`streamer users`: added, changed and removed while the server runs, and no password is shown."""

import json
from pathlib import Path

import pytest

from streamer.admin.admin_server import load_users
from streamer.admin.mapping.admin_store import Query
from streamer.admin.service.access import Access, hash_password
from streamer.admin.service.admin_service import open_service
from streamer.config import static_mapping
from streamer.mapping.rules import Mapping
from tests.support.admin import TARGET, OpenAdmin
from tests.support.invoking import invoke

PASSWORD = "correct horse battery"


def streamer(config: Path, *arguments: str, stdin: str = "") -> tuple[int, str]:
    result = invoke("--config", str(config), *arguments, stdin=stdin)
    return result.exit_code, result.output


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(
        f'target: {{url: "{TARGET}"}}\nmapping_database: {tmp_path / "mapping.sqlite"}\n'
        'http: {listen: ""}\n'
    )
    return path


def test_users_are_added_changed_listed_and_removed(config: Path) -> None:
    assert "no users" in streamer(config, "users", "list")[1]
    code, shown = streamer(config, "users", "add", "alice", "--role", "admin", stdin="short\n")
    assert code == 0
    assert "fewer than 12 characters" in shown
    code, shown = streamer(config, "users", "add", "alice", stdin=f"{PASSWORD}\n")
    assert (code, shown) == (0, "changed: alice (viewer)\n")
    listed = streamer(config, "users", "list", "--json")[1]
    assert json.loads(listed) == [{"name": "alice", "role": "viewer", "from": "database"}]
    backup = streamer(config, "export")[1]
    assert "streamer users add alice --role viewer" in backup
    assert "argon2" not in backup + listed
    assert streamer(config, "users", "remove", "alice")[0] == 0
    assert streamer(config, "users", "remove", "alice")[0] != 0
    assert streamer(config, "users", "add", "bob", stdin="\n")[0] == 2


def test_without_a_mapping_database_the_configuration_file_has_the_users(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f'target: {{url: "{TARGET}"}}\n')
    code, shown = streamer(path, "users", "add", "alice", stdin=f"{PASSWORD}\n")
    assert code == 2
    assert "admin.users" in shown


async def test_a_server_that_runs_takes_users_over_and_ends_their_sessions(
    open_admin: OpenAdmin,
) -> None:
    async with open_admin(is_alone=False) as admin, admin.client(token=None) as client:
        login = {"name": "alice", "password": PASSWORD}
        assert (await client.post("/api/login", json=login)).status_code == 401
        store = admin.service.store
        await store.set_user("alice", "admin", hash_password(PASSWORD), "test")
        await load_users(admin.service, admin.access)
        assert (await client.post("/api/login", json=login)).status_code == 200
        assert (await client.get("/api/draft")).status_code == 200
        await store.remove_user("alice", "test")
        await load_users(admin.service, admin.access)
        assert (await client.get("/api/draft")).status_code == 401
        entries, _ = await store.audit(Query())
        actions = [(entry["action"], entry["object"]) for entry in entries]
        assert actions[:2] == [("delete", "user"), ("create", "user")]


async def test_removing_the_last_user_does_not_open_the_server(config: Path) -> None:
    _, settings = static_mapping.read(config)
    service = await open_service(settings, config, Mapping((), "public"))
    try:
        access = Access(settings.admin)
        assert access.is_open
        await service.store.set_user("alice", "admin", "$argon2id$", "test")
        await load_users(service, access)
        assert not access.is_open
        await service.store.remove_user("alice", "test")
        await load_users(service, access)
        assert not access.is_open
    finally:
        await service.close()
