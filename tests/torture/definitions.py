"""Faults of definitions: the application changes tables that the program streams.

Each fault works on separate tables. The program copies such a table again, or stops the table and
names the resync; `World.operate` then runs the resync like an operator.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

import psycopg

from tests.torture.checks import Violation
from tests.torture.workload import Connection, Source
from tests.torture.world import World

NOTICE_SECONDS = 60.0
"""How long the program may take to notice a change that makes the application's statements fail."""
LARGE_ROWS = 60_000

_LOCKED = (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected)


def _change(world: World, source: Source, statements: str) -> bool:
    """Run *statements* in a transaction; return False if sessions kept the tables locked."""
    try:
        with psycopg.connect(source.url, autocommit=True) as connection:
            connection.execute("set lock_timeout = '10s'")
            connection.execute(f"begin; {statements}; commit".encode())
    except _LOCKED:
        world.skip("the table stays locked")
        return False
    return True


@contextlib.contextmanager
def _open_transaction(source: Source, statement: str) -> Iterator[Connection]:
    with psycopg.connect(source.url, autocommit=True) as connection:
        connection.execute("set lock_timeout = '10s'")
        connection.execute(f"begin; {statement}".encode())
        try:
            yield connection
        finally:
            connection.execute("commit")


def _until(condition: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def add_and_fill(world: World) -> None:
    """A column comes and is filled while a resync waits for a temporary slot.

    The slot waits for an open transaction. So the application's ALTER and UPDATE come before the
    snapshot, and after a careless program has read the definition.
    """
    lone = world.sources[0]
    if not world.is_streaming(lone) or not world.is_copied("filled"):
        return
    world.excuse(lone, "filled")
    before = world.target.execute(_COPIED_AT)
    name = f"c{len(world.schedule)}"
    waiting = "select 1 from pg_replication_slots where temporary and confirmed_flush_lsn is null"
    with _open_transaction(lone, "select txid_current()"):
        world.request("resync", lone, "filled")
        has_begun = _until(lambda: world.source_server.execute(waiting), 15)
        world.note(f"  resync waits for its slot: {has_begun}")
        try:
            world.target.execute(
                f"set lock_timeout = '5s'; alter table filled add column if not exists {name} int"
            )
        except _LOCKED:
            world.skip("the target's table stays locked")
            return
        is_filled = _change(
            world,
            lone,
            f"alter table filled add column {name} int; update filled set {name} = id + 1",
        )
    if is_filled and not _until(
        lambda: _is_copied(world, lone, name, before), world.options.patience
    ):
        raise Violation(f"values of filled.{name} are missing at the target\n{world.states()}")


_COPIED_AT = "select snapshot_lsn::text from streamer.relation where source = 'public.filled'"


def _is_copied(world: World, source: Source, column: str, before: list[tuple[object, ...]]) -> bool:
    """Whether the target has every value of a column, by a copy after *before*.

    The check comes at once, because a further resync would hide a missing value.
    """
    world.operate()
    is_ready = f"{_COPIED_AT} and state = 'ready' and snapshot_lsn is not null"
    if world.target.execute(is_ready) in ([], before):
        return False
    filled = f"select id from filled where {column} is not null"
    try:
        return set(source.execute(filled)) <= set(world.target.execute(filled))
    except psycopg.errors.UndefinedColumn:
        return False


def drop_while_copied(world: World) -> None:
    """The table is dropped and created while a resync waits for a temporary slot."""
    lone = world.sources[0]
    if not world.is_streaming(lone):
        return
    world.excuse(lone, "remade")
    waiting = "select 1 from pg_replication_slots where temporary and confirmed_flush_lsn is null"
    with _open_transaction(lone, "select txid_current()"):
        world.request("resync", lone, "remade")
        _until(lambda: world.source_server.execute(waiting), 15)
        _remake(world, lone)


def _remake(world: World, source: Source) -> None:
    _change(
        world,
        source,
        "drop table remade; create table remade (id int primary key, v text);"
        f" insert into remade select g, 'remade {len(world.schedule)}' from generate_series(1, 50) g",
    )


def drop_and_create(world: World) -> None:
    lone = world.sources[0]
    world.excuse(lone, "remade")
    _remake(world, lone)
    _others_go_on(world, lone)


def swap_by_rename(world: World) -> None:
    """A new table takes the name, as in a migration of an application."""
    lone = world.sources[0]
    world.excuse(lone, "swapped")
    _change(
        world,
        lone,
        "create table swapped_new (id int primary key, v text);"
        f" insert into swapped_new select g, 'swapped {len(world.schedule)}'"
        " from generate_series(1, 50) g;"
        " alter table swapped rename to swapped_old; alter table swapped_new rename to swapped;"
        " drop table swapped_old; alter index swapped_new_pkey rename to swapped_pkey",
    )
    _others_go_on(world, lone)


def _others_go_on(world: World, source: Source) -> None:
    """Changes of a second table must become visible, in any state of this table.

    With ``consistency: transaction``, a table that an earlier fault has stopped delays all tables
    until the operator requests a copy.
    """
    mark = f"mark {len(world.schedule)}"
    source.execute(
        f"insert into quiet values (1, '{mark}') on conflict (id) do update set v = '{mark}'"
    )
    seen = f"select 1 from quiet where id = 1 and v = '{mark}'"

    def is_seen() -> bool:
        world.operate()
        try:
            return bool(world.target.execute(seen))
        except psycopg.errors.UndefinedTable:  # still to be copied
            return False

    if not _until(is_seen, world.options.patience):
        raise Violation(f"{source.slot}: one table's definition stops all tables\n{world.states()}")


def readd_column(world: World) -> None:
    """A column goes and comes again under the same name: old rows have a different value."""
    lone = world.sources[0]
    world.excuse(lone, "readded")
    how = world.random.choice(("at once", "with work between"))
    world.note(f"  {how}")
    drop = "alter table readded drop column w"
    add = f"alter table readded add column w text default 'w {len(world.schedule)}'"
    if how == "at once":
        _change(world, lone, f"{drop}; {add}")
    elif _change(world, lone, drop):
        _change(world, lone, "update readded set v = 'between' where id % 9 = 1")
        if not _until(lambda: _change(world, lone, add), NOTICE_SECONDS):
            raise Violation("the column cannot be added again: the torture itself is wrong")


def gain_identity(world: World) -> None:
    """A table gets a replica identity, updates and deletes, and may lose the identity again."""
    lone = world.sources[0]
    for table, gain, loss in (
        (
            "gaining",
            "alter table gaining replica identity full",
            "alter table gaining replica identity default",
        ),
        (
            "gaining_key",
            "alter table gaining_key add primary key (id)",
            "alter table gaining_key drop constraint gaining_key_pkey",
        ),
    ):
        world.excuse(lone, table)
        has_identity = (
            f"select 1 from pg_class c where oid = '{table}'::regclass and (relreplident = 'f'"
            " or exists (select from pg_index where indrelid = c.oid and indisprimary))"
        )
        if lone.execute(has_identity) and not _change(world, lone, loss):
            continue
        if not _change(world, lone, gain):
            continue
        for _ in range(2):
            _work_on(world, lone, table)
            time.sleep(world.random.choice((0.0, 3.0)))
        _work_on(world, lone, table)
        if world.random.random() < 0.5:
            world.note(f"  {table} loses it again")
            if not _change(world, lone, loss):
                continue
            time.sleep(world.random.choice((0.0, 7.0)))
            if _change(world, lone, gain):
                _work_on(world, lone, table)


def _work_on(world: World, source: Source, table: str) -> None:
    """Update and delete rows. Before the program has noticed, PostgreSQL may refuse that."""
    modulus, rest = 7, world.random.randrange(7)
    with contextlib.suppress(psycopg.errors.ObjectNotInPrerequisiteState):
        _change(
            world,
            source,
            f"update {table} set v = 'gained {len(world.schedule)}' where id % {modulus} = {rest};"
            f" delete from {table} where id % {modulus} = {(rest + 1) % modulus}",
        )


def leaf_identity(world: World) -> None:
    """A leaf without a replica identity joins a table that has an identity; later the leaf gets an
    identity.

    PostgreSQL refuses the application's updates until the program has taken the table out of the
    publication of updates.
    """
    lone = world.sources[0]
    if not world.is_streaming(lone):
        return
    world.excuse(lone, "leafful")
    part = 100 + len(world.schedule)
    leaf = f"leafful_{part}"
    lone.tolerate_missing_identity(NOTICE_SECONDS)
    if not _change(
        world,
        lone,
        f"create table {leaf} partition of leafful for values in ({part});"
        f" insert into leafful select {part}, g, 'leaf' from generate_series(1, 20) g",
    ):
        return

    def works() -> bool:
        try:
            _change(world, lone, f"update leafful set v = v || '.' where part = {part} and id < 5")
        except psycopg.errors.ObjectNotInPrerequisiteState:
            return False
        return True

    if not _until(works, NOTICE_SECONDS):
        raise Violation(f"{lone.slot}: the application cannot update leafful\n{world.states()}")
    lone.tolerate_missing_identity(0)
    _change(world, lone, f"alter table {leaf} replica identity full")
    _change(world, lone, f"update leafful set v = v || '!' where part = {part} and id > 10")


def reattach_partition(world: World) -> None:
    """A partition is detached, changed and attached, within a transaction or in steps."""
    lone = world.sources[0]
    world.excuse(lone, "reattached")
    mark = len(world.schedule)
    steps = (
        "alter table reattached detach partition reattached_low",
        (
            f"update reattached_low set v = 'away {mark}' where id % 3 = 1;"
            f" delete from reattached_low where id % 3 = 2"
        ),
        "alter table reattached attach partition reattached_low for values from (minvalue) to (40)",
    )
    if world.random.random() < 0.5:
        world.note("  in one transaction")
        _change(world, lone, "; ".join(steps))
        return
    seconds = world.random.choice((0.0, 1.0, 7.0))
    world.note(f"  in steps, {seconds:g} s apart")
    if _change(world, lone, steps[0]):
        time.sleep(seconds)
        _change(world, lone, steps[1])
        time.sleep(seconds)
        if not _until(lambda: _change(world, lone, steps[2]), NOTICE_SECONDS):
            raise Violation("the partition cannot be attached again: the torture itself is wrong")


def resync_in_large(world: World) -> None:
    """An operator requests a resync while streamer writes a large transaction: readers see the
    whole transaction or no part.
    """
    lone = world.sources[0]
    if not world.is_streaming(lone) or not world.is_copied("bulk"):
        return
    number = len(world.schedule)
    sizes = f"select tx, count(*) from bulk group by tx having count(*) <> {LARGE_ROWS}"
    world.target_proxy.throttle(4_000_000)
    lone.execute(
        f"delete from bulk where tx < {number} - 40; insert into bulk"
        f" select {number}, repeat('b', 200) from generate_series(1, {LARGE_ROWS})"
    )
    is_written = (
        "select 1 from pg_stat_progress_copy where datname = 'dw' and relid = 'bulk'::regclass"
    )
    try:
        has_begun = _until(lambda: world.target.execute(is_written), 20)
        time.sleep(world.random.choice((0.0, 0.3, 1.0)))
        world.note(f"  the transaction is being written: {has_begun}")
        world.request("resync", lone, "bulk")
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if partial := world.target.execute(sizes):
                raise Violation(
                    f"parts of transactions are visible in bulk: {partial}\n{world.states()}"
                )
            time.sleep(0.05)
    finally:
        world.target_proxy.heal()


def lock_unmapped(world: World) -> None:
    """A table that is not mapped is locked at the source while the program starts."""
    source = world.random.choice(world.mapped)
    if not world.is_streaming(source):
        return
    # The slot stays as soon as a table is copied. Before that, a start creates the slot again, and
    # waits.
    is_ready = (
        "select 1 from streamer.relation r join streamer.source s on s.id = r.source_id"
        f" where s.slot = '{source.slot}' and r.state = 'ready'"
    )
    if not _until(lambda: world.target.execute(is_ready), NOTICE_SECONDS):
        world.skip(f"no table of {source.slot} is ready")
        return
    with _open_transaction(source, "lock table unmapped in access exclusive mode"):
        world.stop()
        world.start()
        if not world.is_streaming(source, NOTICE_SECONDS):
            raise Violation(
                f"{source.slot} does not start while a session locks a table that is not mapped\n"
                f"{world.states()}"
            )
