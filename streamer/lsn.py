"""Positions in a source's write-ahead log.

PostgreSQL documentation, "pg_lsn Type": an LSN is a 64-bit byte position, printed as two
hexadecimal numbers of up to eight digits each, separated by a slash.
"""

from typing import Self


class Lsn(int):
    """A byte position in the source's write-ahead log.

    Ordered like an integer, printed the way PostgreSQL prints it: ``16/B374D848``.
    ``Lsn(0)`` is PostgreSQL's InvalidXLogRecPtr and means "nothing yet".
    """

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read PostgreSQL's ``high/low`` notation; anything else is a ValueError."""
        high, slash, low = text.partition("/")
        if not slash or not 0 < len(high) <= 8 or not 0 < len(low) <= 8:
            raise ValueError(f"not an LSN: {text!r}")
        try:
            return cls((int(high, 16) << 32) | int(low, 16))
        except ValueError:
            raise ValueError(f"not an LSN: {text!r}") from None

    def __str__(self) -> str:
        return f"{self >> 32:X}/{self & 0xFFFF_FFFF:X}"

    def __repr__(self) -> str:
        return f"Lsn({str(self)!r})"


NOTHING = Lsn(0)
EVERYTHING = Lsn(2**64 - 1)
