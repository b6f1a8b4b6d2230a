"""The files of a dbt package about the target's tables, for ``streamer export --dbt``. Pure.

The package declares each replicated table as a dbt source, and tests the keys of tables. Freshness
comes from the bookkeeping. Each history table has a view of its current rows.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import yaml

from streamer import __version__
from streamer.bookkeeping.positions import VISIBLE_UNTIL_SQL
from streamer.mapping.rule_options import TableType
from streamer.mapping.rules import TableRule
from streamer.postgres.quoting import quote_columns, quote_identifier, quote_literal
from streamer.schema.target_relation import TargetRelation

MARK: Final = "Made by `streamer export --dbt`, which replaces this file."
"""The first line of each file, without the sign of a comment."""
_PREFIX: Final = "streamer_"
"""Distinguishes the sources of the package from sources that a project has for the same schema."""
_WARN_MINUTES: Final = 5
_ERROR_MINUTES: Final = 60
_UNQUOTABLE: Final = re.compile(r'[{"\\\x00-\x1f]')
"""dbt renders braces as templates, and does not escape quotes inside a name."""


@dataclass(frozen=True, slots=True)
class ReplicatedTable:
    """A table of the target. ``labels``: the sources that write the table."""

    relation: TargetRelation
    rule: TableRule
    labels: tuple[str, ...]

    @property
    def type(self) -> TableType:
        return self.rule.type

    @property
    def own_columns(self) -> tuple[str, ...]:
        """The columns that streamer adds to keep versions."""
        if self.type is not TableType.HISTORY:
            return ()
        names = (self.rule.history.id, *self.rule.history.names)
        return tuple(name for name in names if name in self.relation.columns)

    @property
    def key(self) -> tuple[str, ...]:
        """The columns that identify a row, or the current row of a history; empty if unknown.

        PostgreSQL accepts several nulls in a unique index, so a key has no nullable column.
        """
        columns = self.relation.columns
        for unique in self.relation.unique_keys:
            key = tuple(name for name in unique if name not in self.own_columns)
            if key and all(columns[name].not_null for name in key):
                return key
        return ()

    @property
    def obstacle(self) -> str | None:
        """The name that dbt cannot quote, if any."""
        name = self.relation.name
        names = (name.namespace, name.name, *self.relation.columns)
        return next((text for text in names if _UNQUOTABLE.search(text)), None)


@dataclass(frozen=True, slots=True)
class DbtPackage:
    """``files``: text by path in the package. ``tables``: the tables, in the form of ``--json``.

    ``left_out``: tables with a name that dbt cannot quote, and that name.
    """

    files: dict[str, str]
    tables: list[dict[str, Any]]
    left_out: list[dict[str, str]]


def dbt_package(tables: Iterable[ReplicatedTable]) -> DbtPackage:
    """Return the package about *tables*."""
    builder = _PackageBuilder()
    for table in sorted(tables, key=lambda table: table.relation.name):
        builder.add(table)
    return builder.package()


class _PackageBuilder:
    """Collects the tables of a package, and gives each a name that dbt accepts."""

    def __init__(self) -> None:
        self._package = DbtPackage({"dbt_project.yml": _project()}, [], [])
        self._sources: dict[str, dict[str, Any]] = {}
        self._views: list[dict[str, Any]] = []
        self._names = _UniqueNames()

    def add(self, table: ReplicatedTable) -> None:
        target = table.relation.name
        if table.obstacle is not None:
            self._package.left_out.append({"target": str(target), "name": table.obstacle})
            return
        source = self._source(target.namespace)
        name = self._names.take(source["name"], target.name)
        source["tables"].append(_source_table(table, name))
        full_name = self._names.take("all", f"{source['name'].removeprefix(_PREFIX)}__{name}")
        tested = reference = f"{{{{ source('{source['name']}', '{name}') }}}}"
        view = None
        if table.type is TableType.HISTORY:
            view = self._add_view(table, full_name, reference)
            tested = f"{{{{ ref('{view}') }}}}"
        if table.key:
            self._package.files[f"tests/{full_name}_key.sql"] = _key_test(table, tested)
        row = {
            "target": str(target),
            "type": table.type.value,
            "source": f"{source['name']}.{name}",
        }
        self._package.tables.append(row | {"key": list(table.key), "current": view})

    def _source(self, namespace: str) -> dict[str, Any]:
        """Return the dbt source of a schema of the target."""
        if namespace not in self._sources:
            name = self._names.take("sources", f"{_PREFIX}{namespace}")
            self._sources[namespace] = _source(namespace, name)
        return self._sources[namespace]

    def _add_view(self, table: ReplicatedTable, name: str, reference: str) -> str:
        """Add the view of the current rows of a history; return its name."""
        view = self._names.take("models", f"{name}_current")
        self._package.files[f"models/{view}.sql"] = _current_rows(table, reference)
        self._views.append(_view(table, view))
        return view

    def package(self) -> DbtPackage:
        documents = {"sources": list(self._sources.values()), "models": self._views}
        for kind, entries in documents.items():
            self._package.files[f"models/{kind}.yml"] = _yaml({kind: entries})
        return self._package


class _UniqueNames:
    """Names that dbt accepts, for names of PostgreSQL that may hold any character."""

    def __init__(self) -> None:
        self._taken: set[tuple[str, str]] = set()

    def take(self, room: str, name: str) -> str:
        """Return a name like *name* that is unique in *room*, such as a source or the models."""
        plain = re.sub(r"[^a-z0-9_]", "_", name.lower())
        candidate, number = plain, 1
        while (room, candidate) in self._taken:
            number += 1
            candidate = f"{plain}_{number}"
        self._taken.add((room, candidate))
        return candidate


def _yaml(document: dict[str, Any]) -> str:
    text = yaml.safe_dump({"version": 2} | document, sort_keys=False, allow_unicode=True, width=96)
    return f"# {MARK}\n{text}"


def _project() -> str:
    project = {
        "name": "streamer",
        "version": __version__,
        "config-version": 2,
        "require-dbt-version": ">=1.10.0",
        "model-paths": ["models"],
        "test-paths": ["tests"],
        "models": {"streamer": {"+materialized": "view"}},
    }
    return f"# {MARK}\n{yaml.safe_dump(project, sort_keys=False)}"


def _source(namespace: str, name: str) -> dict[str, Any]:
    freshness = {
        "warn_after": {"count": _WARN_MINUTES, "period": "minute"},
        "error_after": {"count": _ERROR_MINUTES, "period": "minute"},
    }
    return {
        "name": name,
        "schema": namespace,
        "loader": "streamer",
        "config": {"freshness": freshness},
        "tables": [],
    }


def _source_table(table: ReplicatedTable, name: str) -> dict[str, Any]:
    target = table.relation.name
    labels = ", ".join(label for label in table.labels if not _UNQUOTABLE.search(label))
    query = VISIBLE_UNTIL_SQL.strip().format(target=quote_literal(str(target)))
    return {
        "name": name,
        "identifier": target.name,
        "description": f"A table of type {table.type.value}, from {labels}.",
        "config": {"loaded_at_query": query},
        "columns": _columns(table, table.relation.columns),
    }


def _columns(table: ReplicatedTable, names: Iterable[str]) -> list[dict[str, Any]]:
    columns: list[dict[str, Any]] = []
    for name in names:
        kind = table.relation.columns[name].type
        column: dict[str, Any] = {"name": name, "quote": True}
        if not _UNQUOTABLE.search(kind):
            column["data_type"] = kind
        if name in table.key:
            column["data_tests"] = ["not_null"]
        columns.append(column)
    return columns


def _current_columns(table: ReplicatedTable) -> list[str]:
    return [name for name in table.relation.columns if name not in table.own_columns]


def _current_rows(table: ReplicatedTable, reference: str) -> str:
    """Return the model of the view. Current rows are open versions; deleted keys have none."""
    columns = ",\n    ".join(map(quote_identifier, _current_columns(table)))
    condition = table.rule.history.is_open()
    return f"-- {MARK}\nselect\n    {columns}\nfrom {reference}\nwhere {condition}\n"


def _view(table: ReplicatedTable, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "description": f"The current rows of {table.relation.name}.",
        "columns": _columns(table, _current_columns(table)),
    }


def _key_test(table: ReplicatedTable, reference: str) -> str:
    """A test of dbt passes if its query returns no row."""
    key = quote_columns(table.key)
    return (
        f"-- {MARK}\nselect {key}, count(*)\nfrom {reference}\ngroup by {key}\n"
        "having count(*) > 1\n"
    )
