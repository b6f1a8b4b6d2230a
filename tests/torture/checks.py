"""Invariants of the target: at a kill, and in the end."""

from streamer.commands.demo.embedded_servers import Server
from streamer.util.lsn import Lsn
from tests.support.postgres import Database
from tests.torture.tables import Compare, Kind
from tests.torture.workload import Source

SAMPLE = 8


class Violation(Exception):
    """A state that must never occur."""


def check_acknowledged(source: Source, target: Database) -> int:
    """Check that the target has each acknowledged transaction of *source* once; return their
    number.

    Call this function while the program does not run. The check reads the slot first, and ignores
    later acknowledgements.
    """
    found = source.execute(
        f"select confirmed_flush_lsn::text from pg_replication_slots where slot_name = '{source.slot}'"
    )
    if not found or found[0][0] is None:  # the slot is being made
        return 0
    acknowledged = Lsn.parse(str(found[0][0]))
    expected = source.ledger.through(acknowledged)
    for table in source.ledger.tables:
        in_step = target.execute(
            "select 1 from streamer.relation r join streamer.source s on s.id = r.source_id"
            f" where s.slot = '{source.slot}' and r.source = 'public.{table}' and snapshot_lsn is not null"
        )
        if not in_step:
            continue  # still to be copied
        own = source.kind(table).owned(source.sid)
        rows = [number for (number,) in target.execute(f"select id from {table} where {own}")]
        if missing := sorted(expected.difference(rows)):
            raise Violation(
                f"{source.slot}: acknowledged to {acknowledged}, but {len(missing)} transactions"
                f" are missing in {table}: {missing[:SAMPLE]}"
            )
        if len(set(rows)) != len(rows):
            raise Violation(f"{source.slot}: transactions are twice in {table}")
    return len(expected)


def check_table(source: Source, target: Database, kind: Kind) -> None:
    """Check that the target's table keeps the promise of its type."""
    if kind.compare is Compare.ABSENT:
        _check_absent(target, kind)
        return
    columns = _columns(source, kind)
    listed = ", ".join(columns)
    own = kind.owned(source.sid)
    if kind.compare is Compare.HISTORY:
        _check_versions(source, target, kind, kind.sid or source.sid)
        own += " and kvsz_end = '9999-01-01' and not kvsz_deleted"
    here = f"select ({listed})::text from {kind.name} where {kind.kept or 'true'}"
    there = f"select ({listed})::text from {kind.target} where {own}"
    wanted = sorted(str(row) for (row,) in source.execute(here))
    found = sorted(str(row) for (row,) in target.execute(there))
    if kind.compare is Compare.SUPERSET:
        keep = set(wanted)
        found = [row for row in found if row in keep]
    if kind.compare is Compare.PARTIAL:
        copied = source.execute(f"{here} and {kind.copy_where}")
        keep = {*found, *(str(row) for (row,) in copied)}
        wanted = [row for row in wanted if row in keep]
    if wanted != found:
        raise Violation(f"{source.slot}: {kind.name} differs: {_difference(wanted, found)}")


def _columns(source: Source, kind: Kind) -> list[str]:
    """Columns that both sides have: a history has more, and generated columns may be missing."""
    rows = source.execute(
        "select quote_ident(attname) from pg_attribute"
        f" where attrelid = '{kind.name}'::regclass and attnum > 0 and not attisdropped order by attname"
    )
    return [str(name) for (name,) in rows]


def _check_absent(target: Database, kind: Kind) -> None:
    """Check that neither a table nor the bookkeeping shows the table that the mapping leaves out."""
    if target.execute(f"select 1 from pg_class where relname = '{kind.target}'"):
        raise Violation(f"{kind.name} is left out, and the target has {kind.target}")
    if target.execute(f"select 1 from streamer.relation where source = '{kind.name}'"):
        raise Violation(f"{kind.name} is left out, and the bookkeeping has the table")


def _check_versions(source: Source, target: Database, kind: Kind, sid: str | None) -> None:
    own = f"and a.sid = '{sid}' and b.sid = '{sid}'" if sid else ""
    overlapping = target.execute(
        f"select a.id from {kind.target} a join {kind.target} b on a.id = b.id and a.ctid < b.ctid {own}"
        " where a.kvsz_start < b.kvsz_end and b.kvsz_start < a.kvsz_end"
        " and a.kvsz_start < a.kvsz_end and b.kvsz_start < b.kvsz_end limit 5"
    )
    if overlapping:
        raise Violation(f"{source.slot}: versions overlap in {kind.name}: {overlapping}")


def _difference(wanted: list[str], found: list[str]) -> str:
    missing, extra = list(wanted), []
    left = sorted(found)
    counts: dict[str, int] = {}
    for row in wanted:
        counts[row] = counts.get(row, 0) + 1
    for row in left:
        if counts.get(row, 0):
            counts[row] -= 1
        else:
            extra.append(row)
    missing = [row for row, count in counts.items() for _ in range(count)]
    show = [row[:100] for row in missing[:SAMPLE]], [row[:100] for row in extra[:SAMPLE]]
    return f"{len(missing)} rows missing, {show[0]}; {len(extra)} too many, {show[1]}"


def check_nothing_left(sources: list[Source], source_server: Server, target: Database) -> None:
    """No slot, put-off index, open request or half copy of ours stays behind."""
    slots = {
        str(name) for (name,) in source_server.execute("select slot_name from pg_replication_slots")
    }
    if extra := slots - {source.slot for source in sources}:
        raise Violation(f"slots were left behind: {extra}")
    is_open = "relation_id is not null and state in ('queued', 'taken')"
    for table, condition in (("deferred_index", "true"), ("request", is_open)):
        if rows := target.execute(f"select * from streamer.{table} where {condition}"):
            raise Violation(f"left in streamer.{table}: {rows}")
    off = target.execute(
        "select relname from pg_class where reloptions::text like '%autovacuum_enabled%'"
    )
    if off:
        raise Violation(f"autovacuum stays off: {off}")
