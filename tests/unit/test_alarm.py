"""An alarm limits the time of work that is usually short."""

import asyncio

from streamer.util.alarm import Alarm


async def test_an_alarm_rings_for_the_present_work_only_and_again() -> None:
    rings: list[float] = []
    rung = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ring() -> None:
        rings.append(loop.time())
        rung.set()

    alarm = Alarm(ring)
    alarm.begin(0.05)
    alarm.end()
    alarm.begin(0.2)  # the timer of the earlier work stays, and rings for none
    began = loop.time()
    for _ in range(2):
        rung.clear()
        await asyncio.wait_for(rung.wait(), 30)
    assert rings[0] - began >= 0.19
    assert rings[1] - rings[0] >= 0.19
    alarm.end()


async def test_a_shorter_limit_comes_before_the_former_one() -> None:
    rung = asyncio.Event()
    alarm = Alarm(rung.set)
    alarm.begin(1000)
    alarm.end()
    alarm.begin(0.01)
    await asyncio.wait_for(rung.wait(), 30)
    alarm.end()
