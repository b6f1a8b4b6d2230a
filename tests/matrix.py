"""Run test suites with several combinations of settings, one after the next.

``make matrix`` takes integration and fault tests, combinations that cover every pair of settings,
and each version of PostgreSQL as source and as target. ``ARGS='--all
tests/integration/test_modes.py'`` takes the given tests and all combinations. All further arguments
go to pytest.
"""

import os
import subprocess
import sys
import time

from tests.support.combinations import chosen_combinations

SUITES = ["tests/integration", "tests/fault"]


def main(arguments: list[str]) -> int:
    combinations = chosen_combinations(are_all="--all" in arguments)
    arguments = [argument for argument in arguments if argument != "--all"]
    if not any(argument.startswith("tests/") for argument in arguments):
        arguments += SUITES
    failed = []
    for combination in combinations:
        print(f"== {combination}", flush=True)
        began = time.monotonic()
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "not combinations", *arguments],
            check=False,
            env=os.environ | combination.environment,
        )
        print(f"== {combination}: {time.monotonic() - began:.0f} s", flush=True)
        if run.returncode:
            failed.append(combination)
    for combination in failed:
        settings = " ".join(f"{name}={value}" for name, value in combination.environment.items())
        print(f"failed: {settings} make test ARGS='{' '.join(arguments)}'")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
