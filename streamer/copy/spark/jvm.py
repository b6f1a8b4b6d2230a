"""Starts the JVM of a local Spark without Spark's shell scripts.

Spark's scripts run two shells, a Python and a JVM that prints the command of the actual JVM. This
module reads the command from Spark's launcher class, and runs the command while the driver still
imports PySpark. The command includes the class data archive, if present
(`streamer.copy.spark.class_archive`). The JVM gets the same options, class path and
``spark-defaults.conf`` as with Spark's scripts.

An installation with a ``spark-env.sh`` needs the shell scripts, and so does a cluster.
"""

import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from streamer.copy.spark.security import find_defaults_file
from streamer.util.owned_directory import OwnedDirectory

_MAIN: Final = "org.apache.spark.deploy.SparkSubmit"
_LAUNCHER_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.005
_WITHOUT_INTERRUPTS: Final = ("/bin/sh", "-c", 'trap "" INT; exec "$0" "$@"')
"""Leaves Ctrl-C to the driver, which ends the JVM."""
_INFO_VARIABLE: Final = "_PYSPARK_DRIVER_CONN_INFO_PATH"
GATEWAY_VARIABLE: Final = "PYSPARK_GATEWAY_PORT"
"""spark-submit sets this variable for a driver whose JVM it has started."""


def find_spark_home(environment: Mapping[str, str]) -> Path | None:
    """Return the directory of Spark, in PySpark's search order, or None."""
    if home := environment.get("SPARK_HOME"):
        return Path(home)
    spec = find_spec("pyspark")
    directory = next(iter((spec and spec.submodule_search_locations) or ()), None)
    return None if directory is None else Path(directory)


def java_program(environment: Mapping[str, str]) -> str:
    """Return the Java that Spark uses."""
    home = environment.get("JAVA_HOME")
    return str(Path(home) / "bin" / "java") if home else "java"


@dataclass(frozen=True, slots=True)
class StartedJvm:
    """A JVM that starts. It ends when its standard input is closed."""

    process: "subprocess.Popen[bytes]"
    directory: OwnedDirectory

    @property
    def info(self) -> Path:
        """The file in which the JVM stores the port and secret of the gateway."""
        return self.directory.path / "gateway"

    def wait_until_ready(self) -> bool:
        """Wait for the gateway; return False if the JVM ends first."""
        while not self.info.exists():
            if self.process.poll() is not None:
                return False
            time.sleep(_POLL_SECONDS)
        return True


def start_jvm(settings: Mapping[str, str], options: list[str]) -> StartedJvm | None:
    """Start the JVM of a local driver with *settings*; return None if only Spark's scripts can
    start it.

    *options* of the JVM precede Spark's.
    """
    home = find_spark_home(os.environ)
    if home is None or GATEWAY_VARIABLE in os.environ or os.name != "posix":
        return None
    if find_defaults_file(os.environ, str(home)).with_name("spark-env.sh").exists():
        return None
    command = _read_command(home, settings)
    if command is None:
        return None
    directory = OwnedDirectory(Path(tempfile.gettempdir()), "streamer-spark-")
    info = directory.path / "gateway"
    environment = os.environ | {
        "SPARK_HOME": str(home),
        "SPARK_CONNECT_MODE": "0",
        "PYTHONHASHSEED": "0",
        _INFO_VARIABLE: str(info),
    }
    process = subprocess.Popen(
        [*_WITHOUT_INTERRUPTS, command[0], *options, *command[1:]],
        stdin=subprocess.PIPE,
        stdout=2,  # standard output is for events
        env=environment,
    )
    return StartedJvm(process, directory)


def _read_command(home: Path, settings: Mapping[str, str]) -> list[str] | None:
    """Ask Spark's launcher for the command of the JVM, as ``bin/spark-class`` does."""
    arguments = [item for name, value in settings.items() for item in ("--conf", f"{name}={value}")]
    arguments += shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell"))
    jar = next((home / "jars").glob("spark-launcher_*.jar"), None)
    if jar is None:
        return None
    try:
        output = subprocess.run(
            [
                java_program(os.environ),
                *("-Xmx128m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"),
                *("-cp", str(jar), "org.apache.spark.launcher.Main", _MAIN, *arguments),
            ],
            env=os.environ
            | {
                "SPARK_HOME": str(home),
                "SPARK_SCALA_VERSION": jar.name.removeprefix("spark-launcher_").split("-")[0],
            },
            check=True,
            capture_output=True,
            timeout=_LAUNCHER_SECONDS,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    # The output is lines of messages, a null character, and the command's parts, each ended by a
    # null character.
    _, _, parts = output.decode().partition("\0")
    command = [part.lstrip("\n") for part in parts.split("\0")][:-1]
    return [*_with_jars_listed(command)] or None


def _with_jars_listed(command: list[str]) -> list[str]:
    """Replace a wildcard by its jars in order, without duplicates.

    A class archive fits one class path, and the order of a directory differs between machines.
    """
    listed = list(command)
    for place, part in enumerate(command[:-1]):
        if part == "-cp":
            jars = [jar for entry in command[place + 1].split(":") for jar in _list_jars(entry)]
            listed[place + 1] = ":".join(dict.fromkeys(jars))
    return listed


def _list_jars(entry: str) -> list[str]:
    if not entry.endswith("/*"):
        return [entry]
    return sorted(map(str, Path(entry[:-2]).glob("*.jar")))
