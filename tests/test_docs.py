"""The documentation fits the code: settings, metrics, commands, error codes, links."""

import enum
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from scripts import reference
from streamer.config import static_mapping
from streamer.config.choices import CHOICES
from streamer.config.settings import Settings
from streamer.errors.error_classes import StreamerError
from streamer.errors.error_reports import classes_of_errors
from streamer.mapping.allowed_functions import GROUPS

ROOT: Final = Path(__file__).parent.parent
DOCS: Final = ROOT / "docs"
EXAMPLE: Final = ROOT / "config.example.yaml"
DOCUMENTS: Final = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])

README_LINES_MAX: Final = 150
PAGE_WORDS_MAX: Final = 1500
RESULTS: Final = re.compile("<!-- benchmark -->.*?<!-- /benchmark -->", re.DOTALL)
"""The table that ``make bench ARGS=--publish`` writes."""
NOTES_MAX: Final = 19
NOTE_WORDS_MAX: Final = 1200
SETTINGS: Final = dict(reference.settings())
VARIABLES: Final = ("DW_PASSWORD", "SHOP_EU_PASSWORD", "SHOP_US_PASSWORD")


def page(name: str) -> str:
    """Return the text of a page of the documentation."""
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def test_the_walk_over_settings_finds_them() -> None:
    assert {"target.schema", "sync.jobs", "sources[].urls[].sid", "sources[].tables.*.type"} <= set(
        SETTINGS
    )


@pytest.mark.parametrize("path", reference.files(), ids=lambda path: path.name)
def test_the_reference_agrees_with_the_code(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == reference.generated(path), "run: make reference"


def test_every_setting_and_each_of_its_values_is_described() -> None:
    for name, field in SETTINGS.items():
        assert re.fullmatch(r"[A-Za-z].*\.", field.description or ""), name
        inner = [field.annotation, *get_args(field.annotation)]
        values = {str(v.value) for a in inner if isinstance(a, type(enum.Enum)) for v in a}
        if get_origin(field.annotation) is Literal:
            values = set(get_args(field.annotation))
        assert set(CHOICES.get(name.rpartition(".")[2], ())) >= values, name


def test_every_error_code_has_a_next_step() -> None:
    text = "".join(path.read_text() for path in (ROOT / "streamer").rglob("*.py"))
    codes = set(re.findall(r'^    code(?:: ClassVar\[str\])? = "(\w+)"', text, re.MULTILINE))
    classes = reference.error_classes()
    assert {error.code for error in classes} == codes
    for error in classes:
        assert error is StreamerError or "advice" in vars(error), error


def test_every_error_has_a_runbook_that_names_its_code() -> None:
    for error in classes_of_errors():
        assert (DOCS / "runbooks" / f"{error.runbook}.md").is_file(), error
        if error.code not in ("source", "target"):  # these have no cause in common
            assert f"`{error.code}`" in page(f"runbooks/{error.runbook}"), error


def test_a_code_alone_decides_the_runbook() -> None:
    runbooks: dict[str, set[str]] = {}
    for error in classes_of_errors():
        runbooks.setdefault(error.code, set()).add(error.runbook)
    assert {code: found for code, found in runbooks.items() if len(found) > 1} == {}


def test_every_runbook_has_a_symptom_a_cause_and_a_remedy() -> None:
    for path in sorted((DOCS / "runbooks").glob("*.md")):
        headings = re.findall(r"^## (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        text = " ".join(headings)
        assert re.match(r"Symptoms .*Why.* [Ww]hat to do", text), path


def test_reference_lists_exactly_the_tables_of_the_bookkeeping() -> None:
    migrations = "".join(p.read_text() for p in sorted((ROOT / "migrations/target").glob("*.sql")))
    tables = set(re.findall(r"^create table (streamer\.\w+)", migrations, re.MULTILINE))

    rows = re.findall(r"^\| `(streamer\.\w+)`", page("reference/bookkeeping-tables"), re.MULTILINE)
    assert set(rows) == tables


def test_example_names_every_setting() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    words = set(re.findall(r"(?:^[\s#-]*|[{,] ?)'?(\w+)'?:(?=\s|$)", text, re.MULTILINE))

    assert {name.rpartition(".")[2] for name in SETTINGS} - words == set()


def test_example_gives_optional_settings_their_defaults() -> None:
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

    _, mapping = static_mapping.load(EXAMPLE)

    assert [source.label for source in mapping.sources] == ["shop:eu", "shop:us"]


def test_configuration_of_the_tutorial_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", page("tutorial"), re.DOTALL)
    path = tmp_path / "config.yaml"
    path.write_text(block)
    monkeypatch.setenv("SHOP_PASSWORD", "secret")
    monkeypatch.setenv("DW_PASSWORD", "secret")

    _, mapping = static_mapping.load(path)

    (source,) = mapping.sources
    assert source.publication in page("tutorial")
    assert source.publication_inserts in page("tutorial")


def test_the_functions_that_an_expression_may_call_are_listed() -> None:
    sections = page("reference/functions").split("\n## ")[1:]
    listed = {s.partition("\n")[0]: sorted(re.findall(r"`(\w+)`", s)) for s in sections}
    assert listed == {title: sorted(names.split()) for title, names in GROUPS.items()}


def test_every_word_of_the_glossary_is_one_of_the_code() -> None:
    words = re.findall(r"^\| ([a-z ]+) \|", page("glossary"), re.MULTILINE)[1:]
    assert "lane" in words
    assert words == sorted(words)
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "streamer").rglob("*.py"))
    code = re.sub(r"(?<=[a-z])(?=[A-Z])|[_\s-]+", " ", code).lower()
    assert [word for word in words if word not in code] == []


