"""Whether the source will capture changes of definitions. Pure."""

from collections.abc import Iterable

from streamer.commands.check.findings import Finding, Place, at_source, in_words, warning
from streamer.commands.check.source_facts import SourceFacts
from streamer.mapping.rule_options import DdlCapture, OnDdl
from streamer.postgres.quoting import quote_identifier
from streamer.source.capture.capture_functions import create_sql, schema_of


def check_capture(facts: SourceFacts) -> Iterable[Finding]:
    """Name the statements that create the capture, if the role may not run the statements."""
    yield from _check_commits(facts)
    capture, server, place = facts.capture, facts.server, Place(facts.label)
    if facts.source.ddl is not DdlCapture.CAPTURE or server is None:
        return
    if capture is None or capture.is_current or capture.may_create:
        return
    if capture.is_taken:
        schema = quote_identifier(schema_of(facts.source))
        yield warning(
            place,
            f"changes of definitions are not captured: schema {schema} is not streamer's",
            at_source(f"alter schema {schema} rename to another_name", is_choice=True),
        )
        return
    problem = (
        "the event triggers that capture definitions belong to another version"
        if capture.exists
        else "changes to definitions are not captured: the event triggers are missing"
    )
    statements = create_sql(facts.source, server.role, server.version)
    where = "at its primary, " if server.in_recovery else ""
    words = (
        f"{where}as a superuser: no other role may create event triggers; streamer teardown "
        "removes them"
    )
    yield warning(place, problem, at_source(*statements, words=words))


def _check_commits(facts: SourceFacts) -> Iterable[Finding]:
    """Whether a change that stops a table would stop all commits at the source."""
    if facts.source.ddl is not DdlCapture.CAPTURE or not (
        facts.usage and facts.usage.is_synchronous
    ):
        return
    stops = [kind for kind, reaction in facts.source.on_ddl.items() if reaction is OnDdl.STOP]
    if stops:
        yield warning(
            Place(facts.label),
            "commits at this source wait until streamer has confirmed them, and `on_ddl` is stop "
            f"for {', '.join(stops)}: a stopped table stops all commits",
            in_words(
                "set `on_ddl` to apply or ignore for these kinds, or take streamer out of "
                "synchronous_standby_names before such a change"
            ),
        )
