"""A tenant that comes and goes, while its peers stream.

An operator removes the tenant, deletes the rows and adds the tenant again, by the commands of
`streamer tenants`. Processes and commands may die meanwhile. A removed tenant writes and migrates
as before.
"""

import contextlib
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from subprocess import CompletedProcess, TimeoutExpired

import psycopg

from tests.support.process import command
from tests.torture.checks import Violation
from tests.torture.workload import Source
from tests.torture.world import COMING, World

SID = COMING
COMMAND_SECONDS = 120


def move_tenant(world: World) -> None:
    """The tenant goes, loses all rows at the target, or comes back."""
    tenant = _tenant(world)
    if SID not in world.away:
        if not world.is_streaming(tenant):
            return  # the target may have no row of the tenant yet
        _remove(world, tenant)
        if world.random.random() < 0.5:
            return  # the rows stay for a while
    if not world.purged:
        _purge(world, tenant)
        world.purged = True
        if world.random.random() < 0.5:
            return
    _add(world, tenant)


def restore_records(world: World) -> None:
    """Let the tenant take part in the end."""
    if SID not in world.away:
        return
    if not world.purged:
        _purge(world, _tenant(world))
        world.purged = True
    _add(world, _tenant(world))


def _tenant(world: World) -> Source:
    return next(source for source in world.sources if source.sid == SID)


def _tenants(world: World, *arguments: str) -> CompletedProcess[str]:
    return command(world.config, "tenants", *arguments, seconds=COMMAND_SECONDS)


def _remove(world: World, tenant: Source) -> None:
    """Run the command, and let the process read the file again, or start on the file."""
    name = tenant.database
    with ThreadPoolExecutor(1) as threads:
        removing = threads.submit(_tenants, world, "remove", name, "--sid", SID, "--yes")
        while f"sid: {SID}" in world.config.read_text() and not removing.done():
            time.sleep(0.05)
        world.away.add(SID)
        world.purged = False
        _reload(world)
        result = removing.result()
    world.note(f"  removed: {result.returncode} {result.stderr.strip()[-300:]}")
    if result.returncode:
        raise Violation(f"{tenant.slot} cannot be removed: {result.stderr}\n{world.states()}")
    slot = f"select 1 from pg_replication_slots where slot_name = '{tenant.slot}'"
    if tenant.execute(slot):
        raise Violation(f"{tenant.slot} is removed, and its slot is still there")


def _purge(world: World, tenant: Source) -> None:
    purge_rows(world, tenant.database, SID, [kind.target for kind in tenant.kinds])


def purge_rows(world: World, database: str, sid: str, tables: Iterable[str]) -> None:
    """Delete a tenant's rows; the first commands may be killed."""
    arguments = ("purge", database, "--sid", sid, "--yes")
    for _ in range(world.random.randrange(3)):
        with contextlib.suppress(TimeoutExpired):
            command(world.config, "tenants", *arguments, seconds=world.random.random() * 3)
    deadline = time.monotonic() + world.options.patience
    while (result := _tenants(world, *arguments)).returncode:
        # The storm may have cut the connection, or a session locks a table.
        if time.monotonic() > deadline:
            raise Violation(f"{database}:{sid} cannot be purged: {result.stderr}")
        time.sleep(0.5)
    world.note(f"  purged: {result.stdout.strip()[-200:]}")
    for table in tables:
        with contextlib.suppress(psycopg.errors.UndefinedTable):
            rows = world.target.execute(
                f"select count(*) from {table} where sid = '{sid}' having count(*) > 0"
            )
            if rows:
                raise Violation(f"{database}:{sid} is purged, and {table} has {rows} rows of it")


def _add(world: World, tenant: Source) -> None:
    result = _tenants(world, "add", tenant.database, world.url(tenant), "--sid", SID)
    world.note(f"  added: {result.returncode} {result.stderr.strip()[-300:]}")
    if result.returncode:
        raise Violation(f"{tenant.slot} cannot be added: {result.stderr}")
    world.away.discard(SID)
    _reload(world)


def _reload(world: World) -> None:
    """The process reads the configuration again by SIGHUP, or after a kill at the next start."""
    if world.random.random() < 0.3:
        world.note("  killed")
        world.kill()
        world.start()
    else:
        world.hang_up()
