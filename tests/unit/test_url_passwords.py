"""Where passwords are in a connection string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

from streamer.postgres.url_passwords import check_url, fill_masks, has_mask, mask, secret_spans


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("postgresql://u:secret@h/db", "postgresql://u:***@h/db"),
        ("POSTGRES://u:s%40cret@h:1,g:2/db?sslmode=require", "POSTGRES://u:***@h:1,g:2/db?sslmode=require"),
        ("postgresql://h/db?password=secret&user=u", "postgresql://h/db?password=***&user=u"),
        ("postgresql://h/db?pass%77ord=secret", "postgresql://h/db?pass%77ord=***"),
        ("postgresql://u:one@h/db?password=two&sslpassword=three", "postgresql://u:***@h/db?password=***&sslpassword=***"),
        ("postgresql://u:${PW}@h:${PORT}/db", "postgresql://u:${PW}@h:${PORT}/db"),
        ("postgresql://u:${PW}x@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u@h/a:b@c", "postgresql://u@h/a:b@c"),
        ("host=h password=secret user=u", "host=h password=*** user=u"),
        (r"host=h password='se cr\'et' user=u", "host=h password='***' user=u"),
        (r"host=h password = se\ cret", "host=h password = ***"),
        ("host=h password=${PW}", "host=h password=${PW}"),
        ("host=h sslpassword=secret", "host=h sslpassword=***"),
        ("service=shop", "service=shop"),
    ],
)  # fmt: skip
def test_only_passwords_are_masked(text: str, masked: str) -> None:
    assert mask(text) == masked
    assert "secret" not in masked
    assert mask(masked) == masked


_WORD = st.text(st.sampled_from("ab:/?#@=&'\\ %2$x{}"), min_size=1, max_size=8)


@given(_WORD, _WORD, st.sampled_from(["uri", "query", "words", "quoted"]))
def test_whatever_libpq_takes_for_a_password_is_masked(user: str, password: str, form: str) -> None:
    """The visible rest contains no password: libpq reads the masked text to find the host."""
    text = {
        "uri": f"postgresql://{user}:{password}@h/db",
        "query": f"postgresql://{user}@h/db?password={password}",
        "words": f"host=h user={user} password={password}",
        "quoted": f"host=h password='{password}' user=x",
    }[form]
    try:
        plain = conninfo_to_dict(text).get("password")
    except (ProgrammingError, UnicodeDecodeError):
        return
    masked = mask(text)
    if masked == text:
        spans = secret_spans(text)
        assert not plain or spans or str(plain).startswith("${"), text
        return
    if masked != "***":
        shown = conninfo_to_dict(masked)
        assert shown.get("password") in (None, "***") or str(shown["password"]).startswith("${")


def test_a_mask_stands_for_the_stored_password_while_the_server_is_the_same() -> None:
    stored = "postgresql://u:s%20x@h/db?sslpassword=y"

    assert fill_masks("postgresql://u:***@h/db?sslpassword=***", stored) == stored
    changed = "postgresql://u:***@h/db?sslpassword=***&sslmode=verify-full"
    assert fill_masks(changed, stored) == f"{stored}&sslmode=verify-full"


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://u:***@evil/db",
        "postgresql://u:***@h:1/db",
        "postgresql://u:***@h/db?hostaddr=6.6.6.6",
        "postgresql://other:***@h/db",
        "postgresql://u:***@${HOST}/db",
        "host=h user=u password=*** dbname=db",
        "postgresql://u:***@h/db?scram_client_key=***",
    ],
)
def test_a_password_is_not_sent_to_another_place(text: str) -> None:
    assert has_mask(text)
    with pytest.raises(ValueError, match=r"again|none is stored"):
        fill_masks(text, "postgresql://u:secret@h/db")


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://u:%a2@h/db",
        "",
        "  ",
        "nonsense",
        "postgresql://h/db?x=1",
        "a\0b",
        "\ud800",
        "postgresql://u:p@ss@h/db",
    ],
)
def test_a_url_that_libpq_cannot_read_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        check_url(text)
    assert "p@ss" not in str(error.value)
