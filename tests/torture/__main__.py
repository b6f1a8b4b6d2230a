"""``make torture SECONDS=… SEED=…``: the torture test, for any time."""

import argparse
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.torture.schedule import NAMES, describe, torture
from tests.torture.world import Options


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def main() -> int:
    parser = argparse.ArgumentParser(prog="make torture", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=None, help="a new one if not given")
    parser.add_argument("--workers", default="1,2,3,8", help="numbers to choose from at a start")
    parser.add_argument("--streaming", choices=("on", "off"), default="on")
    parser.add_argument("--postgres", default="18", help="15, 16, 18; or SOURCE:TARGET")
    parser.add_argument("--sessions", type=int, default=2, help="for each source")
    parser.add_argument(
        "--databases", type=int, default=1, help="databases with tenants in schemas"
    )
    parser.add_argument("--schemas", type=int, default=3, help="tenants of each such database")
    parser.add_argument("--shards", type=int, default=2, help="databases with disjoint keys")
    parser.add_argument("--patience", type=float, default=180, help="seconds to come to rest")
    parser.add_argument(
        "--fault", action="append", choices=NAMES, default=[], help="repeatable; all if not given"
    )
    parser.add_argument(
        "--without", action="append", choices=NAMES, default=[], help="a fault to leave out"
    )
    given = parser.parse_args()
    source_version, _, target_version = given.postgres.partition(":")
    options = Options(
        seconds=given.seconds,
        seed=int(time.time()) if given.seed is None else given.seed,
        workers=tuple(map(int, given.workers.split(","))),
        streaming=given.streaming == "on",
        source_version=source_version,
        target_version=target_version or source_version,
        sessions=given.sessions,
        faults=tuple(n for n in given.fault or NAMES if n not in given.without)
        if given.without
        else tuple(given.fault),
        databases=given.databases,
        schemas=given.schemas,
        shards=given.shards,
        patience=given.patience,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stop the servers on the way out
    _say(str(options))
    directory = Path(tempfile.mkdtemp(prefix="streamer-torture-"))
    directory.chmod(0o755)
    world = torture(options, directory)
    _say(describe(world))
    shutil.rmtree(directory, ignore_errors=True)  # kept for the search for the cause of a failure
    transactions = sum(source.transactions for source in world.sources)
    _say(f"equal, after {transactions} transactions, {world.acknowledged} seen acknowledged")
    return 0


if __name__ == "__main__":
    sys.exit(main())
