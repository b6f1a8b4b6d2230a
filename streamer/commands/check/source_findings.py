"""Problems at a source: server, slot, publications, tables, long transactions. Pure."""

from collections.abc import Container, Iterable
from dataclasses import replace
from typing import Final

from streamer.bookkeeping.sources import SourceRecord
from streamer.commands.check.capture_findings import check_capture
from streamer.commands.check.failover_findings import check_failover
from streamer.commands.check.findings import (
    Finding,
    Fix,
    Place,
    at_source,
    error,
    from_error,
    in_words,
    info,
    quote_relation,
    warning,
)
from streamer.commands.check.identity_findings import TableMembership, check_identity
from streamer.commands.check.publication_findings import (
    check_publications,
    find_memberships,
    plan_publications,
)
from streamer.commands.check.sequence_findings import check_sequences
from streamer.commands.check.source_facts import (
    SourceFacts,
)
from streamer.commands.check.target_facts import TargetFacts
from streamer.control.resync_options import after_loss
from streamer.copy.copy_obstacles import find_unreadable
from streamer.errors.command_lines import some_of
from streamer.errors.error_classes import (
    SlotInvalidatedError,
    SlotMissingError,
    SourceDatabaseError,
    SourceDivergedError,
    SourceOldPrimaryError,
    UnpublishedError,
)
from streamer.errors.remedies import resync_source
from streamer.mapping.rule_options import Initial, OnError, OnMaxRetainedWal
from streamer.mapping.rules import RelationMapping, SourceMapping, TableRule
from streamer.postgres.quoting import quote_identifier, quote_literal
from streamer.postgres.supported_versions import MAJOR_TESTED
from streamer.report.problems import Severity
from streamer.runtime.guards.publication_plan import PublicationPlan
from streamer.source.catalog import SourceRelation, SourceServer, check_same_history, find_unready
from streamer.source.connection import names_several_hosts
from streamer.source.copy_grants import usage_sql
from streamer.source.server.primaries_after_failover import require_successor
from streamer.source.slot_and_publications.ownership import obstacle, takeover_remedy, unproven_rows
from streamer.source.slot_and_publications.slot import require_position
from streamer.source.source_database import require_same_database
from streamer.util.lsn import INVALID_LSN, LSN_MAX

TIMEOUT_MILLISECONDS_LOW: Final = 10_000
DECODING_KB_LOW: Final = 16 * 1024
RELOAD: Final = "select pg_reload_conf()"


def check_source(
    facts: SourceFacts, target: TargetFacts | None, *, is_survey: bool = False
) -> list[Finding]:
    """Judge all facts of a source.

    *is_survey*: an operator has not chosen the tables yet, so the publications have no names.
    """
    place = Place(facts.label)
    findings: list[Finding] = []
    if facts.error is not None:
        findings.append(from_error(place, facts.error))
    if facts.server is None or facts.usage is None:
        return findings
    record = None if target is None else target.sources.get(facts.source.label)
    if record is not None:
        server = facts.server
        reached = server.system_identifier, server.database_oid, server.database_names
        try:
            require_same_database(facts.source, record.known_server, *reached)
        except SourceDatabaseError as exc:
            return [from_error(place, exc)]  # more findings would be about a wrong database
    findings += check_server(place, facts.server, facts.source)
    findings += check_settings(place, facts.server, streams=facts.source.streaming)
    findings += check_backlog(place, facts.server, facts.source)
    findings += check_failover(facts)
    if not facts.is_complete:
        return findings
    if target is not None:
        findings += check_encoding(place, facts.usage.encoding, target.server.encoding)
    findings += facts.mapping_findings
    findings += check_position(facts, target)
    try:
        plan = plan_publications(facts, target)
    except UnpublishedError as exc:
        findings.append(from_error(place, exc))
        plan = plan_publications(facts, None)
    if facts.mappings and not is_survey:
        findings += check_publications(facts, target, plan)
    findings += check_transactions(facts, target)
    findings += check_tables(facts, target, None if is_survey else plan)
    findings += check_unreplicated(facts)
    findings += check_sequences(facts, target)
    findings += check_capture(facts)
    return findings


