"""Decides which relations follow renamed tables of the source, and renders the SQL. Pure.

The publication and the stream identify a table by OID, so a rename breaks neither. The rules
identify the table by name. A relation follows its table if a rule determines the target of the new
name without an operator's decision:

- the rule for the new name has the same target as before;
- that rule has a new target, or a pattern derives a new target, and `on_ddl` applies
  `rename_table`. The target table then gets its new name, too.

Tables may swap names, in a cycle or in sequence. Their relations follow together, or not at all. If
the new name is taken, or if peer sources write to the table, a relation without rows does not
rename its target table.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from streamer.errors.error_classes import MappingError, TableRenamedError
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import DdlKind, OnDdl
from streamer.mapping.rules import (
    BOOKKEEPING,
    RelationMapping,
    SourceMapping,
    find_rules,
    map_relation,
)
from streamer.postgres.quoting import quote_identifier, quote_qualified


@dataclass(frozen=True, slots=True)
class Renamed:
    """A relation whose table was called *former* and is now called *now*."""

    relation_id: int
    former: RelationName
    target: RelationName
    now: RelationName
    sid: str | None = None
    """The sid of the relation's rows."""
    is_disjoint: bool = False
    """Only keys distinguish the rows of the relations that share the target."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """The reason why a relation cannot follow, and the next step."""

    problem: str
    hint: str


@dataclass(frozen=True, slots=True)
class Following:
    """A relation that follows its table. ``renames_target``: its target gets a new name, too."""

    mapping: RelationMapping
    renames_target: bool = True


Verdicts = Mapping[Renamed, Following | Obstacle]


@dataclass(frozen=True, slots=True)
class RenameTargets:
    """The former and the new target table of a relation that follows a rename."""

    target_exists: bool
    """The former table exists."""
    is_taken: bool
    """The new table exists."""
    is_shared: bool
    """Several relations write to the former table."""
    is_bare: bool
    """The former table contains no rows of the relation."""
    has_bare_successor: bool
    """Before the guard found the rename, a pattern already added the new name as a relation of this
    table. The added relation has no rows yet.
    """


def follow(
    source: SourceMapping, move: Renamed, target_namespace: str
) -> RelationMapping | Obstacle:
    """Return the mapping that the rules give a renamed table."""
    now, target = move.now, move.target
    try:
        rule = find_rules(source, [now]).get(now)
        mapping = None if rule is None else map_relation(source, rule, now, target_namespace)
    except MappingError as exc:
        return Obstacle(exc.message, exc.hint or "correct the rules")
    advice = rule_hint(move, names_sid=move.sid != source.sid)
    if mapping is None:
        return Obstacle("no rule matches the new name", advice)
    if mapping.sid != move.sid:
        has, gets = ("no sid" if s is None else f'sid "{s}"' for s in (move.sid, mapping.sid))
        # If two tables have swapped names, streamer frees these names only when both relations
        # leave the mapping at once.
        return Obstacle(
            f"its rows have {has}, and the new name would get {gets}",
            f'rename it back; or copy both again: leave "{move.former}" and "{now}" out with '
            "`exclude_tables`, reload, and undo this once `status` lists neither",
        )
    ruled = mapping.target
    if ruled != target and source.on_ddl[DdlKind.RENAME_TABLE] is not OnDdl.APPLY:
        return Obstacle(
            f'its target would be renamed to "{ruled}", and on_ddl is not apply for rename_table',
            f"{advice}, or set `on_ddl: {{rename_table: apply}}`",
        )
    return mapping


def rule_hint(move: Renamed, *, names_sid: bool) -> str:
    """Return the advice to map a renamed table to the target that holds its rows.

    *names_sid*: the rule must name the sid of these rows, too.
    """
    more = f", sid: '{move.sid}'" if names_sid else ""
    if move.is_disjoint:
        more = ", keys: disjoint"
    rule = f"{{'{move.now}': {{target: '{move.target}'{more}}}}}"
    return f"write the new name with the target in `tables`: {rule}"


def rename_error(move: Renamed, obstacle: Obstacle) -> TableRenamedError:
    """Return the error that stops a table that cannot follow."""
    return TableRenamedError(
        f'table "{move.former}" was renamed to "{move.now}" at the source: {obstacle.problem}',
        hint=f"{obstacle.hint}; no change is lost meanwhile",
    )


def judge(
    ruled: Mapping[Renamed, RelationMapping | Obstacle],
    targets: Mapping[Renamed, RenameTargets],
    names: Collection[RelationName],
) -> Verdicts:
    """Return, for each relation, how it follows or the obstacle.

    *ruled*: see `follow`. *targets*: the targets of relations with a mapping. *names*: the names of
    all relations.
    """
    leaving = {move.target for move in ruled}
    verdicts: dict[Renamed, Following | Obstacle] = {}
    present = set()
    for move, mapping in ruled.items():
        if isinstance(mapping, Obstacle):
            verdicts[move] = mapping
            continue
        verdicts[move] = _judge_alone(move, mapping, targets[move], leaving)
        if targets[move].is_taken:
            present.add(mapping.target)
    replaced = {move.now for move, facts in targets.items() if facts.has_bare_successor}
    return _refuse_taken_names(verdicts, set(names) - replaced, present)


def _judge_alone(
    move: Renamed,
    mapping: RelationMapping,
    targets: RenameTargets,
    leaving: Collection[RelationName],
) -> Following | Obstacle:
    """Return how a relation follows, judged by its own targets. *leaving*: targets whose relations
    may move away.
    """
    target = mapping.target
    if target == move.target:
        return Following(mapping, renames_target=False)
    if target.namespace == BOOKKEEPING:
        return Obstacle("its target would be in the schema of the bookkeeping", "change the rule")
    stays_taken = targets.is_taken and target not in leaving
    if targets.is_bare and (not targets.target_exists or stays_taken or targets.is_shared):
        return Following(mapping, renames_target=False)
    if targets.is_shared:
        problem = "other sources write to its target"
        return Obstacle(problem, rule_hint(move, names_sid=mapping.rule.sid is not None))
    return Following(mapping)


def _refuse_taken_names(
    verdicts: Verdicts, names: Collection[RelationName], tables: Collection[RelationName]
) -> Verdicts:
    """Return *verdicts* with an obstacle where a name is not free even after all moves.

    *names*: the names of all relations, except relations without rows that give way to a renamed
    table. *tables*: the new targets that exist.
    """
    formers = {move.former for move in verdicts}
    while True:
        going = {move: step for move, step in verdicts.items() if isinstance(step, Following)}
        staying = set(names) - {move.former for move in going}
        freed = {move.target for move, step in going.items() if step.mapping.target != move.target}
        blocked: dict[Renamed, Following | Obstacle] = {}
        for move, step in going.items():
            target = step.mapping.target
            if move.now in staying:
                blocked[move] = _name_obstacle(move, is_moving=move.now in formers)
            elif step.renames_target and target in tables and target not in freed:
                blocked[move] = Obstacle(
                    f'its target would be renamed to "{target}", and the target has such a table',
                    "drop or rename that table, and restart streamer",
                )
        if not blocked:
            return verdicts
        verdicts = {**verdicts, **blocked}


def _name_obstacle(move: Renamed, *, is_moving: bool) -> Obstacle:
    if is_moving:
        return Obstacle(
            f'the table formerly named "{move.now}" cannot be renamed either',
            "correct the rules for that table",
        )
    return Obstacle(
        f'streamer already replicates a table named "{move.now}"',
        f'add "{move.former}" to `exclude_tables`, or remove its rule; then reload the mapping, '
        f'and resync "{move.now}"',
    )


def groups(verdicts: Verdicts) -> list[dict[Renamed, Following]]:
    """Return the moves that can be made, in groups that swap names."""
    remaining = [(move, step) for move, step in verdicts.items() if isinstance(step, Following)]
    made = []
    while remaining:
        group = [remaining.pop(0)]
        for first in group:  # the loop extends the group
            joined = [candidate for candidate in remaining if _touch(first, candidate)]
            remaining = [candidate for candidate in remaining if candidate not in joined]
            group += joined
        made.append(dict(group))
    return made


def _touch(first: tuple[Renamed, Following], second: tuple[Renamed, Following]) -> bool:
    return any(
        a.now == b.former or step.mapping.target == b.target
        for (a, step), (b, _) in ((first, second), (second, first))
    )


def rename_all_sql(pairs: Sequence[tuple[RelationName, RelationName]]) -> list[str]:
    """Return the statements that rename target tables, which may swap names."""
    formers = {former for former, _ in pairs}
    first, last = [], []
    for number, (former, now) in enumerate(pairs):
        if now in formers:  # the new name becomes free only when the table that has it moves
            aside = RelationName(former.namespace, f"streamer renames {number}")
            first += rename_sql(former, aside)
            last += rename_sql(aside, now)
        else:
            last = [*rename_sql(former, now), *last]
    return first + last


def rename_sql(former: RelationName, now: RelationName) -> list[str]:
    """Return the statements that rename a target table."""
    statements = []
    table = quote_qualified(former.namespace, former.name)
    if former.namespace != now.namespace:
        namespace = quote_identifier(now.namespace)
        statements.append(f"create schema if not exists {namespace}")
        statements.append(f"alter table {table} set schema {namespace}")
        table = quote_qualified(now.namespace, former.name)
    if former.name != now.name:
        statements.append(f"alter table {table} rename to {quote_identifier(now.name)}")
    return statements
