"""Each schema of a tenant has types of its own, and their tables share a table of the target."""

from pathlib import Path

import pytest

from streamer.commands.tenants.tenant_drift import read_drift
from streamer.mapping.scope import Scope
from streamer.report.problems import Severity
from streamer.target.connection import TargetAddress
from tests.support.checking import Checker
from tests.support.comparing import Compare
from tests.support.postgres import Database
from tests.support.remedies import remedy_of
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


PLACES = """
create schema tenant_{sid};
create domain tenant_{sid}.amount as {base} check (value > 0);
create type tenant_{sid}.place as ({attributes});
create table tenant_{sid}.places
    (id int primary key, price tenant_{sid}.amount, place tenant_{sid}.place);
insert into tenant_{sid}.places values (1, 1.255, '(x,y)');
"""
PLACE = "street text, city text"


@pytest.mark.follows("schema_changes.tenant_types:refuse_unlike_types")
@pytest.mark.parametrize("capture", ["", "ddl: capture"])
async def test_equal_types_of_schemas_share_a_type_and_a_different_type_stops_its_table(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    compare: Compare,
    tmp_path: Path,
    capture: str,
) -> None:
    """A value of a type with swapped attributes would change its meaning, without an error."""

    def add(sid: str, base: str = "numeric(9,2)", attributes: str = PLACE) -> None:
        source.execute(PLACES.format(sid=sid, base=base, attributes=attributes))

    for sid in "ab":
        add(sid)
    add("c", attributes="city text, street text")
    add("d", base="numeric")
    columns = "id, price::text, (place).street, (place).city"
    checker = Checker(tmp_path / "check.yaml", source, target)
    checker.configure(RULES, group=capture)
    unlike = [(sid, "which is defined differently from") for sid in "cd"]
    for sid, words in unlike:  # before the first run
        await checker.finds(Severity.ERROR, f"tenant_{sid}.places", words)
    async with stream(RULES, group=capture) as streamer:
        for sid, name in (("c", "place"), ("d", "amount")):
            remedy = await remedy_of(
                streamer, f"tenant_{sid}.places", "which is defined differently from"
            )
            assert f"streamer resume tenant_{sid}.places" in str(remedy)
            assert f'exclude column "{"place" if sid == "c" else "price"}"' in str(remedy), name
        if not capture:  # a captured definition may change the type first
            for sid, words in unlike:
                await checker.finds(Severity.ERROR, f"tenant_{sid}.places", words)
        source.execute("alter table tenant_c.places drop column place; drop type tenant_c.place")
        source.execute(f"create type tenant_c.place as ({PLACE})")
        source.execute("alter table tenant_c.places add column place tenant_c.place")
        source.execute("alter table tenant_d.places alter price type numeric(9,2)")
        source.execute(
            "drop domain tenant_d.amount; create domain tenant_d.amount as numeric(9,2)"
            " check (value > 0)"
        )
        source.execute("alter table tenant_d.places alter price type tenant_d.amount")
        for sid in "cd":
            await streamer.ask("resume", f"tenant_{sid}.places")
        await streamer.caught_up()
        source.execute(
            "; ".join(
                f"insert into tenant_{sid}.places values (2, 3.5, '({sid},v)')" for sid in "abcd"
            )
        )
        await streamer.caught_up()
        for sid in "abcd":
            copied = target.execute(f"select {columns} from places where sid = '{sid}' order by 1")
            assert copied == source.execute(f"select {columns} from tenant_{sid}.places order by 1")
        results = await compare(streamer)
        assert all(result.is_equal for result in results.values())
