"""Functions that the expressions of a source call at the target, where they run as streamer's role.

The owner of a table at the source writes its defaults and checks. These texts must not gain
privileges at the target. So streamer creates a definition without running its expressions. Then it
reads from the catalogs the functions that PostgreSQL resolved: as OIDs in the stored trees, not as
text.

An expression may call built-in functions that are immutable, belong to an operator or a cast, or
are on a short list. None of these reads a table, a file or a setting. Immutable functions of an
extension, which an administrator has installed at the target, are allowed, too.
"""

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Self

from streamer.errors.error_classes import TargetSchemaError
from streamer.mapping.relation_names import RelationName
from streamer.target.connection import TargetConnection, transaction

HARMLESS: Final = (
    # The time, its parts, and its text in the session's time zone.
    *("now", "transaction_timestamp", "statement_timestamp", "clock_timestamp", "timeofday"),
    *("age", "date_part", "date_trunc", "extract", "timezone", "make_timestamptz", "overlaps"),
    *("date_add", "date_subtract", "to_char", "to_date", "to_timestamp"),
    # Numbers and identifiers that the source cannot choose.
    *("random", "random_normal", "gen_random_uuid", "uuidv4", "uuidv7"),
    # Texts and documents made of values.
    *("concat", "concat_ws", "format", "to_number", "quote_literal", "quote_nullable"),
    *("array_to_string", "array_to_json", "row_to_json", "to_json", "to_jsonb"),
    *("json_build_array", "json_build_object", "jsonb_build_array", "jsonb_build_object"),
    *("to_tsvector", "to_tsquery", "plainto_tsquery", "phraseto_tsquery", "websearch_to_tsquery"),
)
"""Functions in pg_catalog that are not immutable, but that expressions may call."""
HARMLESS_OF_EXTENSIONS: Final = (
    *("gen_random_uuid", "gen_random_bytes", "gen_salt"),  # pgcrypto
    *("uuid_generate_v1", "uuid_generate_v1mc", "uuid_generate_v4"),  # uuid-ossp
)
_EXTENSIONS: Final = ("pgcrypto", "uuid-ossp")

_USER_OIDS_BEGIN: Final = 16384

# ts_stat, query_to_xml and the like are neither immutable nor behind an operator or a cast.
# `streamer check` also runs this query at the source.
CALLS_SQL: Final = f"""
with relation as (
    select coalesce(t.relid::oid, c.oid) as oid
      from unnest($1::text[]) w (name)
      join pg_catalog.pg_class c on c.oid = pg_catalog.to_regclass(w.name)
      left join lateral pg_catalog.pg_partition_tree(c.oid) t on true
), expression as (
    select d.oid, r.oid as owner, 'default' as kind, a.attname as name, d.adbin::text as tree
      from relation r join pg_catalog.pg_attrdef d on d.adrelid = r.oid
      join pg_catalog.pg_attribute a on a.attrelid = d.adrelid and a.attnum = d.adnum
    union all
    select k.oid, k.conrelid, 'constraint', k.conname, k.conbin::text
      from pg_catalog.pg_constraint k
     where k.conbin is not null and k.conrelid in (select oid from relation)
    union all
    select i.indexrelid, r.oid, 'index', x.relname, pg_catalog.concat(i.indexprs, i.indpred)
      from relation r join pg_catalog.pg_index i on i.indrelid = r.oid
      join pg_catalog.pg_class x on x.oid = i.indexrelid
    union all
    select p.partrelid, r.oid, 'partition key', c.relname, p.partexprs::text
      from relation r join pg_catalog.pg_partitioned_table p on p.partrelid = r.oid
      join pg_catalog.pg_class c on c.oid = p.partrelid
    union all
    select s.oid, r.oid, 'extended statistics', s.stxname, pg_catalog.to_jsonb(s) ->> 'stxexprs'
      from relation r join pg_catalog.pg_statistic_ext s on s.stxrelid = r.oid
    union all
    select t.oid, t.oid, 'default', t.typname, t.typdefaultbin::text
      from unnest($2::text[], $3::text[]) w (namespace, name)
      join pg_catalog.pg_namespace n on n.nspname = w.namespace
      join pg_catalog.pg_type t on t.typnamespace = n.oid and t.typname = w.name
    union all
    select k.oid, t.oid, 'constraint', k.conname, k.conbin::text
      from unnest($2::text[], $3::text[]) w (namespace, name)
      join pg_catalog.pg_namespace n on n.nspname = w.namespace
      join pg_catalog.pg_type t on t.typnamespace = n.oid and t.typname = w.name
      join pg_catalog.pg_constraint k on k.contypid = t.oid and k.conbin is not null
), called as (
    select e.oid, e.owner, e.kind, e.name, pg_catalog.md5(e.tree) as digest,
           m.found[1]::oid as function
      from expression e, pg_catalog.regexp_matches(e.tree,
           ':(?:funcid|opfuncid|hashfuncid|negfuncid|elemfuncid|aggfnoid|winfnoid) (\\d+)', 'g')
           m (found)
    union
    select e.oid, e.owner, e.kind, e.name, pg_catalog.md5(e.tree), o.oprcode
      from expression e, pg_catalog.regexp_matches(e.tree, ':opno (\\d+)', 'g') m (found)
      join pg_catalog.pg_operator o on o.oid = m.found[1]::oid
)
select c.oid::int8, c.owner::int8, c.kind, c.name, c.digest,
       pg_catalog.format('%I.%I(%s)', n.nspname, p.proname,
                         pg_catalog.pg_get_function_identity_arguments(p.oid)) as function
  from called c join pg_catalog.pg_proc p on p.oid = c.function
  join pg_catalog.pg_namespace n on n.oid = p.pronamespace
 where not case when p.oid < {_USER_OIDS_BEGIN} then
           p.provolatile = 'i' or p.proname = any ($4::text[])
           or c.kind = 'default' and p.proname = 'nextval'
           or exists (select from pg_catalog.pg_operator o where o.oprcode = p.oid)
           or exists (select from pg_catalog.pg_cast k where k.castfunc = p.oid)
       else exists (
           select from pg_catalog.pg_depend d
             join pg_catalog.pg_extension e on e.oid = d.refobjid
            where d.classid = 'pg_catalog.pg_proc'::regclass and d.objid = p.oid
              and d.deptype = 'e' and d.refclassid = 'pg_catalog.pg_extension'::regclass
              and (p.provolatile = 'i'
                   or e.extname = any ($6::text[]) and p.proname = any ($5::text[]))) end
 order by 1, 6
"""


