"""A target table whose rows a crash of the server removes is refused, and so is a partition of such
a table.
"""

import re

import pytest

from tests.support.postgres import Database, assert_same
from tests.support.shared import Shared, streams

pytestmark = pytest.mark.usefixtures("without_spark", "deferred_indexes")

T = "create table t (id int primary key, v int)"
TARGETS = {
    "table": T.replace("create table", "create {} table"),
    "partition": f"{T} partition by range (id);"
    " create {} table few partition of t for values from (0) to (9);"
    " create table many partition of t default",
}
UNLOGGED = {name: sql.format("unlogged") for name, sql in TARGETS.items()}
LOGGED = {name: sql.format("") for name, sql in TARGETS.items()}


async def mend(shared: Shared) -> None:
    """Run the statements that the table's error names."""
    status = await shared.table("t")
    assert status["error_code"] == "target_schema"
    remedy = re.search(r"run at the target: (.*); then resync", status["error"])
    assert remedy is not None, status["error"]
    shared.target.execute(remedy[1])


@pytest.mark.follows("apply.rows.make_plan:unlogged_error")
@pytest.mark.parametrize("target", UNLOGGED.values(), ids=UNLOGGED)
@pytest.mark.parametrize("initial", ["copy", "none"])
@streams("t: {initial: <initial>}", source=T, target="<target>")
async def test_the_first_row_is_refused(shared: Shared, target: str, initial: str) -> None:
    await shared.source_state("streaming")  # `initial: none` brings no row from before
    shared.source.execute("insert into t values (1, 1), (10, 1)")
    await shared.table_state("t", "error")
    await mend(shared)
    if initial == "copy":
        await shared.ask("resume")
    await shared.caught_up()
    assert_same(shared.source, shared.target, "t")


@pytest.mark.parametrize("target", LOGGED.values(), ids=LOGGED)
@streams("t:", source=T, target="<target>")
async def test_a_stream_stops_without_a_change_and_goes_on(shared: Shared, target: str) -> None:
    shared.source.execute("insert into t values (1, 1), (10, 1)")
    await shared.caught_up()
    which = "few" if "few" in target else "t"
    shared.target.execute(f"alter table {which} set unlogged")
    await shared.table_state("t", "error")
    shared.source.execute("update t set v = 2")
    await shared.table_state("t", "error")
    assert count(shared.target) == 0
    await mend(shared)
    await shared.caught_up()
    assert_same(shared.source, shared.target, "t")
    assert (await shared.table("t"))["state"] == "ready"


def count(target: Database) -> object:
    return target.value("select count(*) from t where v = 2")
