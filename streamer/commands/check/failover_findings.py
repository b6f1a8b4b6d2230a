"""The role of a source, and whether streaming continues after its server fails over. Pure."""

from collections.abc import Iterable

from streamer.commands.check.findings import (
    Finding,
    Place,
    at_source,
    error,
    from_error,
    in_words,
    info,
    warning,
)
from streamer.commands.check.source_facts import SourceFacts
from streamer.errors.error_classes import SourceStandbyError
from streamer.postgres.conninfo import parse_conninfo
from streamer.postgres.quoting import quote_literal
from streamer.source.catalog import ON_STANDBY_SINCE
from streamer.source.connection import names_several_hosts
from streamer.source.server.primaries_after_failover import choose
from streamer.source.slot_and_publications.slot import Slot, require_own
from streamer.source.slot_and_publications.standbys import StandbyState
from streamer.source.timeline_branches import KnownServer

RELOAD = "select pg_reload_conf()"
FEEDBACK = "hot_standby_feedback"


def check_failover(facts: SourceFacts) -> Iterable[Finding]:
    """Judge the server's role, the hosts of the source's url, and the standbys."""
    if facts.server is None:
        return
    place = Place(facts.label)
    yield from _check_hosts(place, facts)
    yield from _check_primaries(place, facts)
    if facts.server.in_recovery:
        yield from _check_standby_as_source(place, facts)
    elif facts.source.failover and facts.is_complete:
        yield from _check_primary(place, facts)


def _check_hosts(place: Place, facts: SourceFacts) -> Iterable[Finding]:
    parameters = parse_conninfo(facts.source.url.reveal())
    if names_several_hosts(facts.source) and parameters.get("target_session_attrs", "any") == "any":
        yield warning(
            place,
            "its url lists several hosts without target_session_attrs, so connections may reach a "
            "server that has no slot of streamer",
            in_words(
                "add target_session_attrs=read-write; for a source on a standby, add "
                "target_session_attrs=standby"
            ),
        )


def _check_primaries(place: Place, facts: SourceFacts) -> Iterable[Finding]:
    """Whether an old primary runs beside the new primary."""
    assert facts.server is not None
    identifier = facts.server.system_identifier
    ours = [p for p in facts.primaries if p.server.system_identifier == identifier]
    if len(ours) > 1:
        newest = choose(ours, KnownServer())
        old = ", ".join(str(primary) for primary in ours if primary is not newest)
        yield error(
            place,
            f"has two primaries: {', '.join(map(str, ours))}",
            in_words(
                f"stop the old primary, {old}: its commits reach neither {newest} nor streamer"
            ),
        )


def _check_standby_as_source(place: Place, facts: SourceFacts) -> Iterable[Finding]:
    server, settings, slot = facts.server, facts.replication, facts.slot
    assert server is not None
    if server.version < ON_STANDBY_SINCE:
        return
    try:
        require_own(slot, facts.source, server)
    except SourceStandbyError as exc:
        yield from_error(place, exc)
    if names_several_hosts(facts.source):
        yield info(
            place, "is a standby: streamer writes publications and heartbeats at its primary"
        )
    else:
        words = (
            "create them on the primary, or list the primary in the url as well, with "
            "target_session_attrs=standby"
        )
        problem = "is a standby, so streamer cannot change publications here"
        yield warning(place, problem, in_words(words))
    if not facts.is_complete:
        return
    if settings.get(FEEDBACK) == "off":
        yield warning(
            place,
            "hot_standby_feedback is off: VACUUM at the primary can cancel copies, and invalidate "
            "the slot",
            at_source(f"alter system set {FEEDBACK} = on", RELOAD),
        )
    if not settings.get("primary_slot_name"):
        yield warning(
            place,
            "primary_slot_name is empty: while the standby is disconnected, VACUUM at the primary "
            "can invalidate the slot",
            in_words("create a physical slot on the primary, and name it in primary_slot_name"),
        )


def _check_primary(place: Place, facts: SourceFacts) -> Iterable[Finding]:
    """Whether standbys receive each change before the target, and would keep the slot."""
    listed = facts.replication.get("synchronized_standby_slots", "")
    physical = [
        name for standby in facts.standbys if (name := standby.settings.get("primary_slot_name"))
    ]
    missing = sorted(set(physical) - {name.strip(' "') for name in listed.split(",")})
    problem = (
        "the target can get changes before a standby has them; after a failover to that standby "
        "the source would stop with `diverged`"
    )
    if missing:
        slots = quote_literal(", ".join(filter(None, [listed, *missing])))
        yield warning(
            place,
            f"synchronized_standby_slots lacks {', '.join(missing)}: {problem}",
            at_source(f"alter system set synchronized_standby_slots = {slots}", RELOAD),
        )
    elif not listed:
        words = "set it to the physical slots of the standbys that may become the primary"
        yield warning(place, f"synchronized_standby_slots is empty: {problem}", in_words(words))
    if not names_several_hosts(facts.source):
        yield info(
            place,
            "has failover: true, and its url lists one host",
            in_words("list all hosts in the url, with target_session_attrs=read-write"),
        )
    for standby in facts.standbys:
        yield from _check_candidate(
            Place(facts.label, f"standby {standby.host}"), standby, facts.slot
        )


def _check_candidate(place: Place, standby: StandbyState, slot: Slot | None) -> Iterable[Finding]:
    """Whether a failover to this standby would keep the slot."""
    if standby.error is not None:
        yield warning(place, f"cannot be checked: {standby.error}")
        return
    for name, value, expected in (
        ("sync_replication_slots", "off", "on"),
        (FEEDBACK, "off", "on"),
        ("primary_slot_name", "", "the name of a physical slot on the primary"),
    ):
        if standby.settings.get(name, value) == value:
            yield warning(
                place,
                f"{name} is {value or 'empty'}, so this standby gets no copy of the slot",
                in_words(f"set it on the standby to {expected}"),
            )
    copy = standby.slot
    if copy is not None and copy.invalidation is not None:
        yield error(place, f"its copy of the slot was invalidated: {copy.invalidation}")
    elif slot is not None and (copy is None or copy.is_temporary):
        state = "is temporary, and would be lost in a failover" if copy else "does not exist yet"
        yield warning(
            place,
            f"the copy of the slot {state}",
            in_words(
                "wait until the standby has received the slot's WAL, and streamer has advanced the "
                "slot past the position of the copy; see the standby's log"
            ),
        )
    elif copy is not None:
        yield info(
            place, f"has a copy of the slot at {copy.confirmed_flush_lsn}, ready for failover"
        )
