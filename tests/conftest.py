"""Plugins, and an environment without settings of the machine's user."""

import os

for name in list(os.environ):
    if name.startswith(("STREAMER_", "PG")):
        del os.environ[name]

pytest_plugins = [
    "tests.support.postgres",
    "tests.support.streamer",
    "tests.support.combinations",
    "tests.support.admin",
    "tests.support.proxy",
]
