"""A journal torn at any byte continues after the last whole transaction, and finds damage."""

import asyncio
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.errors.error_classes import JournalError, SourceConnectionError, SpoolError
from streamer.source.history_check import CommittedTransaction
from streamer.source.journal import gather_records
from streamer.source.journal.gather_records import Gatherer
from streamer.source.journal.journal_files import Journal
from streamer.source.journal.journal_records import (
    JournalIdentity,
    Kind,
    Record,
    decode,
    pack,
    unpack,
)
from streamer.source.journal.journal_stream import JournalStream
from streamer.source.timeline_branches import Branch
from streamer.util.lsn import Lsn

IDENTITY = JournalIdentity("7000000000000000001", "streamer_shop")
START = Lsn(1000)
FIRST = Branch(1)


def transaction(number: int, rows: list[bytes]) -> list[bytes]:
    """A transaction in pgoutput's form, with RELATION messages first, as after a reconnect."""
    begin = struct.pack(">cQqI", b"B", final_lsn(number), number, number)
    relation = b"R" + struct.pack(">I", number % 3) + b"definition %d" % number
    commit = struct.pack(">cBQQq", b"C", 0, final_lsn(number), end_lsn(number), number)
    return [begin, relation, *(b"I" + row for row in rows), commit]


def final_lsn(number: int) -> Lsn:
    return Lsn(START + 100 * number + 50)


def end_lsn(number: int) -> Lsn:
    return Lsn(START + 100 * number + 60)


@contextmanager
def small_files() -> Iterator[Path]:
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch.object(gather_records, "RECORD_BYTES", 60),
        mock.patch.object(gather_records, "SEGMENT_BYTES", 200),
    ):
        yield Path(name) / "journal" / "slot"


def gatherer_of(journal: Journal, start_lsn: Lsn = START) -> Gatherer:
    return Gatherer(journal.end_lsn, journal.last, start_lsn)


def messages_in(journal: Journal, lsn: Lsn = START, branch: Branch = FIRST) -> list[bytes]:
    """All changes that a pipeline would read, without the initial contents."""
    stream = JournalStream(journal, lsn, branch)
    found: list[bytes] = []
    while True:
        burst = stream.read()
        if not burst.payloads and burst.wal_end_lsn is None:
            break
        found += burst.payloads
    asyncio.run(stream.close())
    return found


transactions = st.lists(st.lists(st.binary(max_size=50), max_size=6), min_size=1, max_size=12)


def fill(journal: Journal, given_rows: list[list[bytes]], flush_every: int) -> list[list[bytes]]:
    gatherer = gatherer_of(journal)
    whole = []
    for number, rows in enumerate(given_rows, 1):
        messages = transaction(number, rows)
        whole.append(messages)
        assert gatherer.feed(messages)
        if number % flush_every == 0:
            journal.write(gatherer.pop_records())
        if number % 4 == 0:
            assert gatherer.keepalive(Lsn(end_lsn(number) + 10))
    journal.write(gatherer.pop_records())
    return whole


@pytest.mark.parametrize("place", range(6))
def test_a_message_outside_transactions_is_left_out_anywhere(place: int) -> None:
    messages = transaction(1, [b"a", b"b"])
    outside = b"M" + struct.pack(">BQ", 0, final_lsn(1)) + b"other\0" + struct.pack(">I", 2) + b"hi"
    with small_files() as path:
        journal = Journal.create(path, IDENTITY, START, FIRST)
        gatherer = gatherer_of(journal)
        assert gatherer.feed([*messages[:place], outside, *messages[place:]])
        journal.write(gatherer.pop_records())
        assert messages_in(journal) == messages
        journal.close()


def row_messages(messages: list[bytes]) -> list[bytes]:
    """Without RELATION, which may come again where a segment begins."""
    return [message for message in messages if message[:1] != b"R"]


