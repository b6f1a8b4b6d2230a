"""`streamer doctor` names problems and next steps, and its bundle contains no secret."""

import json
import stat
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.support.postgres import Database
from tests.support.process import Process, caught_up, command, status
from tests.support.runbooks import run_block
from tests.support.waiting import eventually

SECRETS = {
    "source": "hunter2-of-the-source",
    "target": "hunter2@of/the:target",
    "token": "the-token-of-this-test",
    "viewer": "the-viewers-token",
    "key": "ErL9BIQqVAZyPzGDIqWZMPLXWGXYZkFM1UNmFNWmyVc=",
    "hash": "$argon2id$v=19$m=65536,t=3,p=4$c29tZXNhbHQ$hash-of-somebody",
    "ssl": "of-a-private-key",
}


@pytest.fixture
def config(tmp_path: Path, source: Database, target: Database) -> Path:
    for db in (source, target):
        db.execute("create table t (id int primary key, v text)")
        db.execute("create table q (id int primary key)")
    quoted = "hunter2%40of%2Fthe%3Atarget"
    target_url = target.url.replace("@", f":{quoted}@") + f"?sslpassword={SECRETS['ssl']}"
    path = tmp_path / "config.yaml"
    path.write_text(
        f"""
target: {{url: "{target_url}"}}
http: {{listen: ""}}
spool: {{directory: {tmp_path / "spool"}}}
admin:
  token: {SECRETS["token"]}
  viewer_token: {SECRETS["viewer"]}
  key: {SECRETS["key"]}
  users: [{{name: alice, password_hash: "{SECRETS["hash"]}"}}]
sources:
- database: shop
  urls: [{{url: "{source.url}?password={SECRETS["source"]}", sid: eu}}]
  tables:
    t: {{initial: none}}
    q: {{initial: none, on_error: quarantine}}
"""
    )
    return path


def test_an_empty_mapping_comes_before_a_target_that_is_away(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text('target: {url: "postgresql://nobody@127.0.0.1:1/dw"}\nhttp: {listen: ""}\n')
    found = command(path, "doctor").stdout
    assert 0 < found.find("The mapping: no sources.") < found.find("The target:"), found


def test_doctor_lists_each_problem_until_the_last_is_mended(
    config: Path, source: Database, target: Database
) -> None:
    before = command(config, "doctor")
    assert before.returncode == 1
    assert "Source shop:eu: no process has run this source yet." in before.stdout
    assert "start:\n      streamer run\n" in before.stdout

    with Process(config, spark=False) as process:
        caught_up(process)
        well = command(config, "doctor")
        assert (well.returncode, well.stderr) == (0, ""), well.stdout
        assert well.stdout.endswith("No errors found, only warnings.\n")  # fsync is off
        assert json.loads(command(config, "doctor", "--json").stdout)["well"] is True

        # A refused row and a stopped table: doctor names both, with the command to run.
        target.execute("alter table q add check (id < 10); alter table t drop column v")
        source.execute("insert into q values (11); insert into t values (1, 'x')")
        eventually(lambda: status(config)[0]["tables"][1]["state"] == "error", 60)
        eventually(lambda: status(config)[0]["tables"][0]["quarantined"] == 1, 60)
        ill = command(config, "doctor", "--json")
        assert ill.returncode == 1
        found = json.loads(ill.stdout)
        assert found["well"] is False
        by_object = {f["object"]: f for f in found["findings"] if f["severity"] == "error"}
        assert by_object["public.t"]["at"] == "target"
        assert by_object["public.q"]["sql"] == [
            "streamer quarantine list --table public.q --database shop --sid eu"
        ]
        listed = command(config, *by_object["public.q"]["sql"][0].split()[1:])
        assert listed.returncode == 0, listed.stderr  # the printed command works

        # The next step fixes the problem.
        target.execute("; ".join(by_object["public.t"]["sql"]))
        target.execute("alter table q drop constraint q_id_check")
        assert command(config, "quarantine", "retry").returncode == 0
        eventually(lambda: command(config, "doctor").returncode == 0, 60)
        process.kill()

    dead = command(config, "doctor")
    assert dead.returncode == 1
    assert "no process reads its slot" in dead.stdout


@pytest.mark.follows("runbooks:defect#1")
def test_a_bundle_is_whole_private_and_without_secrets(
    config: Path, tmp_path: Path, target: Database
) -> None:
    with Process(config, spark=False) as process:
        caught_up(process)
    # A secret turns up in an unexpected place.
    target.execute(f"update streamer.relation set error = 'oh, {SECRETS['source']}!'")
    path = tmp_path / "streamer.zip"

    run_block(config, "defect#1", code=1)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {p.name for p in tmp_path.glob("*.zip*")} == {"streamer.zip"}
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    for name, text in texts.items():
        for secret in (*SECRETS.values(), "hunter2"):
            assert secret not in text, name
    shown = yaml.safe_load(texts["streamer/configuration.yaml"])["settings"]
    assert shown["sources"][0]["urls"][0]["sid"] == "eu"
    assert shown["target"]["url"].startswith("postgresql://postgres:***@")
    assert shown["admin"] == {
        "token": "***",
        "viewer_token": "***",
        "users": [{"name": "alice", "password_hash": "***", "role": "viewer"}],
        "key": "***",
        "key_file": None,
        "session_hours": 12,
        "secrets_directory": None,
        "variables": [],
    }
    versions = json.loads(texts["streamer/versions.json"])
    assert versions["packages"]["asyncpg"]
    assert versions["target_server"] == versions["source_servers"]["shop:eu"]
    books = json.loads(texts["streamer/bookkeeping.json"])
    assert all(isinstance(part, list) for part in books.values()), books  # or refused
    assert books["last_changes"][0]["error"] == "oh, ***!"
    (slot,) = json.loads(texts["streamer/slots.json"])
    assert slot["slots"][0]["slot"]["plugin"] == "pgoutput"

    # Existing files are not overwritten, and a failed write leaves no file.
    content = path.read_bytes()
    again = command(config, "doctor", "--bundle", str(path))
    assert (again.returncode, path.read_bytes()) == (2, content)
    assert "already exists" in again.stderr
    nowhere = command(config, "doctor", "--bundle", str(tmp_path / "no" / "bundle.zip"))
    assert nowhere.returncode == 2
    assert "cannot write" in nowhere.stderr


def test_servers_that_are_away_are_part_of_the_diagnosis(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        """
target: {url: "postgresql://loader:hunter2-away@127.0.0.1:1/dw"}
sources:
- database: shop
  urls: [{url: "postgresql://streamer@127.0.0.1:1/shop", password_command: "echo argument-of"}]
  tables: {t: }
"""
    )
    path = tmp_path / "bundle.zip"

    result = command(config, "doctor", "--bundle", str(path))

    assert result.returncode == 1
    assert "The target: " in result.stdout
    assert "Source shop: " in result.stdout
    assert "hunter2-away" not in result.stdout + result.stderr
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            assert b"hunter2-away" not in archive.read(name)
            assert b"argument-of" not in archive.read(name)
