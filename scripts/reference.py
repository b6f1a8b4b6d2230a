"""Writes the parts of the reference that come from the code, and ``config.example.yaml``.

``make reference`` runs this module; `tests/test_docs.py` compares the result with the committed
files. A page holds prose and generated sections. A generated section begins with a heading that
`SECTIONS` names and ends before the next heading of the same or a higher rank.
"""

import enum
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, get_args, get_origin

import typer
import yaml
from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from streamer.admin.api.router import make_router
from streamer.cli.main import app
from streamer.cli.shared_options import PANELS
from streamer.commands.demo import demo_servers, embedded_servers
from streamer.config.choices import CHOICES
from streamer.config.json_schema import schema_of_file
from streamer.config.settings import Settings, SourceSettings, TableSettings, UrlSettings
from streamer.errors.error_classes import (
    AdminError,
    ComparisonError,
    CutoverError,
    StreamerError,
)
from streamer.errors.error_reports import classes_of_errors
from streamer.observability.http_server import add_routes
from streamer.observability.metrics import Metrics
from streamer.runtime.health.gauges import ScrapeFacts, families

ROOT: Final = Path(__file__).parent.parent
PAGES: Final = ROOT / "docs" / "reference"
EXAMPLE: Final = ROOT / "config.example.yaml"
SCHEMA: Final = PAGES / "config.schema.json"
_WIDTH: Final = 100


def _table(header: str, rows: Iterable[Iterable[str]]) -> str:
    columns = header.split(" | ")
    lines = [columns, ["---"] * len(columns), *(list(row) for row in rows)]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )


# ---- settings ------------------------------------------------------------------------------------

_SEE: Final = {
    "target.create_fk_indexes": "../guides/indexes-under-foreign-keys.md",
    "on_error": "../runbooks/rows-in-quarantine.md",
    "heartbeat_interval": "../guides/monitor.md#heartbeats",
    "sync.spark_master": "../guides/spark-cluster.md",
    "sync.allow_insecure_spark": "../guides/spark-cluster.md",
    "http.listen": "http-api.md",
    "admin.token": "http-api.md#authentication",
    "notify.webhook": "../guides/notifications.md",
    "opentelemetry.endpoint": "../guides/opentelemetry.md",
    "spool.directory": "../runbooks/target-away.md",
    "mapping_database": "../guides/mapping-database-and-page.md",
    "sources[].max_retained_wal": "../runbooks/source-disk-fills.md",
    "sources[].on_max_retained_wal": "../runbooks/target-away.md",
    "sources[].tables.*.keys": "../guides/shards.md",
    "sources[].ddl": "../guides/definitions.md",
    "sources[].on_ddl": "../guides/definitions.md",
    "sources[].forward_origins": "../guides/databases-that-feed-each-other.md",
    "sources[].failover": "../runbooks/failover.md",
    "sources[].tables.*.type": "#types-of-tables",
    "sources[].tables.*.filter": "../guides/filter-and-set.md",
    "sources[].tables.*.set": "../guides/filter-and-set.md",
    "hash_keys": "../guides/keep-columns-at-the-source.md#hash-a-column-with-a-key",
    "sources[].tables.*.column_list": "../guides/keep-columns-at-the-source.md",
    "sources[].tables.*.partition_by.column": "../guides/time-partitions.md",
    "sources[].tables.*.initial": "../guides/initial-copy-and-resync.md",
    "sources[].tables.*.on_column_added": "../guides/columns-that-change.md",
    "sources[].tables.*.skip_truncate": "../guides/mass-deletes.md",
    "sources[].tables.*.max_deleted_rows": "../guides/mass-deletes.md",
}
"""Pages with further information about a setting."""