def copied(facts: SourceFacts, target: TargetFacts | None) -> list[RelationMapping]:
    """Return the tables of which `run` would begin or continue a copy, without a further request.

    Without *target*, every table counts as new.
    """
    return [
        mapping
        for mapping in facts.mappings
        if (
            mapping.rule.initial is not Initial.NONE
            if target is None
            else target.begins_copy(facts.source, mapping)
        )
    ]


def check_server(place: Place, server: SourceServer, source: SourceMapping) -> Iterable[Finding]:
    """Check the version, wal_level, and the role's right to replicate."""
    if server.major > MAJOR_TESTED:
        problem = (
            f"PostgreSQL {server.version_text} is newer than any version tested with this streamer"
        )
        yield warning(place, problem, in_words("upgrade streamer if a newer version exists"))
    for unready in find_unready(server, source):
        yield from_error(place, unready)
    if not server.role_may_replicate:
        fix = at_source(f"alter role {quote_identifier(server.role)} replication")
        yield error(place, f'role "{server.role}" may not replicate', fix)


def check_settings(place: Place, server: SourceServer, *, streams: bool) -> Iterable[Finding]:
    """Find settings that end the stream, lose the slot, or slow down decoding."""
    settings = {name: int(value) for name, value in server.settings.items()}
    role = quote_identifier(server.role)
    timeout = settings["wal_sender_timeout"]
    if 0 < timeout < TIMEOUT_MILLISECONDS_LOW:
        yield warning(
            place,
            f"wal_sender_timeout is {timeout} ms: if streamer is silent for longer, the source "
            "ends the stream",
            at_source(f"alter role {role} set wal_sender_timeout = '60s'"),
        )
    size = settings.get("max_slot_wal_keep_size", -1)
    if size >= 0:
        yield warning(
            place,
            f"max_slot_wal_keep_size is {size} MB: if more WAL waits for streamer, the "
            "slot is lost and all tables need a new copy. With spool.directory, a journal begins "
            "at half of this size",
            at_source("alter system set max_slot_wal_keep_size = -1", RELOAD),
        )
    idle = settings.get("idle_replication_slot_timeout", 0)
    if idle > 0:
        yield warning(
            place,
            f"idle_replication_slot_timeout is {idle} s: if streamer stops for longer, the slot is "
            "lost and all tables need a new copy",
            at_source("alter system set idle_replication_slot_timeout = 0", RELOAD),
        )
    memory = settings.get("logical_decoding_work_mem")
    if memory is not None and memory < DECODING_KB_LOW:
        is_streamed = streams and server.version >= 14_00_00
        effect = "sent before they end" if is_streamed else "written to the source's disk first"
        yield info(
            place,
            f"logical_decoding_work_mem is {memory} kB: transactions larger than that are {effect}",
            at_source(f"alter role {role} set logical_decoding_work_mem = '64MB'"),
        )


def check_heartbeat(facts: SourceFacts, interval: float) -> Iterable[Finding]:
    """Whether the configured heartbeats can measure how long commits take to become visible."""
    configured = facts.source.heartbeat_interval
    seconds = interval if configured is None else configured
    if not seconds or facts.server is None or facts.usage is None:
        return
    place, server = Place(facts.label), facts.server
    if server.in_recovery:
        if not names_several_hosts(facts.source):
            problem = "has no heartbeats, because it is a standby whose url lacks the primary"
            yield info(place, problem)
    elif not facts.usage.may_write_heartbeats:
        types = "boolean, text, text" + (", boolean" if server.version >= 17_00_00 else "")
        function = f"pg_catalog.pg_logical_emit_message({types})"
        role = quote_identifier(server.role)
        yield info(
            place,
            f'has no heartbeats, because role "{server.role}" may not execute '
            "pg_logical_emit_message",
            at_source(f"grant execute on function {function} to {role}"),
        )


def check_backlog(place: Place, server: SourceServer, source: SourceMapping) -> Iterable[Finding]:
    """Find a WAL limit above the server's own limit. A journal begins before either limit."""
    limit = source.max_retained_wal_bytes
    size = int(server.settings.get("max_slot_wal_keep_size", -1))
    if source.on_max_retained_wal is OnMaxRetainedWal.SPOOL:
        return
    if limit is not None and 0 <= size * 1024 * 1024 <= limit:
        yield warning(
            place,
            f"max_slot_wal_keep_size is {size} MB: the slot is lost before max_retained_wal, which "
            f"is {limit} bytes, is reached",
            in_words("set max_retained_wal to half of max_slot_wal_keep_size, or less"),
        )


