"""A copy in chunks that is killed at every step continues at the chunk, exactly once."""

import asyncio
from pathlib import Path

import pytest

from tests.support.chunk_case import ChunkCase, PartitionedCase
from tests.support.postgres import Database

pytestmark = pytest.mark.usefixtures("without_spark", "deferred_indexes")

STEPS = [
    ("sync.copied", 0),  # in the first chunk, which begins again
    ("sync.chunk_stored", 1),
    ("sync.prepared", 1),
    ("sync.guarded", 1),
    ("sync.at_point", 1),
    ("sync.planned", 1),
    ("sync.job_started", 1),
    ("sync.copied", 1),
    ("sync.chunk_stored", 2),
    ("sync.catching_up", 0),  # after the last chunk
    ("sync.drained", 0),
]
"""The failpoint at which a process dies, and the number of chunks that the target has then."""


async def test_a_copy_in_chunks_is_killed_at_every_step(
    tmp_path: Path, source: Database, target: Database
) -> None:
    case = ChunkCase(tmp_path, source, target)
    place = None
    for armed, chunks in STEPS:
        await asyncio.to_thread(case.die_writing, armed)
        assert case.chunks == chunks, armed
        is_whole = armed in ("sync.catching_up", "sync.drained")
        assert case.indexes == ["big_id_v", *["big_v"][: int(is_whole)]], armed
        if chunks:
            place = place or case.unchanged
            assert case.unchanged == place, "a chunk that is there is not copied again"
        if armed == "sync.planned":
            await asyncio.to_thread(case.part_dies, "sync.part_copied", case.write)
    assert case.unchanged == place
    case.write(3)
    await case.recover()


async def test_a_copy_of_partitions_that_come_and_go_is_killed(
    tmp_path: Path, source: Database, target: Database
) -> None:
    case = PartitionedCase(tmp_path, source, target)
    await asyncio.to_thread(case.die_writing, "sync.chunk_stored")
    assert case.chunks == 1
    case.change_partitions()
    place = case.unchanged
    for armed, chunks in (("sync.planned", 1), ("sync.copied", 1), ("sync.chunk_stored", 2)):
        await asyncio.to_thread(case.die_writing, armed)
        assert case.chunks == chunks, armed
    await case.recover()
    assert case.unchanged == place, "a chunk that is there is not copied again"
