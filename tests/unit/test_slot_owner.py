"""The owner of a slot: the stored id of this installation, and the proofs of ownership."""

from pathlib import Path

import pytest

from streamer.runtime.installation_id import Installation, installation_file
from streamer.runtime.slot_owner import unproven
from streamer.source.slot_and_publications.ownership import SourceObjects
from tests.unit.build import source_mapping

TARGET = "postgresql://loader:secret@dw.example/dw"


@pytest.mark.parametrize(
    ("marks", "installation", "tolerated", "reason"),
    [
        (("ours",), "ours", None, None),
        ((), "ours", None, "no publication has a comment"),
        (("theirs",), "ours", None, "belongs to installation theirs"),
        (("ours", "theirs"), "ours", None, "belongs to installation theirs"),
        (("ours",), None, None, "has no installation id"),
        ((), None, None, "has no installation id"),
        # The pipeline has claimed the slot of a publication that an administrator made.
        ((), "ours", (), None),
        # The pipeline has taken over a slot whose mark our role may not change.
        (("theirs",), "ours", ("theirs",), None),
        # A foreign installation has marked the publications since the claim.
        (("others",), "ours", ("theirs",), "belongs to installation others"),
    ],
)
def test_a_slot_is_touched_only_with_a_proof(
    marks: tuple[str, ...],
    installation: str | None,
    tolerated: tuple[str, ...] | None,
    reason: str | None,
) -> None:
    found = SourceObjects(has_slot=True, reader=None, is_used=True, installations=marks)
    problem = unproven(found, source_mapping(), installation, tolerated)
    assert problem is None if reason is None else reason in (problem or "")


async def test_the_id_is_stored_for_its_target_only(tmp_path: Path) -> None:
    directory = tmp_path / "spool"
    installation = Installation(directory, TARGET)
    assert installation.id is None
    await installation.store("one")
    assert Installation(directory, TARGET).id == "one"
    assert Installation(directory, TARGET.replace("secret", "changed")).id == "one"
    for other in ("dw2.example/dw", "dw.example/other", "dw.example:5433/dw"):
        assert Installation(directory, f"postgresql://loader:secret@{other}").id is None
    await Installation(directory, TARGET).store("two")  # the target was made again
    assert Installation(directory, TARGET).id == "two"
    (file,) = directory.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert "secret" not in file.name + file.read_text()


async def test_a_damaged_or_refused_file_is_no_id(tmp_path: Path) -> None:
    file = installation_file(tmp_path, TARGET)
    file.write_text("")
    assert Installation(tmp_path, TARGET).id is None
    file.write_bytes(b"\xff\xfe")
    assert Installation(tmp_path, TARGET).id is None
    (tmp_path / "file").write_text("in the way of the directory")
    installation = Installation(tmp_path / "file", TARGET)
    await installation.store("one")  # logged, and known for the life of this process
    assert installation.id == "one"
