"""Random changes of pairs of equal tables: one is written as sets, the other in exact order.

A trigger that fires for replicated changes forces exact order. Both tables get the same statements
in the same transactions, so they have to be equal, with all times. `SEED` repeats a run.
"""

import asyncio
import os
import random
from collections.abc import Iterator

import pytest

from tests.support.postgres import Database
from tests.support.properties import EXAMPLES
from tests.support.streamer import MakeStreamer

FILTER = 'filter: "n > 2"'
RULES = {
    "clone": "type: clone",
    "computed": 'set: {v: "upper(v)"}',
    "facts": "metadata: {committed_at: at, operation: op, lsn: l}",
    "append": "type: append",
    "append_filter": f"type: append, {FILTER}",
    "mark": "on_delete: mark",
    "mark_filter": f"on_delete: mark, {FILTER}",
    "filter": FILTER,
    "skip": "skip_truncate: true",
    "history": "type: history",
    "history_skip": "type: history, skip_truncate: true",
    "history_filter": f"type: history, {FILTER}",
}
"""Each of them with and without REPLICA IDENTITY FULL, and an index of the target."""
KINDS = {
    "int": [str(number) for number in range(1, 9)],
    "numeric": ["1", "1.0", "1.00", "2", "2.0", "3", "4", "5.5", "5.50"],
    "text": ["'a'", "'A'", "''", r"'\'", r"E'\t'", "'NULL'", "'b'", "'c'"],
}
EXTRA = {
    "mark": ", deleted_at timestamptz",
    "facts": ", at timestamptz, op text, l pg_lsn",
    "history": ", kvsz_start timestamptz not null, kvsz_end timestamptz not null,"
    " kvsz_deleted boolean not null",
}
ROUNDS = max(2, EXAMPLES // 15)
FACTS = {
    "mark": ", deleted_at",
    "facts": ", at, op, l",
    "history": ", kvsz_start, kvsz_end, kvsz_deleted",
}
FORCE = """
create function nothing() returns trigger language plpgsql as 'begin return new; end'
"""


def names() -> Iterator[tuple[str, str, bool, bool]]:
    for rule in RULES:
        for is_full in (False, True):
            for is_indexed in (False, True):
                if "mark" in rule and is_full and not is_indexed:
                    continue  # a mark needs a key
                suffix = f"{'_full' if is_full else ''}{'' if is_indexed else '_bare'}"
                yield f"{rule}{suffix}", rule, is_full, is_indexed


def make(source: Database, target: Database, kind: str) -> str:
    """Make all tables, those in exact order with an x behind their names; return the rules."""
    rules = []
    target.execute(FORCE)
    for name, rule, is_full, is_indexed in names():
        columns = f"k {kind} not null, g int not null, n int, v text, big text"
        extra = EXTRA.get(rule.split("_")[0], "")
        # The filter needs unchanged large values, which only whole old rows have.
        storage = "plain" if FILTER in RULES[rule] and not is_full else "external"
        unique = "" if "history" in rule else "unique"
        for table in (name, f"{name}_x"):
            source.execute(
                f"create table {table} ({columns}, primary key (k, g));"
                f"alter table {table} alter big set storage {storage}"
                + (f"; alter table {table} replica identity full" if is_full else "")
            )
            index = f"create {unique} index on {table} (k, g)" if is_indexed else ""
            target.execute(f"create table {table} ({columns}{extra}); {index}")
            rules.append(f"{table}: {{initial: none, {RULES[rule]}}}")
        target.execute(
            f"create trigger nothing before update on {name}_x for each row"
            f" execute function nothing(); alter table {name}_x enable always trigger nothing"
        )
    return "\n".join(rules)


def statement(choose: random.Random, keys: list[str]) -> str:
    def key() -> tuple[str, int]:
        return choose.choice(keys), choose.choice([0, 0, 0, 1])

    (k, g), (other, h) = key(), key()
    n, v = choose.randrange(6), f"'{choose.choice('abc')}'"
    big = choose.choice(["null", "'s'", f"repeat({v}, 3000)"])
    taken = f"select from {{0}} o where (o.k, o.g) = ({other}, {h}) and (o.k, o.g) <> ({k}, {g})"
    insert = f"insert into {{0}} values ({k}, {g}, {n}, {v}, {big}) on conflict do nothing"
    update = f"update {{0}} set n = {n}, v = {v} where (k, g) = ({k}, {g})"
    move = (
        f"update {{0}} set k = {other}, g = {h}, n = {choose.choice(['n', str(n)])}"
        f" where (k, g) = ({k}, {g}) and not exists ({taken})"
    )
    weights = {
        insert: 6,
        update: 5,
        f"update {{0}} set big = {big} where (k, g) = ({k}, {g})": 1,
        "update {0} set n = n + 1": 1,
        move: 3,
        f"delete from {{0}} where (k, g) = ({k}, {g})": 4,
        "truncate {0}": 0.5,
    }
    return choose.choices([*weights], [*weights.values()])[0]


@pytest.mark.parametrize(
    ("kind", "transport"), [("int", "binary"), ("numeric", "text"), ("text", "binary")]
)
@pytest.mark.timeout(180)
async def test_sets_write_what_exact_order_writes(
    source: Database, target: Database, stream: MakeStreamer, kind: str, transport: str
) -> None:
    seed = int(os.environ.get("SEED", random.randrange(1_000_000)))
    choose = random.Random(seed)
    rules = make(source, target, kind)
    tables = [f"{name}{suffix}" for name, *_ in names() for suffix in ("", "_x")]

    def work() -> list[list[str]]:
        transactions = [
            [statement(choose, KINDS[kind]) for _ in range(choose.choice([1, 1, 2, 5, 12]))]
            for _ in range(choose.randrange(1, 6))
        ]
        with source.connect() as connection:
            for statements in transactions:
                with connection.transaction():
                    for each in statements:
                        connection.execute("; ".join(each.format(t) for t in tables).encode())
        return transactions

    # Several transactions share a window.
    settings = "commit_interval: 0.3\ncommit_interval_min: 0.2"
    async with stream(rules, group=f"transport: {transport}", settings=settings) as streamer:
        await streamer.caught_up()
        for _ in range(ROUNDS):
            transactions = await asyncio.to_thread(work)
            await streamer.caught_up()
            for name, rule, _, _ in names():
                columns = f"k::text, g, n, v, md5(big){FACTS.get(rule.split('_')[0], '')}"
                sets, ordered = (
                    target.execute(f"select {columns} from {table} order by {columns}")
                    for table in (name, f"{name}_x")
                )
                assert sets == ordered, (seed, name, transactions)
                if rule in ("clone", "facts"):
                    rows = source.execute(f"select k::text, g, n, v, md5(big) from {name}")
                    assert sorted(map(str, rows)) == sorted(str(row[:5]) for row in sets), seed
