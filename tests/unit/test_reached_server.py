from streamer.source.reached_server import find_difference, identity_of

EXPECTED = ("7001", 1, 5)


def test_a_session_on_the_same_server_and_timeline_differs_in_nothing() -> None:
    reached = identity_of("7001", "000000010000000000000003", 5, EXPECTED)
    assert find_difference(EXPECTED, reached) is None


def test_a_promoted_standby_is_another_server() -> None:
    reached = identity_of("7001", "0000000A0000000000000003", 5, EXPECTED)
    assert reached == ("7001", 10, 5)
    assert "timeline 1, another 7001 and 10" in str(find_difference(EXPECTED, reached))


def test_a_standby_does_not_tell_its_timeline() -> None:
    assert find_difference(EXPECTED, identity_of("7001", None, 5, EXPECTED)) is None
    assert find_difference(EXPECTED, identity_of("7002", None, 5, EXPECTED)) is not None


def test_a_standby_is_another_server_than_its_primary() -> None:
    assert "of one cluster" in str(
        find_difference(EXPECTED, identity_of("7001", None, 6, EXPECTED))
    )


def test_a_server_from_the_bookkeeping_does_not_know_the_start_of_the_server() -> None:
    stored = ("7001", 1, 0)
    assert find_difference(stored, identity_of("7001", None, 6, stored)) is None