def check_encoding(place: Place, source: str, target: str) -> Iterable[Finding]:
    """Find an encoding of the target that lacks characters of the source."""
    words = "create the target database with: encoding 'UTF8' template template0"
    if source == "SQL_ASCII":
        problem = (
            "its encoding is SQL_ASCII: the target refuses rows whose text is not valid UTF-8, "
            "and their table stops"
        )
        yield warning(place, problem, in_words("correct such text, or convert the database"))
    elif target == "SQL_ASCII":
        yield warning(place, "the target's encoding is SQL_ASCII", in_words(words))
    elif target not in (source, "UTF8"):
        problem = (
            f"its encoding is {source}, the target's {target}: the target rejects characters that "
            "its encoding lacks"
        )
        yield warning(place, problem, in_words(words))


def check_same_database(sources: Iterable[SourceFacts]) -> Iterable[Finding]:
    """Name a database that a group lists under two sids: the target would get its rows twice."""
    first: dict[tuple[str, ...], SourceFacts] = {}
    for facts in sources:
        server, usage = facts.server, facts.usage
        if server is None or usage is None:
            continue
        key = (
            facts.source.database,
            server.system_identifier,
            usage.server_started,
            server.database,
        )
        first_facts = first.setdefault(key, facts)
        if first_facts is not facts:
            yield warning(
                Place(facts.label),
                f"its url and the url of {first_facts.label} lead to the same database "
                f'"{server.database}", so the target gets its rows twice, once with each sid',
                in_words(f"correct the url of {facts.label} or {first_facts.label}"),
            )


def check_position(facts: SourceFacts, target: TargetFacts | None) -> Iterable[Finding]:
    """Whether slot, source and target belong together, by the rules of the pipeline's start."""
    place, slot, source, server = Place(facts.label), facts.slot, facts.source, facts.server
    assert server is not None
    record = target.sources.get(source.label) if target is not None else None
    misfit = None if slot is None else slot.misfit(server.database)
    if misfit is not None:
        problem = f'replication slot "{source.slot}" {misfit.problem}'
        yield error(place, problem, Fix.of(misfit.remedy))
        return
    if target is None or not target.are_records_readable:
        return
    if record is not None:
        try:
            require_successor(source, server, record.known_server)
        except SourceOldPrimaryError as exc:
            yield from_error(place, exc)
            return
    if facts.objects is not None:
        has_position = record is not None and record.acknowledged_lsn != INVALID_LSN
        problem = obstacle(facts.objects, source, target.installation, has_position=has_position)
        if problem:
            hint = takeover_remedy(source)
            # If a different installation owns the slot, the operator of that installation decides
            # whether to end the reader.
            reads = slot is not None and slot.active_pid and not facts.objects.installations
            sql = f"select pg_terminate_backend({slot.active_pid})" if slot and reads else None
            end = at_source(sql, words=str(hint), is_choice=True) if sql else None
            yield error(place, problem, end or Fix.of(hint))
        uncopied = [m.source for m in facts.mappings if m.rule.initial is Initial.NONE]
        unproven = unproven_rows(
            facts.objects, source, target.installation, uncopied, has_position=has_position
        )
        if unproven is not None:
            yield from_error(place, unproven)
    in_sync = [
        mapping
        for mapping in facts.mappings
        if target.record(source, mapping) is not None and not target.needs_copy(source, mapping)
    ]
    synced = [str(mapping.source) for mapping in in_sync]
    if slot is None and not synced:
        return
    try:
        _check_history(facts, server, record)
    except (SourceDivergedError, SlotMissingError, SlotInvalidatedError) as exc:
        if synced:
            options = after_loss(mapping.type for mapping in in_sync)
            exc.remedy = resync_source(synced, *options, database=source.database, sid=source.sid)
            yield from_error(place, exc)
        else:
            yield warning(
                place, f"{exc.message}; no table is in sync, so `run` re-creates the slot"
            )


def _check_history(facts: SourceFacts, server: SourceServer, record: SourceRecord | None) -> None:
    if record is not None:
        check_same_history(server, record.system_identifier, record.acknowledged_lsn)
    acknowledged_lsn = LSN_MAX if record is None else record.acknowledged_lsn
    require_position(facts.slot, facts.source.slot, server.database, acknowledged_lsn)


