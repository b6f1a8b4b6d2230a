"""Plugins, and an environment without settings of the machine's user."""

import functools
import gc
import os

import httpx

# Collecting tests makes objects that live to the end: garbage collection would take a third of the
# time.
gc.disable()

for name in list(os.environ):
    if name.startswith(("STREAMER_", "PG")):
        del os.environ[name]

# Spark in tests: the JVM compiles once, quickly, and does not verify classes. A start then takes
# less than half of the CPU.
os.environ["SPARK_SUBMIT_OPTS"] = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"
    " -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
)

# The heaps of servers and programs come in pages of 2 MB: one page fault in place of 500. The kernel
# takes a tenth of the time of short-lived backends for page faults.
os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"

# Each call of httpx.get reads the certificates of all authorities: 20 ms of CPU, and tests poll.
httpx._transports.default.create_ssl_context = functools.cache(  # type: ignore[attr-defined]
    httpx._transports.default.create_ssl_context  # type: ignore[attr-defined]
)

pytest_plugins = [
    "tests.support.isolation",
    "tests.support.blocking",
    "tests.support.postgres",
    "tests.support.streamer",
    "tests.support.hostile_sessions",
    "tests.support.shared",
    "tests.support.comparing",
    "tests.support.combinations",
    "tests.support.admin",
    "tests.support.proxy",
    "tests.support.checking",
    "tests.support.properties",
]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
