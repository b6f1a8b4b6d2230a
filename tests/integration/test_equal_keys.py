"""Keys that are equal by type, and differ in bytes: numeric scale, nondeterministic collations."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from streamer.commands.demo.embedded_servers import Server
from tests.support.postgres import Database, versions
from tests.support.streamer import MakeStreamer


def has_icu(binaries: Path) -> bool:
    program = binaries / "pg_config"
    if not program.exists():
        return False
    configured = subprocess.run(
        [program, "--configure"], check=True, capture_output=True, text=True
    ).stdout
    return "--with-icu" in configured


ICU = next((major for major, binaries in versions().items() if has_icu(binaries)), None)
"""A server with ICU and citext; servers of distributions have both, packaged servers do not."""
KEYS = {"numeric": ("numeric", "1.0", "1.00")}
OF_DISTRIBUTIONS = {
    "collation": ("text collate caseless", "'a'", "'A'"),
    "citext": ("citext", "'a'", "'A'"),
}
if ICU is not None:
    KEYS |= OF_DISTRIBUTIONS
NEEDED = {
    "collation": "create collation caseless"
    " (provider = icu, locale = 'und-u-ks-level2', deterministic = false)",
    "citext": "create extension citext",
}
"""What a database needs for a case."""
HISTORY = """
, kvsz_start timestamptz not null, kvsz_end timestamptz not null, kvsz_deleted boolean not null
"""


def needs_icu(item: pytest.Item) -> bool:
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return parameters.get("name") in OF_DISTRIBUTIONS


@pytest.fixture
def shared_server(
    request: pytest.FixtureRequest, shared_server: Server, servers: Callable[[str], Server]
) -> Server:
    return servers(ICU) if ICU is not None and needs_icu(request.node) else shared_server


@pytest.fixture
def target_server(
    request: pytest.FixtureRequest, shared_server: Server, target_server: Server
) -> Server:
    return shared_server if needs_icu(request.node) else target_server


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("transport", ["text", "binary"])
async def test_one_row_of_them_takes_the_place_of_the_other(
    source: Database, target: Database, stream: MakeStreamer, name: str, transport: str
) -> None:
    kind, one, other = KEYS[name]
    tables = {
        "appends": "type: append",
        "marks": "on_delete: mark",
        "keeps": "skip_truncate: true",
        "history": "type: history",
        "indexed": "type: append",
    }
    for db in (source, target):
        if name in NEEDED:
            db.execute(NEEDED[name])
    for table in tables:
        columns = f"id {kind} not null, v text, big text"
        source.execute(f"create table {table} ({columns}, primary key (id))")
        source.execute(f"alter table {table} alter big set storage external")
        extra = HISTORY if table == "history" else ", deleted_at timestamptz"
        index = f"create {'' if table == 'history' else 'unique'} index on {table} (id)"
        indexed = index if table in ("history", "indexed") else ""
        target.execute(f"create table {table} ({columns}{extra}); {indexed}")
    rules = "\n".join(f"{table}: {{initial: none, {rule}}}" for table, rule in tables.items())

    def change(statements: str) -> None:
        source.execute("; ".join(statements.format(t=table) for table in tables))

    async with stream(rules, group=f"transport: {transport}") as streamer:
        await streamer.caught_up()
        # WHEN a key comes again with different bytes, in one window and in two
        change(
            f"begin; insert into {{t}} values ({one}, 'old', repeat('x', 3000)); delete from {{t}}; "
            f"insert into {{t}} values ({other}, 'new', repeat('x', 3000)); commit"
        )
        await streamer.caught_up()
        change(
            f"begin; update {{t}} set v = 'newer'; delete from {{t}}; "
            f"insert into {{t}} values ({one}, 'last', repeat('x', 3000)); commit"
        )
        await streamer.caught_up()
        change(f"begin; update {{t}} set v = v || '!'; update {{t}} set id = {other}; commit")
        await streamer.caught_up()
        # THEN the key has one row, and versions that do not overlap
        for table in tables:
            where = " where kvsz_end > '9000-01-01'" if table == "history" else ""
            found = target.execute(f"select id::text, v, length(big) from {table}{where}")
            assert found == [(other.strip("'"), "last!", 3000)], table
        assert not target.execute(
            "select a.*, b.* from history a join history b on a.id = b.id and a.ctid <> b.ctid"
            " and a.kvsz_start < b.kvsz_end and b.kvsz_start < a.kvsz_end"
        )
