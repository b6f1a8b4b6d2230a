"""`streamer check` at the target: role, bookkeeping, origins, foreign keys. The printed SQL is the
remedy.
"""

from streamer.bookkeeping.deferred_indexes import defer_indexes
from streamer.config import static_mapping
from streamer.mapping.relation_names import RelationName
from streamer.target.connection import TargetAddress, target_connection
from tests.support.checking import (
    ERROR,
    INFO,
    ITEMS,
    WARNING,
    Checker,
    both,
    matching,
    prepare_bookkeeping,
)
from tests.support.postgres import Database
from tests.support.streamer import MakeStreamer


async def test_a_role_that_may_nothing_at_the_target(role: str, checker: Checker) -> None:
    target, name = checker.target, checker.target.name
    checker.source.execute(f"{ITEMS}; create table more (id int primary key)")
    target.execute(
        f"drop schema streamer cascade; {ITEMS}; create schema inner_;"
        "revoke usage on schema public from public;"
        f'revoke temporary on database "{name}" from public;'
        "revoke usage on language plpgsql from public"
    )
    target.url_user = role
    checker.configure("items: {}\nmore: {target: inner_.more}\n")
    await checker.mends(ERROR, "may not create temporary tables")
    checker.configure("items: {}\nmore: {target: nowhere_yet.more}\n")
    await checker.finds(
        ERROR, 'schema "nowhere_yet": is missing, and streamer may not create it', "create schema"
    )
    checker.configure("items: {}\nmore: {target: inner_.more}\n")
    await checker.mends(ERROR, "may not use language plpgsql")
    target.execute("drop extension plpgsql")
    await checker.mends(ERROR, "has no language plpgsql")
    found = await checker.mends(ERROR, 'schema "streamer"', "may not create schemas")
    assert f'grant create on database "{name}"' in str(found)
    await checker.mends(ERROR, 'schema "public"', "may not use it")
    await checker.mends(ERROR, 'schema "inner_"', "may not use it")
    await checker.mends(ERROR, 'schema "inner_"', "may not create the missing tables there")
    found = await checker.mends(ERROR, "lacks select, insert, update, delete, truncate")
    assert f'grant select, insert, update, delete, truncate on "public"."items" to "{role}"' in str(
        found
    )
    assert not matching(await checker.findings(), ERROR)
    target.execute("create publication onwards")
    await checker.mends(
        WARNING, "may not mark its writes with a replication origin", "session_setup(text)"
    )


async def test_places_for_replication_origins(checker: Checker) -> None:
    checker.source.execute(ITEMS)
    checker.configure("items:", settings="workers: 64")
    await checker.is_gone(WARNING, "replication origins")
    checker.target.execute("create publication onwards")
    found = await checker.finds(WARNING, "replication origins", "up to 77 connections write")
    assert "alter system set max_" in str(found)
    checker.configure("items:", settings="workers: 1\nsync: {jobs: 1}")
    await checker.is_gone(WARNING, "replication origins")


async def test_a_source_that_is_a_target_too(
    checker: Checker, stream: MakeStreamer, second: Database
) -> None:
    for db in (checker.source, checker.target):
        db.execute(ITEMS)
    async with stream("items: {initial: none}") as streamer:
        await streamer.caught_up()
        checker.source.execute("insert into items values (1, 'a')")
        await streamer.caught_up()
    onwards = Checker(checker.path, checker.target, second)
    onwards.configure("items:")
    await onwards.finds(
        INFO, "a streamer process also writes to this database", "forward_origins: true"
    )
    onwards.configure("items:", group="forward_origins: true")
    await onwards.is_gone(INFO, "a streamer process also writes to this database")


async def test_truncate_is_not_needed_where_nothing_is_truncated(
    role: str, checker: Checker
) -> None:
    both(checker, ITEMS)
    checker.target.execute(
        f'drop schema streamer cascade; grant create on database "{checker.target.name}" to {role}'
    )
    checker.target.execute(f"grant select, insert, update, delete on items to {role}")
    checker.target.url_user = role
    checker.configure("items: {type: append, initial: none}")
    assert await checker.findings() == []
    checker.configure("items: {type: append}")
    await checker.finds(WARNING, "lacks truncate", "an interrupted copy")
    checker.configure("items:")
    await checker.mends(ERROR, "lacks truncate")
    # streamer must not change foreign objects, even during a copy.
    settings, _ = static_mapping.load(checker.path)
    checker.target.execute("create index on items (name)")
    async with target_connection(TargetAddress.parse(settings.target.url)) as connection:
        assert await defer_indexes(connection, RelationName("public", "items")) == 0


async def test_bookkeeping_that_is_not_ours(role: str, checker: Checker) -> None:
    both(checker, ITEMS)
    checker.configure("items:")
    checker.target.execute(
        "drop schema streamer cascade; create schema streamer; create table streamer.source (id int)"
    )
    await checker.mends(ERROR, "does not belong to streamer, but has a table source")

    await prepare_bookkeeping(checker)
    assert not matching(await checker.findings(), ERROR)
    checker.target.execute(
        f'grant create on database "{checker.target.name}" to {role}; grant all on items to {role}'
    )
    checker.target.url_user = role
    checker.configure("items:")
    await checker.mends(ERROR, 'schema "streamer"', "may not use it")
    await checker.mends(ERROR, 'schema "streamer"', "may not write its tables")
    assert not matching(await checker.findings(), ERROR)
    checker.target.execute("insert into streamer.migration values (9999, 'from the future', 9999)")
    await checker.finds(ERROR, "was made by a newer streamer (migration 9999)")


async def test_foreign_keys_and_triggers_that_cannot_be_switched_off(
    role: str, checker: Checker
) -> None:
    both(checker, f"{ITEMS}; create table lines (id int primary key, item int references items)")
    checker.target.execute(
        "drop schema streamer cascade;"
        "create function f() returns trigger language plpgsql as 'begin return new; end';"
        "create trigger audit before insert on lines for each row execute function f();"
        f'grant create on database "{checker.target.name}" to {role};'
        f"grant all on items, lines to {role}"
    )
    checker.configure("items: {}\nlines: {}")
    assert await checker.findings() == []
    checker.target.url_user = role
    checker.configure("items: {}\nlines: {}")
    await checker.finds(ERROR, "public.items", "foreign keys", "would be checked")
    await checker.finds(WARNING, "public.lines", "triggers", "(audit)")
    await checker.mends(ERROR, "public.lines", "foreign keys", "session_replication_role")
    assert await checker.findings() == []


async def test_a_target_that_refuses_the_bookkeeping(checker: Checker) -> None:
    """`check` meets the errors that `run` would meet, and leaves no object behind."""
    both(checker, ITEMS)
    checker.configure("items:")
    target = checker.target
    target.execute("drop schema streamer cascade")
    assert not matching(await checker.findings(), ERROR)
    assert not target.value("select count(*) from pg_namespace where nspname = 'streamer'")
    target.execute(
        "create function forbid() returns event_trigger language plpgsql as"
        " $$begin raise 'no tables here'; end$$;"
        "create event trigger forbid on ddl_command_start when tag in ('CREATE TABLE')"
        " execute function forbid()"
    )
    await checker.finds(
        ERROR, 'schema "streamer"', "refuses to create the schema", "no tables here"
    )
    target.execute("drop event trigger forbid")
    assert not matching(await checker.findings(), ERROR)
