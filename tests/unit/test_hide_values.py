"""An error that everybody may read holds no values of rows."""

import pytest

from streamer.observability.http import hide_values

SECRET = 'b\u00e4r(1) "x"'


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (
            f'violates unique constraint "t_pkey": Key (id, "n")=(5, {SECRET}) already exists',
            ['"t_pkey"', 'Key (id, "n")=(…)'],
        ),
        (f'invalid input syntax for type integer: "{SECRET}"', ["type integer"]),
        (f'value "{SECRET}" is out of range for type integer', ["out of range for type integer"]),
        (f'null value in column "v" of relation "t": Key (id)=({SECRET})', ['column "v"', '"t"']),
        (f'date/time field value out of range: "{SECRET}"', ["out of range"]),
    ],
)
def test_names_stay_and_values_go(error: str, left: list[str]) -> None:
    hidden = hide_values(error)
    assert "b\u00e4r" not in hidden
    for text in left:
        assert text in hidden


def test_an_error_without_values_stays_as_it_is() -> None:
    error = 'target: relation "public.t" does not exist; run: alter table "t" add column "v" text'
    assert hide_values(error) == error
