"""Rejected configurations, and the places that their errors name."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from streamer.config import static_mapping
from streamer.errors.error_classes import (
    MappingError,
    SettingsError,
    SourceConfigurationError,
    StreamerError,
)
from streamer.mapping.relation_names import RelationName, parse_name
from streamer.mapping.rule_options import DdlKind, Interval, OnColumnAdded, OnDdl
from streamer.mapping.rules import RelationMapping, find_rules, resolve
from streamer.mapping.time_partitions import PartitionBy
from streamer.source.connection import conninfo

CONFIG = """\
target: {url: "postgresql://nowhere/dw"}
on_error: %(on_error)s
sources:
- database: shop
  urls: [{url: "postgresql://nowhere/shop"}]
  tables:
    t:
      on_error: %(table)s
      initial: none
"""


def write(path: Path, on_error: str = "stop", table: str = "stop", more: str = "") -> Path:
    file = path / "config.yaml"
    file.write_text(CONFIG % {"on_error": on_error, "table": table} + more)
    return file


@pytest.mark.parametrize(
    ("on_error", "table", "expected"),
    [
        ("quarantine", "null", "quarantine"),
        ("quarantine", "stop", "stop"),
        ("stop", "quarantine", "quarantine"),
    ],
)
def test_a_table_goes_by_its_own_on_error_or_by_that_of_all(
    tmp_path: Path, on_error: str, table: str, expected: str
) -> None:
    _, mapping = static_mapping.load(write(tmp_path, on_error, table))

    assert mapping.sources[0].rules[0].on_error == expected


def test_an_unknown_word_is_refused_with_the_allowed_words(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"line 2: on_error: .*'stop'"):
        static_mapping.load(write(tmp_path, on_error="skip"))


@pytest.mark.parametrize(
    "setting",
    ["workers: on", "verify_interval: true", "sync: {total_rows_per_second: yes}", "table"],
)
def test_a_boolean_is_no_number(tmp_path: Path, setting: str) -> None:
    is_table = setting == "table"
    table = "stop\n      verify_interval: on" if is_table else "stop"
    with pytest.raises(SettingsError, match=r"line \d+: .*: expected a number, not true or false"):
        static_mapping.load(write(tmp_path, table=table, more="" if is_table else setting))


def test_an_allowed_word_is_accepted(tmp_path: Path) -> None:
    _, mapping = static_mapping.load(write(tmp_path))

    assert [rule.on_error for rule in mapping.sources[0].rules] == ["stop"]


@pytest.mark.parametrize("word", list(OnDdl))
def test_one_word_decides_about_all_changes_of_definitions(tmp_path: Path, word: OnDdl) -> None:
    _, mapping = static_mapping.load(write(tmp_path, more=f"  on_ddl: {word}\n"))

    assert dict(mapping.sources[0].on_ddl) == dict.fromkeys(DdlKind, word)
    is_ignored = mapping.sources[0].rules[0].on_column_added is OnColumnAdded.IGNORE
    assert is_ignored == (word is OnDdl.IGNORE)


@pytest.mark.parametrize(
    ("on_ddl", "problem"),
    [
        ("skip", r"sources\[0\]\.on_ddl: input should be 'apply', 'stop' or 'ignore'$"),
        ("[apply]", r"sources\[0\]\.on_ddl: input should be a valid dictionary$"),
        ("{drop_column: skip}", r"sources\[0\]\.on_ddl\.drop_column: .*'ignore'$"),
    ],
)
def test_a_fault_of_on_ddl_names_the_form_that_the_user_wrote(
    tmp_path: Path, on_ddl: str, problem: str
) -> None:
    with pytest.raises(SettingsError, match=problem):
        static_mapping.load(write(tmp_path, more=f"  on_ddl: {on_ddl}\n"))


@pytest.mark.parametrize(
    ("more", "transport"),
    [("", "auto"), ("  transport: text\n", "text"), ("  transport: binary\n", "binary")],
)
def test_transport_is_chosen_by_streamer_unless_a_source_says_which(
    tmp_path: Path, more: str, transport: str
) -> None:
    _, mapping = static_mapping.load(write(tmp_path, more=more))

    assert mapping.sources[0].transport == transport


MISSING = """\
target: {url: "postgresql://nowhere/dw"}
sources:
- database: shop
  urls:
  - {url: "postgresql://a:${EU_PASSWORD}@nowhere/shop", sid: eu}
  - {url: "postgresql://a:${US_PASSWORD}@nowhere/shop", sid: us}
  tables: {t: {}}
