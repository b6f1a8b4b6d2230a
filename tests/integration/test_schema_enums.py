"""Each schema of a tenant has an enum of its own, and their tables share a table of the target."""

import pytest

from streamer.commands.command_scope import Scope
from streamer.commands.tenants.tenant_drift import read_drift
from streamer.target.connection import TargetAddress
from tests.support.comparing import Compare
from tests.support.postgres import Database
from tests.support.streamer import MakeStreamer

pytestmark = pytest.mark.usefixtures("without_spark", "short_backoffs")

RULES = '"tenant_*.*": {sid: "{schema:tenant_(.*)}", create: all}'
LABELS = """
select enumlabel::text from pg_enum
 where enumtypid = (select atttypid from pg_attribute
                     where attrelid = 'orders'::regclass and attname = 'state')
 order by enumsortorder
"""


def add_tenant(source: Database, sid: str, labels: str) -> None:
    schema = f"tenant_{sid}"
    source.execute(
        f"create schema {schema}; create type {schema}.state as enum ({labels});"
        f"create table {schema}.orders (id int primary key, state {schema}.state,"
        f" states {schema}.state[] default '{{}}');"
        f"insert into {schema}.orders (id, state) select row_number() over (), label"
        f" from unnest(enum_range(null::{schema}.state)) label"
    )


def labels_of(target: Database) -> list[str]:
    return [str(label) for (label,) in target.execute(LABELS)]


def rows(db: Database, table: str, condition: str = "true") -> list[tuple[object, ...]]:
    return db.execute(f"select id, state::text from {table} where {condition} order by id")


@pytest.mark.parametrize("capture", ["", "ddl: capture"])
async def test_the_target_has_the_labels_of_all_schemas(
    source: Database, target: Database, stream: MakeStreamer, compare: Compare, capture: str
) -> None:
    labels = {"a": "'new', 'done'", "b": "'new', 'paid', 'done'", "c": "'draft', 'done'"}
    for sid in "ab":
        add_tenant(source, sid, labels[sid])
    async with stream(RULES, settings="discovery_interval: 0.5", group=capture) as streamer:
        await streamer.caught_up()
        add_tenant(source, "c", labels["c"])
        await streamer.table_state("tenant_c.orders", "ready")
        order = labels_of(target)
        assert set(order) == {"draft", "new", "paid", "done"}
        assert order.index("paid") < order.index("done")
        if capture:
            source.execute("alter type tenant_b.state add value 'sent' before 'done'")
            source.execute("insert into tenant_b.orders values (9, 'sent')")
            await streamer.caught_up()
            assert labels_of(target).index("sent") == order.index("done")
            # A tenant renames a label that further tenants have, with rows at the target.
            for sid, name in (("a", "fresh"), ("b", "first")):
                source.execute(f"alter type tenant_{sid}.state rename value 'new' to '{name}'")
                source.execute(f"insert into tenant_{sid}.orders values (10, '{name}')")
                await streamer.caught_up()

            async def is_filled() -> bool:
                return all(
                    rows(target, "orders", f"sid = '{sid}'") == rows(source, f"tenant_{sid}.orders")
                    for sid in "ab"
                )

            await streamer.eventually(is_filled)
        for sid in "abc":
            there = rows(target, "orders", f"sid = '{sid}'")
            assert there == rows(source, f"tenant_{sid}.orders")
        results = await compare(streamer)
        assert all(result.is_equal for result in results.values())
        address = TargetAddress.parse(streamer.settings.target.url)
        drift = await read_drift(address, streamer.mapping, Scope())
        assert all(item.is_equal for item in drift.items)
