"""The profiles of ``make bench``: each is a schema, a workload, and the changes that it makes.

SQL goes through `str.format` with these names. The names of a round are ``changes``,
``transactions``, ``round`` (from 1) and ``first`` (changes of earlier rounds). Further names are
``rows`` (of the fill) and ``source`` (the number of the source, from 0).
"""

import enum
from dataclasses import dataclass
from typing import Any, Final


class Kind(enum.Enum):
    """The way to measure a profile."""

    DRAIN = "changes/s"
    """Each side applies the same backlog."""
    LATENCY = "ms"
    """Each side streams a steady load; the time from the flush of a commit to its visibility."""
    LOAD = "% of a core"
    """Each side streams a steady load, or no load; the CPU of its processes."""
    COPY = "s"
    """Each side copies all tables; the time from its start until the tables are ready."""


@dataclass(frozen=True, slots=True)
class Pgbench:
    """A load that the program pgbench makes. *script*: SQL, or None for pgbench's own."""

    script: str | None = None
    rate: int | None = None
    """Transactions a second; None: as fast as possible."""


@dataclass(frozen=True, slots=True)
class Case:
    """A profile."""

    name: str
    title: str
    kind: Kind = Kind.DRAIN
    schema: str = ""
    """SQL for each source and for the target database of each side."""
    schema_of_streamer: str | None = None
    """SQL that replaces `schema` for streamer, whose tables may have further columns."""
    fill: str = ""
    """SQL that fills sources and targets with the same rows, before the first round."""
    procedure: str = ""
    """SQL of a procedure at sources."""
    workload: str | Pgbench = ""
    touch: str = ""
    """A last transaction of each round that changes every table once."""
    per_transaction: int = 20
    """Changes a transaction."""
    share: float = 1.0
    """Changes of a round, as a fraction of ``--changes``."""
    rows: int | None = None
    """Rows of the fill; None for the number of changes of all rounds."""
    tables: tuple[str, ...] = ("items",)
    touched: int = 1
    """Changes that `touch` makes."""
    rule: str = "initial: none"
    compared: str = "select * from {table}"
    """The query whose rows must be equal on both sides."""
    compared_of_streamer: str | None = None
    sources: int = 1
    transports: tuple[str, ...] = ("binary", "text")
    streams_natively: bool = False
    """PostgreSQL's subscription gets transactions in progress, too."""
    pgbench_scale: int = 0
    """Tables and rows come from ``pgbench --initialize``."""

    @property
    def identifier(self) -> str:
        """The name of databases, slots and subscriptions."""
        return self.name.replace("-", "_")


ITEMS: Final = (
    "create table items (id bigint primary key, name text, amount numeric(12,2), at timestamptz,"
    " note text);"
)
_ROW: Final = (
    "g, 'name of item ' || g, g * 0.25, timestamptz '2026-01-01' + g * interval '1 second',"
    " md5(g::text)"
)
FILL_ITEMS: Final = f"insert into items select {_ROW} from generate_series(-100, {{rows}}) g"
_CALL: Final = "call work({transactions}, {first}, {rows})"
_TOUCH: Final = "update items set amount = amount + 1 where id = 0"


def _procedure(body: str, declare: str = "") -> str:
    """Return a procedure that commits once for each of *transactions*; *t* counts them, *first* the
    changes before, *size* the rows of the table.
    """
    return (
        "create procedure work(transactions int, first bigint, size bigint) language plpgsql as $$"
        f" declare {declare} t bigint; begin for t in 0 .. transactions - 1 loop {body} commit;"
        " end loop; end $$"
    )


def _spread(count: int, size: str = "size") -> str:
    """Return SQL for *count* different keys from 1 to *size*, far apart in the table.

    *size* must not be a multiple of the prime 104729.
    """
    return (
        f"array(select 1 + ((first + t * {count}) * 7919 + g * 104729) % {size}"
        f" from generate_series(1, {count}) g)"
    )


