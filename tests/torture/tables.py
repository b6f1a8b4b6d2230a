"""The tables of the torture test: many kinds, and the operations of a random session on each.

An operation is a list of statements that belong together. An operation may fail (a duplicate key, a
deadlock), which ends the transaction like any error of an application.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from random import Random

KEYS = 120
"""Sessions share few keys, so that they meet."""

SPAN = 10_000_000
"""Tables with disjoint keys have a range of so many keys each."""

Operation = Callable[[Random], list[str]]


class Compare(Enum):
    """The expected state of a target table in the end."""

    EQUAL = "the same rows"
    HISTORY = "open versions are the source's rows, and versions of a key do not overlap"
    SUPERSET = "every row of the source is there"
    PARTIAL = "rows of the source: all that match copy_where, and others that have changed"
    ABSENT = "the target and the bookkeeping have no such table"


@dataclass(frozen=True)
class Kind:
    """A table: the creation at the source, the operations, and the expected target."""

    name: str
    ddl: str
    operations: tuple[Operation, ...]
    target_ddl: str | None = None
    """The creation at the target, unless the program creates the table."""
    type: str = "clone"
    compare: Compare = Compare.EQUAL
    columns: str = "*"
    """The compared columns."""
    rule: str = ""
    """More settings of the table's rule."""
    faults: tuple[str, ...] = ()
    """The faults that need the table. Empty: the table always exists."""
    copy_where: str = ""
    """The condition of the first copy."""
    sid: str | None = None
    """The sid of the rows, if the table's schema or name is a tenant."""
    pattern: str = ""
    """The pattern of the rule, if several tables have one rule."""
    into: str = ""
    """The table of the target, if its name differs."""
    keys: int | None = None
    """The first key of the table, if the keys tell the rows of several tables apart."""
    kept: str = ""
    """The condition of the rows that the target keeps. Empty: all."""

    @property
    def target(self) -> str:
        """The table of the target, which the schemas of tenants share."""
        return self.into or self.name.rpartition(".")[2]

    @property
    def line(self) -> str:
        """The line of the configuration for the table."""
        condition = f'copy_where: "{self.copy_where}"' if self.copy_where else ""
        target = f"target: {self.into}" if self.into else ""
        keys = "" if self.keys is None else "keys: disjoint"
        settings = filter(None, (f"type: {self.type}", target, keys, self.rule, condition))
        name = f'"{self.pattern}"' if self.pattern else self.name
        return f"{name}: {{{', '.join(settings)}}}"

    def owned(self, source_sid: str | None) -> str:
        """Return the condition of the rows of the target that come from this table."""
        if self.keys is not None:
            return f"id / {SPAN} = {self.keys // SPAN}"
        sid = self.sid or source_sid
        return f"sid = '{sid}'" if sid else "true"


def text(random: Random) -> str:
    """A value that COPY has to escape now and then."""
    words = ("plain", "tab\there", "back\\slash", "line\nbreak", "\\N", "quo''te", "ünï😀", "")
    return f"{random.choice(words)}{random.randrange(10_000)}"


def _upsert(table: str, first: int = 0) -> Operation:
    def make(random: Random) -> list[str]:
        values = f"({first + random.randrange(KEYS)}, '{text(random)}')"
        update = "on conflict (id) do update set v = excluded.v"
        return [f"insert into {table} (id, v) values {values} {update}"]

    return make


def _insert(table: str, first: int = 0) -> Operation:
    """A plain insert: deleted keys are inserted again, used keys make the transaction fail now and
    then.
    """
    return lambda r: [
        f"insert into {table} (id, v) values ({first + r.randrange(KEYS)}, '{text(r)}')"
    ]


def _update(table: str) -> Operation:
    return lambda r: [f"update {table} set v = '{text(r)}' where id % 40 = {r.randrange(40)}"]


def _delete(table: str, first: int = 0) -> Operation:
    return lambda r: [f"delete from {table} where id = {first + r.randrange(KEYS)}"]


def _truncate(*tables: str) -> Operation:
    """Rarely, because the remaining operations need rows."""
    return lambda r: [f"truncate {', '.join(tables)}"] if r.random() < 0.1 else []


def _move(table: str, first: int = 0) -> Operation:
    """A key changes, to a key that may be in use."""

    def make(random: Random) -> list[str]:
        old, new = random.sample(range(first, first + KEYS), 2)
        return [f"delete from {table} where id = {new}"] * random.randrange(2) + [
            f"update {table} set id = {new} where id = {old}"
        ]

    return make


