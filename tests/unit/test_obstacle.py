"""The look at Java, before Spark starts."""

from pathlib import Path

import pytest

from streamer.copy.spark.obstacle import find_obstacle


def test_the_look_at_java_gets_no_passwords(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (program := tmp_path / "bin" / "java").parent.mkdir()
    program.write_text(f"#!/bin/sh\nenv > {tmp_path}/seen\necho 'version \"17.0.1\"' >&2\n")
    program.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("SHOP_PASSWORD", "hidden-one")
    monkeypatch.setenv("PGPASSWORD", "hidden-two")
    assert find_obstacle() is None
    seen = (tmp_path / "seen").read_text()
    assert f"JAVA_HOME={tmp_path}" in seen
    assert "hidden" not in seen
