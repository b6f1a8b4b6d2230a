"""`python -m streamer` without Spark: see `tests.support.plain_copies`.

Copies of small tables defer indexes, as copies of large tables do.
"""

from streamer.cli.main import main
from streamer.runtime.processes import parent
from streamer.sync import plan_copies
from streamer.sync.spark import launcher
from tests.support import plain_copies

if __name__ == "__main__":
    setattr(launcher, "create_subprocess_exec", plain_copies.start)  # noqa: B010
    setattr(launcher, "find_obstacle", lambda: None)  # noqa: B010  # the real function asks Java for its version
    setattr(parent, "PROGRAM", "tests.support.plain_streamer")  # noqa: B010
    setattr(plan_copies, "DEFER_BYTES_MIN", 0)  # noqa: B010
    main()
