"""Sizes in settings, in PostgreSQL's notation."""

import re
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field

_SIZE: Final = re.compile(r"\s*(\d+)\s*(B|kB|MB|GB|TB)?\s*", re.ASCII)
_UNITS: Final = {None: 1, "B": 1, "kB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}
_BIGINT_MAX: Final = 2**63 - 1


def parse_size(value: Any) -> Any:
    """Read a size in PostgreSQL's notation; a plain number means bytes."""
    if not isinstance(value, str):
        return value
    if (match := _SIZE.fullmatch(value)) is None:
        raise ValueError('expected a size such as "10GB", with B, kB, MB, GB or TB, or bytes')
    return int(match[1]) * _UNITS[match[2]]


Size = Annotated[
    int,
    BeforeValidator(
        parse_size, json_schema_input_type=int | Annotated[str, Field(pattern=f"^{_SIZE.pattern}$")]
    ),
    Field(strict=True, le=_BIGINT_MAX),
]
"""A number of bytes."""