_CHANGE: Final = "amount = amount + 1, at = clock_timestamp(), note = md5((first + t)::text)"
_INSERT: Final = (
    f"insert into items select {_ROW} from generate_series("
    "size + first + t * {count} + 1, size + first + t * {count} + {count}) g;"
)
_MIX: Final = _procedure(
    "for i in 1 .. 4 loop"
    f" update items set {_CHANGE} where id = 1 + ((first + t) * 7919 + i * 104729) % size;"
    " end loop;"
    f" insert into items select {_ROW} from (select size + first / 5 + t + 1 as g) g;"
)
_WIDE_TYPES: Final = ("int", "text", "numeric(10,2)", "timestamptz", "boolean", "double precision")
_WIDE_VALUES: Final = (
    "(g * {n}) % 100000",
    "'text {n} of row ' || g",
    "(g * {n}) % 100000 / 100.0",
    "timestamptz '2026-01-01' + g * interval '{n} seconds'",
    "(g + {n}) % 2 = 0",
    "g / 7.0 + {n}",
)


def _wide_row() -> str:
    values = [
        f"case when (g + {n}) % 10 = 0 then null else {_WIDE_VALUES[n % 6].format(n=n)} end"
        for n in range(1, 60)
    ]
    return ", ".join(["g", *values])


_WIDE: Final = (
    "create table wide (id bigint primary key, "
    + ", ".join(f"c{n} {_WIDE_TYPES[n % 6]}" for n in range(1, 60))
    + ");"
)
_MANY: Final = tuple(f"items_{number}" for number in range(1, 51))
_MANY_CHANGE: Final = _procedure(
    # Four tables in turn, five rows each: two tables get new rows, and two tables change rows.
    "for i in 0 .. 3 loop"
    " n := 1 + (t * 4 + i) % 50;"
    " if i % 2 = 0 then"
    f" execute format('insert into items_%s select {_ROW.replace(chr(39), chr(39) * 2)}"
    " from generate_series(%s, %s) g', n, size + first + t * 20 + i * 5 + 1,"
    " size + first + t * 20 + i * 5 + 5);"
    " else"
    " execute format('update items_%s set amount = amount + 1 where id = any ($1)', n)"
    " using array(select 1 + ((first + t) * 7919 + g * 104729) % size"
    " from generate_series(1, 5) g);"
    " end if;"
    " end loop;",
    "n bigint;",
)


def copy_of_tables(count: int) -> dict[str, Any]:
    """Return the fields of a case that copies *count* small tables."""
    names = tuple(f"small_{number}" for number in range(1, count + 1))
    return {
        "schema": " ".join(ITEMS.replace("table items", f"table {name}") for name in names),
        "fill": "; ".join(
            FILL_ITEMS.replace("into items", f"into {name}").replace("{rows}", "200")
            for name in names
        ),
        "tables": names,
    }


_HISTORY: Final = (
    "create table items (id bigint not null, name text, amount numeric(12,2), at timestamptz,"
    " note text, kvsz_id bigint generated by default as identity,"
    " kvsz_start timestamptz not null default '1900-01-01 00:00:00+00',"
    " kvsz_end timestamptz not null default '9999-01-01 00:00:00+00',"
    " kvsz_deleted boolean not null default false, primary key (id, kvsz_id));"
    " create unique index on items (id)"
    " where kvsz_end = '9999-01-01 00:00:00+00';"
)
_PGBENCH: Final = ("pgbench_accounts", "pgbench_branches", "pgbench_tellers", "pgbench_history")
_PGBENCH_TOUCH: Final = (
    "update pgbench_accounts set abalance = abalance + 1 where aid = 1;"
    " update pgbench_branches set bbalance = bbalance + 1 where bid = 1;"
    " update pgbench_tellers set tbalance = tbalance + 1 where tid = 1;"
    " insert into pgbench_history (tid, bid, aid, delta) values (1, 1, 1, 1)"
)
_STEADY: Final = (
    "insert into items (name, amount, at, note)"
    " values ('name of an item', 12.5, clock_timestamp(), md5(random()::text))"
)
_NUMBERED: Final = ITEMS.replace("bigint", "bigint generated by default as identity", 1)

