"""The documentation names what there is: settings, metrics, commands, error codes. Links resolve."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, get_args, get_origin

import pytest
import typer
import yaml
from fastapi import FastAPI
from pydantic import BaseModel

from streamer.admin.api import make_router
from streamer.cli.main import app
from streamer.config import static
from streamer.config.settings import Settings, TableSettings
from streamer.mapping.functions import GROUPS
from streamer.observability.metrics import Metrics
from streamer.runtime.gauges import Facts, families

ROOT: Final = Path(__file__).parent.parent
DOCS: Final = ROOT / "docs"
EXAMPLE: Final = ROOT / "config.example.yaml"
DOCUMENTS: Final = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])

README_LINES_MAX: Final = 150
PAGE_WORDS_MAX: Final = 1500
VARIABLES: Final = ("DW_PASSWORD", "SHOP_EU_PASSWORD", "SHOP_US_PASSWORD")


def models_in(annotation: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the models that a field holds, with what a path to them has: '' or '[]' or '.*'."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "", annotation
        return
    marks: dict[Any, str] = {list: "[]", dict: ".*"}
    mark = marks.get(get_origin(annotation), "")
    for argument in get_args(annotation):
        for inner, model in models_in(argument):
            yield mark + inner, model


def setting_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every setting that holds a value, as people write it: ``sources[].urls[].sid``."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        inner = list(models_in(field.annotation))
        if not inner:
            yield path
        for mark, its in inner:
            yield from setting_names(its, f"{path}{mark}.")


SETTINGS: Final = list(setting_names(Settings))


def metric_names() -> set[str]:
    registered = {
        f"{metric.name}_total" if metric.type == "counter" else metric.name
        for metric in Metrics().registry.collect()
    }
    return registered | {metric.name for metric in families(Facts(True, 0.0))}


def error_codes() -> set[str]:
    text = "".join(path.read_text() for path in (ROOT / "streamer").rglob("*.py"))
    return set(re.findall(r'^    code(?:: ClassVar\[str\])? = "(\w+)"', text, re.MULTILINE))


def commands() -> dict[str, Any]:
    """Return every command by name, and the program itself under none."""
    group: Any = typer.main.get_command(app)
    return {"": group, **group.commands}


def leaves() -> Iterator[tuple[str, Any]]:
    """Yield every command that does something, by its whole name."""
    for name, command in commands().items():
        inner = getattr(command, "commands", None) if name else None
        if inner is None:
            yield name, command
        else:
            yield from ((f"{name} {its}", it) for its, it in inner.items())


def options() -> list[tuple[str, str]]:
    """Return every option with its command, but for those that typer adds to all."""
    return [
        (name, option)
        for name, command in leaves()
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--") and "completion" not in option
    ]


def page(name: str) -> str:
    """Return the text of a page of the documentation."""
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def first_cells(text: str) -> set[str]:
    """Return what stands in backticks in the first column of a text's tables."""
    return {
        name
        for line in text.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`([^`]+)`", line.split("|")[1])
    }


def test_the_walk_over_settings_finds_them() -> None:
    assert {"target.schema", "sync.jobs", "sources[].urls[].sid", "sources[].tables.*.type"} <= set(
        SETTINGS
    )


def test_reference_lists_exactly_the_settings_there_are() -> None:
    of_tables = {name for name in SETTINGS if name.startswith("sources[].tables.*.")}
    general = set(SETTINGS) - of_tables | {"sources[].tables"}
    settings, tables = page("reference/configuration").split("\n## Tables\n")

    assert first_cells(settings) == general
    assert first_cells(tables) == set(TableSettings.model_fields)
    assert {name.rpartition(".")[2] for name in of_tables} == set(TableSettings.model_fields)


def test_reference_lists_exactly_the_metrics_there_are() -> None:
    names = {name for name in first_cells(page("reference/metrics")) if "streamer_" in name}

    assert names == metric_names()


def test_reference_lists_exactly_the_error_codes_there_are() -> None:
    assert first_cells(page("reference/error-codes")) == error_codes()


def test_reference_lists_exactly_the_commands_there_are() -> None:
    rows = {cell.split()[0] for cell in first_cells(page("reference/cli")) if not cell.isdigit()}

    assert rows == set(commands()) - {""}


def test_reference_lists_exactly_the_routes_there_are() -> None:
    app = FastAPI()
    never: Any = None
    app.include_router(make_router(never, never, never))
    routes = {
        f"{method} {path.removeprefix('/api').replace('{number}', 'ID')}"
        for path, methods in app.openapi()["paths"].items()
        for method in map(str.upper, methods)
    }
    documented = first_cells(page("reference/http-api").split("\n## The API\n")[1])

    assert documented == routes


@pytest.mark.parametrize(("command", "option"), options(), ids=lambda value: value or "streamer")
def test_reference_names_option(command: str, option: str) -> None:
    text = page("reference/cli")
    rows = [line for line in text.splitlines() if line.startswith(f"| `{command}")]
    shared = re.sub(r"^\|.*\n", "", text, flags=re.MULTILINE)

    assert option in (rows[0] if command and option in rows[0] else shared)


