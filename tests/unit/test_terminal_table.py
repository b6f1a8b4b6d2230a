"""The table in which commands list rows."""

import dataclasses
import io
import json

import pytest
from rich.console import Console
from rich.text import Text

from streamer.cli.terminal import show
from streamer.commands import conflict_log, ddl_decisions, execute_script, quarantined_rows
from streamer.commands.tenants import tenant_list as tenants
from streamer.commands.terminal_table import Listing, ListingColumn, print_rows, table_lines

HOSTILE = "[/b] [red]x [link=http://x]"


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    count: int
    note: str | None = None


COLUMNS: tuple[ListingColumn[Row], ...] = (
    ListingColumn("name", lambda row: Text(row.name, "red")),
    ListingColumn("count", lambda row: row.count, 2, is_number=True),
    ListingColumn("note", lambda row: row.note, 1),
)
ROWS = (Row("a", 7), Row("long name", 1234, HOSTILE))
LISTING = Listing("rows", COLUMNS, "no rows")


def printed(rows: tuple[Row, ...]) -> str:
    file = io.StringIO()
    print_rows(LISTING, rows, Console(file=file, width=20))
    return file.getvalue()


def test_each_row_is_a_line_with_its_texts_as_they_are() -> None:
    assert printed(ROWS) == (
        f"  name       count  note\n  a              7  \n  long name   1234  {HOSTILE}\n"
    )


def test_no_rows_are_a_sentence() -> None:
    assert printed(()) == "no rows\n"


@pytest.mark.parametrize(
    ("width", "titles"),
    [
        (None, ["name", "count", "note"]),
        (60, ["name", "count", "note"]),
        (44, ["name", "note"]),
        (12, ["name"]),
        (1, ["name"]),
    ],
)
def test_a_narrow_terminal_loses_columns_by_priority(width: int | None, titles: list[str]) -> None:
    assert table_lines(COLUMNS, ROWS, width)[0].plain.split() == titles


def test_a_column_without_values_is_left_out() -> None:
    assert table_lines(COLUMNS, ROWS[:1])[0].plain.split() == ["name", "count"]


def test_json_has_the_fields_of_rows(capsys: pytest.CaptureFixture[str]) -> None:
    show(LISTING, ROWS, as_json=True)
    assert json.loads(capsys.readouterr().out) == {
        "rows": [dataclasses.asdict(row) for row in ROWS]
    }


def test_values_of_rows_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    values: dict[str, str | None] = {"v": HOSTILE}
    row = quarantined_rows.QuarantinedRow(
        1,
        "shop",
        None,
        "t",
        "insert",
        values,
        None,
        values,
        "0/1",
        "now",
        1,
        HOSTILE,
        None,
        "",
        None,
    )
    show(quarantined_rows.LISTING, [row], as_json=False)
    conflict = conflict_log.ConflictRecord(
        1, "shop", None, "t", "t", "k", "r", "insert", values, "0/1", "now", 1, None, "now"
    )
    show(conflict_log.LISTING, [conflict], as_json=False)
    tenant = tenants.Tenant("shop", "a", "error", None, error=HOSTILE)
    show(tenants.LISTING, [tenant], as_json=False)
    out = capsys.readouterr().out
    assert out.count(HOSTILE) == 4


def test_every_listing_has_a_key_of_its_own() -> None:
    listings = (
        conflict_log.LISTING,
        ddl_decisions.LISTING,
        execute_script.LISTING,
        quarantined_rows.LISTING,
        tenants.LISTING,
    )
    assert len({listing.name for listing in listings}) == len(listings)