- database: billing
  urls: [{url: "postgresql://nowhere/billing"}]
  heartbeat_interval: ${BEAT}
  tables: {t: {filter: "id > ${LEAST}", target: billing_t}}
- database: ledger
  urls: [{url: "postgresql://nowhere/ledger"}]
  tables: {t: {target: ledger_t}}
"""


def test_a_missing_variable_is_the_fault_of_the_source_that_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EU_PASSWORD", "hidden")
    file = tmp_path / "config.yaml"
    file.write_text(MISSING)
    _, mapping = static_mapping.load(file)
    sources = {source.label: source for source in mapping.sources}
    assert list(sources) == ["shop:eu", "shop:us", "billing", "ledger"]
    assert {label for label, each in sources.items() if each.fault} == {"shop:us", "billing"}
    assert sources["shop:us"].fault is not None
    assert sources["shop:us"].fault.problem == (
        f"{file}, line 6: sources[0].urls[1].url: environment variable US_PASSWORD is not set"
    )
    assert sources["shop:eu"].url_place == (
        f"{file}, line 5: sources[0].urls[0].url (from environment: EU_PASSWORD)"
    )
    assert sources["billing"].fault is not None
    assert sources["billing"].fault.problem == (
        f"{file}, line 10: sources[1].heartbeat_interval: environment variable BEAT is not set"
    )
    with pytest.raises(SourceConfigurationError, match="US_PASSWORD is not set"):
        conninfo(sources["shop:us"])


def test_a_variable_that_makes_no_url_is_the_fault_of_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(MISSING.replace("postgresql://a:${US_PASSWORD}@nowhere/shop", "${US_URL}"))
    monkeypatch.setenv("EU_PASSWORD", "hid@den")
    monkeypatch.setenv("US_URL", "")
    _, mapping = static_mapping.load(file)
    eu, us = mapping.sources[:2]
    assert eu.fault is not None
    assert us.fault is not None
    assert "line 5: sources[0].urls[0].url (from environment: EU_PASSWORD)" in eu.fault.problem
    assert "hid" not in eu.fault.problem
    assert "US_URL is empty" in us.fault.problem


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("postgresql://nowhere/dw", "${NONE}", "line 1: target.url: .* NONE is not set"),
        ("database: ledger", "database: ${NONE}", "sources.2..database: .* NONE is not set"),
        ("sid: us", "sid: '${NONE}'", "sources.0..urls.1..sid: .* NONE is not set"),
        ("heartbeat_interval: ${BEAT}", "none: 1", "none: unknown key"),
    ],
)
def test_a_variable_that_all_sources_need_or_that_names_one_is_refused(
    tmp_path: Path, old: str, new: str, named: str
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(MISSING.replace(old, new))
    with pytest.raises(SettingsError, match=named):
        static_mapping.load(file)


def test_a_file_of_which_no_source_can_be_used_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(MISSING[: MISSING.index("- database: billing")])
    with pytest.raises(SettingsError, match=r"line 5: .* EU_PASSWORD is not set"):
        static_mapping.load(file)


@pytest.mark.parametrize("other", ["Shop", "shop_ins"])
def test_no_two_sources_share_a_slot_or_a_publication(tmp_path: Path, other: str) -> None:
    """In a shared publication, the tables of each source would get the operations of both."""
    more = f"- database: {other}\n  urls: [{{url: postgresql://nowhere/two}}]\n  tables: {{u: }}\n"
    with pytest.raises(MappingError, match="would share the name streamer_shop"):
        static_mapping.load(write(tmp_path, more=more))


LEFT_OUT = """
target: {url: "postgresql://nowhere/dw"}
sources:
- database: shop
  exclude_tables: ["bi.*"]
  urls:
  - {url: "postgresql://nowhere/eu", sid: eu, exclude_tables: [orders, "old.*"]}
  - {url: "postgresql://nowhere/us", sid: us}
  tables: {"*.*": {target: "*.*"}, orders: {}, bi.kept: {}}