def test_the_files_that_internals_name_are_there() -> None:
    for path in (DOCS / "internals").rglob("*.md"):
        for name in re.findall(r"`((?:streamer|tests)/[\w/.]+)`", path.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{path.name} names {name}"


def commands_in(text: str) -> Iterator[list[str]]:
    """Yield the commands of streamer in a page, as words without the program."""
    blocks = re.findall(r"^ *```(?:sh|shell)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    for line in [*lines, *re.findall(r"`([^`\n]+)`", prose)]:
        found = re.match(r"\s*(?:\S*/bin/)?streamer (?!snapshot$)(.*?)(?: [>&]|  #|$)", line)
        if found:
            yield shlex.split(found[1])


def problem_of(words: list[str]) -> str | None:
    """Return the fault of a command line; None if streamer accepts command and options."""
    group: Any = reference.PROGRAM
    known = {"--help"} | {option for parameter in group.params for option in parameter.opts}
    for number, word in enumerate(words):
        if hasattr(group, "commands") and not word.startswith("-"):
            group = group.commands.get(word)
            if group is None:
                return f"no command {' '.join(words[: number + 1])}"
            known |= {option for parameter in group.params for option in parameter.opts}
        elif word.startswith("-") and len(word) > 1 and word.partition("=")[0] not in known:
            return f"no option {word} of {' '.join(words)}"
    return None


WRITTEN: Final = [path for path in DOCUMENTS if path not in reference.files()]


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_streamer_takes_every_command_of_a_page(path: Path) -> None:
    assert problem_of(["resync", "t", "--fast"]) is not None
    found = map(problem_of, commands_in(path.read_text(encoding="utf-8")))

    assert [problem for problem in found if problem is not None] == []


def setting_paths(value: Any, path: str) -> Iterator[str]:
    """Yield the paths of the settings that a piece of configuration sets."""
    if path in SETTINGS or not isinstance(value, dict | list):
        yield path
    elif isinstance(value, list):
        for inner in value:
            yield from setting_paths(inner, f"{path}[]")
    else:
        for key, inner in value.items():
            name = "*" if path.endswith("tables") else str(key)
            if inner is not None:
                yield from setting_paths(inner, f"{path}.{name}" if path else name)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_streamer_has_every_setting_of_a_page(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for block in re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        given = yaml.safe_load(block)
        # A guide shows tables alone, without sources.
        are_tables = not set(given) & set(Settings.model_fields)
        paths = setting_paths(given, "sources[].tables" if are_tables else "")

        assert set(paths) <= set(SETTINGS), block


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
    assert set(listed) == pages


def test_the_readme_is_short_and_its_configuration_is_that_of_the_tutorial() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = [
        re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) for text in (readme, page("tutorial"))
    ]

    assert len(readme.splitlines()) <= README_LINES_MAX
    assert blocks[0] == blocks[1]


def test_design_notes_are_few_and_short_and_have_facts_a_design_and_the_refused_forms() -> None:
    notes = sorted((DOCS / "decisions").glob("*.md"))
    assert 0 < len(notes) <= NOTES_MAX
    for path in notes:
        text = path.read_text(encoding="utf-8")
        title, facts, *rest = re.findall(r"^#+ (.*)$", text, re.MULTILINE)

        assert facts.startswith("Facts about PostgreSQL"), path
        assert rest == ["Design", "Refused"], path
        assert len(text.split()) <= NOTE_WORDS_MAX, path
        assert f"[{title}](decisions/{path.name})" in page("index"), path


def test_no_text_names_a_design_note_by_a_number() -> None:
    numbered = re.compile(r"\bdecisions?\s+\d+\b|decisions/\d", re.IGNORECASE)
    texts = [*DOCUMENTS, ROOT / "Makefile", ROOT / "mkdocs.yml"]
    for top in ("streamer", "tests", "scripts", "benchmarks", "migrations", "deploy"):
        texts += [path for path in (ROOT / top).rglob("*") if path.suffix in {".py", ".md", ".sql"}]

    assert [path for path in texts if numbered.search(path.read_text(encoding="utf-8"))] == []


def test_a_page_answers_one_question() -> None:
    long = {
        str(path.relative_to(DOCS)): words
        for path in DOCS.rglob("*.md")
        if path.parent.name != "reference"
        if (words := len(RESULTS.sub("", path.read_text("utf-8")).split())) > PAGE_WORDS_MAX
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


def test_each_of_the_five_paths_names_a_file_once() -> None:
    _, _, section = page("internals/architecture").partition("## The five paths\n")
    section, _, _ = section.partition("\n## ")
    ways = re.split(r"^### ", section, flags=re.MULTILINE)[1:]
    assert len(ways) == 5
    for way in ways:
        names = re.findall(r"`(streamer/[\w/]+\.py)`", way)
        assert len(names) > 5
        assert len(names) == len(set(names)), way.splitlines()[0]


def test_each_of_the_twenty_behaviours_is_in_the_file_that_the_page_names() -> None:
    lines = page("internals/behaviours").splitlines()
    rows = [line.split(" | ") for line in lines if "`streamer/" in line]
    assert len(rows) == 20
    for behaviour, guess, name in rows:
        path = guess.strip("`")
        defined = re.findall(r"^ *(?:async def|def|class) (\w+)", (ROOT / path).read_text(), re.M)
        assert name.strip("` |") in defined, behaviour
        assert (ROOT / re.findall(r"`(\S+\.py)`", guess)[0]).is_file(), behaviour
