"""`python -m streamer`, with copies that need no Spark: see `tests.support.plain_copies`."""

from streamer.cli.main import main
from streamer.sync import launcher

if __name__ == "__main__":
    setattr(launcher, "PROGRAM", "tests.support.plain_copies")  # noqa: B010  # it is Final
    main()