@dataclass(frozen=True, slots=True)
class ForeignCall:
    """A call in an expression of the object with ``oid``. ``digest``: a hash of the expression.

    ``owner``: the OID of its table or type.
    """

    oid: int
    owner: int
    kind: str
    name: str
    digest: str
    function: str

    def __str__(self) -> str:
        return f'{self.kind} "{self.name}" calls {self.function}'


async def read_calls(
    connection: TargetConnection, tables: Sequence[str], types: Sequence[RelationName] = ()
) -> list[ForeignCall]:
    """Return the calls that need consent in expressions of *types* and of *tables*, given as
    SQL.
    """
    rows = await connection.fetch(CALLS_SQL, *calls_parameters(tables, types))
    return [ForeignCall(**row) for row in rows]


def calls_parameters(tables: Sequence[str], types: Sequence[RelationName]) -> tuple[list[str], ...]:
    """Return the parameters of `CALLS_SQL`. Pure."""
    return (
        list(tables),
        [kind.namespace for kind in types],
        [kind.name for kind in types],
        list(HARMLESS),
        list(HARMLESS_OF_EXTENSIONS),
        list(_EXTENSIONS),
    )


class ForeignCallError(TargetSchemaError):
    """An expression of a source calls functions that only an operator may allow."""


def foreign_error(calls: Sequence[ForeignCall]) -> ForeignCallError:
    """Return the error about *calls*."""
    return ForeignCallError(
        f"{'; '.join(map(str, calls))}; streamer's role runs only harmless built-in functions in "
        "expressions of a source; read the function before you run the statement"
    )


class ForeignCalls:
    """Refuses calls of foreign functions that statements add to some tables and types of the
    target.
    """

    def __init__(
        self,
        connection: TargetConnection,
        tables: Sequence[str],
        types: Sequence[RelationName],
        allowed: Sequence[ForeignCall],
    ) -> None:
        self._connection = connection
        self._tables = tables
        self._types = types
        self._allowed = frozenset(allowed)

    @classmethod
    async def before(
        cls,
        connection: TargetConnection,
        tables: Sequence[str],
        types: Sequence[RelationName] = (),
    ) -> Self:
        """Return an object that allows the existing calls, which only an operator can add."""
        allowed = await read_calls(connection, tables, types)
        return cls(connection, tables, types, allowed)

    async def refuse(self) -> None:
        """Raise TargetSchemaError if calls were added; the caller's transaction then rolls back."""
        calls = await read_calls(self._connection, self._tables, self._types)
        if added := [call for call in calls if call not in self._allowed]:
            raise foreign_error(added)


class _UndoneError(Exception):
    """Ends a trial and rolls it back."""


async def is_refused(connection: TargetConnection, make: Callable[[], Awaitable[None]]) -> bool:
    """Whether *make* adds calls of foreign functions. Rolls *make* back, and raises other errors of
    *make*.
    """
    is_made = False
    with contextlib.suppress(_UndoneError, ForeignCallError):
        async with transaction(connection):
            await make()
            is_made = True
            raise _UndoneError
    return not is_made


async def refuse_in_trial(
    connection: TargetConnection, table: str, prefix: str, after: str
) -> None:
    """Raise TargetSchemaError if a statement would add calls of foreign functions to *table*.

    *table*: the quoted name. *prefix* and *after*: the statement around the table's name. The
    statement runs on an empty table with the columns of *table*, so that no expression is
    evaluated, and is rolled back.
    """
    trial = f"streamer.trial_{await connection.fetch_value('select pg_catalog.pg_backend_pid()')}"
    calls: list[ForeignCall] = []
    with contextlib.suppress(_UndoneError):
        async with transaction(connection):
            await connection.execute(f"create table {trial} (like {table})")
            await connection.execute(f"{prefix}{trial}{after}")
            calls = await read_calls(connection, [trial])
            raise _UndoneError
    if calls:
        raise foreign_error(calls)
