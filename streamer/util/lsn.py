"""Positions in a source's write-ahead log.

PostgreSQL documentation, "pg_lsn Type": an LSN is a 64-bit byte position. The text is two
hexadecimal numbers of up to eight digits each, separated by a slash.
"""

import re
from typing import Final, Self

# The syntax of pg_lsn_in: int() would also accept signs, spaces, underscores and non-ASCII digits.
_WRITTEN: Final = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")


class Lsn(int):
    """A byte position in the source's write-ahead log.

    Ordered like an integer, and printed as in PostgreSQL: ``16/B374D848``.
    """

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read PostgreSQL's ``high/low`` notation. Raises ValueError."""
        written = _WRITTEN.fullmatch(text)
        if written is None:
            raise ValueError(f"not an LSN: {text!r}")
        return cls(int(written[1], 16) << 32 | int(written[2], 16))

    def __str__(self) -> str:
        return f"{self >> 32:X}/{self & 0xFFFF_FFFF:X}"

    def __repr__(self) -> str:
        return f"Lsn({str(self)!r})"


INVALID_LSN: Final = Lsn(0)
"""PostgreSQL's InvalidXLogRecPtr: no position yet."""
LSN_MAX: Final = Lsn(2**64 - 1)
"""No position is higher: as a limit, all changes."""
