"""The start of Spark: settings, the code of the workers, and the class data archive."""

import os
import sys
from pathlib import Path

import pyspark
import pytest

from streamer.copy.spark.class_archive import (
    archive_name,
    cache_directory,
    find_archive,
    use_options,
)
from streamer.copy.spark.start import choose_settings


def test_a_local_driver_keeps_its_protection_and_the_user_has_the_rest() -> None:
    given = {"spark.authenticate": "false", "spark.driver.memory": "2g"}
    settings = choose_settings("local[*]", 3, {}, given, allow_insecure=False)
    assert settings["spark.master"] == "local[3,4]"
    assert settings["spark.authenticate"] == "true"
    assert settings["spark.driver.memory"] == "2g"
    assert settings["spark.python.daemon.module"] == "streamer.copy.spark.spark_worker"


def test_a_cluster_gets_no_module_that_its_workers_lack_and_no_master_of_ours() -> None:
    submitted = {"spark.master": "spark://one:7077", "spark.ui.enabled": "true"}
    settings = choose_settings(None, 3, submitted, {}, allow_insecure=False)
    assert settings["spark.master"] == "spark://one:7077"
    assert settings["spark.ui.enabled"] == "true"
    assert settings["spark.io.encryption.enabled"] == "true"
    assert "spark.python.daemon.module" not in settings
    assert "spark.authenticate" not in settings


def java(directory: Path) -> dict[str, str]:
    (directory / "bin").mkdir(parents=True)
    (directory / "bin" / "java").write_text("#!/bin/sh\n")
    (directory / "bin" / "java").chmod(0o755)
    return {"JAVA_HOME": str(directory), "XDG_CACHE_HOME": str(directory.parent / "cache")}


def test_an_archive_serves_one_java_and_only_a_file_that_others_cannot_write(
    tmp_path: Path,
) -> None:
    one, other = java(tmp_path / "one"), java(tmp_path / "other")
    name = archive_name(one)
    assert name is not None
    assert name != archive_name(other)
    assert archive_name({"JAVA_HOME": str(tmp_path / "none")}) is None
    directory = cache_directory(one)
    assert directory == tmp_path / "cache" / "streamer"
    directory.mkdir(parents=True)
    archive = directory / name
    assert use_options(one) == []
    archive.write_text("")
    assert find_archive(one) == archive
    assert f"-XX:SharedArchiveFile={archive}" in use_options(one)
    assert find_archive(other) is None
    archive.chmod(0o666)
    assert find_archive(one) is None
    archive.chmod(0o644)
    directory.chmod(0o777)
    assert find_archive(one) is None


def test_workers_import_pyspark_from_where_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))  # the import of the module changes sys.path
    from streamer.copy.spark.spark_worker import without_archives

    home = Path(pyspark.__file__).parent
    archives = [f"{home}/python/lib/{name}" for name in ("pyspark.zip", "py4j-0.10.9.9-src.zip")]
    paths = [*archives, str(home.parent), "/usr/lib/python311.zip"]
    assert without_archives(paths) == [str(home.parent), "/usr/lib/python311.zip"]
    elsewhere = ["/opt/spark/python/lib/pyspark.zip", str(home.parent)]
    assert without_archives(elsewhere) == elsewhere
    alone = [archives[0], os.path.dirname(os.__file__)]
    assert without_archives(alone) == alone
