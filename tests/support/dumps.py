"""The schemas of both sides in the words of `pg_dump`, which shares no code with streamer."""

import difflib
import re
import subprocess
from collections.abc import Iterable
from typing import Final

from tests.support.postgres import Database, versions

Dump = dict[str, str]
"""The statements that make each object, by kind and name."""

NOT_CARRIED: Final = {
    *("FUNCTION", "PROCEDURE", "AGGREGATE", "VIEW", "MATERIALIZED VIEW", "TRIGGER", "RULE"),
    *("POLICY", "ROW SECURITY", "ACL", "SCHEMA"),
}
"""Kinds of objects that stay at the source: docs/decisions/definitions-at-the-target.md."""

_ENTRY: Final = re.compile(
    r"^--\n-- Name: (.*); Type: ([A-Z ]+); Schema: (.*); Owner: .*\n--\n", re.MULTILINE
)
# The mark of CLUSTER is no part of a definition that streamer carries.
_LEFT_OUT: Final = re.compile(r"\n+ALTER TABLE \S+ CLUSTER ON \S+;")
_SETTING: Final = re.compile(r"^SET .*;\n", re.MULTILINE)
_LEAF: Final = re.compile(r"ATTACH PARTITION (\S+) ")
# PostgreSQL 18 prints the name of a NOT NULL that differs from the default name of today.
_NOT_NULL: Final = re.compile(r"CONSTRAINT \S+ NOT NULL")