def _swap(table: str, first: int = 0) -> Operation:
    """Two rows change keys, by way of a third."""

    def make(random: Random) -> list[str]:
        one, other = random.sample(range(first, first + KEYS), 2)
        away = first - random.randrange(1, 1000)
        return [
            f"update {table} set id = {new} where id = {old}"
            for old, new in ((one, away), (other, one), (away, other))
        ]

    return make


def _life(table: str, first: int = 0) -> Operation:
    """Born, changed, moved, changed, gone, born again."""

    def make(random: Random) -> list[str]:
        one, other = random.sample(range(first, first + KEYS), 2)
        return [
            f"delete from {table} where id in ({one}, {other})",
            f"insert into {table} (id, v) values ({one}, 'born')",
            f"update {table} set v = 'changed' where id = {one}",
            f"update {table} set id = {other} where id = {one}",
            f"update {table} set v = v || ' again' where id = {other}",
            f"delete from {table} where id = {other}",
            f"insert into {table} (id, v) values ({one}, '{text(random)}')",
        ][: random.randrange(2, 8)]

    return make


def _keyed(table: str) -> tuple[Operation, ...]:
    return (
        *(_upsert(table), _insert(table), _update(table), _delete(table)),
        *(_move(table), _swap(table), _life(table), _truncate(table)),
    )


def _disjoint(table: str, first: int) -> tuple[Operation, ...]:
    """Operations without TRUNCATE, which would stop a table with `keys: disjoint`."""
    return (
        *(_upsert(table, first), _insert(table, first), _update(table), _delete(table, first)),
        *(_move(table, first), _swap(table, first), _life(table, first)),
    )


def _rows(table: str, count: int, values: str) -> Operation:
    """Many rows at once: several pieces, and streamed where the source streams."""

    def make(random: Random) -> list[str]:
        if random.random() > 0.05:
            return []
        return [
            f"insert into {table} select {values} from generate_series(1, {random.randrange(count)}) g"
        ]

    return make


def _handed_over(random: Random) -> list[str]:
    """A unique value goes from row to row, now and then through a chain of rows."""
    ids = random.sample(range(KEYS), 3)
    statements = [
        f"insert into uniq (id, slot) values ({i}, null) on conflict do nothing" for i in ids
    ]
    slot = random.randrange(50)
    statements += [
        f"update uniq set slot = null where slot = {slot}",
        f"update uniq set slot = {slot}, v = '{text(random)}' where id = {ids[0]}",
        f"update uniq set slot = null where id = {ids[0]}",
        f"update uniq set slot = {slot} where id = {ids[1]}",
    ]
    return statements[: random.randrange(4, 8)]


def _doc(random: Random) -> str:
    return f"jsonb_build_object('n', {random.randrange(1000)}, 'long', repeat(md5('{random.random()}'), {random.choice((1, 100, 400))}))"


def _wide_insert(random: Random) -> list[str]:
    values = ", ".join(f"'{random.randrange(100)}'" for _ in range(60))
    names = ", ".join(f"c{n}" for n in range(60))
    return [
        f"insert into wide (id, {names}) values ({random.randrange(KEYS)}, {values}) on conflict do nothing"
    ]


def _simple(table: str) -> tuple[Operation, ...]:
    return (_upsert(table), _insert(table), _update(table), _delete(table))


def _refused_without_identity(table: str) -> tuple[Operation, ...]:
    """Inserts, and statements that change no row: PostgreSQL refuses these where a publication
    publishes updates of a leaf without a replica identity.
    """
    return (
        lambda r: [
            f"insert into {table} values ({r.choice((1, 2))}, {r.randrange(10**8)}, '{text(r)}')"
        ],
        lambda r: [f"update {table} set v = v where id % 40 = {r.randrange(40)}"],
        lambda r: [f"delete from {table} where false"],
    )


def _upsert_free(table: str) -> Operation:
    """Insert rows whose keys are free: ON CONFLICT takes no deferrable key."""
    return lambda r: [
        (
            f"insert into {table} (id, v) select g, '{text(r)}' from generate_series(0, {KEYS}) g"
            f" where g % 10 = {r.randrange(10)} and not exists (select 1 from {table} where id = g)"
        )
    ]


