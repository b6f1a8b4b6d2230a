"""Tables that keep the past, compared with a model. Random requests, errors, new columns and
restarts lose no version, and no row that comes and goes.

The tables belong to a source without tenants, or to a schema that is a tenant. The rows of a second
schema, with equal keys, stay unchanged.
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
"{}.h": {{type: history, column_list: true, exclude: [secret], on_column_added: add{}{}}}
"{}.a": {{type: append, copy_where: "id > 0"{}}}
"{}.m": {{on_delete: mark, metadata: {{deleted_at: gone}}{}}}
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
    schema: str
    scope: str
    """The condition of the rows at the target."""
    values: int = 0
    keys: list[int] = field(default_factory=lambda: [1])
    columns: int = 0
    refuses: bool = False

    async def write(self) -> None:
        for _ in range(self.chance.randint(1, 6)):
            self.values += 1
            self.source.execute(f"update {self.schema}.h set v = {self.values} where id = 1")
            key = self.keys[-1] + 1
            self.keys.append(key)
            for table in ("a", "m"):
                name = f"{self.schema}.{table}"
                self.source.execute(f"insert into {name} values ({key}, {key})")
                if self.chance.random() < 0.7:
                    self.source.execute(f"delete from {name} where id = {key}")

    async def resync(self) -> None:
        mode = self.chance.choice(["reload", "diff"])
        await self.streamer.ask("resync", self._any_table(), mode=mode)

    async def pause(self) -> None:
        await self.streamer.ask("pause", self._any_table())

    async def resume(self) -> None:
        await self.streamer.ask("resume", self._any_table())

    def _any_table(self) -> str:
        return f"{self.schema}.{self.chance.choice(TABLES)}"

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
        added = f"add column w{self.columns} int default 7"
        await self._alter(self.source, f"alter table {self.schema}.h {added}")

    async def _alter(self, db: Database, sql: str) -> None:
        await asyncio.to_thread(db.execute, sql)  # the engine may have to let a lock go first

    async def restart(self) -> None:
        await self.streamer.kill()
        self.streamer.start()

    async def settle(self) -> None:
        if self.refuses:
            await self.refuse()
        for table in TABLES:
            await self.streamer.ask("resume", f"{self.schema}.{table}")
        await self.streamer.caught_up()

    def check(self) -> None:
        busy = f"select v from h where id = 1 and {self.scope} order by kvsz_id"
        found = self.target.execute(busy)
        # A copy of all rows makes a new version for the values of a new column.
        versions = [value for value, _ in itertools.groupby(v for (v,) in found)]
        assert versions == list(range(self.values + 1))
        for table in ("a", "m"):
            rows = self.target.execute(f"select id from {table} where {self.scope} order by id")
            assert rows == [(key,) for key in self.keys], table
        present = f"select id from m where gone is null and {self.scope} order by id"
        assert self.target.execute(present) == self.source.execute(
            f"select id from {self.schema}.m order by id"
        )


@pytest.mark.since(15)  # lists of columns
@pytest.mark.parametrize("consistency", ["table", "transaction"])
@pytest.mark.parametrize(("seed", "schemas"), [(1, ["public"]), (2, ["tenant_a", "tenant_b"])])
async def test_the_past_is_that_of_the_source(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    seed: int,
    consistency: str,
    schemas: list[str],
) -> None:
    for schema in schemas:
        source.execute(f"create schema if not exists {schema}")
        for table, more in zip(TABLES, (", secret int", "", ""), strict=True):
            name = f"{schema}.{table}"
            source.execute(f"create table {name} (id int primary key, v int{more})")
            source.execute(f"insert into {name} (id, v) values (1, 0)")
    has_tenants = len(schemas) > 1
    rule = ("tenant_*", ', sid: "{schema:tenant_(.*)}"') if has_tenants else ("public", "")
    scope = "sid = 'a'" if has_tenants else "true"
    partitions = ", partition_by: {keep: 3}" if has_tenants else ""
    rules = RULES.format(*rule, partitions, *rule * 2)
    async with stream(rules, settings=f"consistency: {consistency}") as streamer:
        await streamer.caught_up()
        model = Model(source, target, streamer, random.Random(seed), schemas[0], scope)
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
        if has_tenants:
            beside = "select id, v from {} where sid = 'b'"
            assert [target.execute(beside.format(table)) for table in TABLES] == [[(1, 0)]] * 3
