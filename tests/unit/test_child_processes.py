"""`processes: N`: restarts, the process that serves the port, and the commands of the parent."""

import asyncio
from pathlib import Path

import pytest

from streamer.config.settings import Settings
from streamer.observability.joined_metrics import join_metrics
from streamer.runtime.child_processes.child_process import (
    RELOAD,
    SERVE,
    STOP,
    Membership,
    obey,
    process_directory,
)
from streamer.runtime.child_processes.orphaned_journals import gather_journals
from streamer.runtime.child_processes.restarts import (
    ERROR_EXITS_MAX,
    LASTING_SECONDS,
    SECONDS_MAX,
    Restarts,
    choose_acceptor,
)
from streamer.source.journal.journal_files import Journal, directory_of, remove_journal
from streamer.source.journal.journal_records import JournalIdentity
from streamer.source.timeline_branches import Branch
from streamer.util.lsn import Lsn
from streamer.util.owned_directory import OwnedDirectory

KILLED = -9


def test_a_killed_process_starts_again_each_time_later_and_never_ends_the_others() -> None:
    restarts = Restarts()
    delays = [restarts.next_seconds(KILLED, 1.0) for _ in range(50)]
    assert None not in delays
    assert delays == sorted(delays, key=lambda seconds: seconds or 0.0)
    assert (delays[0], delays[-1]) == (0.5, SECONDS_MAX)
    assert restarts.next_seconds(KILLED, LASTING_SECONDS) == 0.5


def test_a_process_that_a_user_stopped_starts_again() -> None:
    assert Restarts().next_seconds(0, 1.0) == 0.5


@pytest.mark.parametrize("code", [1, 3, 4])
def test_an_error_of_a_process_ends_all_if_restarts_do_not_help(code: int) -> None:
    restarts = Restarts()
    delays = [restarts.next_seconds(code, 1.0) for _ in range(ERROR_EXITS_MAX)]
    assert [delay is None for delay in delays] == [False] * (ERROR_EXITS_MAX - 1) + [True]


def test_an_error_after_a_long_life_counts_as_the_first() -> None:
    restarts = Restarts()
    assert [restarts.next_seconds(4, LASTING_SECONDS) for _ in range(9)] == [0.5] * 9


def test_a_wrong_configuration_ends_all_at_once() -> None:
    assert Restarts().next_seconds(2, 1.0) is None


def test_the_oldest_process_serves_the_port() -> None:
    assert choose_acceptor({1: 30.0, 2: 10.0, 3: 10.0}) == 2
    assert choose_acceptor({}) is None


async def heard(lines: bytes) -> tuple[list[str], list[int]]:
    commands = asyncio.StreamReader()
    commands.feed_data(lines)
    commands.feed_eof()
    acts: list[str] = []
    exits: list[int] = []
    await obey(commands, acts.append, exits.append)
    return acts, exits


async def test_a_process_stops_in_order_when_its_parent_dies() -> None:
    assert await heard(b"serve\nreload\n") == ([SERVE, RELOAD, STOP], [])


async def test_a_process_exits_at_once_when_its_parent_ends_after_a_stop() -> None:
    acts, exits = await heard(b"stop\n")
    assert (acts[0], exits) == (STOP, [1])


def test_each_process_has_a_spool_directory_and_the_first_has_the_configured_one() -> None:
    settings = Settings.model_validate(
        {"target": {"url": "postgresql:///t"}, "spool": {"directory": "/spool"}}
    )
    first, second = (
        Membership(number, None, Path("/run")).own_settings(settings).spool.directory
        for number in (1, 2)
    )
    assert (first, second) == (Path("/spool"), Path("/spool/process-2"))


def test_journals_of_processes_that_no_longer_start_go_to_the_first_one(tmp_path: Path) -> None:
    def begin(number: int, slot: str, lsn: int) -> None:
        spool = tmp_path if number == 1 else process_directory(tmp_path, number)
        identity = JournalIdentity("1", slot)
        Journal.create(directory_of(spool, slot), identity, Lsn(lsn), Branch(1)).close()

    def journals(number: int) -> list[str]:
        spool = tmp_path if number == 1 else process_directory(tmp_path, number)
        return sorted(path.name for path in spool.glob("journal/*"))

    begin(2, "stays", 1)
    begin(3, "moves", 2)
    begin(3, "twice", 3)
    begin(1, "twice", 4)
    begin(12, "far", 5)
    with OwnedDirectory(process_directory(tmp_path, 12), "streamer-"):
        gather_journals(tmp_path, 2)
        assert journals(12) == ["far"], "its process lives"
    assert (journals(1), journals(2), journals(3)) == (["moves", "twice"], ["stays"], ["twice"])
    opened = Journal.open(directory_of(tmp_path, "moves"))
    assert opened is not None
    assert opened.end_lsn == Lsn(2)
    opened.close()
    # WHEN the first process has drained its own journal THEN the next start moves the second
    # journal
    remove_journal(directory_of(tmp_path, "twice"))
    gather_journals(tmp_path, 1)
    assert journals(1) == ["far", "moves", "stays", "twice"]
    assert list(tmp_path.glob("process-*")) == []


@pytest.mark.parametrize("port", [None, 5])
def test_a_membership_survives_the_command_line(port: int | None) -> None:
    membership = Membership(2, port, Path("/tmp/a:b"))
    assert Membership.parse(str(membership)) == membership


def test_joined_metrics_have_each_family_once_and_name_the_process_of_each_series() -> None:
    def text(number: int) -> str:
        return (
            "# HELP python_info Version\n# TYPE python_info gauge\npython_info 1.0\n"
            "# HELP streamer_fleet_sources Sources\n# TYPE streamer_fleet_sources gauge\n"
            'streamer_fleet_sources{state="streaming"} 3.0\n'
            "# HELP streamer_commits_total Commits\n# TYPE streamer_commits_total counter\n"
            f'streamer_commits_total{{worker="a b{{}}\u2028"}} {number}.0\n'
        )

    assert join_metrics({2: text(2), 1: text(1)}) == (
        "# HELP python_info Version\n# TYPE python_info gauge\n"
        'python_info{replica="2"} 1.0\npython_info{replica="1"} 1.0\n'
        "# HELP streamer_fleet_sources Sources\n# TYPE streamer_fleet_sources gauge\n"
        'streamer_fleet_sources{state="streaming"} 3.0\n'
        "# HELP streamer_commits_total Commits\n# TYPE streamer_commits_total counter\n"
        'streamer_commits_total{replica="2",worker="a b{}\u2028"} 2.0\n'
        'streamer_commits_total{replica="1",worker="a b{}\u2028"} 1.0\n'
    )