def _shift(table: str) -> Operation:
    """Keys that are duplicates in the middle of a statement or transaction: the key is deferrable."""

    def make(random: Random) -> list[str]:
        one, size = random.randrange(KEYS), random.randrange(2, 8)
        born = f"insert into {table} (id, v) values ({one}, '{text(random)}')"
        up = [
            f"delete from {table} where id = {one + size}",
            f"update {table} set id = id + 1 where id between {one} and {one + size - 1}",
        ]
        down = [
            f"delete from {table} where id = {one - 1}",
            f"update {table} set id = id - 1 where id between {one} and {one + size}",
        ]
        exchange = [
            f"update {table} set id = {2 * one + 1} - id where id in ({one}, {one + 1})",
            f"update {table} set v = v || '.' where id = {one}",
        ]
        replaced = [
            "set constraints all deferred",
            born,
            f"delete from {table} where ctid = (select min(ctid) from {table} where id = {one})",
        ]
        given_up = [
            "set constraints all deferred",
            f"insert into {table} (id, v) values ({one}, 'twice')",
            f"update {table} set v = v || '!' where id = {one}",
            f"delete from {table} where id = {one} and v like 'twice%'",
        ]
        return random.choice((up, down, exchange, replaced, given_up))

    return make


def _log(random: Random) -> list[str]:
    """Rows of these days, of a time whose partition is gone, of the future, and without a time."""
    times = ("now()", "now() - interval '1 day'", "now() - interval '90 days'")
    time = random.choice((*times, "now() + interval '400 days'", "null"))
    return [
        f"insert into logged (at, v) select {time}, '{text(random)}' from generate_series(1, 3)"
    ]


_KEYED_COLUMNS = "(id int primary key, v text)"

