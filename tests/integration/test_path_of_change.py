"""The card of the target on real servers: facts of its server, and changes that a table holds."""

from streamer.admin.live.events import Events
from streamer.mapping.relation_names import RelationName
from streamer.postgres.secret import Secret
from streamer.target.connection import TargetAddress, TargetConnection
from streamer.target.server_facts import read_server_facts
from tests.support.postgres import Database, ordinary_role
from tests.support.streamer import MakeStreamer
from tests.support.waiting import until

TABLE = RelationName("public", "t")


async def test_the_changes_of_a_paused_table_are_held_in_its_lane(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for db in (source, target):
        db.execute("create table t (id int primary key)")
    async with stream("t: {initial: none}") as streamer:
        await streamer.caught_up()
        events = Events(streamer.engine, TargetAddress.parse(Secret(target.url)), list)
        (supervisor,) = streamer.engine.supervisors
        pipeline = supervisor.pipeline
        assert pipeline is not None
        assert pipeline.table_figures(TABLE) == (0.0, 0)
        assert pipeline.table_figures(RelationName("public", "absent")) is None
        await streamer.ask("pause", "public.t")
        await streamer.table_state("public.t", "paused")
        source.execute("insert into t select generate_series(1, 100)")

        async def is_held() -> bool:
            figures = pipeline.table_figures(TABLE)
            return figures is not None and figures[0] > 0 and figures[1] > 0

        await until(is_held)
        events.history.work.sample()
        facts = events.path_facts(1, 100)
        assert facts.lag_seconds > 0
        assert facts.queued_bytes == 0
        assert facts.use == [0.0] * len(streamer.engine.workers)
        assert facts.use
        assert not facts.is_full


async def test_an_ordinary_role_reads_version_size_and_connections(target: Database) -> None:
    with ordinary_role(target) as role:
        target.execute(f"alter role {role} connection limit 7")
        address = TargetAddress.parse(Secret(target.url))
        connection = await TargetConnection.connect(address, "streamer test")
        try:
            facts = await read_server_facts(connection)
        finally:
            await connection.close()
        assert facts.version == target.value("show server_version")
    assert facts.size_bytes > 1_000_000
    assert 0 < facts.connections <= facts.connections_max
    assert (facts.role_connections, facts.role_connections_max) == (1, 7)