"""


def test_a_database_leaves_out_more_tables_than_its_group(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(LEFT_OUT)
    eu, us = static_mapping.load(file)[1].sources
    assert [str(pattern) for pattern in us.exclude_tables] == ["bi.*"]
    assert [str(pattern) for pattern in eu.exclude_tables] == ["bi.*", "public.orders", "old.*"]
    names = [parse_name(name) for name in ("public.orders", "bi.kept", "old.t", "public.t")]
    assert {str(name) for name in find_rules(us, names)} == {str(name) for name in names}
    assert {str(name) for name in find_rules(eu, names)} == {"bi.kept", "public.t"}


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('["bi.*"]', "[bi.kept]", r"exclude_tables: \"bi.kept\" is also in `tables`"),
        ('["bi.*"]', "[a.b.c]", "exclude_tables: 'a.b.c' is not a table name"),
    ],
)
def test_a_name_that_cannot_be_left_out_is_refused(
    tmp_path: Path, old: str, new: str, named: str
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(LEFT_OUT.replace(old, new))
    with pytest.raises(StreamerError, match=named):
        static_mapping.load(file)


def test_a_variable_that_would_leave_out_tables_is_the_fault_of_its_database(
    tmp_path: Path,
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(LEFT_OUT.replace('"old.*"', '"${OLD_TABLES}"'))
    eu, us = static_mapping.load(file)[1].sources
    assert eu.fault is not None
    assert "exclude_tables[1]: environment variable OLD_TABLES is not set" in eu.fault.problem
    assert us.fault is None


@pytest.mark.parametrize(
    "other", ["exclude: [v]", "set: {v: \"'x'\"}", "columns: {id: id, v: w}, set: {w: id}"]
)
def test_a_condition_of_copies_uses_columns_that_the_target_has(tmp_path: Path, other: str) -> None:
    file = tmp_path / "config.yaml"
    table = '{columns: {id: id, w: v}, copy_where: "w > 1"}'
    file.write_text(LEFT_OUT.replace("orders: {}", f"orders: {table}"))
    static_mapping.load(file)
    refused = f'{{{other}, copy_where: "v > 1"}}'
    file.write_text(LEFT_OUT.replace("orders: {}", f"orders: {refused}"))
    with pytest.raises(MappingError, match=r'source column "v"'):
        static_mapping.load(file)


PARTITIONED = "partition_by: {column: at, interval: week, keep: 3}"


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        (PARTITIONED, "only tables of `type: append` or `type: history`"),
        (f"type: history, {PARTITIONED}", 'by the end of its versions, column "kvsz_end"'),
        ("type: append, partition_by: {keep: 3}", "an append table need a column"),
        (f"type: append, partitioned: true, {PARTITIONED}", "source's partitions instead"),
        (f"type: append, keys: disjoint, {PARTITIONED}", "needs a unique key"),
        (f"type: append, exclude: [at], {PARTITIONED}", 'column "at" does not hold'),
        (f"type: append, set: {{at: v}}, {PARTITIONED}", 'column "at" does not hold'),
        (f"type: append, columns: {{id: id, at: day}}, {PARTITIONED}", 'column "at" does not hold'),
        ("type: append, partition_by: {column: at}", "needs `keep`, or `since`"),
        ("type: append, partition_by: {column: at, keep: 1, since: 2024-01-01}", "exclude each"),
        ("type: append, partition_by: {column: at, keep: 0}", "keep"),
    ],
)
def test_time_partitions_need_a_column_of_an_append_table(
    tmp_path: Path, table: str, problem: str
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(LEFT_OUT.replace("orders: {}", f"orders: {{{table}}}"))
    with pytest.raises((MappingError, SettingsError), match=problem):
        static_mapping.load(file)


def test_time_partitions_are_read(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    table = f"{{type: append, columns: {{id: id, made: at}}, {PARTITIONED}}}"
    file.write_text(LEFT_OUT.replace("orders: {}", f"orders: {table}"))
    _, mapping = static_mapping.load(file)
    rule = next(r for r in mapping.sources[1].rules if r.pattern.name == "orders")
    assert rule.partition_by == PartitionBy("at", Interval.WEEK, 3)
    orders = RelationName("public", "orders")
    kept = RelationMapping(orders, orders, rule).kept_rows(datetime(2024, 3, 6, tzinfo=UTC))
    assert str(kept) == "(\"made\" < '2024-02-12 00:00:00+00') is not true"


@pytest.mark.parametrize("column", ["", "column: until, "])
def test_a_history_has_partitions_by_the_end_of_its_versions(tmp_path: Path, column: str) -> None:
    file = tmp_path / "config.yaml"
    partitions = f"partition_by: {{{column}keep: 3}}"
    table = f"{{type: history, history: {{end: until}}, {partitions}}}"
    file.write_text(LEFT_OUT.replace("orders: {}", f"orders: {table}"))
    _, mapping = static_mapping.load(file)
    rule = next(r for r in mapping.sources[1].rules if r.pattern.name == "orders")
    assert rule.partition_by == PartitionBy("until", Interval.MONTH, 3, is_of_versions=True)
    # No row of the source is too old for an open version.
    orders = RelationName("public", "orders")
    assert RelationMapping(orders, orders, rule).kept_rows(datetime(2024, 3, 6, tzinfo=UTC)) is None
    assert not rule.may_lack_rows


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ("{history: {end: until}}", "history: only `type: history` has versions"),
        ("{type: history, history: {end: valid_from}}", '"valid_from" already gets another value'),
        ("{type: history, history: {end: ''}}", '"" is not a column name'),
        ("{type: history, columns: {a: valid_from}}", '"valid_from" already gets another value'),
        ("{type: history, history: {begin: since}}", r"history\.begin"),
    ],
)
def test_columns_of_versions_need_names_of_their_own(
    tmp_path: Path, table: str, named: str
) -> None:
    file = tmp_path / "config.yaml"
    text = f"history: {{start: valid_from}}\n{LEFT_OUT}"
    file.write_text(text.replace("orders: {}", "orders: {type: history, history: {end: until}}"))
    (rule,) = (
        r for r in static_mapping.load(file)[1].sources[1].rules if r.pattern.name == "orders"
    )
    assert rule.history.names == ("valid_from", "until", "kvsz_deleted")
    file.write_text(text.replace("orders: {}", f"orders: {table}"))
    with pytest.raises(StreamerError, match=named):
        static_mapping.load(file)


@pytest.mark.parametrize("more", ["keys: disjoint", 'sid: "{table}"'])
def test_captured_definitions_of_a_shared_table_need_consistency_by_table(
    tmp_path: Path, more: str
) -> None:
    file = tmp_path / "config.yaml"
    rule = f'"orders_*": {{target: orders, {more}}}'
    text = LEFT_OUT.replace('"*.*": {target: "*.*"}, orders: {}, bi.kept: {}', rule)
    text = text.replace("- database: shop", "- database: shop\n  ddl: capture")
    file.write_text(text)
    static_mapping.load(file)
    file.write_text(f"{text}consistency: transaction\n")
    with pytest.raises(MappingError, match="would wait for other tables with its target"):
        static_mapping.load(file)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("type: append", r"type: `keys: disjoint` excludes .* a deleted row keeps its key"),
        ("type: history", r"type: `keys: disjoint` excludes .* a key has many versions"),
        ('sid: "{table}"', r"sid: `keys: disjoint` excludes"),
        ("filter: id > 1", r"filter: `keys: disjoint` excludes"),
        ("copy_where: id > 1", r"copy_where: `keys: disjoint` excludes"),
        ("initial: none", r"initial: `keys: disjoint` excludes"),
        ("truncate_target: true", r"truncate_target: `keys: disjoint` excludes"),
        ("on_delete: mark", r"on_delete: `keys: disjoint` excludes"),
        ("on_error: quarantine", r"on_error: `keys: disjoint` excludes .* set `on_error: stop`"),
    ],
)
def test_disjoint_keys_exclude_settings_that_leave_keys_unguarded(
    tmp_path: Path, more: str, named: str
) -> None:
    file = tmp_path / "config.yaml"
    rule = '"orders_*": {target: orders, keys: disjoint}'
    text = LEFT_OUT.replace('"*.*": {target: "*.*"}, orders: {}, bi.kept: {}', rule)
    file.write_text(text)
    for source in static_mapping.load(file)[1].sources:
        names = [RelationName("public", f"orders_{number}") for number in (1, 2)]
        for mapping in resolve(source, names, "public"):
            assert mapping.rows == (RelationName("public", "orders"), None)
    file.write_text(text.replace("keys: disjoint", f"keys: disjoint, {more}"))
    with pytest.raises(MappingError, match=named):
        static_mapping.load(file)
