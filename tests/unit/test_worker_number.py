"""The worker of a lane is the same in every process and on every machine."""

from streamer.runtime.tables.relations import worker_number


def test_numbers_do_not_change_between_releases() -> None:
    """A change is harmless to data, but all lanes would move at the next start."""
    assert [worker_number("shop:eu", name, 8) for name in ("public.a", "public.b", "é.t")] == [
        1,
        3,
        5,
    ]


def test_every_worker_gets_some_of_many_lanes() -> None:
    numbers = [worker_number("shop", f"public.t{n}", 4) for n in range(200)]
    assert {numbers.count(worker) > 20 for worker in range(4)} == {True}


def test_one_worker_gets_everything() -> None:
    assert {worker_number("shop", f"t{n}", 1) for n in range(20)} == {0}


def test_source_and_lane_are_kept_apart() -> None:
    pairs = [(f"a{'x' * n}", f"{'x' * (20 - n)}b") for n in range(20)]
    assert len({worker_number(*pair, 1000) for pair in pairs}) > 10
