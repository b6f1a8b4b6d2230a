"""A hashed column: copy, stream, resync and another key; the target never has the plain value."""

import hmac
import json

import pytest

from streamer.commands.compare import compare
from streamer.compare.comparison import ComparisonScope
from tests.support.comparing import DEFAULTS
from tests.support.postgres import Database
from tests.support.streamer import MakeStreamer

KEY = "0123456789abcdef0123456789abcdef"
OTHER = "fedcba9876543210fedcba9876543210"
RULE = "t: {set: {email: {hmac: email, key: people}}, on_error: quarantine, truncate_target: true}"
BIG = "(select 'p1ain' || string_agg(md5(g::text), '') from generate_series(1, 300) g)"


def settings(key: str) -> str:
    return f"hash_keys: {{people: {{key: {key}}}}}"


def expected(source: Database, key: str) -> list[tuple[object, ...]]:
    rows = source.execute("select id, email, note from t order by id")
    return [
        (i, e and hmac.digest(key.encode(), str(e).encode(), "sha256").hex(), n) for i, e, n in rows
    ]


def bookkeeping(target: Database) -> str:
    """Everything that the target holds: its bookkeeping, and the table."""
    names = target.execute(
        "select format('%I.%I', schemaname, tablename) from pg_tables"
        " where schemaname in ('streamer', 'public')"
    )
    return json.dumps(
        [target.execute(f"select x::text from {name} x") for (name,) in names], default=str
    )


@pytest.mark.usefixtures("comparing_without_spark")
async def test_copy_stream_and_quarantine_hold_hashes_and_another_key_copies_the_table(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    table = "create table t (id int primary key, email varchar(100000), note int)"
    source.execute(table + "; alter table t alter email set storage external")
    target.execute(table + "; alter table t add check (note <> 13)")
    source.execute(
        "insert into t values (1, E'p1ain\\t\\\\N\\n\\u00fc', 1), (2, null, 2), (3, 'p1ain3', 3);"
        f"insert into t select 4, {BIG}, 4"
    )
    logged = target.server.log.stat().st_size
    target.execute(f"alter database {target.name} set log_statement = 'all'")
    async with stream(RULE, settings=settings(KEY)) as streamer:
        await streamer.caught_up()
        found = "select id, email, note from t order by id"
        assert target.execute(found) == expected(source, KEY)
        for change in (
            "insert into t values (5, 'p1ain5', 5), (6, 'p1ain6', 6), (7, 'p1ain7', 7)",
            "update t set note = 40 where id = 4",  # an unchanged TOAST value
            "update t set email = 'p1ain33' where id = 3; update t set email = null where id = 1",
            "update t set id = 50 where id = 5; delete from t where id = 6",
            "alter table t replica identity full; update t set note = 8 where id in (3, 7)",
            "delete from t where id = 7",
        ):
            source.execute(change)
            await streamer.caught_up()
            assert target.execute(found) == expected(source, KEY), change
        source.execute("insert into t values (13, 'p1ain13', 13)")

        async def is_quarantined() -> bool:
            return bool(target.value("select count(*) from streamer.quarantine") == 1)

        await streamer.eventually(is_quarantined)
        assert "p1ain" not in bookkeeping(target)
        assert KEY not in bookkeeping(target)
        source.execute("delete from t where id = 13")
        await streamer.caught_up()
        # Under its new name, no rule hashes the column.
        source.execute("alter table t rename email to mail; insert into t values (8, 'p1ain8', 8)")
        await streamer.table_state("public.t", "error", 60)
        assert "p1ain" not in bookkeeping(target)
        source.execute("alter table t rename mail to email")
        assert (await streamer.dump()).count(KEY) == 0
        log = target.server.log.read_text(errors="replace")[logged:]
        assert "COPY" in log.upper()
        assert "p1ain" not in log
        assert KEY not in log
    source.execute(f"alter database {source.name} set log_statement = 'all'")
    async with stream(RULE, settings=settings(OTHER)) as streamer:

        async def is_copied() -> bool:
            return target.execute(found) == expected(source, OTHER)

        await streamer.eventually(is_copied)
        source.execute("insert into t values (9, 'p1ain9', 9)")
        await streamer.caught_up()
        assert target.execute(found) == expected(source, OTHER)
        target.execute("update t set email = 'wrong' where id = 9; delete from t where id = 3")
        await streamer.ask("resync", mode="diff")
        await streamer.eventually(is_copied)
        assert "p1ain" not in bookkeeping(target)
        await streamer.table_state("public.t", "ready")
        (result,) = await compare(streamer.settings, streamer.mapping, ComparisonScope(), DEFAULTS)
        assert result.error is None
        assert result.is_equal
    for server in (source.server, target.server):
        assert OTHER not in server.log.read_text(errors="replace")