CASES: Final = (
    Case(
        "insert",
        "insert",
        schema=ITEMS,
        procedure=_procedure(_INSERT.format(count=20)),
        workload=_CALL,
        touch="insert into items (id) values (-{round})",
        rows=0,
    ),
    Case(
        "update",
        "update by key",
        schema=ITEMS,
        fill=FILL_ITEMS,
        procedure=_procedure(f"update items set {_CHANGE} where id = any ({_spread(20)});"),
        workload=_CALL,
        touch=_TOUCH,
    ),
    Case(
        "delete",
        "delete",
        schema=ITEMS,
        fill=FILL_ITEMS,
        procedure=_procedure(
            "delete from items where id between first + t * 20 + 1 and first + t * 20 + 20;"
        ),
        workload=_CALL,
        touch="delete from items where id = -{round}",
    ),
    Case(
        "mix",
        "four random updates and one insert a transaction",
        schema=ITEMS,
        fill=FILL_ITEMS,
        procedure=_MIX,
        workload=_CALL,
        touch=_TOUCH,
        per_transaction=5,
    ),
    Case(
        "single",
        "one update a transaction",
        schema=ITEMS,
        fill=FILL_ITEMS,
        procedure=_procedure(f"update items set {_CHANGE} where id = any ({_spread(1)});"),
        workload=_CALL,
        touch=_TOUCH,
        per_transaction=1,
    ),
    Case(
        "hot",
        "1,000 hot rows",
        schema=ITEMS,
        fill=FILL_ITEMS,
        procedure=_procedure(f"update items set {_CHANGE} where id = any ({_spread(20)});"),
        workload=_CALL,
        touch=_TOUCH,
        rows=1000,
    ),
    Case(
        "wide",
        "60 columns, 10 % NULL: inserts and updates",
        schema=_WIDE,
        fill=f"insert into wide select {_wide_row()} from generate_series(0, {{rows}}) g",
        procedure=_procedure(
            f"insert into wide select {_wide_row()} from generate_series("
            "size + first + t * 10 + 1, size + first + t * 10 + 10) g;"
            " update wide set c6 = c6 + 1, c1 = md5(t::text), c2 = c2 + 1"
            f" where id = any ({_spread(10)});"
        ),
        workload=_CALL,
        touch="update wide set c6 = 0 where id = 0",
        share=0.2,
        rows=10_000,
        tables=("wide",),
    ),
    Case(
        "toast",
        "updates beside an unchanged TOAST value",
        schema="create table documents (id bigint primary key, title text, seen int, body text);"
        " alter table documents alter body set storage external;",
        fill="insert into documents select g, 'title of document ' || g, 0,"
        " repeat(md5(g::text), 100) from generate_series(0, {rows}) g",
        procedure=_procedure(
            "update documents set seen = seen + 1, title = 'title ' || t"
            f" where id = any ({_spread(20)});"
        ),
        workload=_CALL,
        touch="update documents set seen = seen + 1 where id = 0",
        rows=5_000,
        tables=("documents",),
    ),
    Case(
        "full",
        "REPLICA IDENTITY FULL: updates",
        schema=f"{ITEMS} alter table items replica identity full;",
        fill=FILL_ITEMS,
        procedure=_procedure(f"update items set {_CHANGE} where id = any ({_spread(20)});"),
        workload=_CALL,
        touch=_TOUCH,
        share=0.5,
    ),
    Case(
        "tables",
        "50 tables, four of them a transaction",
        schema=" ".join(ITEMS.replace("table items", f"table {name}") for name in _MANY),
        fill="; ".join(
            FILL_ITEMS.replace("into items", f"into {name}").replace("{rows}", "1000")
            for name in _MANY
        ),
        procedure=_MANY_CHANGE,
        workload=_CALL,
        touch="; ".join(f"update {name} set amount = 0 where id = 0" for name in _MANY),
        rows=1000,
        tables=_MANY,
        touched=len(_MANY),
    ),
    Case(
        "sources",
        "four sources into one table",
        schema=ITEMS,
        schema_of_streamer="create table items (sid text not null, id bigint not null, name text,"
        " amount numeric(12,2), at timestamptz, note text, primary key (sid, id))",
        fill=f"insert into items select {_ROW} from generate_series("
        "{source} * 1000000000::bigint, {source} * 1000000000::bigint + {rows}) g",
        procedure=_procedure(
            f"update items set {_CHANGE} where id = any (array("
            "select base + k from unnest("
            f"{_spread(10)}) k));"
            f" insert into items select {_ROW} from generate_series("
            "base + size + first + t * 10 + 1, base + size + first + t * 10 + 10) g;",
            "base bigint := (select min(id) from items);",
        ),
        workload=_CALL,
        touch="update items set amount = 0 where id = {source} * 1000000000::bigint",
        rows=10_000,
        share=0.25,
        compared="select id, name, amount, at, note from {table} where id / 1000000000 = {source}",
        sources=4,
    ),
    Case(
        "history",
        "history of versions; the subscription keeps a plain copy",
        schema=ITEMS,
        schema_of_streamer=_HISTORY,
        fill=FILL_ITEMS.replace("into items", "into items (id, name, amount, at, note)"),
        procedure=_MIX,
        workload=_CALL,
        touch=_TOUCH,
        per_transaction=5,
        rule="initial: none, type: history",
        compared_of_streamer="select id, name, amount, at, note from {table}"
        " where kvsz_end = '9999-01-01 00:00:00+00' and not kvsz_deleted",
    ),
    Case(
        "pgbench",
        "pgbench's own script",
        workload=Pgbench(),
        touch=_PGBENCH_TOUCH,
        per_transaction=4,
        tables=_PGBENCH,
        touched=4,
        pgbench_scale=10,
    ),
    Case(
        "huge",
        "one huge transaction of inserts",
        schema=ITEMS,
        workload=f"insert into items select {_ROW}"
        " from generate_series({first} + 1, {first} + {changes}) g",
        touch="insert into items (id) values (-{round})",
        share=5.0,
        rows=0,
        streams_natively=True,
    ),
    Case(
        "latency",
        "commit to visible, 500 inserts a second",
        Kind.LATENCY,
        schema=_NUMBERED,
        workload=Pgbench(_STEADY, 500),
        touch=_STEADY,
        transports=("default",),
        rows=0,
    ),
    Case(
        "pgbench-latency",
        "commit to visible, pgbench's own script 500 times a second",
        Kind.LATENCY,
        workload=Pgbench(rate=500),
        touch=_PGBENCH_TOUCH,
        tables=_PGBENCH,
        transports=("default",),
        pgbench_scale=10,
    ),
    Case(
        "load",
        "CPU at 200 inserts a second",
        Kind.LOAD,
        schema=_NUMBERED,
        workload=Pgbench(_STEADY, 200),
        touch=_STEADY,
        transports=("default",),
        rows=0,
    ),
    Case(
        "idle",
        "CPU while nothing happens",
        Kind.LOAD,
        schema=ITEMS,
        transports=("default",),
        rows=0,
    ),
    Case(
        "copy-tables",
        "initial copy of 500 small tables",
        Kind.COPY,
        **copy_of_tables(500),
        rule="",
        rows=0,
        transports=("default",),
    ),
    Case(
        "copy-rows",
        "initial copy of one large table",
        Kind.COPY,
        schema=ITEMS,
        fill=FILL_ITEMS,
        share=10.0,
        rule="",
        transports=("default",),
    ),
)
