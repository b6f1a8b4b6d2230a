"""Positions in a source's write-ahead log.

PostgreSQL documentation, "pg_lsn Type": an LSN is a 64-bit byte position. Its text is two
hexadecimal numbers of up to eight digits each, with a slash between them.
"""

import re
from typing import Final, Self

# As pg_lsn_in reads it: int() would also take signs, spaces, underscores and other scripts' digits.
_WRITTEN: Final = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")


class Lsn(int):
    """A byte position in the source's write-ahead log.

    Ordered like an integer, printed the way PostgreSQL prints it: ``16/B374D848``.
    ``Lsn(0)`` is PostgreSQL's InvalidXLogRecPtr and means "nothing yet".
    """

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read PostgreSQL's ``high/low`` notation; anything else is a ValueError."""
        written = _WRITTEN.fullmatch(text)
        if written is None:
            raise ValueError(f"not an LSN: {text!r}")
        return cls(int(written[1], 16) << 32 | int(written[2], 16))

    def __str__(self) -> str:
        return f"{self >> 32:X}/{self & 0xFFFF_FFFF:X}"

    def __repr__(self) -> str:
        return f"Lsn({str(self)!r})"


NOTHING = Lsn(0)
EVERYTHING = Lsn(2**64 - 1)
