"""The transport of each table, and the reason that status shows."""

from streamer.mapping.relation_names import RelationName
from streamer.runtime.session.choose_transport import TEXT, ChosenTransport

T, OTHER = RelationName("public", "t"), RelationName("public", "other")
MOOD = 'column "v" of table "public.t" is of public.mood, which is not safe in binary'


def test_a_table_of_a_binary_source_comes_in_binary() -> None:
    transport, reason = ChosenTransport(frozenset({23})).transport_of(T)
    assert transport == "binary"
    assert reason == "every written column has the same built-in type on both sides"


def test_each_table_names_the_table_that_does_not_qualify() -> None:
    chosen = ChosenTransport(TEXT, MOOD, {T: MOOD})
    assert chosen.transport_of(T) == ("text", MOOD)
    assert chosen.transport_of(OTHER) == (
        "text",
        f"another table of this source forces text: {MOOD}",
    )


def test_a_reason_of_the_whole_source_is_the_reason_of_each_table() -> None:
    chosen = ChosenTransport(TEXT, "PostgreSQL 13 cannot send binary values")
    assert (
        chosen.transport_of(T)
        == chosen.transport_of(OTHER)
        == ("text", "PostgreSQL 13 cannot send binary values")
    )
