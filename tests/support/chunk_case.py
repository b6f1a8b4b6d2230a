"""A table whose rows change on both sides of each border during the copy of its chunks."""

from pathlib import Path

from tests.support.kills import Kills
from tests.support.postgres import Database

DDL = """
create table big (id numeric primary key, v text, large text, region int default 0);
alter table big alter large set storage external;
insert into big select g, 'before', case when g % 5 = 0 then repeat('large', 420) end
from generate_series(1, 1200) g;
"""
PARTITIONED_DDL = """
create table big (id numeric, v text, large text, region int default 0, primary key (id, region))
    partition by range (id);
create table low (region int not null default 0, large text, gone int, v text, id numeric not null);
alter table low alter large set storage external, drop gone;
alter table big attach partition low for values from (minvalue) to (300);
create table mid partition of big for values from (300) to (900) partition by list (region);
create table mid_0 partition of mid for values in (0);
create table mid_rest partition of mid default;
create table old partition of big for values from (900) to (950);
create table kept partition of big for values from (950) to (1000);
create table rest partition of big default;
alter table big alter large set storage external;
insert into big select g, 'before', case when g % 5 = 0 then repeat('large', 420) end
from generate_series(1, 1200) g;
"""
"""Rows of a range of keys are in several partitions. One partition has a different order and
different numbers of columns.
"""
SETTINGS = "sync: {resumable_above: 400kB}"
"""The first chunk has 320 rows: streamer assumes 128 bytes for a row without statistics."""
CHUNKS = "select coalesce((select (chunks->>'count')::int from streamer.relation), 0)"


def write(source: Database, n: int) -> None:
    """Change rows before and after each border, and move rows across it in both directions."""
    source.execute(
        f"""
        begin;
        insert into big values ({-n}, 'new', null), (100000 + {n}, 'new', repeat('new', 1000));
        update big set v = v || '.' where id % 97 = {n % 97} and id <> 97;
        delete from big where id = 3 * {n} + 2;
        update big set id = id + 20000, large = 'moved up' where id = 7 * {n} + 8;
        update big set id = -20000 - id, large = null where id = 1199 - {n};
        commit
        """
    )


def request(target: Database, action: str) -> None:
    target.execute(
        f"insert into streamer.request (relation_id, action) select id, '{action}' from"
        " streamer.relation; notify streamer"
    )


class ChunkCase(Kills):
    """A source, its target, and the writer."""

    DDL = DDL

    def __init__(self, directory: Path, source: Database, target: Database) -> None:
        super().__init__(directory, source, target, "big:", settings=SETTINGS)
        self.written = 0
        source.execute(self.DDL)
        target.execute(
            "create table big (id numeric primary key, v text, large text, region int);"
            "create index big_v on big (v); create index big_id_v on big (id, v)"
        )

    def write(self, count: int = 1) -> None:
        for _ in range(count):
            self.written += 1
            write(self.source, self.written)

    @property
    def chunks(self) -> int:
        return int(str(self.target.value(CHUNKS)))

    @property
    def unchanged(self) -> str:
        """The xmin and ctid of a row of the first chunk. The writer never changes this row, but a
        second copy would write a new version.
        """
        return str(self.target.value("select xmin || ' ' || ctid from big where id = 97"))

    @property
    def indexes(self) -> list[object]:
        """The names of the secondary indexes that exist at the target."""
        names = (
            "select relname::text from pg_class where relname in ('big_v', 'big_id_v') order by 1"
        )
        return [name for (name,) in self.target.execute(names)]

    def die_writing(self, failpoint: str) -> None:
        """Write until *failpoint* kills the process, at most 20 times."""
        writes_max = self.written + 20
        self.die(failpoint, lambda: self.write(int(self.written < writes_max)))

    async def recover(self) -> None:
        await super().recover()
        self.assert_equal()

    def assert_equal(self) -> None:
        rows = "select * from big order by id"
        assert self.source.execute(rows) == self.target.execute(rows)
        assert self.target.execute("select from streamer.relation where chunks is not null") == []
        conflicts = self.target.execute("select kind, key from streamer.conflict")
        assert self.indexes == ["big_id_v", "big_v"]
        assert conflicts == [], "each change found its row as it was"


class PartitionedCase(ChunkCase):
    """A partitioned source, whose partitions come and go."""

    DDL = PARTITIONED_DDL

    def __init__(self, directory: Path, source: Database, target: Database) -> None:
        super().__init__(directory, source, target)
        target.execute("alter table big drop constraint big_pkey, add primary key (id, region)")

    def write(self, count: int = 1) -> None:
        super().write(count)
        n = self.written
        self.source.execute(
            f"update big set region = 1 - region where id % 89 = {n % 89} and id <> 97"
        )

    def change_partitions(self) -> None:
        """Change partitions with rows that only later chunks copy."""
        self.source.execute(
            """
            drop table old;
            alter table big detach partition kept; update kept set v = 'detached';
            create table more partition of big for values from (30000) to (40000);
            insert into big select g, 'new' from generate_series(30001, 30010) g;
            create table joined (v text, large text, id numeric not null, region int not null);
            insert into joined select 'joined', repeat('large', 420), g, 0
            from generate_series(40001, 40050) g;
            alter table big attach partition joined for values from (40000) to (50000)
            """
        )
