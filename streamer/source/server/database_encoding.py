"""Reads the characters of the encoding of a source's database in UTF-8, as PostgreSQL converts
them.
"""

from itertools import product
from typing import Final

from streamer.decode.text_conversion import TextConversion, character_ranges
from streamer.source.connection import Connection, fetch_one

PASSED: Final = ("UTF8", "SQL_ASCII")
"""UTF8 needs no conversion, and SQL_ASCII does not define the characters."""

# A DO block returns no value, so it stores the result in a setting. The list of characters comes
# from streamer and contains only hexadecimal digits. PL/pgSQL would copy the whole array for each
# change inside an exception handler, so the array grows outside.
_CONVERT_SQL: Final = """
do $streamer$
declare
    streamer_character bytea;
    streamer_utf8 bytea;
    streamer_found text[] := array[]::text[];
begin
    foreach streamer_character in array '{characters}'::bytea[] loop
        begin
            streamer_utf8 := pg_catalog.convert(streamer_character, '{encoding}', 'UTF8');
        exception when untranslatable_character or character_not_in_repertoire then
            continue;
        end;
        streamer_found := pg_catalog.array_append(streamer_found,
            pg_catalog.encode(streamer_character, 'hex') || ' '
                || pg_catalog.encode(streamer_utf8, 'hex'));
    end loop;
    perform pg_catalog.set_config(
        'streamer.characters', pg_catalog.array_to_string(streamer_found, ','), false);
end $streamer$
"""
_RESULT_SQL: Final = "select current_setting('streamer.characters') as characters"


async def read_conversion(connection: Connection) -> TextConversion | None:
    """Return the conversion of the source's text to UTF-8; None if streamer passes the bytes on."""
    encoding = connection.info.parameter_status("server_encoding") or "UTF8"
    if encoding in PASSED:
        return None
    await connection.execute(conversion_sql(encoding))
    row = await fetch_one(connection, _RESULT_SQL)
    return TextConversion(encoding, read_characters(row["characters"]))


def conversion_sql(encoding: str) -> str:
    """Return the block that converts each character of *encoding* outside ASCII. Pure."""
    characters = (
        bytes(character)
        for ranges in character_ranges(encoding)
        for character in product(*(range(first, last + 1) for first, last in ranges))
    )
    listed = ",".join(f'"\\\\x{character.hex()}"' for character in characters)
    return _CONVERT_SQL.replace("{characters}", f"{{{listed}}}").replace("{encoding}", encoding)


def read_characters(text: str) -> dict[bytes, bytes]:
    """Read the block's result: pairs of hexadecimal digits. Pure."""
    pairs = (pair.split(" ") for pair in text.split(",") if pair)
    return {bytes.fromhex(stored): bytes.fromhex(utf8) for stored, utf8 in pairs}
