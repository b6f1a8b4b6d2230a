"""A source that was removed from the mapping comes back as a source in sync."""

from pathlib import Path

import pytest

from streamer.errors.remedies import Remedy
from tests.support.checking import ERROR, Checker
from tests.support.postgres import Database
from tests.support.remedies import Operator
from tests.support.streamer import Streamer, write_config

pytestmark = pytest.mark.usefixtures("without_spark")
OTHER = "create table other (id int primary key)"


@pytest.mark.follows("bookkeeping.purges:remaining_rows_error")
# A purge finds rows by the sid.
@pytest.mark.parametrize(
    ("sid", "purge"),
    [
        ("a", ""),
        ("a", "delete from t where id = 1; update streamer.purge set began_at = now()"),
        ("a", "delete from t; update streamer.purge set began_at = now(), finished_at = now()"),
        (None, ""),
    ],
    ids=["kept", "half purged", "purged", "without a sid"],
)
async def test_a_source_that_comes_back_waits_for_a_resync(
    sid: str | None,
    purge: str,
    source: Database,
    second: Database,
    target: Database,
    tmp_path: Path,
) -> None:
    source.execute("create table t (id int primary key); insert into t values (1), (2)")
    second.execute(OTHER)
    path = tmp_path / "config.yaml"
    write_config(path, source, target, "t:", sid=sid)
    both = path.read_text() + (
        f"\n- database: stays\n  urls: [{{url: '{second.url}'}}]\n  tables: {{other: {{}}}}\n"
    )
    without = both[: both.index("- database: shop")] + both[both.index("- database: stays") :]
    path.write_text(both)
    streamer = Streamer(path)
    streamer.start()
    try:
        # GIVEN a source that was removed, and written to
        await streamer.caught_up()
        path.write_text(without)
        await streamer.apply()
        source.execute("insert into t values (3)")
        if purge:
            target.execute(purge)
        # WHEN the source comes back as in sync THEN its table waits, and `check` says so before
        declared = both.replace("    t:", "    t: {initial: none}")
        path.write_text(declared)
        checker = Checker(path, source, target)
        await checker.finds(ERROR, "was removed from the mapping", "streamer resync public.t")
        await streamer.apply()
        await streamer.table_state("public.t", "error")
        status = next(each for each in await streamer.statuses() if each["database"] == "shop")
        (table,) = status["tables"]
        assert table["error_code"] == "gap"
        # WHEN the operator runs the command of the message THEN the table is equal
        remedy = Remedy.from_json(table["remedy"])
        assert remedy is not None
        await Operator(path, source, target).follow(remedy)
        await streamer.table_state("public.t", "ready")
        await streamer.caught_up()
        rows = "select id from t order by id"
        assert target.execute(rows) == source.execute(rows) == [(1,), (2,), (3,)]
    finally:
        await streamer.stop()
