"""Starts Spark in this process, for the programs that `streamer.copy.spark.job` runs.

A local driver gets a JVM that streamer starts (`streamer.copy.spark.jvm`), and Python processes
that import code before the fork (`streamer.copy.spark.spark_worker`). PySpark starts the driver of
a cluster. This module starts no SQL session: a program that needs DataFrames creates a session from
the context.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from streamer.copy.spark.class_archive import make_options, use_options
from streamer.copy.spark.jvm import GATEWAY_VARIABLE, StartedJvm, start_jvm
from streamer.copy.spark.security import CLUSTER_SETTINGS, LOCAL_SETTINGS, is_local

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark import SparkContext

# These options halve the time to start; jobs end before optimization pays off.
_JAVA_OPTIONS: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.scheduler.mode": "FAIR",
    # Rows pass through Python processes; the JVMs only distribute work and need little memory.
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.driver.defaultJavaOptions": _JAVA_OPTIONS,
    "spark.executor.defaultJavaOptions": _JAVA_OPTIONS,
    "spark.task.maxFailures": "4",
    "spark.log.level": "ERROR",
    "spark.python.worker.reuse": "true",
}
"""streamer's settings for Spark; the user's `spark_settings` take precedence."""

WORKER_SETTINGS: Final = {"spark.python.daemon.module": "streamer.copy.spark.spark_worker"}
"""Settings for a local driver only: workers of a cluster lack the module."""


@dataclass(frozen=True, slots=True)
class StartedSpark:
    """A driver that is ready. ``jvm``: None if PySpark started it."""

    context: "SparkContext"
    jvm: StartedJvm | None
    lacks_archive: bool
    """The JVM would have started faster with a class data archive."""

    def stop(self) -> None:
        """Stop the context, and then the JVM; return after the end of the JVM."""
        self.context.stop()
        if self.jvm is not None:
            assert self.jvm.process.stdin is not None
            self.jvm.process.stdin.close()
            self.jvm.process.wait()


def choose_settings(
    master: str | None,
    jobs: int,
    submitted: "Mapping[str, str]",
    spark_settings: "Mapping[str, str]",
    *,
    allow_insecure: bool,
) -> dict[str, str]:
    """Return the settings of a driver, including the master. *submitted*: the settings of
    spark-submit. Pure.

    Without a *master*, use the master of spark-submit. *spark_settings* take precedence over all
    settings except those that protect a local driver.
    """
    master = master or submitted.get("spark.master") or "local[*]"
    settings = SETTINGS | {"spark.cores.max": str(jobs)}
    if is_local(master):
        # local[*] would use the number of cores, but tasks mostly wait for servers, so `jobs`
        # is the limit.
        master = f"local[{jobs},4]"
        settings |= WORKER_SETTINGS
    elif not allow_insecure:
        settings |= CLUSTER_SETTINGS
    settings |= {**submitted, **spark_settings}
    if is_local(master):
        settings |= LOCAL_SETTINGS
    return settings | {"spark.master": master, "spark.app.name": "streamer"}


def start_spark(
    master: str | None,
    jobs: int,
    spark_settings: "Mapping[str, str] | None" = None,
    *,
    allow_insecure: bool = False,
    archive_classes: Path | None = None,
) -> StartedSpark:
    """Start or join Spark. *jobs* limits the number of tasks at a time.

    *archive_classes*: the path of a class data archive that a local JVM writes at its end.
    """
    user_settings = spark_settings or {}
    is_submitted = GATEWAY_VARIABLE in os.environ
    settings = choose_settings(
        master,
        jobs,
        _read_submitted() if is_submitted else {},
        user_settings,
        allow_insecure=allow_insecure,
    )
    jvm, lacks_archive = None, False
    with ThreadPoolExecutor(1) as thread:
        starting = None
        if is_local(settings["spark.master"]):
            options = use_options(os.environ)
            lacks_archive = not options
            if archive_classes is not None:
                options = make_options(archive_classes)
            starting = thread.submit(start_jvm, settings, options)
        # Importing PySpark takes half a second, in which the JVM starts.
        from pyspark import SparkConf, SparkContext

        if starting is not None:
            jvm = starting.result()
    if jvm is not None and not _connect(jvm):
        jvm = None  # PySpark starts a new JVM, or reports the failure
    conf = SparkConf()
    for name, value in settings.items():
        conf.set(name, value)
    return StartedSpark(SparkContext(conf=conf), jvm, lacks_archive and jvm is not None)


def _read_submitted() -> dict[str, str]:
    """Return the settings of the JVM that spark-submit has started for this driver."""
    from pyspark import SparkConf, SparkContext

    SparkContext.getSystemProperty("spark.master")  # connects to the JVM
    return dict(SparkConf().getAll())


def _connect(jvm: StartedJvm) -> bool:
    """Connect PySpark to *jvm* as to a JVM of spark-submit; return False if *jvm* has ended."""
    from pyspark import SparkContext
    from pyspark.serializers import UTF8Deserializer, read_int

    if not jvm.wait_until_ready():
        jvm.directory.close()
        return False
    with jvm.info.open("rb") as info:
        gateway = {
            GATEWAY_VARIABLE: str(read_int(info)),
            "PYSPARK_GATEWAY_SECRET": str(UTF8Deserializer().loads(info)),
        }
    jvm.directory.close()
    os.environ.update(gateway)
    try:
        SparkContext.getSystemProperty("spark.master")
    finally:
        for name in gateway:
            del os.environ[name]
    return True
