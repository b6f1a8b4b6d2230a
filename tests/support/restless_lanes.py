"""`python -m streamer`, with lanes that get a separate connection for a window at a time.

Every lane that delays a second lane moves, so lanes move all the time. Connections without work end
at once.
"""

import math
from collections.abc import Callable

from streamer.apply.lanes import hot_lanes, slow_lanes
from streamer.apply.write import worker
from streamer.cli.main import main


def unsettle(set_constant: Callable[[object, str, object], None] = setattr) -> None:
    """Make every lane look hot to its neighbours, and cool to itself."""
    set_constant(slow_lanes, "LONG_SECONDS_MIN", 0)
    set_constant(slow_lanes, "LONG_TIMES", 0)
    set_constant(slow_lanes, "WINDOWS", 1)
    set_constant(slow_lanes, "SLOW_SECONDS_MIN", math.inf)
    set_constant(slow_lanes, "COOL_SECONDS", math.inf)
    set_constant(hot_lanes, "ASIDE_SECONDS", 0)
    set_constant(worker, "IDLE_SECONDS", 0.02)


if __name__ == "__main__":
    unsettle()
    main()