KINDS = (
    Kind("keyed", f"create table keyed {_KEYED_COLUMNS}", _keyed("keyed")),
    Kind(
        "composite",
        "create table composite (a int, b text, v text, n int default 0, primary key (a, b))",
        (
            lambda r: [f"insert into composite values ({r.randrange(9)}, '{text(r)}', 'x')"],
            lambda r: [f"update composite set n = n + 1 where a = {r.randrange(9)}"],
            lambda r: [
                f"update composite set a = {r.randrange(9)} where a = {r.randrange(9)} and n = {r.randrange(9)}"
            ],
            lambda r: [f"delete from composite where a = {r.randrange(9)} and b > '{text(r)}'"],
            _truncate("composite", "keyless"),
        ),
    ),
    Kind(
        "keyless",
        "create table keyless (a int, b text)",
        (
            lambda r: [
                f"insert into keyless values ({r.randrange(5)}, '{text(r)}'), ({r.randrange(5)}, 'same')"
            ],
            _rows("keyless", 60_000, "g % 5, repeat('x', 200)"),
            _truncate("keyless"),
        ),
    ),
    Kind(
        "whole",
        "create table whole (a int, b text, c numeric); alter table whole replica identity full",
        (
            lambda r: [
                f"insert into whole select {r.randrange(9)}, 'same', null from generate_series(1, {r.randrange(4)})"
            ],
            lambda r: [
                f"insert into whole values ({r.randrange(9)}, '{text(r)}', {r.choice(('1.0', '1.00', 'null'))})"
            ],
            lambda r: [
                f"update whole set b = '{text(r)}' where ctid = (select ctid from whole where a = {r.randrange(9)} limit 1)"
            ],
            lambda r: [
                f"delete from whole where ctid = (select ctid from whole where a = {r.randrange(9)} limit 1)"
            ],
            lambda r: [
                f"update whole set a = (a + 1) % 9 where a = {r.randrange(9)} and b = 'same'"
            ],
            _truncate("whole"),
        ),
    ),
    Kind(
        "by_index",
        "create table by_index (id int not null, v text); create unique index by_index_id on by_index (id);"
        " alter table by_index replica identity using index by_index_id",
        _keyed("by_index"),
    ),
    Kind(
        "hist",
        f"create table hist {_KEYED_COLUMNS}",
        (
            _upsert("hist"),
            _insert("hist"),
            _update("hist"),
            _delete("hist"),
            _move("hist"),
            _life("hist"),
        ),
        type="history",
        compare=Compare.HISTORY,
    ),
    Kind(
        "appended",
        "create table appended (id bigint generated always as identity primary key, v text)",
        (
            lambda r: [f"insert into appended (v) values ('{text(r)}')"],
            lambda r: [f"update appended set v = '{text(r)}' where id % 50 = {r.randrange(50)}"],
            lambda r: [f"delete from appended where id % 50 = {r.randrange(50)}"],
            _truncate("appended"),
        ),
        type="append",
        compare=Compare.SUPERSET,
    ),
    Kind(
        "parted",
        f"create table parted {_KEYED_COLUMNS} partition by range (id);"
        " create table parted_low partition of parted for values from (minvalue) to (40);"
        " create table parted_high partition of parted default",
        _keyed("parted"),
    ),
    Kind(
        "toasted",
        "create table toasted (id int primary key, v text, doc jsonb, n int);"
        " alter table toasted alter doc set storage external",
        (
            lambda r: [
                f"insert into toasted values ({r.randrange(KEYS)}, 'x', {_doc(r)}, 0) on conflict (id) do update set doc = excluded.doc"
            ],
            lambda r: [f"update toasted set n = n + 1 where id % 30 = {r.randrange(30)}"],
            *(_update("toasted"), _delete("toasted"), _move("toasted"), _swap("toasted")),
        ),
    ),
    Kind(
        "uniq",
        "create table uniq (id int primary key, v text, slot int unique)",
        (_handed_over, _handed_over, _update("uniq"), _delete("uniq"), _move("uniq")),
        target_ddl="create table uniq (id int primary key, v text, slot int unique)",
    ),
    Kind(
        "parent",
        f"create table parent {_KEYED_COLUMNS}",
        (_upsert("parent"), _delete("parent"), _truncate("child", "parent")),
        target_ddl=f"create table parent {_KEYED_COLUMNS}",
    ),
    Kind(
        "child",
        "create table child (id int primary key, v text, parent_id int references parent on delete cascade)",
        (
            lambda r: [
                f"insert into parent values ({(p := r.randrange(KEYS))}, 'p') on conflict do nothing",
                f"insert into child values ({r.randrange(KEYS)}, 'c', {p}) on conflict (id) do update set parent_id = {p}",
            ],
            *(_update("child"), _delete("child")),
        ),
        target_ddl="create table child (id int primary key, v text, parent_id int references parent on delete cascade)",
    ),
    Kind(
        "computed",
        "create table computed (id int primary key, v text, n int default 1, twice int generated always as (n * 2) stored)",
        (
            *_keyed("computed"),
            lambda r: [
                f"update computed set n = {r.randrange(99)} where id % 9 = {r.randrange(9)}"
            ],
        ),
        target_ddl="create table computed (id int primary key, v text, n int default 1, twice int generated always as (n * 2) stored)",
    ),
    Kind(
        "wide",
        f"create table wide (id int primary key, v text, {', '.join(f'c{n} text' for n in range(60))})",
        (_wide_insert, _update("wide"), _delete("wide"), _move("wide")),
    ),
    Kind("quiet", "create table quiet (id int primary key, v text)", ()),
    Kind("grown", f"create table grown {_KEYED_COLUMNS}", _keyed("grown")),
    Kind(
        "deferred",
        "create table deferred (id int primary key deferrable initially immediate, v text);"
        " alter table deferred replica identity full",
        (
            *(_shift("deferred"), _shift("deferred"), _shift("deferred"), _upsert_free("deferred")),
            *(_update("deferred"), _delete("deferred"), _truncate("deferred")),
        ),
        faults=("deferrable_keys",),
    ),
    Kind(
        "deferred_made",
        "create table deferred_made (id int primary key deferrable initially immediate, v text);"
        " alter table deferred_made replica identity full",
        (*(_shift("deferred_made"), _shift("deferred_made")), _upsert_free("deferred_made")),
        target_ddl="create table deferred_made"
        " (id int primary key deferrable initially immediate, v text)",
        faults=("deferrable_keys",),
    ),
    Kind(
        "leafless",
        "create table leafless (part int, id int, v text) partition by list (part);"
        " create table leafless_1 partition of leafless for values in (1);"
        " create table leafless_2 partition of leafless for values in (2);"
        " alter table leafless replica identity full",
        _refused_without_identity("leafless"),
        faults=("leaf_identity",),
    ),
    Kind(
        "leaf_keyed",
        "create table leaf_keyed (part int, id int, v text) partition by list (part);"
        " create table leaf_keyed_1 partition of leaf_keyed for values in (1);"
        " create table leaf_keyed_2 partition of leaf_keyed for values in (2);"
        " alter table leaf_keyed replica identity full;"
        " alter table leaf_keyed_1 add primary key (id);"
        " alter table leaf_keyed_2 add primary key (id)",
        _refused_without_identity("leaf_keyed"),
        faults=("leaf_identity",),
    ),
    Kind(
        "leafful",
        "create table leafful (part int, id int, v text) partition by list (part);"
        " create table leafful_1 partition of leafful for values in (1);"
        " create table leafful_2 partition of leafful for values in (2);"
        " alter table leafful replica identity full;"
        " alter table leafful_1 replica identity full;"
        " alter table leafful_2 replica identity full",
        (
            lambda r: [
                f"insert into leafful values ({r.choice((1, 2))}, {r.randrange(KEYS)}, '{text(r)}')"
            ],
            lambda r: [f"update leafful set v = '{text(r)}' where id % 40 = {r.randrange(40)}"],
            lambda r: [f"delete from leafful where id % 40 = {r.randrange(40)}"],
        ),
        faults=("leaf_identity",),
    ),
    Kind(
        "filled",
        f"create table filled {_KEYED_COLUMNS}",
        _simple("filled"),
        faults=("add_and_fill",),
    ),
    Kind(
        "remade",
        f"create table remade {_KEYED_COLUMNS}",
        _simple("remade"),
        faults=("drop_and_create", "drop_while_copied"),
    ),
    Kind(
        "swapped",
        f"create table swapped {_KEYED_COLUMNS}",
        _simple("swapped"),
        faults=("swap_by_rename",),
    ),
    Kind(
        "readded",
        "create table readded (id int primary key, v text, w text default 'first');"
        " insert into readded select g, 'still' from generate_series(1000, 1050) g",
        (
            _upsert("readded"),
            _delete("readded"),
            lambda r: [f"update readded set v = '{text(r)}' where id = {r.randrange(KEYS)}"],
        ),
        faults=("readd_column",),
    ),
    Kind(
        "gaining",
        "create table gaining (id int, v text);"
        " insert into gaining select g, 'first' from generate_series(1, 200) g",
        (lambda r: [f"insert into gaining values ({r.randrange(500)}, '{text(r)}')"],),
        faults=("gain_identity",),
    ),
    Kind(
        "gaining_key",
        "create table gaining_key (id int generated always as identity, v text);"
        " insert into gaining_key (v) select 'first' from generate_series(1, 200)",
        (lambda r: [f"insert into gaining_key (v) values ('{text(r)}')"],),
        faults=("gain_identity",),
    ),
    Kind(
        "reattached",
        f"create table reattached {_KEYED_COLUMNS} partition by range (id);"
        " create table reattached_low partition of reattached for values from (minvalue) to (40);"
        " create table reattached_high partition of reattached for values from (40) to (maxvalue)",
        _simple("reattached"),
        faults=("reattach_partition",),
    ),
    Kind(
        "partial",
        f"create table partial {_KEYED_COLUMNS};"
        f" insert into partial select g, 'old' from generate_series({KEYS}, {2 * KEYS}) g",
        _simple("partial"),
        compare=Compare.PARTIAL,
        copy_where=f"id % {KEYS} > {KEYS // 2}",
    ),
    Kind(
        "logged",
        "create table logged (id bigint generated always as identity primary key,"
        " at timestamptz, v text)",
        (
            _log,
            lambda r: [f"update logged set v = '{text(r)}' where id % 50 = {r.randrange(50)}"],
            lambda r: [f"delete from logged where id % 50 = {r.randrange(50)}"],
            _truncate("logged"),
        ),
        type="append",
        compare=Compare.SUPERSET,
        rule="partition_by: {column: at, interval: day, keep: 3}",
        kept="at is null or at > now() - interval '2 days'",
    ),
    *(
        Kind(
            f"metric_{sid}",
            f"create table metric_{sid} {_KEYED_COLUMNS}",
            _keyed(f"metric_{sid}"),
            sid=sid,
            pattern="metric_*",
            into="metrics",
            rule='sid: "{table:metric_(.*)}"',
        )
        for sid in ("cpu", "disk")
    ),
    Kind("bulk", "create table bulk (tx int, v text)", (), faults=("resync_in_large",)),
    Kind(
        "ledger",
        "create table ledger (id bigint primary key)",
        (),
    ),
    Kind("ledger_keyless", "create table ledger_keyless (id bigint)", ()),
)