@given(transactions, st.integers(1, 5))
def test_written_records_are_read(rows: list[list[bytes]], flush_every: int) -> None:
    with small_files() as path:
        journal = Journal.create(path, IDENTITY, START, FIRST)
        whole = fill(journal, rows, flush_every)
        assert messages_in(journal) == [message for each in whole for message in each]
        for segment in journal._segments:
            # A reader of a later segment knows the relations as of that segment.
            known: dict[bytes, bytes] = {}
            for message in messages_in(journal, segment.start_lsn):
                if message[:1] == b"R":
                    known[message[1:5]] = message
            expected: dict[bytes, bytes] = {}
            for each in whole:
                expected[each[1][1:5]] = each[1]
            assert known == expected
        journal.close()


@given(transactions, st.integers(1, 3), st.data())
def test_a_torn_journal_ends_after_a_whole_transaction(
    rows: list[list[bytes]], flush_every: int, data: st.DataObject
) -> None:
    with small_files() as path:
        journal = Journal.create(path, IDENTITY, START, FIRST)
        whole = fill(journal, rows, flush_every)
        journal.close()
        last = sorted(path.glob("*.journal"))[-1]
        header = journal._segments[-1]
        content = last.read_bytes()
        found = decode(content)
        assert found is not None
        keep = data.draw(st.integers(found[1], len(content)), label="bytes that are left")
        garbage = data.draw(st.binary(max_size=40), label="bytes after them")
        last.write_bytes(content[:keep] + garbage)

        again = Journal.open(path)

        assert again is not None
        assert header.start_lsn <= again.end_lsn
        survivors = [each for n, each in enumerate(whole, 1) if end_lsn(n) <= again.end_lsn]
        expected = [message for each in survivors for message in each]
        assert row_messages(messages_in(again)) == row_messages(expected)
        assert again.last == (
            CommittedTransaction(end_lsn(len(survivors)), len(survivors), len(survivors))
            if survivors
            else None
        )
        # The journal goes on, and the source sends all changes again from the beginning.
        again.rewind()
        gatherer = gatherer_of(again)
        assert gatherer.feed([message for each in whole for message in each])
        again.write(gatherer.pop_records())
        everything = [message for each in whole for message in each]
        assert row_messages(messages_in(again)) == row_messages(everything)
        again.close()


@given(transactions, st.data())
def test_a_changed_byte_is_found(rows: list[list[bytes]], data: st.DataObject) -> None:
    with small_files() as path:
        journal = Journal.create(path, IDENTITY, START, FIRST)
        whole = fill(journal, rows, 1)
        end = journal.end_lsn
        journal.close()
        file = data.draw(st.sampled_from(sorted(path.glob("*.journal"))), label="file")
        content = bytearray(file.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1), label="place")
        content[place] ^= data.draw(st.integers(1, 255), label="difference")
        file.write_bytes(content)
        expected = row_messages([message for each in whole for message in each])

        try:
            again = Journal.open(path)
            assert again is not None
            found = row_messages(messages_in(again))
        except JournalError:
            return
        # A journal that looks torn ends before the acknowledged position, which the slot shows.
        assert again.end_lsn < end or found == expected
        assert found == expected[: len(found)]
        again.close()


def test_a_transaction_that_has_not_ended_is_not_read() -> None:
    with small_files() as path:
        journal = Journal.create(path, IDENTITY, START, FIRST)
        gatherer = gatherer_of(journal)
        first, second = transaction(1, [b"x"]), transaction(2, [b"y" * 100] * 5)
        gatherer.feed(first)
        gatherer.keepalive(Lsn(end_lsn(1) + 5))
        gatherer.feed(second[:-1])
        journal.write(gatherer.pop_records())
        assert journal.end_lsn == end_lsn(1) + 5
        assert messages_in(journal) == first
        journal.rewind()  # the connection is lost
        assert messages_in(journal) == first
        again = gatherer_of(journal)
        assert again.feed([*first, *second])
        journal.write(again.pop_records())
        journal.close()
        opened = Journal.open(path)
        assert opened is not None
        assert row_messages(messages_in(opened)) == row_messages([*first, *second])
        opened.close()


def test_another_history_is_refused() -> None:
    with small_files() as path:
        journal = Journal.create(path, IDENTITY, START, FIRST)
        fill(journal, [[b"x"], [b"y"]], 1)
        other = transaction(2, [b"z"])
        other[0] = struct.pack(">cQqI", b"B", final_lsn(2), 2, 77)
        assert not gatherer_of(journal).feed([*transaction(1, [b"x"]), *other])
        missing = gatherer_of(journal)
        assert missing.feed(transaction(1, [b"x"]))
        assert not missing.keepalive(end_lsn(3))
        journal.close()


