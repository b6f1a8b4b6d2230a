"""Faults of processes, networks and servers, and requests of an operator."""

import contextlib
import signal
import time

import psycopg

from tests.support.proxy import Proxy, Way
from tests.torture.world import World


def kill(world: World) -> None:
    world.kill()
    world.start()


def restart(world: World) -> None:
    world.stop()
    world.start()


def suspend(world: World) -> None:
    process = world._assert_alive().process
    process.send_signal(signal.SIGSTOP)
    time.sleep(world.random.choice((0.5, 2, 8)))
    process.send_signal(signal.SIGCONT)


def _proxy(world: World) -> tuple[str, Proxy]:
    return world.random.choice((("source", world.source_proxy), ("target", world.target_proxy)))


def cut(world: World) -> None:
    name, proxy = _proxy(world)
    reset = world.random.random() < 0.5
    world.note(f"  {name}, reset {reset}")
    proxy.cut(reset=reset)


def cut_in_the_middle(world: World) -> None:
    name, proxy = _proxy(world)
    way, size = world.random.choice(list(Way)), world.random.randrange(1, 100_000)
    world.note(f"  {name}, after {size} bytes {way.value}")
    proxy.cut_after(size, way)


def lose_answers(world: World) -> None:
    world.target_proxy.lose_answers(b"commit\0", world.random.randrange(1, 5))


def lose_bookkeeping_answers(world: World) -> None:
    """Answers to statements that commit without BEGIN."""
    world.target_proxy.lose_answers(b"E\0\0\0", world.random.randrange(1, 5))


def blackhole(world: World) -> None:
    name, proxy = _proxy(world)
    seconds = world.random.choice((1, 3, 7))
    world.note(f"  {name}, {seconds} s")
    proxy.blackhole()
    time.sleep(seconds)
    if world.random.random() < 0.5:
        proxy.cut(reset=True)
    proxy.heal()


def slow(world: World) -> None:
    name, proxy = _proxy(world)
    seconds = world.random.choice((0.02, 0.2))
    world.note(f"  {name}, {seconds} s")
    proxy.delay(seconds)
    time.sleep(3)
    proxy.heal()


def restart_server(world: World) -> None:
    name, server = world.random.choice(
        (("source", world.source_server), ("target", world.target_server))
    )
    mode = world.random.choice(("fast", "immediate"))
    world.note(f"  {name}, {mode}")
    server.stop(mode)
    time.sleep(world.random.choice((0, 1)))
    server.start()


def terminate_backends(world: World) -> None:
    server = world.random.choice((world.source_server, world.target_server))
    share = world.random.choice((0.1, 0.3, 1))
    server.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'streamer%'"
        f" and random() <= {share}"
    )


def lock(world: World) -> None:
    """A user of the target locks a table for a while."""
    source = world.random.choice(world.sources)
    table = world.random.choice(source.kinds).target
    mode = world.random.choice(("access exclusive", "share"))
    seconds = world.random.choice((0.5, 4))
    world.note(f"  {table}, {mode}, {seconds} s")
    with contextlib.suppress(psycopg.errors.UndefinedTable), world.target.connect() as connection:
        connection.execute(
            f"set deadlock_timeout = '10s'; begin; lock table {table} in {mode} mode; select pg_sleep({seconds}); commit".encode()
        )


def ask(world: World) -> None:
    """Pause, resume or copy a table again, several times in a row."""
    source, kind = world.random.choice(world.resynced)
    for _ in range(world.random.randrange(1, 4)):
        action = world.random.choice(("pause", "resume", "resync", "resync"))
        mode = world.random.choice((None, "diff")) if source.is_shard else None
        world.note(f"  {action} {mode or ''} {source.slot} {kind.name}")
        world.request(action, source, kind.name, mode)
        time.sleep(world.random.choice((0, 0.1, 0.7)))


def rewrite(world: World) -> None:
    source = world.random.choice(world.sources)
    table = world.random.choice(source.kinds).name
    statement = world.random.choice(
        ("vacuum full {0}", "vacuum analyze {0}", "checkpoint", "reindex table {0}")
    )
    world.note(f"  {source.slot}: {statement.format(table)}")
    with contextlib.suppress(psycopg.errors.DeadlockDetected):
        source.execute(statement.format(table))


def grow(world: World) -> None:
    """A column more, at the target first."""
    name = f"c{len(world.schedule)}"
    world.target.execute(f"alter table if exists grown add column if not exists {name} int")
    lone = world.sources[0]
    with contextlib.suppress(psycopg.errors.DeadlockDetected):
        lone.execute(f"alter table grown add column if not exists {name} int")
        lone.execute(f"update grown set {name} = id where id % 3 = 1")


def change_identity(world: World) -> None:
    identity = world.random.choice(("full", "default"))
    with contextlib.suppress(psycopg.errors.DeadlockDetected):
        world.sources[0].execute(f"alter table keyed replica identity {identity}")


def write_elsewhere(world: World) -> None:
    """WAL without changes of mapped tables."""
    world.source_server.execute(
        "create table if not exists noise (v text);"
        " insert into noise select repeat('n', 500) from generate_series(1, 3000)"
    )


def leave_alone(world: World) -> None:
    time.sleep(1)
