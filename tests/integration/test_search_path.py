"""No foreign function in a schema of the role's search_path runs as the role."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamer.commands.check import check as check_command
from streamer.commands.doctor.diagnosis import diagnose
from streamer.commands.teardown import teardown
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database, contents
from tests.support.streamer import MakeStreamer

pytestmark = pytest.mark.usefixtures("without_spark")

# Each trap advances a sequence, which no rollback takes back, and fails.
TRAPS = """
create sequence public.trapped;
grant all on sequence public.trapped to public;
do $do$
declare
    it record;
    body text := $$ begin perform pg_catalog.nextval('public.trapped'); raise 'trapped'; end $$;
begin
    for it in
        select p.proname as name, pg_catalog.oidvectortypes(p.proargtypes) as arguments,
               case when proretset then 'setof ' else '' end
                 || pg_catalog.format_type(p.prorettype, null) as result
        from pg_catalog.pg_proc p
        where pronamespace = 'pg_catalog'::regnamespace and prokind = 'f'
    loop
        begin
            execute pg_catalog.format('create function public.%I(%s) returns %s language plpgsql as %L',
                                      it.name, it.arguments, it.result, body);
        exception when others then null;  -- of internal types
        end;
    end loop;
    for it in
        select o.oid, oprname as name, oprresult::regtype as result,
               nullif(oprleft, 0)::regtype as left, oprright::regtype as right
        from pg_catalog.pg_operator o where oprnamespace = 'pg_catalog'::regnamespace
    loop
        begin
            execute pg_catalog.format(
                'create function public.trap_%s(%s) returns %s language plpgsql as %L',
                it.oid, pg_catalog.concat_ws(',', it.left, it.right), it.result, body);
            execute pg_catalog.format(
                'create operator public.%s (%s rightarg = %s, function = public.trap_%s)',
                it.name, 'leftarg = ' || it.left || ',', it.right, it.oid);
        exception when others then null;
        end;
    end loop;
    for it in
        select relname as name from pg_catalog.pg_class
        where relnamespace = 'pg_catalog'::regnamespace and relkind in ('r', 'v')
    loop
        execute pg_catalog.format('create table public.%I ()', it.name);
    end loop;
    for it in
        select typname as name from pg_catalog.pg_type
        where typnamespace = 'pg_catalog'::regnamespace and typtype = 'b' and typcategory <> 'A'
    loop
        execute pg_catalog.format('create type public.%I as enum (''trapped'')', it.name);
    end loop;
end $do$;
"""


@contextlib.contextmanager
def trapped(db: Database) -> Iterator[None]:
    """Let the program connect as a role whose search_path begins with a hostile schema."""
    db.execute(TRAPS)
    role = f"careless_{db.name}"
    db.execute(
        f"create role {role} superuser login; alter role {role} set search_path = public, pg_catalog"
    )
    with pytest.raises(Exception, match="trapped"):
        db.server.execute(
            f"set role {role}; set search_path = public, pg_catalog; select 1 + 1", db.name
        )
    db.execute("select setval('public.trapped', 1, false)")
    db.url_user = role
    try:
        yield
    finally:
        db.execute(f"reassign owned by {role} to postgres; drop owned by {role}; drop role {role}")


async def test_traps_in_public_on_both_sides_are_never_entered(
    stream: MakeStreamer, source: Database, target: Database, tmp_path: Path
) -> None:
    source.execute(
        "create table t (id int primary key, v text); insert into t values (1, 'Copied'), (2, 'no');"
        "create table h (id int primary key, v text); insert into h values (1, 'Copied');"
        "create table keyless (v text); insert into keyless values ('Copied');"
        "create table whole (v text); alter table whole replica identity full;"
    )
    tables = """
    t: {filter: "v <> 'no'", set: {v: "lower(v) || '!'"}}
    h: {type: history}
    keyless:
    whole:
    """
    with trapped(source), trapped(target):
        async with stream(tables) as streamer:
            await streamer.caught_up(60)
            source.execute(
                "insert into t values (3, 'Streamed'), (4, 'no'); update t set v = 'New' where id = 1;"
                "update h set v = 'New'; insert into keyless values ('Streamed');"
                "insert into whole values ('a'), ('b'); update whole set v = 'c' where v = 'a';"
                "delete from whole where v = 'b'; truncate keyless; insert into keyless values ('x')"
            )
            await streamer.caught_up(60)
            assert contents(target, "t", "id, v") == [("(1,new!)",), ("(3,streamed!)",)]
            assert contents(target, "h", "id, v", "kvsz_start") == [
                ("(1,Copied)",),
                ("(1,New)",),
            ]
            assert contents(target, "keyless", "v") == [("x",)]
            assert contents(target, "whole", "v") == [("c",)]
            report = await check_command.check(streamer.settings, streamer.mapping)
            assert report.is_ready, [str(finding) for finding in report.findings]
            assert (await diagnose(streamer.settings, streamer.mapping)).is_well
        address = TargetAddress.parse(streamer.settings.target.url)
        sources = list(streamer.mapping.sources)
        assert all(
            done.error is None for done in await teardown(address, sources, tmp_path, actor="test")
        )
        for db in (source, target):
            assert db.value("select is_called from public.trapped") is False, db.name