def models_in(annotation: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the models that a field holds, with the mark of the container: '', '[]' or '.*'."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "", annotation
        return
    marks: dict[Any, str] = {list: "[]", dict: ".*"}
    mark = marks.get(get_origin(annotation), "")
    for argument in get_args(annotation):
        for inner, model in models_in(argument):
            yield mark + inner, model


_WHOLE: Final = {"hash_keys", "sources[].tables.*.set"}
"""Settings whose description shows the inner settings."""


def settings(
    model: type[BaseModel] = Settings, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """Yield every setting that holds a value, by path, such as ``sources[].urls[].sid``."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        inner = [] if path in _WHOLE else list(models_in(field.annotation))
        if not inner:
            yield path, field
        for mark, inner_model in inner:
            yield from settings(inner_model, f"{path}{mark}.")


def plain(value: Any) -> Any:
    """Return *value* as a value of YAML."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.value if isinstance(value, enum.Enum) else value


def written(value: Any) -> str:
    """Return *value* as a word of YAML."""
    text = yaml.safe_dump(
        plain(value), default_flow_style=True, width=10_000, allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("\n").removesuffix("\n...")


_BOUNDS: Final = {"ge": "At least", "gt": "More than", "le": "At most"}


def limits(field: FieldInfo) -> str:
    """Return the bounds of a number, such as ``1 to 64``."""
    bounds = {
        kind: getattr(b, kind) for b in field.metadata for kind in _BOUNDS if hasattr(b, kind)
    }
    return "".join(f" {words} {bounds[kind]}." for kind, words in _BOUNDS.items() if kind in bounds)


def default_text(field: FieldInfo) -> str:
    """Return the default of a setting for a reader."""
    if field.is_required():
        return "required"
    if field.default in (None, [], {}):
        return "inherited" if (field.description or "").startswith("Overrides") else "none"
    return f"`{written(field.default)}`"


def meaning(path: str, field: FieldInfo) -> str:
    """Return description, values and link of a setting."""
    name = path.rpartition(".")[2]
    parts = [f"{field.description}{limits(field)}"]
    parts += [f"`{value}`: {text}." for value, text in choices(name, field).items()]
    if (link := _SEE.get(path)) is not None:
        parts.append(f"[More]({link})")
    return " ".join(parts)


def choices(name: str, field: FieldInfo) -> dict[str, str]:
    """Return the meanings of the values of a setting with an enumeration of values."""
    words = CHOICES.get(name, {})
    # The reference explains the values of a table's setting at the global setting. The name of a
    # number can equal the name of a setting with an enumeration.
    is_other = (field.description or "").startswith("Overrides") or field.annotation is float
    return {} if is_other else words


def settings_table(is_shown: Callable[[str], bool], prefix: str = "") -> str:
    """Return the settings that *is_shown* accepts, as a table."""
    return _table(
        "setting | default | meaning",
        (
            (f"`{path.removeprefix(prefix)}`", default_text(field), meaning(path, field))
            for path, field in settings()
            if is_shown(path)
        ),
    )


_OF_TABLE: Final = "sources[].tables.*."


def _is_of_source(path: str) -> bool:
    return path.startswith("sources[]") and not path.startswith(_OF_TABLE)


# ---- config.example.yaml -------------------------------------------------------------------------

_HEAD: Final = """\
# yaml-language-server: $schema=docs/reference/config.schema.json
#
# Every setting, with unit and default. Copy this file to config.yaml and keep the keys that you
# need: only `target.url` and `sources` are required.
#
# Precedence: command line, environment, this file, default. The environment variable of a setting
# has the name of its path, as in STREAMER_TARGET__URL or STREAMER_HTTP__LISTEN. streamer replaces
# ${NAME} in a string from the environment. Write $${NAME} for the literal text. streamer rejects an
# unknown key, a wrong type or a missing variable with file, line and key. A missing variable of a
# source stops that source alone.
#
# `streamer config schema` prints the JSON schema that the first line names. Editors with the YAML
# language server then complete keys and mark faults.
#
# `make reference` writes this file from streamer/config/settings.py.
"""
_MORE_TABLES: Final = """
      audit.events: {type: append, exclude: [payload]}
      "log.*": {target: "log.*", type: append}
"""


_EXPLAINED: Final = re.compile(r"\b(?:By default|The default|Without it|Not set)\b")


def comment(path: str, field: FieldInfo, indent: str) -> str:
    """Return the description of a setting as comment lines."""
    name = path.rpartition(".")[2]
    sentences = f"{field.description}{limits(field)}"
    default = "Required." if field.is_required() else f"Default: {default_text(field)}."
    if default != "Default: none." or not _EXPLAINED.search(sentences):
        sentences += " " + default.replace("`", "")
    text = [sentences, *(f"- {value}: {text}" for value, text in choices(name, field).items())]
    return "\n".join(
        textwrap.fill(
            paragraph,
            _WIDTH,
            initial_indent=f"{indent}# ",
            subsequent_indent=f"{indent}#   " if paragraph.startswith("- ") else f"{indent}# ",
            break_on_hyphens=False,
        )
        for paragraph in text
    )


def example_value(field: FieldInfo) -> str:
    """Return the example of a setting, or the default."""
    return written(field.examples[0] if field.examples else field.default)


def _lines(model: type[BaseModel], prefix: str, indent: str, *skip: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        key = field.alias or name
        if key in skip:
            continue
        yield comment(prefix + key, field, indent)
        # YAML 1.1 reads a plain `on` as true.
        yield f"{indent}{written(key)}: {example_value(field)}"
        for _, item in models_in(field.annotation) if prefix + key not in _WHOLE else ():
            examples = [f"{n}: {example_value(f)}" for n, f in item.model_fields.items()]
            yield from (f"{indent}# {'- ' if e is examples[0] else '  '}{e}" for e in examples)


def _example_source() -> Iterator[str]:
    fields = SourceSettings.model_fields
    yield comment("sources[].database", fields["database"], "  ")
    yield "  - database: shop"
    yield comment("sources[].urls", fields["urls"], "    ")
    yield "    urls:"
    for name, field in UrlSettings.model_fields.items():
        yield comment(f"sources[].urls[].{name}", field, "      ")
    for sid in ("eu", "us"):
        url = f"postgresql://streamer:${{SHOP_{sid.upper()}_PASSWORD}}@{sid}-db.example/shop"
        yield f'      - {{url: "{url}", sid: {sid}}}'
    yield from _lines(SourceSettings, "sources[].", "    ", "database", "urls", "tables")
    yield comment("sources[].tables", fields["tables"], "    ")
    yield "    tables:"
    yield "      # A table with all defaults."
    yield "      customers:"
    yield ""
    yield "      # A table with every setting."
    yield "      orders:"
    yield from _lines(TableSettings, _OF_TABLE, "        ")
    yield ""


def example_file() -> str:
    """Return ``config.example.yaml``."""
    lines: list[str] = [_HEAD]
    for name, field in Settings.model_fields.items():
        if name == "sources":
            lines += [comment(name, field, ""), "sources:", *_example_source()]
        elif name not in _WHOLE and (inner := list(models_in(field.annotation))):
            lines += [f"{name}:", *_lines(inner[0][1], f"{name}.", "  "), ""]
        else:
            lines += [comment(name, field, ""), f"{name}: {example_value(field)}", ""]
    return "\n".join(lines) + _MORE_TABLES


# ---- commands ------------------------------------------------------------------------------------

PROGRAM: Final[Any] = typer.main.get_command(app)


def leaves(group: Any = PROGRAM, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every command without subcommands, by the whole name."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


_WORDS: Final = {"str": "TEXT", "path": "FILE", "(?:int|float)(?: range)?": "NUMBER"}
"""Words of the reference for the types in a help record."""


def _help_rows(command: Any, name: str) -> list[tuple[str, str]]:
    context = command.make_context(name, [], resilient_parsing=True)
    rows = []
    for parameter in command.params:
        if (record := parameter.get_help_record(context)) is None:
            continue  # hidden: a process of streamer passes the option to a child
        declared, text = record
        for name_of_type, word in _WORDS.items():
            declared = re.sub(rf" <{name_of_type}>", f" {word}", declared)
        declared = re.sub(r"^([A-Z_]+)\b.*", r"\1", declared)
        rows.append((f"`{re.sub('[<>]', '', declared)}`", text.replace("  [", " [")))
    return rows


def _summary(command: Any) -> str:
    return str(command.help.split("\n\n")[0])


def command_sections() -> str:
    """Return the commands by panel, then a section for each command."""
    parts = []
    by_name = dict(leaves())
    for panel in PANELS:
        names = {n for n, c in PROGRAM.commands.items() if c.rich_help_panel == panel}
        rows = (
            (f"[`{name}`](#streamer-{name.replace(' ', '-')})", _summary(command))
            for name, command in by_name.items()
            if name.split()[0] in names
        )
        parts += [f"### {panel}", _table("command | meaning", rows)]
    for name, command in by_name.items():
        usage = " ".join(
            command.collect_usage_pieces(command.make_context(name, [], resilient_parsing=True))
        )
        parts += [
            f"### streamer {name}",
            command.help,
            f"    streamer {name} {usage}".replace("{", "").replace("}", ""),
            _table("argument or option | meaning", _help_rows(command, name))
            if command.params
            else "It has no options.",
            f"{command.epilog.replace(': ', ': `', 1)}`",
        ]
    return "\n\n".join(parts)


def global_options() -> str:
    """Return the options before a command, as a table."""
    return _table("option | meaning", _help_rows(PROGRAM, "streamer"))


# ---- metrics, errors, routes ---------------------------------------------------------------------


def _labels(metric: Any) -> Iterable[str]:
    return getattr(metric, "_labelnames", ())


def metric_rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type, labels and help of every metric."""
    metrics = Metrics()
    counters = [value for value in vars(metrics).values() if hasattr(value, "describe")]
    families_of_own = [(value, next(iter(value.describe()))) for value in counters]
    described = [(family, _labels(value) or _labels(family)) for value, family in families_of_own]
    gauges = [(family, _labels(family)) for family in families(ScrapeFacts(True, 0.0))]
    for family, labels in described + gauges:
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        yield name, family.type, ", ".join(labels), family.documentation


def metrics_table() -> str:
    """Return every metric as a table."""
    return _table(
        "metric | type | labels | meaning",
        ((f"`{n}`", kind, f"`{labels}`" if labels else "none", f"{text}.")
         for n, kind, labels, text in sorted(metric_rows())),
    )  # fmt: skip


def error_classes() -> list[type[StreamerError]]:
    """Return the classes of errors that define a code."""
    assert issubclass(embedded_servers.ServerError, StreamerError)
    assert issubclass(demo_servers.DemoError, StreamerError)
    return [error for error in classes_of_errors() if "code" in vars(error)]


_RETRIES: Final = {"timed": "automatic", "manual": "after the remedy", "never": "no"}
_OF_COMMANDS: Final = (AdminError, ComparisonError, CutoverError)
"""Errors that end a command, which an operator repeats."""


def errors_table() -> str:
    """Return the error codes as a table."""
    rows = []
    for error in error_classes():
        paragraphs = inspect.cleandoc(error.__doc__ or "").split("\n\n")
        advice = error.advice
        advice += f" [Runbook](../runbooks/{error.runbook}.md)"
        rows.append(
            (f"`{error.code}`", " ".join(paragraphs[0].split()), advice,
             "no" if issubclass(error, _OF_COMMANDS) else _RETRIES[error.retry.value],
             str(error.exit_code))
        )  # fmt: skip
    return _table("code | meaning | remedy | retry | exit code", rows)


def routes_table() -> str:
    """Return the routes of the API as a table."""
    app = FastAPI()
    never: Any = None
    add_routes(app, make_router(never, never, never, never))
    rows = []
    for path, methods in app.openapi()["paths"].items():
        for method, route in methods.items():
            text = " ".join((route.get("description") or route["summary"]).split())
            names = [p["name"] for p in route.get("parameters", ()) if p["in"] == "query"]
            schemas = re.findall(r"#/components/schemas/(\w+)", str(route.get("requestBody", "")))
            takes = ", ".join([*(f"`{name}`" for name in names), *(f"body `{s}`" for s in schemas)])
            where = path.removeprefix("/api").replace("{number}", "ID")
            rows.append((f"`{method.upper()} {where}`", text.removesuffix("."), takes))
    rows.sort(key=lambda row: row[0].strip("`").split(" ")[1])
    return _table("route | meaning | query parameters or body", rows)


# ---- pages ---------------------------------------------------------------------------------------

SECTIONS: Final[dict[str, dict[str, Callable[[], str]]]] = {
    "configuration": {
        "## General settings": lambda: settings_table(lambda path: not path.startswith("sources")),
        "## Settings of a group of sources": lambda: settings_table(_is_of_source),
        "## Settings of a table": lambda: settings_table(
            lambda path: path.startswith(_OF_TABLE), _OF_TABLE
        ),
    },
    "cli": {"## Global options": global_options, "## Commands": command_sections},
    "metrics": {"## All metrics": metrics_table},
    "error-codes": {"## All codes": errors_table},
    "http-api": {"## Routes": routes_table},
}
"""The generated sections by page and heading."""


def with_section(text: str, heading: str, body: str) -> str:
    """Return *text* with *body* under *heading*. Raises ValueError without that heading."""
    rank = heading.partition(" ")[0]
    head, separator, following = text.partition(f"\n{heading}\n")
    if not separator:
        raise ValueError(f"no heading {heading!r}")
    after = re.search(rf"^#{{1,{len(rank)}}} ", following, re.MULTILINE)
    tail = f"\n{following[after.start() :]}" if after else ""
    return f"{head}\n{heading}\n\n{body}\n{tail}"


def files() -> list[Path]:
    """Return the files that have generated parts."""
    return [EXAMPLE, SCHEMA, *(PAGES / f"{page}.md" for page in SECTIONS)]


def generated(path: Path) -> str:
    """Return the expected text of a file."""
    if path == EXAMPLE:
        return example_file()
    if path == SCHEMA:
        return json.dumps(schema_of_file(), indent=2, ensure_ascii=False) + "\n"
    text = path.read_text(encoding="utf-8")
    for heading, make in SECTIONS[path.stem].items():
        text = with_section(text, heading, make())
    return text


if __name__ == "__main__":
    for path in files():
        path.write_text(generated(path), encoding="utf-8")