TENANT_KINDS = (
    Kind("orders", "create table orders (id int primary key, v text)", _keyed("orders")),
    Kind(
        "events",
        "create table events (a int, b text)",
        (
            lambda r: [f"insert into events values ({r.randrange(5)}, '{text(r)}'), (1, 'same')"],
            _rows("events", 30_000, "g % 5, repeat('y', 300)"),
            _truncate("events", "orders"),
        ),
    ),
    Kind(
        "versions",
        "create table versions (id int primary key, v text)",
        (_upsert("versions"), _delete("versions"), _move("versions"), _life("versions")),
        type="history",
        compare=Compare.HISTORY,
    ),
    Kind(
        "evolving",
        "create type evolving_mood as enum ('first');"
        " create table evolving (id int primary key, v text, mood evolving_mood default 'first')",
        _simple("evolving"),
        faults=("evolve",),
        rule="create: all",
    ),
    Kind(
        "evolving_parts",
        "create table evolving_parts (id int primary key, v text) partition by range (id);"
        " create table evolving_parts_0 partition of evolving_parts for values from (0) to (120)",
        _simple("evolving_parts"),
        faults=("evolve",),
        rule="create: all",
    ),
    Kind("tenant_ledger", "create table tenant_ledger (id bigint primary key)", ()),
    Kind("tenant_ledger_keyless", "create table tenant_ledger_keyless (id bigint)", ()),
)


