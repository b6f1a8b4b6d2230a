"""TRUNCATE of a table that keeps removed rows, some of which are in quarantine."""

import pytest

from tests.integration.test_quarantine import QUARANTINE, apply, retry_like_twins
from tests.support.shared import Shared, streams

VERSIONS = """
, kvsz_start timestamptz not null, kvsz_end timestamptz not null, kvsz_deleted bool not null
"""
KEEPING = {
    "keyed": ("type: history", "primary key", "default", VERSIONS),
    "whole": ("type: history", "", "full", VERSIONS),
    "keyless": ("type: history", "", "default", VERSIONS),
    "marked": ("on_delete: mark", "primary key", "default", ", deleted_at timestamptz"),
    "filtered": (
        'on_delete: mark, filter: "id > 0"',
        "primary key",
        "full",
        ", deleted_at timestamptz",
    ),
}
"""Tables that keep removed rows: rule, key and replica identity, and columns of the target."""


def twins(*, is_target: bool) -> str:
    """Return statements for each table of `KEEPING` and its twin, which refuses no row."""
    made = []
    for name, (rule, key, identity, extra) in KEEPING.items():
        for table in (name, f"{name}_twin"):
            if is_target:
                check = "check (v > 0)" if table == name else ""
                own_key = "" if "history" in rule else key
                made.append(f"create table {table} (id int {own_key}, v int {check}{extra})")
            else:
                made.append(f"create table {table} (id int {key}, v int)")
                made.append(f"alter table {table} replica identity {identity}")
    return "; ".join(made)


@pytest.mark.parametrize("transport", ["text", "binary"])
@streams(
    "\n".join(
        f"{table}: {{initial: none, {rule}}}"
        for name, (rule, *_) in KEEPING.items()
        for table in (name, f"{name}_twin")
    ),
    source=twins(is_target=False),
    target=twins(is_target=True),
    settings=QUARANTINE,
    group="transport: <transport>",
)
async def test_a_retry_after_a_truncate_writes_the_rows_that_a_table_keeps(
    shared: Shared, transport: str
) -> None:
    source = shared.source
    await shared.caught_up()

    async def work(statement: str, *names: str) -> None:
        both = (statement.format(t) for name in names for t in (name, f"{name}_twin"))
        await apply(shared, source, f"begin; {'; '.join(both)}; commit")

    equal = "insert into {} values (3, -3), (3, -3), (3, -3)"
    first = "where ctid = (select min(ctid) from {0} where id = 3)"
    await work("insert into {} values (1, 1), (2, 2), (4, 4)", *KEEPING)
    await work("update {} set v = -2 where id = 2", "keyed", "whole", "marked", "filtered")
    await work("delete from {} where id = 2", "keyed")
    await work("insert into {} values (3, -3)", "keyed", "marked", "filtered")
    await work("update {} set id = 5, v = 5 where id = 4", "keyed", "whole", "marked", "filtered")
    await work("insert into {} values (4, -4)", "keyed", "marked", "filtered")
    await work(equal, "whole", "keyless")
    await work("update {0} set v = -6 " + first, "whole")
    await work("delete from {0} " + first, "whole")
    await work(
        "insert into {0} values (7, -7); truncate {0}; insert into {0} values (8, -8)", *KEEPING
    )
    await work("insert into {0} values (2, 2), (3, -3)", *KEEPING)
    await work("truncate {}", *KEEPING)
    await work("insert into {0} values (2, 2), (3, -3), (9, 9)", *KEEPING)
    await retry_like_twins(shared, KEEPING)
