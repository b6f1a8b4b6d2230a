"""Tables that keep the past, compared with a model. Random requests, errors, new columns and
restarts lose no version, and no row that comes and goes.
"""

import asyncio
import itertools
import random
from dataclasses import dataclass, field

import pytest

from tests.support.postgres import Database
from tests.support.streamer import MakeStreamer, Streamer

pytestmark = [pytest.mark.usefixtures("without_spark"), pytest.mark.usefixtures("short_backoffs")]

RULES = """
h: {type: history, column_list: true, exclude: [secret], on_column_added: add}
a: {type: append}
m: {on_delete: mark, metadata: {deleted_at: gone}}
"""
TABLES = ("h", "a", "m")
STEPS = 14


@dataclass
class Model:
    """What the source has had: the values of a busy row, and the keys that came and went."""

    source: Database
    target: Database
    streamer: Streamer
    chance: random.Random
    values: int = 0
    keys: list[int] = field(default_factory=lambda: [1])
    columns: int = 0
    refuses: bool = False

    async def write(self) -> None:
        for _ in range(self.chance.randint(1, 6)):
            self.values += 1
            self.source.execute(f"update h set v = {self.values} where id = 1")
            key = self.keys[-1] + 1
            self.keys.append(key)
            for table in ("a", "m"):
                self.source.execute(f"insert into {table} values ({key}, {key})")
                if self.chance.random() < 0.7:
                    self.source.execute(f"delete from {table} where id = {key}")

    async def resync(self) -> None:
        mode = self.chance.choice(["reload", "diff"])
        await self.streamer.ask("resync", f"public.{self.chance.choice(TABLES)}", mode=mode)

    async def pause(self) -> None:
        await self.streamer.ask("pause", f"public.{self.chance.choice(TABLES)}")

    async def resume(self) -> None:
        await self.streamer.ask("resume", f"public.{self.chance.choice(TABLES)}")

    async def refuse(self) -> None:
        """The target begins or ends to refuse new values."""
        self.refuses = not self.refuses
        for table in TABLES:
            await self._alter(
                self.target,
                f"alter table {table} add constraint no_more check (v is null) not valid"
                if self.refuses
                else f"alter table {table} drop constraint no_more",
            )

    async def add_column(self) -> None:
        self.columns += 1
        await self._alter(self.source, f"alter table h add column w{self.columns} int default 7")

    async def _alter(self, db: Database, sql: str) -> None:
        await asyncio.to_thread(db.execute, sql)  # the engine may have to let a lock go first

    async def restart(self) -> None:
        await self.streamer.kill()
        self.streamer.start()

    async def settle(self) -> None:
        if self.refuses:
            await self.refuse()
        for table in TABLES:
            await self.streamer.ask("resume", f"public.{table}")
        await self.streamer.caught_up()

    def check(self) -> None:
        found = self.target.execute("select v from h where id = 1 order by kvsz_id")
        # A copy of all rows makes a new version for the values of a new column.
        versions = [value for value, _ in itertools.groupby(v for (v,) in found)]
        assert versions == list(range(self.values + 1))
        for table in ("a", "m"):
            rows = self.target.execute(f"select id from {table} order by id")
            assert rows == [(key,) for key in self.keys], table
        gone = self.target.execute("select id from m where gone is null order by id")
        assert gone == self.source.execute("select id from m order by id")


@pytest.mark.parametrize("consistency", ["table", "transaction"])
@pytest.mark.parametrize("seed", [1, 2])
async def test_the_past_is_that_of_the_source(
    source: Database, target: Database, stream: MakeStreamer, seed: int, consistency: str
) -> None:
    source.execute("create table h (id int primary key, v int, secret int)")
    source.execute("create table a (id int primary key, v int)")
    source.execute("create table m (id int primary key, v int)")
    for table in TABLES:
        source.execute(f"insert into {table} (id, v) values (1, 0)")
    async with stream(RULES, settings=f"consistency: {consistency}") as streamer:
        await streamer.caught_up()
        model = Model(source, target, streamer, random.Random(seed))
        acts = [
            model.resync, model.resync, model.pause, model.resume,
            model.refuse, model.add_column, model.restart,
        ]  # fmt: skip
        for _ in range(STEPS):
            await model.write()
            await model.chance.choice(acts)()
        await model.write()
        await model.settle()
        model.check()
