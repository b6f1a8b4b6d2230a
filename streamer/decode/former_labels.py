"""Converts values of enums to the present names of labels.

ALTER TYPE … RENAME VALUE locks no table. So a transaction may write rows, wait, and commit after
the rename. PostgreSQL decodes each change by the catalogs of its position in the WAL (snapbuild.c,
SnapBuildDistributeSnapshotAndInval). So such a row comes after the rename with the former label,
which the type no longer has. Pure.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final

from streamer.decode.tuples import Row, Value

Labels = Mapping[str, str]
"""The present names of labels, by former name."""

_ELEMENT: Final = re.compile(rb'"((?:[^"\\]|\\.)*)"|([^{},"]+)', re.DOTALL)
_ESCAPED: Final = re.compile(rb"\\(.)", re.DOTALL)


class FormerLabels:
    """Converts the columns of a table, by position in a row."""

    def __init__(self, scalars: Mapping[int, Labels], arrays: Mapping[int, Labels]) -> None:
        self._scalars = {number: _encoded(labels) for number, labels in scalars.items()}
        self._arrays = {number: _encoded(labels) for number, labels in arrays.items()}

    def reading(self, read: Callable[..., tuple[Row, int]]) -> Callable[..., tuple[Row, int]]:
        """Return a function that reads a row with *read*, and converts the row."""

        def read_renamed(message: bytes, *position: int) -> tuple[Row, int]:
            row, end = read(message, *position)
            for number, labels in self._scalars.items():
                if row[number].__class__ is bytes:
                    row[number] = labels.get(row[number], row[number])
            for number, labels in self._arrays.items():
                if row[number].__class__ is bytes:
                    row[number] = _convert_array(row[number], labels)
            return row, end

        return read_renamed


def _encoded(labels: Labels) -> dict[bytes, bytes]:
    return {former.encode(): now.encode() for former, now in labels.items()}


def _convert_array(value: Value, labels: Mapping[bytes, bytes]) -> Value:
    """Convert the elements of an array in the format of ``array_out``."""

    def convert(match: re.Match[bytes]) -> bytes:
        quoted, plain = match.groups()
        label = plain if quoted is None else _ESCAPED.sub(rb"\1", quoted)
        now = labels.get(label)
        if now is None or (plain is not None and plain.upper() == b"NULL"):
            return match[0]
        return b'"' + re.sub(rb'(["\\])', rb"\\\1", now) + b'"'

    bounds, equals, items = value.rpartition(b"={") if value.startswith(b"[") else (b"", b"", value)
    if equals:
        return bounds + equals + _ELEMENT.sub(convert, items)
    return _ELEMENT.sub(convert, value)