def check_transactions(facts: SourceFacts, target: TargetFacts | None) -> Iterable[Finding]:
    """Find the transactions for which the creation of a slot would wait."""
    if facts.slot is not None and not copied(facts, target):
        return
    place = Place(facts.label)
    for open_one in facts.open_transactions:
        age = "for a while" if open_one.seconds is None else f"for {open_one.seconds} s"
        yield warning(
            place,
            f"creating a slot waits for a transaction that has been open {age}: pid "
            f"{open_one.pid}, "
            f'user "{open_one.user}", database "{open_one.database}"',
            at_source(
                f"select pg_terminate_backend({open_one.pid})",
                words="or wait until it ends",
                is_choice=True,
            ),
        )
    for prepared in facts.prepared_transactions:
        gid = quote_literal(prepared.gid).strip()
        yield warning(
            place,
            f"creating a slot waits for prepared transaction {gid}",
            at_source(
                f"rollback prepared {gid}",
                words=f"or commit prepared {gid}; either statement must run in database "
                f'"{prepared.database}"',
                is_choice=True,
            ),
        )


def check_tables(
    facts: SourceFacts, target: TargetFacts | None, plan: PublicationPlan | None
) -> Iterable[Finding]:
    """Judge every mapped table of a source. *plan*: None before the publications have names."""
    to_copy = copied(facts, target)
    memberships = {} if plan is None else find_memberships(facts, plan)
    yield from check_usage(facts, to_copy)
    for mapping, relation in facts.mapped():
        if mapping.rule.initial is not Initial.NONE:
            yield from check_readable(facts, mapping, relation, is_copied=mapping in to_copy)
        place = _place(facts, mapping)
        membership = memberships.get(mapping.source, TableMembership())
        yield from check_identity(place, mapping, relation, facts.candidates, membership)
        yield from check_rule(facts, mapping, relation)
        yield from check_expressions(facts, mapping, relation)
        if target is not None:
            yield from check_locales(facts, target, mapping, relation)


def _place(facts: SourceFacts, mapping: RelationMapping) -> Place:
    return Place(facts.label, str(mapping.source))


def check_usage(facts: SourceFacts, to_copy: list[RelationMapping]) -> Iterable[Finding]:
    """Find schemas whose tables the role cannot read, despite grants on the tables."""
    assert facts.server is not None
    namespaces = {mapping.source.namespace for mapping in to_copy}
    role = facts.server.role
    for namespace in sorted(namespaces - facts.usable_namespaces):
        place = Place(facts.label, f'schema "{namespace}"')
        yield error(place, f'role "{role}" may not use it', at_source(usage_sql(namespace, role)))


def check_readable(
    facts: SourceFacts, mapping: RelationMapping, relation: SourceRelation, *, is_copied: bool
) -> Iterable[Finding]:
    """Whether a copy, now or after a resync, can read every row. The stream needs no such right."""
    assert facts.server is not None
    severity = Severity.ERROR if is_copied else Severity.WARNING
    for unreadable in find_unreadable(relation, facts.server.role):
        yield replace(from_error(_place(facts, mapping), unreadable), severity=severity)


def check_rule(
    facts: SourceFacts, mapping: RelationMapping, relation: SourceRelation
) -> Iterable[Finding]:
    """Find missing columns that a rule for this table names."""
    rule = mapping.rule
    if rule.pattern.is_pattern:
        return
    named = {name for name, _ in rule.columns or ()} | rule.exclude
    for name in sorted(named - set(relation.column_names)):
        yield warning(
            _place(facts, mapping),
            f'its rule names column "{name}", which does not exist',
            in_words(
                f"correct the rule; the table has the columns: {', '.join(relation.column_names)}"
            ),
        )


def _unwritten(mapping: RelationMapping, relation: SourceRelation) -> list[str]:
    """Return the columns that expressions use and whose source values the target does not get."""
    unwritten = []
    for name in mapping.expression_inputs(relation.column_names):
        target_name = mapping.target_column(name)
        if target_name is None or mapping.is_computed(target_name):
            unwritten.append(name)
    return unwritten


