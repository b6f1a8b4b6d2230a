"""`filter` and `set`: for any expressions and rows, the copy, the stream and a SELECT at the source
agree.

Each example makes two tables for each of a handful of rules. The first gets all rows before
streaming begins, the second the same rows by changes.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from streamer.commands.demo.embedded_servers import Server
from streamer.copy.spark.launcher import SparkLauncher
from streamer.mapping.expressions import parse_expression
from tests.support.postgres import Database, database
from tests.support.properties import EXAMPLES
from tests.support.streamer import Streamer, copy_in_threads

RULES: Final = 8
COLUMNS: Final = {
    "i": "int",
    "n": "numeric(8,2)",
    "f": "float8",
    "s": "text",
    "b": "boolean",
    "d": "date",
    "ts": "timestamptz",
    "j": "jsonb",
    "a": "int[]",
    "m": "mood",
    "c": "char(4)",
}

# ---- expressions, by the type of the result ----------------------------------------------------

_LEAVES: Final = {
    "number": ["i", "n", "f", "7", "-1.5", "length(s)", "extract(year from ts)", "cardinality(a)"],
    "text": [
        "s",
        "'x'",
        "i::text",
        "b::text",
        "f::text",
        "n::text",
        "d::text",
        "ts::text",
        "m::text",
        "j ->> 'k'",
        "to_char(ts, 'YYYY-MM-DD HH24:MI:SS.US')",
        "a::text",
        "c::text",
        "null",
        "j::text",
    ],
    "bool": [
        "b",
        "s is null",
        "j ? 'k'",
        "d > '2020-06-01'",
        "m > 'sad'",
        "i in (1, 2, 3)",
        "true",
        "n between 0 and 50",
        "isfinite(ts)",
        "a && array[1, 2]",
        "m = 'ok'",
        "c = 'ab'",
        "j @> '{}'",
    ],
}
_GROWN: Final = {
    "number": [
        "{number} + {number}",
        "abs({number})",
        "coalesce({number}, 0)",
        "- ({number})",
        "case when {bool} then {number} else {number} end",
        "greatest({number}, {number})",
    ],
    "text": [
        "upper({text})",
        "md5({text})",
        "({text}) || ({text})",
        "coalesce({text}, '')",
        "left({text}, 2)",
        "case when {bool} then {text} end",
        "concat({text}, {number}, {bool})",
        "quote_nullable({text})",
        "replace({text}, 'a', E'\\\\b')",
        "nullif({text}, {text})",
    ],
    "bool": [
        "({bool}) and ({bool})",
        "({bool}) or ({bool})",
        "not ({bool})",
        "({number}) < ({number})",
        "({text}) = ({text})",
        "({text}) like '%a%'",
        "({bool}) is not true",
        "({text}) is null",
        "({number}) is distinct from ({number})",
        "({text}) ~ '[a-z]'",
    ],
}
_OTHERS: Final = [
    "d + 1",
    "date_trunc('day', ts)",
    "a || 1",
    "j || '{\"z\": 1}'",
    "f",
    "ts",
    "a[1:2]",
]
_OTHERS.extend(
    ["age(ts, '2020-01-01')", "n::numeric(12, 4)", "d", "j -> 'k'", "m", "c", "f::float4"]
)


@st.composite
def expressions(draw: Callable[..., Any], kind: str, depth: int = 2) -> str:
    """SQL that gives a *kind* of value and fails on no row."""
    if depth == 0 or draw(st.integers(0, 2)) == 0:
        leaf: str = draw(st.sampled_from(_LEAVES[kind]))
        return leaf
    grown: str = draw(st.sampled_from(_GROWN[kind]))
    for part in ("number", "text", "bool"):
        while f"{{{part}}}" in grown:
            grown = grown.replace(f"{{{part}}}", draw(expressions(part, depth - 1)), 1)
    return grown


values = st.one_of(
    expressions("text"), expressions("bool"), expressions("number"), st.sampled_from(_OTHERS)
)
rules = st.fixed_dictionaries(
    {
        "filter": st.one_of(st.none(), expressions("bool", 3)),
        "set": st.dictionaries(
            st.sampled_from(["s", "n", "extra", 'More "of" it']), values, max_size=3
        ),
    }
)

# ---- rows --------------------------------------------------------------------------------------

texts = st.one_of(
    st.sampled_from(["", "a", "ab", "\\", "\\N", "\t\n\r", "'", '"', "ÄÖß", "$x$", "null", "{}"]),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8),
)
VALUES: Final = {
    "i": st.integers(-5, 5).map(str),
    "n": st.sampled_from(["0", "-1.50", "49.99", "50", "NaN", "100000.01"]),
    "f": st.sampled_from(["0", "-0", "1.1", "NaN", "Infinity", "1e-30", "0.30000000000000004"]),
    "s": texts,
    "b": st.sampled_from(["true", "false"]),
    "d": st.sampled_from(["2020-02-29", "infinity", "0044-03-15 BC", "2021-12-31"]),
    "ts": st.sampled_from(["2020-01-01 12:00:00.123456+05", "-infinity", "1969-07-20 20:17:40+00"]),
    "j": st.sampled_from(['{"k": "v"}', '{"k": null, "a": 1.00}', "[1, 2]", '"k"', "{}"]),
    "a": st.sampled_from(["{}", "{1,2,3}", "{NULL,2}", "{5}"]),
    "m": st.sampled_from(["sad", "ok", "happy"]),
    "c": st.sampled_from(["", "ab", "abcd", "ä"]),
}
row = st.tuples(*(st.one_of(st.none(), VALUES[name]) for name in COLUMNS))


@settings(
    max_examples=max(2, EXAMPLES // 50),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(
    st.lists(rules, min_size=RULES, max_size=RULES),
    st.lists(row, min_size=4, max_size=12),
    st.lists(row, min_size=12, max_size=12),
    st.sampled_from(["default", "full"]),
)
@pytest.mark.timeout(600)
def test_copy_stream_and_source_agree(
    shared_server: Server,
    tmp_path_factory: pytest.TempPathFactory,
    rules: list[dict[str, Any]],
    before: list[tuple[str | None, ...]],
    after: list[tuple[str | None, ...]],
    identity: str,
) -> None:
    path = tmp_path_factory.mktemp("expressions") / "config.yaml"
    with database(shared_server, "source") as source, database(shared_server, "target") as target:
        make(path, source, target, rules, identity)
        asyncio.run(run(path, source, target, rules, before, after))


def rule_yaml(rule: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in rule.items() if value}


def make(
    path: Path, source: Database, target: Database, rules: list[dict[str, Any]], identity: str
) -> None:
    """Make two tables for each rule, and the configuration."""
    source.execute("create type mood as enum ('sad', 'ok', 'happy')")
    columns = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
    tables: dict[str, Any] = {}
    for number, rule in enumerate(rules):
        for kind in ("copied", "streamed"):
            name = f"{kind}_{number}"
            source.execute(f"create table {name} (id int primary key, {columns})")
            source.execute(f"alter table {name} replica identity {identity}")
            tables[name] = rule_yaml(rule)
    configuration = {
        "target": {"url": target.url},
        "http": {"listen": ""},
        "spool": {"directory": str(path.parent / "spool")},
        "sources": [{"database": "shop", "urls": [{"url": source.url}], "tables": tables}],
    }
    path.write_text(yaml.safe_dump(configuration))


async def run(
    path: Path,
    source: Database,
    target: Database,
    rules: list[dict[str, Any]],
    before: list[tuple[str | None, ...]],
    after: list[tuple[str | None, ...]],
) -> None:
    for number in range(len(rules)):
        write(source, f"copied_{number}", after)
        write(source, f"streamed_{number}", before[: len(before) // 2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SparkLauncher, "submit", copy_in_threads)
        streamer = Streamer(path)
        streamer.start()
        try:
            await streamer.caught_up(120)
            for number in range(len(rules)):
                change(source, f"streamed_{number}", before, after)
            await streamer.caught_up(120)
        finally:
            await streamer.stop()
    for number, rule in enumerate(rules):
        expected = source.execute(expected_sql(f"copied_{number}", rule))
        for kind in ("copied", "streamed"):
            assert target.execute(found_sql(f"{kind}_{number}", rule)) == expected, (kind, rule)


def write(source: Database, table: str, rows: list[tuple[str | None, ...]]) -> None:
    """Make *table* hold *rows*, numbered."""
    names = ", ".join(COLUMNS)
    casts = ", ".join(f"%s::{kind}" for kind in COLUMNS.values())
    assignments = ", ".join(f"{name} = excluded.{name}" for name in COLUMNS)
    with source.connect() as connection, connection.transaction():
        for number, values in enumerate(rows):
            connection.execute(
                f"insert into {table} (id, {names}) values ({number}, {casts})"
                f" on conflict (id) do update set {assignments}".encode(),
                values,
            )
        connection.execute(f"delete from {table} where id >= {len(rows)}".encode())


def change(
    source: Database,
    table: str,
    before: list[tuple[str | None, ...]],
    after: list[tuple[str | None, ...]],
) -> None:
    """Come from the first half of *before* to *after*, by every kind of change."""
    write(source, table, before)
    source.execute(f"update {table} set id = id + 1000 where id % 3 = 0")
    source.execute(f"update {table} set id = id - 1000 where id > 1000")
    source.execute(f"delete from {table} where id % 4 = 1")
    write(source, table, after)


def outcome(rule: dict[str, Any]) -> dict[str, str]:
    """Each column of the target, in terms of the source."""
    computed: dict[str, str] = rule["set"]
    return {name: name for name in ("id", *COLUMNS)} | computed


def expected_sql(table: str, rule: dict[str, Any]) -> str:
    listed = ", ".join(f"({sql})" for sql in outcome(rule).values())
    where = f" where ({rule['filter']})" if rule["filter"] else ""
    return f"select row({listed})::text from {table}{where} order by id"


def found_sql(table: str, rule: dict[str, Any]) -> str:
    listed = ", ".join('"' + name.replace('"', '""') + '"' for name in outcome(rule))
    return f"select row({listed})::text from {table} order by id"


@given(expressions("bool", 4))
def test_generated_expressions_are_taken(text: str) -> None:
    assert parse_expression(text).columns <= {*COLUMNS}
