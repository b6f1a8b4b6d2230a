"""`python -m streamer` without Spark: see `tests.support.plain_copies`.

Copies of small tables defer indexes, as copies of large tables do.
"""

from streamer.cli.main import main
from streamer.copy import plan_copies
from streamer.copy.spark import launcher
from streamer.runtime.child_processes import parent_process
from tests.support import plain_copies

if __name__ == "__main__":
    setattr(launcher, "start_driver", plain_copies.start)  # noqa: B010
    setattr(launcher, "find_obstacle", lambda: None)  # noqa: B010  # the real function asks Java for its version
    setattr(parent_process, "PROGRAM", "tests.support.plain_streamer")  # noqa: B010
    setattr(plan_copies, "DEFER_BYTES_MIN", 0)  # noqa: B010
    main()
