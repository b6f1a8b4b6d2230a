"""Protects connection strings inside Spark by settings and environment, and checks a cluster. Pure.

A Spark driver listens on ports from which executors fetch tasks. Without `spark.authenticate` the
driver gives tasks to every client that can reach these ports, and a task on a cluster holds
connection strings. So a local driver listens on the loopback interface only and authenticates
clients. A driver of a cluster sends a job only if Spark authenticates and encrypts, or if
`allow_insecure_spark` is set.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

LOCAL_SETTINGS: Final = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # In local mode Spark generates a random secret and keeps it in memory.
    "spark.authenticate": "true",
    "spark.network.crypto.enabled": "true",
    "spark.network.crypto.saslFallback": "false",
    # A comparison writes rows to Spark's disks.
    "spark.io.encryption.enabled": "true",
}
"""Settings of every local driver; `spark_settings` cannot override these settings."""

LOCAL_ENVIRONMENT: Final = {
    # The address of the UI, if `spark_settings` enable the UI. A fixed address also avoids the name
    # look-up of this machine, which can take seconds.
    "SPARK_LOCAL_IP": "127.0.0.1",
    "SPARK_LOCAL_HOSTNAME": "127.0.0.1",
}

CLUSTER_SETTINGS: Final = {
    # An executor that runs out of memory writes tasks to disk.
    "spark.io.encryption.enabled": "true",
}
"""Settings for a cluster that authenticates, unless `spark_settings` override them."""

_ENCRYPTION: Final = (
    "spark.network.crypto.enabled",
    "spark.authenticate.enableSaslEncryption",
    "spark.ssl.rpc.enabled",
)


def is_local(master: str) -> bool:
    """Return whether tasks run on the driver's machine, as child processes of the driver."""
    return master == "local" or master.startswith("local[")


def find_weaknesses(settings: Mapping[str, str]) -> list[str]:
    """Return the reasons why a cluster with these *settings* does not protect the secrets of a
    job.
    """
    problems = []
    if not _is_on(settings, "spark.authenticate"):
        problems.append("spark.authenticate is off: every client on the network may fetch tasks")
    if not any(_is_on(settings, name) for name in _ENCRYPTION):
        problems.append("spark.network.crypto.enabled is off: tasks cross the network unencrypted")
    return problems


def _is_on(settings: Mapping[str, str], name: str) -> bool:
    return settings.get(name, "").strip().lower() == "true"


_PROPERTY: Final = re.compile(r"\s*([^\s=:#!][^\s=:]*)\s*[\s=:]\s*(.*?)\s*")


def parse_properties(text: str) -> dict[str, str]:
    """Read the lines of a ``spark-defaults.conf``."""
    matches = (_PROPERTY.fullmatch(line) for line in text.splitlines())
    return {match[1]: match[2] for match in matches if match}


def find_defaults_file(environment: Mapping[str, str], spark_home: str) -> Path:
    """Return the path where Spark searches for ``spark-defaults.conf``."""
    home = environment.get("SPARK_HOME") or spark_home
    return Path(environment.get("SPARK_CONF_DIR") or f"{home}/conf") / "spark-defaults.conf"


_PASSED: Final = frozenset(
    [
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "TMPDIR", "TMP", "TEMP"),
        *("LANG", "LANGUAGE", "TZ", "VIRTUAL_ENV", "KUBECONFIG", "KRB5_CONFIG", "KRB5CCNAME"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "STREAMER_FAILPOINTS", "XDG_CACHE_HOME"),
    ]
)
_PASSED_PREFIXES: Final = (
    *("LC_", "LD_", "DYLD_", "JAVA_", "JDK_", "_JAVA_", "PYTHON", "PYSPARK_", "SPARK_", "_SPARK_"),
    *("HADOOP_", "YARN_", "KUBERNETES_", "PG"),
)
_PASSWORDS: Final = frozenset({"PGPASSWORD"})


def choose_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of *environment* that the Spark process needs.

    Variables of this process may hold passwords that Spark does not need. A job file contains the
    passwords of the job's two databases.
    """
    return {
        name: value
        for name, value in environment.items()
        if (name in _PASSED or name.startswith(_PASSED_PREFIXES)) and name not in _PASSWORDS
    }
