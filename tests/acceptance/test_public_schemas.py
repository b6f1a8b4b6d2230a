"""Schemas of well-known databases arrive at the target: by the first copies, and by the stream."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.equal_sides import World, assert_equal
from tests.support.postgres import Database
from tests.support.process import ROOT, Process, caught_up
from tests.support.streamer import write_config

pytestmark = pytest.mark.timeout(240)

SCHEMAS = Path(__file__).with_name("schemas")
RULE = '"*.*": {target: "{schema}.{table}"}'
NAMES = {
    "pagila": ("public",),
    "northwind": ("public",),
    "gitlab": ("public",),
    "adventureworks": ("person", "humanresources", "production", "purchasing", "sales"),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        ways = [(name, comes) for name in NAMES for comes in ("streamed", "copied")]
        chosen = ways if os.environ.get("TEST_COMBINATIONS") == "all" else ways[:1]
        metafunc.parametrize(("name", "comes"), chosen)


def test_a_public_schema_arrives_whole(
    name: str, comes: str, source: Database, target: Database, tmp_path: Path
) -> None:
    definitions, _, rows = (SCHEMAS / f"{name}.sql").read_text().partition("\n-- rows\n")
    config = tmp_path / "config.yaml"
    write_config(config, source, target, RULE, group="ddl: capture\ncreate: all")
    source.execute("create table first (id int primary key)")
    if comes == "copied":
        source.execute(definitions)
    with Process(config, spark=False) as process:
        caught_up(process)
        if comes == "streamed":
            source.execute(definitions)
        source.execute(rows)
        assert_equal(World(schemas=NAMES[name]), {None: source}, target, process)


def migrate(source: Database, *target: str) -> None:
    """Run Django's migrations up or down to *target*."""
    environment = {
        "DJANGO_SETTINGS_MODULE": "tests.acceptance.django_site",
        "DJANGO_DATABASE": source.server.url(source.name),
    }
    subprocess.run(
        [sys.executable, "-m", "django", "migrate", "--verbosity=0", "--skip-checks", *target],
        check=True,
        cwd=ROOT,
        env=os.environ | environment,
    )


def test_the_migrations_that_django_runs_arrive(
    source: Database, target: Database, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    write_config(config, source, target, '"*":', group="ddl: capture\ncreate: all\non_ddl: apply")
    source.execute("create table first (id int primary key)")
    with Process(config, spark=False) as process:
        caught_up(process)
        migrate(source, "auth", "0001")
        source.execute(
            "insert into auth_user (username, first_name, last_name, email, password, is_superuser,"
            " is_staff, is_active, date_joined, last_login) select 'u' || g, '', '', '', '', false,"
            " false, true, now(), now() from generate_series(1, 20) g"
        )
        migrate(source)
        source.execute(
            "update auth_user set last_login = null, last_name = repeat('l', 30) where id % 2 = 0"
        )
        migrate(source, "auth", "0004")
        source.execute("insert into auth_group (name) values ('staff')")
        migrate(source)
        assert_equal(World(), {None: source}, target, process)