def kinds_of_shard(number: int) -> tuple[Kind, ...]:
    """Return the tables of a shard, whose rows have no sid."""
    first = number * SPAN
    return (
        Kind("shard_ledger", "create table shard_ledger (id bigint primary key)", (), keys=first),
        Kind("shard_ledger_keyless", "create table shard_ledger_keyless (id bigint)", ()),
        Kind(
            "pieces", f"create table pieces {_KEYED_COLUMNS}", _disjoint("pieces", first),
            keys=first,
        ),
        *(reading(2 * number + half) for half in range(2)),
    )  # fmt: skip


def reading(number: int) -> Kind:
    """Return one of the like-named tables of all shards, which share a table of the target."""
    name, first = f"reading_{number}", number * SPAN
    return Kind(
        name, f"create table {name} (id bigint primary key, v text)", _disjoint(name, first),
        pattern="reading_*", into="readings", keys=first, rule="on_table_dropped: keep",
    )  # fmt: skip


HOSTED_KINDS = (
    Kind("hosted_ledger", "create table hosted_ledger (id bigint primary key)", ()),
    Kind("hosted_ledger_keyless", "create table hosted_ledger_keyless (id bigint)", ()),
)
"""The tables of a database with a schema for each tenant, beside the tables of the schemas."""
HOSTED_EXCLUDED = '["*.scraps"]'
HOSTED_RULES = (
    '"hosted_*":',
    '"tenant_*.*s": {sid: "{sid}_{schema:tenant_(.*)}", on_table_dropped: keep}',
    '"tenant_*.trail": {sid: "{sid}_{schema:tenant_(.*)}", on_table_dropped: keep, type: history}',
)


def kinds_of_schema(namespace: str, sid: str) -> tuple[Kind, ...]:
    """Return the tables of a tenant that is a schema."""
    accounts, entries, trail, scraps = (
        f"{namespace}.{name}" for name in ("accounts", "entries", "trail", "scraps")
    )
    return (
        Kind(
            accounts,
            f"create schema if not exists {namespace}; create table {accounts} {_KEYED_COLUMNS}",
            _keyed(accounts),
            sid=sid,
        ),
        Kind(
            entries,
            f"create table {entries} (a int, b text)",
            (
                lambda r: [f"insert into {entries} values ({r.randrange(5)}, '{text(r)}')"],
                _rows(entries, 10_000, "g % 5, repeat('z', 300)"),
                _truncate(entries, accounts),
            ),
            sid=sid,
        ),
        Kind(
            trail,
            f"create table {trail} {_KEYED_COLUMNS}",
            (_upsert(trail), _delete(trail), _move(trail), _life(trail)),
            type="history",
            compare=Compare.HISTORY,
            sid=sid,
        ),
        Kind(
            scraps,
            f"create table {scraps} {_KEYED_COLUMNS}",
            _keyed(scraps),
            compare=Compare.ABSENT,
            sid=sid,
        ),
    )
