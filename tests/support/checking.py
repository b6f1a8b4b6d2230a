"""A source and a target for `streamer check`, and a way to run the SQL that a finding names."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamer.commands.check.check import check, examine
from streamer.commands.check.findings import CheckReport, Finding
from streamer.commands.demo.embedded_servers import Server
from streamer.config import static_mapping
from streamer.postgres.quoting import quote_literal
from streamer.report.problems import Severity
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database, role_at
from tests.support.streamer import write_config

ITEMS = "create table items (id int primary key, name text)"
ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO


async def run_check(path: Path) -> CheckReport:
    return await check(*static_mapping.load(path))


def matching(findings: list[Finding], severity: Severity, *words: str) -> list[Finding]:
    return [
        finding
        for finding in findings
        if finding.severity is severity and all(word in str(finding) for word in words)
    ]


class Checker:
    """Checks a source and a target, and runs the SQL of a finding."""

    def __init__(self, path: Path, source: Database, target: Database) -> None:
        self.path = path
        self.source = source
        self.target = target

    def configure(self, tables: str, *, group: str = "", **options: Any) -> None:
        if "transport:" not in group:  # each test would find that binary is not used
            group = f"transport: text\n{group}"
        write_config(self.path, self.source, self.target, tables, group=group, **options)

    async def findings(self) -> list[Finding]:
        """Return the findings about the servers; `run_check` would start a JVM each time."""
        report = (await examine(*static_mapping.load(self.path))).report
        # The servers of the tests run without fsync.
        return [finding for finding in report.findings if "fsync" not in finding.problem]

    async def finds(self, severity: Severity, *words: str) -> Finding:
        """Return the only finding with all *words*."""
        findings = await self.findings()
        matches = matching(findings, severity, *words)
        assert len(matches) == 1, "\n".join(map(str, findings))
        assert "\n" not in str(matches[0])
        return matches[0]

    async def is_gone(self, severity: Severity, *words: str) -> None:
        findings = await self.findings()
        assert not matching(findings, severity, *words), "\n".join(map(str, findings))

    async def mends(self, severity: Severity, *words: str) -> Finding:
        """Check that the finding appears, and disappears after its SQL has run."""
        finding = await self.finds(severity, *words)
        self.run_fix(finding)
        await self.is_gone(severity, *words)
        return finding

    def run_fix(self, finding: Finding) -> None:
        assert finding.fix is not None
        assert finding.fix.sql
        db = {"source": self.source, "target": self.target}[str(finding.fix.at)]
        assert f"run at the {finding.fix.at}: {'; '.join(finding.fix.sql)}" in str(finding)
        for statement in finding.fix.sql:
            db.execute(statement)


@pytest.fixture
def role(shared_server: Server, target_server: Server) -> Iterator[str]:
    """A role with hardly any privilege, at both servers."""
    with role_at({shared_server, target_server}, "lowly", "replication") as name:
        yield name


@pytest.fixture
def checker(tmp_path: Path, source: Database, target: Database) -> Checker:
    return Checker(tmp_path / "config.yaml", source, target)


def both(checker: Checker, ddl: str) -> None:
    checker.source.execute(ddl)
    checker.target.execute(ddl)


def two_sources(checker: Checker, tables: str, urls: dict[str, str]) -> None:
    listed = ", ".join(f'{{url: "{url}", sid: {sid}}}' for sid, url in urls.items())
    checker.configure(tables)
    lines = checker.path.read_text().splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("  urls:"))
    lines[at] = f"  urls: [{listed}]"
    checker.path.write_text("\n".join(lines))


async def prepare_bookkeeping(checker: Checker) -> None:
    from streamer.bookkeeping.bookkeeping import Bookkeeping
    from streamer.bookkeeping.bookkeeping_schema import migrate

    settings, _ = static_mapping.load(checker.path)
    bookkeeping = Bookkeeping(TargetAddress.parse(settings.target.url))
    await migrate(bookkeeping)
    await bookkeeping.close()


@contextlib.contextmanager
def prepared(db: Database, gid: str) -> Iterator[None]:
    """Have a prepared transaction during a block, or until a session ends the
    transaction.
    """
    db.execute(f"begin; insert into items values (1); prepare transaction {quote_literal(gid)}")
    try:
        yield
    finally:
        remaining = f"select 1 from pg_prepared_xacts where gid = {quote_literal(gid)}"
        if db.execute(remaining):
            db.execute(f"rollback prepared {quote_literal(gid)}")
