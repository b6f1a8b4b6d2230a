"""Plugins, and an environment without settings of the machine's user."""

import os

for name in list(os.environ):
    if name.startswith(("STREAMER_", "PG")):
        del os.environ[name]

# Spark in tests: compiled once, quickly. A JVM then starts with half of the CPU.
os.environ["SPARK_SUBMIT_OPTS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"

pytest_plugins = [
    "tests.support.blocking",
    "tests.support.postgres",
    "tests.support.streamer",
    "tests.support.comparing",
    "tests.support.combinations",
    "tests.support.admin",
    "tests.support.proxy",
    "tests.support.checking",
    "tests.support.properties",
]
