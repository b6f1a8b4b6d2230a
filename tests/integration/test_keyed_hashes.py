"""A hashed column: copy, stream, resync and a new key; the target never has the plain value."""

import hmac
import json
import os
import re
from pathlib import Path

import pytest

from streamer.commands.compare_command import compare
from streamer.commands.demo.embedded_servers import Server
from streamer.compare.comparison import ComparisonScope
from tests.support.comparing import DEFAULTS
from tests.support.postgres import Database, drop_database
from tests.support.remedies import Operator, remedy_of
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer, Streamer, write_config

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
    """All data of the target: the bookkeeping, and the tables of the test."""
    names = target.execute(
        "select format('%I.%I', schemaname, tablename) from pg_tables"
        f" where schemaname in ('streamer', '{target.schema}')"
    )
    return json.dumps(
        [target.execute(f"select x::text from {name} x") for (name,) in names], default=str
    )


@pytest.mark.usefixtures("comparing_in_threads")
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
        # Under the new name, no rule hashes the column.
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


TYPES = {
    "c": ("char(8)", "'ab'"),
    "b": ("boolean", "true"),
    "s": ("smallint", "-7"),
    "i": ("integer", "0"),
    "l": ("bigint", "9007199254740993"),
    "n": ("numeric(12,3)", "1.10"),
    "d": ("date", "'0044-03-15 BC'"),
    "t": ("time", "'23:59:59.5'"),
    "tz": ("timetz", "'23:59:59+05:30'"),
    "ts": ("timestamp", "'infinity'"),
    "tstz": ("timestamptz", "'2026-01-02 03:04:05+05:30'"),
    "iv": ("interval", "'1 year -2 days'"),
    "y": ("bytea", "'\\x00ff'"),
    "a": ("inet", "'10.0.0.1/8'"),
    "u": ("uuid", "'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'"),
    "v": ("text", "''"),
}


HASHES = ", ".join(f"hashed_{name}: {{hmac: {name}, key: people}}" for name in TYPES)
LISTED = ", ".join(value for _, value in TYPES.values())
TYPES_DDL = f"""
create table t (id int primary key, {", ".join(f"{name} {kind}" for name, (kind, _) in TYPES.items())});
insert into t values (1, {LISTED}); insert into t values (2)
"""


@pytest.mark.follows("apply.write.planner:Planner._check_hashed_types")
@streams(
    f"t: {{exclude: [{', '.join(TYPES)}], set: {{{HASHES}}}}}",
    source=TYPES_DDL,
    settings=settings(KEY),
    group="transport: binary",
)
async def test_hashes_of_other_types_are_of_their_text_under_any_transport(shared: Shared) -> None:
    source, target = shared.source, shared.target
    texts = ", ".join(
        f"case when {name} is not null then format('%s', {name}) end" for name in TYPES
    )
    shown = ", ".join(f"hashed_{name}" for name in TYPES)

    def is_equal() -> bool:
        rows = source.execute(
            "set datestyle = 'ISO'; set intervalstyle = 'postgres'; set timezone = 'UTC';"
            f" set bytea_output = 'hex'; select id, {texts} from t order by id"
        )
        wanted = [
            (
                key,
                *(v and hmac.digest(KEY.encode(), str(v).encode(), "sha256").hex() for v in values),
            )
            for key, *values in rows
        ]
        wanted = [tuple(EMPTY if v == "" else v for v in row) for row in wanted]
        return target.execute(f"select id, {shown} from t order by id") == wanted

    await shared.caught_up()
    assert is_equal()
    source.execute(f"insert into t values (3, {LISTED}); update t set i = 5, d = null where id = 1")
    await shared.caught_up()
    assert is_equal()
    # Rows of the target have hashes of a different text.
    source.execute("alter table t alter n type numeric(12,1); insert into t values (4)")
    was = f'column "n" of table "{shared.own("t")}" changed its type from numeric(12,3) to numeric(12,1)'
    remedy = await remedy_of(shared, shared.own("t"), was)
    await Operator(shared.path, source, target).follow(remedy)
    await shared.table_state("public.t", "ready", 60)
    await shared.caught_up()
    assert is_equal()


