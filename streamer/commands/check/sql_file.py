"""The statements of all findings as a script for psql, in an executable order. Pure.

Statements that end or remove objects of other users stay comments: an administrator decides.
"""

from collections.abc import Iterator
from typing import Final

from streamer.commands.check.findings import CheckReport, Finding, one_line
from streamer.postgres.conninfo import SERVER_PARAMETERS, database_parameters, join_parameters
from streamer.postgres.quoting import without_line_breaks

_HEAD: Final = """\
-- Statements of `streamer check` for an administrator of the databases. Run them with:
--   psql -X -f FILE CONNECTION
\\set ON_ERROR_STOP on
"""


def sql_file(report: CheckReport) -> str:
    """Return the script for the findings of *report*, each statement once for each database."""
    by_place: dict[str | None, list[Finding]] = {}
    for finding in report.findings:
        if (fix := finding.fix) is not None and fix.sql and fix.at in ("source", "target"):
            place = finding.place.source if fix.at == "source" else None
            by_place.setdefault(place, []).append(finding)
    databases = {place: database_parameters(report.urls[place].reveal()) for place in by_place}
    servers = {tuple(d.get(name) for name in SERVER_PARAMETERS) for d in databases.values()}
    sections: dict[str, list[Finding]] = {}
    for place, findings in by_place.items():
        connection = databases[place]
        if len(servers) == 1:
            connection = {name: value for name, value in connection.items() if name == "dbname"}
        sections.setdefault(_connect(connection), []).extend(findings)
    lines = [_HEAD]
    for connect, findings in sections.items():
        lines += [connect, *_statements(findings)]
    return "\n".join(lines)


def _connect(parameters: dict[str, str]) -> str:
    if not parameters:
        return "-- In the database of the source or target:"
    text = join_parameters(parameters).replace("\\", "\\\\").replace("'", "''")
    return "\\connect -reuse-previous=on '{}'".format(text.replace("\n", "\\n"))


def _statements(findings: list[Finding]) -> Iterator[str]:
    present: set[str] = set()
    for finding in findings:
        assert finding.fix is not None
        missing = [sql for sql in dict.fromkeys(finding.fix.sql) if sql not in present]
        if not missing:
            continue
        yield f"\n-- {one_line(f'{finding.severity} {finding.place}: {finding.problem}')}"
        for text in filter(None, (finding.fix.introduction, finding.fix.words)):
            yield f"-- {one_line(text)}"
        if finding.fix.is_choice:
            yield from (f"--   {one_line(without_line_breaks(sql))};" for sql in missing)
            continue
        present.update(missing)
        yield from (f"{without_line_breaks(sql)};" for sql in missing)
    yield ""
