"""Replica identities of roots and leaves: the application's own statements never fail because of us."""

from pathlib import Path

from streamer.commands.check.command import check
from streamer.config import static
from tests.support.postgres import Database
from tests.support.streamer import MakeStreamer, write_config

LOST = "updates and deletes are not replicated"
ROOTS = """
create table p (id int not null, day date not null, v text) partition by range (day);
create table p1 partition of p for values from ('2021-01-01') to ('2022-01-01');
alter table p replica identity full;
create table q (id int not null, v text) partition by range (id);
create table q1 partition of q for values from (0) to (10);
create table q2 partition of q for values from (10) to (20) partition by range (id);
create table q21 partition of q2 for values from (10) to (20);
create unique index q_id on q (id);
alter table q replica identity using index q_id;
insert into p values (1, '2021-05-05', 'copied'); insert into q values (1, 'copied'), (11, 'copied')
"""


async def test_a_leaf_without_the_identity_of_its_root_does_not_stop_the_application(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    without_spark: None,
    tmp_path: Path,
) -> None:
    source.execute(ROOTS)
    write_config(tmp_path / "check.yaml", source, target, "p:\nq:")
    settings, mapping = static.load(tmp_path / "check.yaml")
    report = await check(settings, mapping)
    problems = {str(f.place): f for f in report.findings if LOST in f.problem}
    assert 'its partition "public.p1"' in problems["shop public.p"].problem
    assert 'its partition "public.q1"' in problems["shop public.q"].problem
    async with stream("p:\nq:") as streamer:
        await streamer.caught_up(60)
        source.execute("update p set v = 'updated'; delete from q where id = 1")
        source.execute("insert into p values (2, '2021-06-06', 'new')")
        await streamer.caught_up(60)
    # What check says mends it: then both are published whole.
    for finding in (problems["shop public.p"], problems["shop public.q"]):
        assert finding.fix is not None
        for sql in finding.fix.sql:
            source.execute(sql)
    report = await check(settings, mapping)
    assert not [f for f in report.findings if LOST in f.problem]