def dump(database: Database, schemas: Iterable[str] = ("public",)) -> Dump:
    """Return the objects of *schemas* that streamer carries."""
    newest = versions()[str(max(map(int, versions())))]
    result = subprocess.run(
        [
            newest / "pg_dump",
            *("--schema-only", "--no-owner", "--no-privileges", "--no-publications"),
            *(f"--schema={schema}" for schema in schemas),
            f"--dbname={database.server.url(database.name)}",
        ],
        check=False,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    text = _SETTING.sub(
        "", result.stdout.partition("\n--\n-- PostgreSQL database dump complete")[0]
    )
    _, *parts = _ENTRY.split(text)
    entries = list(zip(*(parts[n::4] for n in range(4)), strict=True))
    views = {f"{schema}.{name}" for name, kind, schema, _ in entries if kind == "MATERIALIZED VIEW"}
    return {
        f"{kind} {schema}.{name}": _LEFT_OUT.sub("", _NOT_NULL.sub("NOT NULL", statement.strip()))
        for name, kind, schema, statement in entries
        if kind not in NOT_CARRIED
        and not (kind == "COMMENT" and name.startswith("SCHEMA "))
        and not (kind == "INDEX" and any(f" ON {view} " in statement for view in views))
    }


def without_partitions(objects: Dump) -> Dump:
    """Return the objects as in a target without partitions."""
    leaves = {match[1] for text in objects.values() for match in _LEAF.finditer(text)}
    of_leaf = re.compile(rf" ({'|'.join(map(re.escape, leaves)) or '$^'})[\s;]")
    return {
        name: re.sub(r"\)\nPARTITION BY .*;", ");", text)
        .replace(" ON ONLY ", " ON ")
        .replace("ALTER TABLE ONLY", "ALTER TABLE")
        for name, text in objects.items()
        if not of_leaf.search(text) and not name.startswith(("TABLE ATTACH", "INDEX ATTACH"))
    }


Sides = tuple[Dump, Dump]
"""The objects that a source wants of the target, and those that the target has."""


def of_clones(source: Dump, target: Dump) -> Sides:
    return without_partitions(source), without_partitions(target)


def _without_names_of_keys(objects: Dump) -> Dump:
    """streamer's own primary key of a table keeps the name that the table had first."""
    named = re.compile(r"ALTER TABLE (\S+)\n +ADD CONSTRAINT \S+ PRIMARY KEY")
    return {
        f"PRIMARY KEY {key[1]}" if (key := named.match(text)) else name: named.sub(r"\1", text)
        for name, text in objects.items()
    }


def of_tenants(source: Dump, target: Dump) -> Sides:
    """`sid` leads all keys. NOT NULL and defaults of a tenant do not bind the remaining tenants."""
    expected = {}
    for name, text in without_partitions(source).items():
        keyed = re.sub(
            r"(PRIMARY KEY|FOREIGN KEY|UNIQUE|REFERENCES \S+?|BY) ?\(", r"\g<0>sid, ", text
        )
        keyed = re.sub(r"(UNIQUE INDEX .* USING \w+ \()", r"\1sid, ", keyed)
        keyed = re.sub(r"(EXCLUDE USING \w+ \()", r"\1sid WITH =, ", keyed)
        if name.startswith("TABLE "):
            keyed = "\n".join(sorted([*_columns(text), "sid text"]))
        expected[name] = keyed
    tables = {
        name: "\n".join(_columns(text)) for name, text in target.items() if name[:6] == "TABLE "
    }
    actual = without_partitions(target) | tables
    return _without_names_of_keys(expected), _without_names_of_keys(actual)


def of_history(source: Dump, target: Dump) -> Sides:
    """Versions outlive their rows: columns and labels stay, no column is NOT NULL, no index unique.

    Only streamer writes versions, so no column has a default or a sequence.
    """
    expected, actual = without_partitions(source), {}
    for name, text in list(expected.items()):
        if name.startswith(("FK CONSTRAINT ", "DEFAULT ", "SEQUENCE ")):
            del expected[name]
        elif name.startswith("TABLE ") or _ENUM in text:
            expected[name] = "\n".join(_parts(text))
        elif key := _KEY.search(text):
            table, constraint, columns = key[1], key[2], key[4]
            if key[3] == "PRIMARY KEY":
                expected[name] = text.replace(f"({columns})", f"({columns}, kvsz_id)")
                continue
            del expected[name]
            method = re.match(r"EXCLUDE USING (\w+)", key[3])
            columns = re.sub(r" WITH [^,]+", "", columns)
            expected[f"INDEX {table.partition('.')[0]}.{constraint}"] = (
                f"CREATE INDEX {constraint} ON {table} USING {method[1] if method else 'btree'} ({columns});"
            )
        else:
            expected[name] = text.replace("CREATE UNIQUE INDEX", "CREATE INDEX")
    for name, text in target.items():
        if name.startswith("TABLE ") or _ENUM in text:
            expected_lines = set(expected.get(name, "").splitlines())
            actual[name] = "\n".join(line for line in _parts(text) if line in expected_lines)
        elif "kvsz_id_seq" not in name and "WHERE (kvsz_end = " not in text:
            actual[name] = text.replace("ALTER TABLE ONLY", "ALTER TABLE")
    return _without_names_of_keys(expected), _without_names_of_keys(actual)


_KEY: Final = re.compile(
    r"ALTER TABLE (\S+)\n +ADD CONSTRAINT (\S+) (PRIMARY KEY|UNIQUE|EXCLUDE USING \w+) \((.*?)\)"
)
_ENUM: Final = " AS ENUM ("
_OWN: Final = re.compile(r"( DEFAULT .*?)?( NOT NULL)?( COLLATE \S+)?$")


def _columns(text: str) -> list[str]:
    """Return the columns of CREATE TABLE without NOT NULL and defaults."""
    inner = text.partition("(\n")[2].rpartition("\n)")[0]
    lines = [line.strip().removesuffix(",") for line in inner.splitlines()]
    return sorted(
        line if line.startswith("CONSTRAINT ") else _OWN.sub(r"\3", line, count=1) for line in lines
    )


def _parts(text: str) -> list[str]:
    """Return the columns of CREATE TABLE, or the labels of CREATE TYPE in order."""
    return (
        [line.removesuffix(",") for line in text.splitlines()] if _ENUM in text else _columns(text)
    )


def difference(expected: Dump, actual: Dump) -> str:
    """Return the differences of two dumps for a reader; empty without differences."""
    lines = []
    for name in sorted(expected.keys() | actual.keys()):
        expected_lines, actual_lines = (
            set_of.get(name, "").splitlines() for set_of in (expected, actual)
        )
        if expected_lines != actual_lines:
            lines += [name, *difflib.unified_diff(expected_lines, actual_lines, lineterm="", n=0)]
    return "\n".join(lines)