EMPTY = hmac.digest(KEY.encode(), b"", "sha256").hex()


CUSTOMERS = """
    create table customer (tenant int, email text, note text, primary key (tenant, email));
    create table invoice (id int primary key, tenant int, buyer text,
        foreign key (tenant, buyer) references customer on update cascade on delete cascade);
    create table visit (email varchar(40) primary key, at int);
    alter table visit replica identity full;
    create table event (email text primary key, kind int);
"""


@pytest.mark.usefixtures("comparing_in_threads")
async def test_hashed_keys_still_find_their_rows_and_join(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(CUSTOMERS)
    source.execute(
        "insert into customer select g % 3, 'p1ain' || g, g from generate_series(1, 300) g;"
        "insert into invoice select g, g % 3, 'p1ain' || g from generate_series(1, 300) g;"
        "insert into visit select 'p1ain' || g, g from generate_series(1, 300) g;"
        "insert into event values ('p1ain1', 1), ('p1ain2', 2)"
    )
    hashed = "{{set: {{{0}: {{hmac: {0}, key: people}}}}, create: all{1}}}"
    rules = "".join(
        f"\n        {name}: {hashed.format(column, more)}"
        for name, column, more in (
            ("customer", "email", ""),
            ("invoice", "buyer", ""),
            ("visit", "email", ""),
            ("event", "email", ", type: history"),
        )
    )

    def is_equal() -> bool:
        for query in (
            "select tenant, email, note from customer",
            "select id, buyer, tenant from invoice",
            "select at, email from visit",
        ):
            wanted = {
                tuple(
                    hmac.digest(KEY.encode(), v.encode(), "sha256").hex()
                    if isinstance(v, str) and v.startswith("p1ain")
                    else v
                    for v in row
                )
                for row in source.execute(query)
            }
            if set(target.execute(query)) != wanted:
                return False
        return True

    more = f"{settings(KEY)}\nsync: {{resumable_above: 8192}}"
    async with stream(rules, settings=more) as streamer:
        await streamer.caught_up()
        assert is_equal()
        joined = "invoice i join customer c on (i.tenant, buyer) = (c.tenant, email)"
        assert target.value(f"select count(*) from {joined}") == 300
        for change in (
            "update customer set email = 'p1ain-new' where email = 'p1ain7'",
            "update customer set note = 'x' where email in ('p1ain8', 'p1ain9')",
            "delete from customer where email = 'p1ain10'",
            "insert into customer values (0, 'p1ain10', 'again')",
            "update visit set at = -1 where email = 'p1ain5'; delete from visit where at = 6",
            "update visit set email = 'p1ain-x' where at = 8",
            "begin; delete from visit where at = 9; insert into visit values ('p1ain9', 90); commit",
            "update event set kind = 3 where email = 'p1ain1'; delete from event where kind = 2",
        ):
            source.execute(change)
            await streamer.caught_up()
            assert is_equal(), change
        versions = "select kind, kvsz_deleted from event order by kvsz_id"
        assert target.execute(versions) == [(1, False), (2, True), (3, False)]
        target.execute(
            "delete from customer where note = '20'; update visit set email = 'w' where at = 20"
        )
        for table in ("customer", "invoice", "visit"):
            await streamer.ask("resync", table=f"public.{table}", mode="diff")

        async def is_mended() -> bool:
            return is_equal()

        await streamer.eventually(is_mended)
        await streamer.caught_up()
        scope, defaults = ComparisonScope(), DEFAULTS
        results = await compare(streamer.settings, streamer.mapping, scope, defaults)
        assert [(r.error, r.is_equal) for r in results] == [(None, True)] * 4
        target.execute("update invoice set buyer = null where id = 30")
        results = await compare(streamer.settings, streamer.mapping, scope, defaults)
        assert [r.is_equal for r in results].count(False) == 1
        assert "p1ain" not in bookkeeping(target)


async def test_a_hash_is_of_utf8_whatever_the_encoding_of_the_source(
    shared_server: Server, target: Database, tmp_path: Path, without_spark: None
) -> None:
    name = f"source_hashed_{os.getpid()}"
    shared_server.execute(
        f"create database {name} encoding 'WIN1252' lc_collate 'C' lc_ctype 'C' template template0"
    )
    try:
        source = Database(shared_server, name)
        source.execute(f"alter database {name} set client_encoding to 'UTF8'")
        source.execute("create table t (id int primary key, email text, note int)")
        source.execute("insert into t values (1, 'p1ain \u20ac', 1)")
        write_config(tmp_path / "config.yaml", source, target, RULE, settings=settings(KEY))
        streamer = Streamer(tmp_path / "config.yaml")
        streamer.start()
        try:
            await streamer.caught_up()
            source.execute("insert into t values (2, 'p1ain \u20ac\u00fc', 2)")
            await streamer.caught_up()
            found = "select id, email, note from t order by id"
            assert target.execute(found) == expected(source, KEY)
            source.execute("insert into t values (3, E'p1ain\\x81', 3)")
            await streamer.table_state("public.t", "ready")

            async def is_quarantined() -> bool:
                return bool(target.value("select count(*) from streamer.quarantine") == 1)

            await streamer.eventually(is_quarantined)
            assert "p1ain" not in bookkeeping(target)
        finally:
            await streamer.stop()
    finally:
        drop_database(shared_server, name)


ADDED = "{set: {email: {hmac: email, key: people}}, <more>, exclude: [lowered]}"


@streams(
    f"t: {ADDED.replace('<more>', 'on_column_added: add')}\n"
    f"u: {ADDED.replace('<more>', 'create: all')}",
    source="""
        create table t (id int primary key, email int not null default 99004700, note int,
            lowered int generated always as (email + 99004701) stored,
            constraint fine check (email <> 99004702));
        create unique index busy on t (note) where email <> 99004703;
        create index low on t ((email + 99004704)); create statistics s on (email + 99004705), note from t;
        insert into t values (1, 99004711, 1);
        create table u (like t including all); insert into u values (1, 99004711, 1)
        """,
    target="create table t (id int primary key, note int)",
    settings=settings(KEY),
    group="transport: binary",
)
async def test_a_hashed_column_that_the_target_lacks_is_added_as_text_without_its_default(
    shared: Shared,
) -> None:
    source, target = shared.source, shared.target
    found = "select id, email, note from t order by id"

    def expected() -> list[tuple[object, ...]]:
        rows = source.execute(found)
        return [
            (i, hmac.digest(KEY.encode(), str(email).encode(), "sha256").hex(), note)
            for i, email, note in rows
        ]

    await shared.caught_up()
    assert target.execute(found) == expected()
    source.execute("insert into t values (2, 99004712, 2)")
    await shared.caught_up()
    target.execute("alter table t drop column email")
    source.execute("insert into t (id) values (3)")

    async def is_back() -> bool:
        kind = "select count(*) from pg_attribute where attrelid = 't'::regclass"
        is_there = target.value(f"{kind} and attname = 'email' and atttypid = 25") == 1
        return is_there and target.execute(found) == expected()

    await shared.eventually(is_back)
    default = "select count(*) from pg_attrdef where adrelid = 't'::regclass"
    assert target.value(default) == 0

    # The error names the definitions that read the column, without literals.
    async def are_named() -> bool:
        reason = 'streamer hashes column "email"'
        sql = f"select count(*) from streamer.definition where reason = '{reason}'"
        return bool(target.value(sql) == 3)

    await shared.eventually(are_named)
    assert not re.search(r"990047\d\d", bookkeeping(target))