def check_expressions(
    facts: SourceFacts, mapping: RelationMapping, relation: SourceRelation
) -> Iterable[Finding]:
    """Whether the source accepts `filter` and `set`, and sends their columns."""
    place = _place(facts, mapping)
    if (refused := facts.expression_errors.get(mapping.source)) is not None:
        yield error(place, refused.message, in_words(refused.hint) if refused.hint else None)
        return
    if mapping.rule.on_error is OnError.QUARANTINE and (unwritten := _unwritten(mapping, relation)):
        yield warning(
            place,
            "changes in quarantine hold unaltered values of columns that the target does not "
            f"have ({some_of(unwritten)}), because `filter` and `set` need them",
            in_words(
                "set `on_error: stop` for the table, if these values must not leave the source"
            ),
        )
    rule = mapping.rule
    is_plain = not rule.checked_expressions and rule.expiry is None
    if is_plain or not relation.has_usable_identity:
        return
    if relation.replica_identity == "f":
        return
    used = {name for expression in mapping.rule.expressions for name in expression.names}
    large = [
        column.name
        for column in relation.columns
        if column.may_be_toasted
        and column.name not in relation.key
        # A row that enters the target must be complete; computed columns need only their inputs.
        and (mapping.rule.may_lack_rows or column.name in used)
    ]
    if not large:
        return
    problem = (
        f"{_needing(rule, large)} may need {some_of(large)}, and an UPDATE does not send a value "
        "above 2 kB that it leaves unchanged. Such an UPDATE stops the table"
    )
    if relation.oid in facts.with_large_values:
        fix = at_source(f"alter table {quote_relation(relation.name)} replica identity full")
        yield warning(place, problem, fix)
    else:
        yield info(place, f"{problem}; the table has no such value so far")


def _needing(rule: TableRule, large: Container[str]) -> str:
    """Return the settings for which the stream must contain the values of *large* columns."""
    computed = {name for _, expression in rule.set for name in expression.names}
    needing = {
        "`filter`": rule.filter is not None,
        "`set`": any(name in large for name in computed),
        "changes of rows outside `copy_where`": rule.copy_where is not None,
        "changes of rows older than `partition_by` keeps": rule.expiry is not None,
    }
    return " and ".join(setting for setting, needs in needing.items() if needs)


_TEXT_TYPES: Final = ("text", "character", "name", '"char"')


def check_locales(
    facts: SourceFacts, target: TargetFacts, mapping: RelationMapping, relation: SourceRelation
) -> Iterable[Finding]:
    """Whether both databases sort text and fold case alike, if expressions depend on locales."""
    assert facts.usage is not None
    source_locale, target_locale = facts.usage.locale, target.server.locale
    if source_locale == target_locale:
        return
    texts = {
        column.name
        for column in relation.columns
        if column.type.startswith(_TEXT_TYPES) and column.collation is None
    }
    for place, expression in mapping.rule.checked_expressions:
        if expression.may_follow_locale and texts & expression.names:
            words = "write the collation into the expression, as in: name collate \"C\" < 'm'"
            yield warning(
                _place(facts, mapping),
                f"its {place} may depend on the database's locale, which is {source_locale} at "
                f"the source and {target_locale} at the target",
                in_words(words),
            )


def check_unreplicated(facts: SourceFacts) -> Iterable[Finding]:
    """Find objects that PostgreSQL's logical replication omits, with any mapping."""
    place, usage = Place(facts.label), facts.usage
    assert usage is not None
    if usage.is_target and not facts.source.forward_origins:
        yield info(
            place,
            "a streamer process also writes to this database, and the source omits those changes",
            in_words(
                "set `forward_origins: true` to replicate these changes, if they cannot return "
                "to this database"
            ),
        )
    if usage.large_objects:
        yield warning(
            place,
            f"{usage.large_objects} large objects are not replicated",
            in_words("keep such data in bytea columns"),
        )
    if usage.is_synchronous:
        yield info(
            place,
            "commits at this source wait until streamer has confirmed them, because "
            "synchronous_standby_names lists it",
            in_words('see the guide "Synchronous mode": they also wait while a table is stopped'),
        )
    if any(relation.is_partitioned for relation in facts.relations.values()):
        yield info(
            place,
            "TRUNCATE of a single partition is not replicated",
            in_words("to empty a partition, delete its rows"),
        )