def test_applied_segments_are_deleted_and_the_rest_is_a_journal() -> None:
    with small_files() as path:
        journal = Journal.create(path, IDENTITY, START, FIRST)
        whole = fill(journal, [[bytes(50)] * 3 for _ in range(9)], 1)
        journal.trim(end_lsn(5))
        assert journal.start_lsn <= end_lsn(5)
        assert journal.start_lsn > START
        left = [each for n, each in enumerate(whole, 1) if end_lsn(n) > journal.start_lsn]
        journal.close()
        again = Journal.open(path)
        assert again is not None
        assert again.start_lsn == journal.start_lsn
        assert row_messages(messages_in(again)) == row_messages([m for each in left for m in each])
        again.close()


def test_a_missing_segment_shortens_it_and_two_processes_cannot_have_it() -> None:
    with small_files() as path:
        journal = Journal.create(path, IDENTITY, START, FIRST)
        fill(journal, [[bytes(50)] * 3 for _ in range(9)], 1)
        with pytest.raises(SpoolError, match="another process"):
            Journal.open(path)
        journal.close()
        names = sorted(path.glob("*.journal"))
        names[1].unlink()
        again = Journal.open(path)
        assert again is not None
        assert again.start_lsn == again._segments[0].start_lsn > START
        assert again._segments[0].path == names[2]
        again.remove()
        assert not path.exists()
        assert Journal.open(path) is None


def test_a_failed_flush_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    with small_files() as path:
        journal = Journal.create(path, IDENTITY, START, FIRST)
        whole = fill(journal, [[b"x"]], 1)
        end, size = journal.end_lsn, journal.size_bytes
        gatherer = gatherer_of(journal)
        gatherer.feed(whole[0] + transaction(2, [b"y"]))

        def fail(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", fail)
            with pytest.raises(SpoolError, match="No space left"):
                journal.write(gatherer.pop_records())
        assert (journal.end_lsn, journal.size_bytes) == (end, size)
        journal.rewind()
        assert journal._segments[-1].path.stat().st_size == journal._segments[-1].size
        assert messages_in(journal) == whole[0]
        journal.close()


def test_a_journal_goes_on_with_a_later_timeline_and_a_reader_of_the_former_one_stops_there() -> (
    None
):
    """The last record is a position after the fork; the switch to the later timeline removes it."""
    fork_lsn = Lsn(end_lsn(1) + 1)
    later = Branch(2, ((1, fork_lsn),))
    another = Branch(2, ((1, Lsn(fork_lsn - 2)),))
    with small_files() as path:
        journal = Journal.create(path, IDENTITY, START, FIRST)
        first = fill(journal, [[b"x"]], 1)[0]
        gatherer = gatherer_of(journal, journal.end_lsn)
        assert gatherer.keepalive(Lsn(fork_lsn + 1))
        journal.write(gatherer.pop_records())
        assert journal.changes_end_lsn < fork_lsn < journal.end_lsn
        journal.rewind()
        journal.turn(later)
        assert journal.end_lsn == end_lsn(1)
        journal.turn(later)
        assert len(journal._segments) == 2
        journal.close()
        again = Journal.open(path)
        assert again is not None
        assert again.branch == later
        again.rewind()
        gatherer = gatherer_of(again, again.end_lsn)
        second = transaction(2, [b"y"])
        assert gatherer.feed(second)
        again.write(gatherer.pop_records())
        assert messages_in(again, branch=later) == first + second
        for branch in (FIRST, another):
            with pytest.raises(SourceConnectionError, match="different history"):
                messages_in(again, branch=branch)
        again.close()


@given(st.lists(st.binary()))
def test_bodies_come_back(messages: list[bytes]) -> None:
    record = Record(Kind.COMMITS, pack(messages), Lsn(7), 8, -9)
    data = b"".join(record.encode())
    assert decode(b"xx" + data, 2) == (record, 2 + len(data))
    assert unpack(record.body) == messages
