"""A key that finds several rows of the target stops the table before anything is committed."""

import pytest

from tests.support.postgres import Database, assert_same
from tests.support.streamer import MakeStreamer, Streamer

CHANGES = {
    "removed": "delete from removed where id = 1",
    "changed": "update changed set v = 'new' where id = 1",
    # As many rows as asked for, but not the ones asked for.
    "mixed": "update mixed set v = 'new' where id in (1, 2)",
    "moved": "update moved set id = 9 where id = 1",
    "once": "update once set v = 'new' where id = 1",
}
# The key becomes one of which the stream brings a part only. From 18 on, the source refuses that.
GENERATED = (
    "begin; alter table emptied drop constraint emptied_pkey, add primary key (grp, twice);"
    "delete from emptied where id = 2; commit"
)


def counts(streamer: Streamer) -> dict[str, float]:
    (conflicts,) = streamer.engine.metrics.conflicts.collect()
    return {s.labels["kind"]: s.value for s in conflicts.samples if s.name.endswith("_total")}


@pytest.mark.parametrize("on_error", ["stop", "quarantine"])
async def test_more_rows_than_were_asked_for_are_a_conflict_before_the_commit(
    source: Database, target: Database, stream: MakeStreamer, on_error: str
) -> None:
    changes = dict(CHANGES)
    if int(str(source.value("show server_version_num"))) < 180000:
        changes["emptied"] = GENERATED
    for name in CHANGES:
        source.execute(f"create table {name} (id int primary key, v text)")
        target.execute(f"create table {name} (id int, v text)")
    emptied = "id int primary key, grp int not null, twice int generated always as (id * 2) stored"
    source.execute(f"create table emptied ({emptied})")
    target.execute(f"create table emptied ({emptied})")
    rules = "\n".join(
        f"{name}: {{initial: none, on_error: {on_error}"
        + (", type: append}" if name == "once" else "}")
        for name in changes
    )
    async with stream(rules) as streamer:
        await streamer.caught_up()
        for name in CHANGES:
            source.execute(f"insert into {name} select g, 'old' from generate_series(1, 3) g")
        source.execute("insert into emptied (id, grp) select g, 1 from generate_series(1, 3) g")
        await streamer.caught_up()
        for name in CHANGES:
            target.execute(f"insert into {name} values (1, 'another')")
        target.execute("delete from mixed where id = 2")
        before = {name: target.execute(f"select * from {name} order by 1, 2") for name in changes}
        for statement in changes.values():
            source.execute(statement)
        for name in changes:
            if on_error == "stop":
                await streamer.table_state(f"public.{name}", "error", 40)
                error = (await streamer.table(f"public.{name}"))["error"]
                assert "several rows" in error
                assert f'create unique index on "public"."{name}"' in error
                assert target.execute(f"select * from {name} order by 1, 2") == before[name]
        if on_error == "quarantine":
            await streamer.caught_up(40)
            held = target.execute(
                "select r.source from streamer.quarantine q join streamer.relation r"
                " on r.id = q.relation_id where q.error like '%several rows%' order by 1"
            )
            assert held == [(f"public.{name}",) for name in sorted(changes)]
        assert all(value >= 0 for value in counts(streamer).values())
        if on_error == "stop":
            target.execute("truncate removed, changed, mixed, moved, once")
            for name in CHANGES:
                target.execute(f"insert into {name} values (1, 'old'), (2, 'old'), (3, 'old')")
                target.execute(f"create unique index on {name} (id)")
            target.execute("delete from emptied where id <> 2")
            await streamer.caught_up(40)
            for name in CHANGES:
                assert_same(source, target, name)
