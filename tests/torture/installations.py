"""Faults of whole servers: a fail-over of either side, and a second installation."""

import contextlib
import time
from pathlib import Path

import psycopg

from streamer.commands.demo.embedded_servers import Server
from tests.support.postgres import Database, versions
from tests.support.process import Process
from tests.support.waiting import polls
from tests.torture.checks import Violation
from tests.torture.world import World

_SECOND_SECONDS = 15.0
_FIRST_SECONDS = 60.0


def _standby(world: World, primary: Server, version: str) -> Server:
    """Return a running asynchronous standby of *primary*, which clients reach over
    `World.standby_proxy`.
    """
    world.standby_proxy.heal()
    world.standby_proxy.move_to(primary)
    directory = world.directory / f"standby-{len(world.schedule)}"
    standby = Server(directory, versions()[version])
    world.servers.callback(standby.stop, "immediate")
    conninfo = f"host=127.0.0.1 port={world.standby_proxy.port} user=postgres"
    standby._run(
        *("pg_basebackup", "--pgdata", str(standby.data), "--dbname", conninfo),
        *("--write-recovery-conf", "--checkpoint", "fast", "--no-sync"),
    )
    standby.start()
    deadline = time.monotonic() + 30
    while not primary.execute("select 1 from pg_stat_replication where state = 'streaming'"
                              " and application_name = 'walreceiver'"):  # fmt: skip
        if time.monotonic() > deadline:
            raise Violation("the standby does not stream")
        time.sleep(0.1)
    return standby


def _promote(standby: Server) -> None:
    standby._run("pg_ctl", "promote", "--pgdata", str(standby.data), "--wait")


def fail_over_target(world: World) -> None:
    """The target fails over to a standby that lacks the last commits.

    In half of the cases the old primary lives on, and the program keeps some connections to that
    server.
    """
    old = world.target_server
    standby = _standby(world, old, world.options.target_version)
    world.standby_proxy.leave()  # from here on the standby lags
    time.sleep(world.random.choice((0.0, 1.0, 3.0)))
    is_split = world.random.random() < 0.5
    world.note(f"  {'the old primary lives on' if is_split else 'the old primary is gone'}")
    if not is_split:
        old.stop("immediate")
    _promote(standby)
    world.target_server = standby
    world.target = Database(standby, "dw")
    world.target_proxy.move_to(standby)
    for source in world.sources:
        world.excuse(source, "*")
    if is_split:
        world.target_proxy.cut_some(world.random)
        time.sleep(world.random.choice((1.0, 6.0, 12.0)))
        old.stop("immediate")
    world.rest()


def fail_over_source(world: World) -> None:
    """The source fails over to a standby that lacks the last commits and has no slots.

    Mostly an administrator makes the slots there, after the applications have begun to write.
    """
    old = world.source_server
    standby = _standby(world, old, world.options.source_version)
    world.standby_proxy.leave()
    old.execute(
        "create table if not exists noise (v text);"
        " insert into noise select repeat('n', 500) from generate_series(1, 3000)"
    )
    time.sleep(world.random.choice((1.0, 3.0)))
    old.stop("immediate")
    _promote(standby)
    world.source_server = standby
    for source in world.sources:
        world.excuse(source, "*")
        source.move_to(standby)
    is_made = world.random.random() < 0.7
    time.sleep(world.random.choice((0.0, 1.0)))
    world.note(f"  slots are made anew: {is_made}")
    if is_made:
        for source in world.mapped:
            source.execute(
                f"select pg_create_logical_replication_slot('{source.slot}', 'pgoutput')"
            )
    world.source_proxy.move_to(standby)
    world.source_proxy.cut()
    world.rest()


def second_installation(world: World) -> None:
    """A second installation runs a copy of the configuration with a different target and fewer
    tables.
    """
    lone = world.sources[0]
    is_alone = world.random.random() < 0.6
    world.note(f"  while the first is {'stopped' if is_alone else 'running'}")
    for _ in polls(_FIRST_SECONDS):  # a name that no installation has yet belongs to the second one
        if _membership(world) and _confirmed(world):
            break
    if is_alone:
        world.stop()
    with contextlib.suppress(psycopg.errors.DuplicateDatabase):
        world.target_server.execute("create database dw2")
    before = _membership(world), _confirmed(world)
    with Process(_second_config(world), spark=False) as process:
        deadline = time.monotonic() + _SECOND_SECONDS
        while process.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
    after = _membership(world), _confirmed(world)
    world.target_server.execute("drop database if exists dw2 with (force)")
    # The first installation may move a table between publications when the table's key changes.
    tables = [sorted(row if is_alone else row[1:] for row in rows) for rows, _ in (before, after)]
    if tables[0] != tables[1]:
        raise Violation(
            f"a second installation changed the publications of {lone.slot}: "
            f"{before[0]} became {after[0]}\n{process.output[-2000:]}"
        )
    if is_alone and after[1] != before[1]:
        raise Violation(
            f"a second installation consumed {lone.slot}: {before[1]} became {after[1]}\n"
            f"{process.output[-2000:]}"
        )
    if is_alone:
        world.start()


def _membership(world: World) -> list[tuple[object, ...]]:
    return world.sources[0].execute(
        "select pubname::text, tablename::text from pg_publication_tables"
        " where pubname like 'streamer%' order by 1, 2"
    )


def _confirmed(world: World) -> list[tuple[object, ...]]:
    return world.source_server.execute(
        "select slot_name::text, confirmed_flush_lsn::text from pg_replication_slots"
        f" where slot_name = '{world.sources[0].slot}'"
    )


def _second_config(world: World) -> Path:
    directory = world.directory / "second"
    directory.mkdir(exist_ok=True)
    config = directory / "config.yaml"
    config.write_text(
        f'target: {{url: "{world.target_server.url("dw2")}"}}\n'
        f'http: {{listen: ""}}\nspool: {{directory: {directory / "spool"}}}\n'
        "sources:\n- database: lone\n"
        f'  urls: [{{url: "{world.sources[0].url}"}}]\n'
        "  tables: {keyed: {}, ledger: {}}\n"
    )
    return config
