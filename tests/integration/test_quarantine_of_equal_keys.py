"""Changes of a quarantined row also go into quarantine when the key comes in different bytes."""

from typing import Any

import pytest

from tests.integration.test_equal_keys import (
    ICU,
    NEEDED,
    OF_DISTRIBUTIONS,
    shared_server,
    target_server,
)
from tests.integration.test_quarantine import QUARANTINE, ask, rows
from tests.support.postgres import Database, assert_same
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer, Streamer

__all__ = ["shared_server", "target_server"]

pytestmark = pytest.mark.usefixtures("without_spark")

KEYS = {
    "numeric": ("numeric", "12", "12.0"),
    "char": ("char(3)", "'a'", "'a  '"),
    "float": ("float8", "'0'", "'-0'"),
    "interval": ("interval", "'1 month'", "'30 days'"),
    "array": ("numeric[]", "'{12}'", "'{12.0}'"),
    "range": ("numrange", "'[1,2)'", "'[1.0,2.0)'"),
    "document": ("jsonb", "'{\"a\": 1}'", "'{\"a\": 1.0}'"),
}
"""For each case the type, and two values that are equal to the type."""
TABLE = "create table t (id <kind> primary key, n int default 1, v int)"
POSITIVE = "alter table t add constraint positive check (v > 0)"


async def retry_last_row(
    streamer: Streamer, source: Database, target: Database, value: str, equal: str
) -> None:
    await streamer.caught_up()
    source.execute(f"insert into t values ({value}, 1, -1)")
    await streamer.caught_up()
    # The row goes, and comes again with different bytes.
    source.execute("delete from t")
    source.execute(f"insert into t values ({equal}, 2, 2)")
    source.execute("update t set n = 3")
    await streamer.caught_up()
    assert len(await rows(target)) == 4
    target.execute("alter table t drop constraint positive")
    await ask(streamer, target, "retry", (await rows(target))[-1].id)
    await streamer.caught_up()
    assert not await rows(target)
    assert_same(source, target, "t")


@pytest.mark.parametrize(("kind", "value", "equal"), KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("transport", ["text", "binary"])
@streams(
    "t: {initial: none}",
    source=TABLE,
    target=f"{TABLE}; {POSITIVE}",
    settings=QUARANTINE,
    group="transport: <transport>",
)
async def test_a_retry_brings_the_last_row(
    shared: Shared, kind: str, value: str, equal: str, transport: str
) -> None:
    await retry_last_row(shared, shared.source, shared.target, value, equal)


@pytest.mark.parametrize("name", OF_DISTRIBUTIONS if ICU is not None else ())
@pytest.mark.parametrize("transport", ["text", "binary"])
async def test_a_retry_brings_the_last_row_of_a_type_that_distributions_have(
    source: Database, target: Database, stream: MakeStreamer, name: str, transport: str
) -> None:
    kind, value, equal = OF_DISTRIBUTIONS[name]
    for db in (source, target):
        db.execute(f"{NEEDED[name]}; {TABLE.replace('<kind>', kind)}")
    target.execute(POSITIVE)
    settings: dict[str, str] = {"settings": QUARANTINE, "group": f"transport: {transport}"}
    async with stream("t: {initial: none}", **settings) as streamer:
        await retry_last_row(streamer, source, target, value, equal)


def test_the_target_names_values_of_every_kind(target: Database) -> None:
    def names(kind: str, *values: str) -> list[Any]:
        documents = ", ".join(f"""'{{"v": "{value}"}}'""" for value in values)
        named = f"select unnest(streamer.name_values('{kind}', array[{documents}]))"
        return [name for (name,) in target.execute(named)]

    # A type without a hash, values that are none, and values that a modifier rounds or refuses.
    one, same, other = names("money", "1", "1.00", "2")
    assert one == same != other
    one, none, same = names("numeric", "1", "one", "1.0")
    assert one == same
    assert none is None
    one, same, other = names("numeric(10,1)", "1.04", "1", "1.1")
    assert one == same != other
    assert names("varchar(3)", "abcd") == [None]
    assert names("no_such_type", "1") == [None]