def test_example_names_every_setting() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    words = set(re.findall(r"(?:^[\s#-]*|[{,] ?)(\w+):(?=\s|$)", text, re.MULTILINE))

    assert {name.rpartition(".")[2] for name in SETTINGS} - words == set()


def test_example_gives_what_is_optional_its_default() -> None:
    values = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))

    for name in SETTINGS:
        section_name, _, key = name.rpartition(".")
        if "[]" in name or name == "target.url":
            continue
        model = Settings.model_fields[section_name].annotation if section_name else Settings
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        (field,) = (f for n, f in model.model_fields.items() if key in (n, f.alias))
        given = values[section_name][key] if section_name else values[key]
        assert given == field.default, name


def test_example_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "secret")

    _, mapping = static.load(EXAMPLE)

    assert [source.label for source in mapping.sources] == ["shop:eu", "shop:us"]


def test_configuration_of_the_tutorial_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", page("tutorial"), re.DOTALL)
    path = tmp_path / "config.yaml"
    path.write_text(block)
    monkeypatch.setenv("SHOP_PASSWORD", "secret")
    monkeypatch.setenv("DW_PASSWORD", "secret")

    _, mapping = static.load(path)

    (source,) = mapping.sources
    assert source.publication in page("tutorial")
    assert source.publication_inserts in page("tutorial")


def test_the_functions_that_an_expression_may_call_are_listed() -> None:
    sections = page("reference/functions").split("\n## ")[1:]
    listed = {s.partition("\n")[0]: sorted(re.findall(r"`(\w+)`", s)) for s in sections}
    assert listed == {title: sorted(names.split()) for title, names in GROUPS.items()}


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def pages_in(navigation: Any) -> Iterator[str]:
    """Yield the paths of the pages that the navigation of the site lists."""
    if isinstance(navigation, str):
        yield navigation
    else:
        for inner in navigation.values() if isinstance(navigation, dict) else navigation:
            yield from pages_in(inner)


def test_the_navigation_of_the_site_lists_every_page_once() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    listed = list(pages_in(site["nav"]))

    assert len(listed) == len(set(listed))
    assert set(listed) == pages - {"progress.md"}


def test_the_readme_is_short_and_its_configuration_is_that_of_the_tutorial() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = [
        re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) for text in (readme, page("tutorial"))
    ]

    assert len(readme.splitlines()) <= README_LINES_MAX
    assert blocks[0] == blocks[1]


def test_a_page_answers_one_question() -> None:
    long = {
        str(path.relative_to(DOCS)): words
        for path in DOCS.rglob("*.md")
        if path.parent.name != "reference" and path.name not in ("decisions.md", "progress.md")
        if (words := len(path.read_text(encoding="utf-8").split())) > PAGE_WORDS_MAX
    }

    assert not long


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)

    for link in re.findall(r"\]\(([^)]+)\)", text):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        linked = path.parent / name if name else path
        assert linked.exists(), link
        assert not anchor or anchor in anchors(linked), link
