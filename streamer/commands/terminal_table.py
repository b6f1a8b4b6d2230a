"""Rows as a table in the terminal: the form in which all commands print records.

A table never cuts or wraps a value, so programs can read each row as a line. Texts appear
unchanged: values of rows may look like the markup of a terminal library.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from rich.console import Console
from rich.text import Text

_GAP: Final = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ListingColumn(Generic[T]):
    """A column of a table in the terminal."""

    title: str
    cell: Callable[[T], object]
    """Returns the value of a row: a Text, a value to convert into text, or None for no text."""
    priority: int = 0
    """A narrow terminal first omits the columns with the highest number, and never those with 0."""
    is_number: bool = False


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    """The rows that a command lists."""

    name: str | None
    """The key of the rows in the JSON object; None prints an array of rows."""
    columns: Sequence[ListingColumn[T]]
    empty_text: str
    """The line in place of an empty table."""


def table_lines(
    columns: Sequence[ListingColumn[T]], rows: Sequence[T], width: int | None = None
) -> list[Text]:
    """Return the titles and *rows* as lines, without the columns that do not fit into *width*.

    The table omits columns without a value.
    """
    cells = [[_text(column.cell(row)) for row in rows] for column in columns]
    shown = [n for n, texts in enumerate(cells) if any(text.plain for text in texts)]
    titled = {n: [Text(columns[n].title, "bold"), *cells[n]] for n in shown}
    widths = {n: max(text.cell_len for text in texts) for n, texts in titled.items()}
    while width is not None and sum(widths[n] + _GAP for n in shown) > width:
        last = max(shown, key=lambda n: columns[n].priority)
        if columns[last].priority == 0:
            break  # the names alone are wider than the terminal, so the line is longer
        shown.remove(last)
    lines = []
    for number in range(len(rows) + 1):
        line = Text()
        for n in shown:
            text = titled[n][number]
            padding = " " * (widths[n] - text.cell_len)
            line.append(" " * _GAP)
            if columns[n].is_number:
                line.append(padding)
            line.append_text(text)
            if n != shown[-1] and not columns[n].is_number:
                line.append(padding)
        lines.append(line)
    return lines


def _text(value: object) -> Text:
    return value if isinstance(value, Text) else Text("" if value is None else str(value))


def print_lines(lines: Iterable[Text | str], console: Console | None = None) -> None:
    """Print *lines* unchanged, on standard output by default."""
    console = Console() if console is None else console
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def print_rows(listing: Listing[T], rows: Sequence[T], console: Console | None = None) -> None:
    """Print *rows*, or the text for an empty list."""
    print_lines(table_lines(listing.columns, rows) if rows else [listing.empty_text], console)
