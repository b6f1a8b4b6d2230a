"""Expressions call only harmless functions of PostgreSQL: the test tries every function of
`pg_proc`.
"""

import functools
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from streamer.commands.demo.embedded_servers import Server
from streamer.mapping.allowed_functions import ALLOWED, PINNED_STABLE
from streamer.mapping.expressions import ExpressionError, parse_expression
from tests.support.postgres import versions

FUNCTIONS_SQL = """
select p.proname, p.prokind, p.provolatile, p.proretset, p.proparallel,
       p.proacl is not null or p.prosecdef as is_guarded,
       array(select t.typname || case when t.typtype = 'p' then ' (pseudo)' else '' end
             from unnest(p.proargtypes::oid[] || p.prorettype) a (oid)
             join pg_catalog.pg_type t on t.oid = a.oid) as types
from pg_catalog.pg_proc p where p.pronamespace = 'pg_catalog'::regnamespace
"""
WORLDLY = re.compile(
    "^(pg_|lo_|dblink|currtid|txid|query_to|table_to|schema_to|database_to|cursor_to|binary_upgrade|"
    "ts_stat|ts_rewrite|nextval|setval|currval|set_config|current_|inet_(client|server)|has_|row_sec)"
    "|file|sleep|advisory|_sendn?$|_recv$|xml_and_|xmlschema"
)
"""Reads or changes something besides its arguments, by its name."""
VOLATILE_BEFORE_15 = {"timezone"}
"""PostgreSQL 14 took the offset of a timetz from the clock; 15 takes it from the transaction."""
KINDS = ("", "array", "nonarray", "range", "multirange")
VALUES = ["any", "anyelement", "anyenum", *(f"any{k}" for k in KINDS[1:])]
VALUES += [f"anycompatible{kind}" for kind in KINDS]
PSEUDO = {f"{name} (pseudo)" for name in (*VALUES, "record")}


@functools.cache
def can_be_called(name: str) -> bool:
    """Return whether an expression may call *name* in any form; versions share most names."""
    quoted = '"' + name.replace('"', '""') + '"'
    forms = (
        f"{name}(a)",
        f"{quoted}(a)",
        f"pg_catalog.{name}()",
        f"x || pg_catalog . {quoted} ( 1 )",
    )
    return any(map(is_taken, forms))


def is_taken(text: str) -> bool:
    try:
        parse_expression(text)
    except ExpressionError:
        return False
    return True


def is_harmless(
    name: str, kind: str, volatile: str, sets: bool, parallel: str, guarded: bool
) -> bool:
    steady = {"s", "v"} if name in VOLATILE_BEFORE_15 else {"s"}
    return (
        kind == "f"
        and (volatile == "i" or (volatile in steady and name in PINNED_STABLE))
        and not sets
        and parallel == "s"
        and not guarded
        and not WORLDLY.search(name)
    )


@pytest.mark.parametrize("version", sorted(versions()))
def test_every_function_that_can_be_called_is_harmless(
    servers: Callable[[str], Server], version: str
) -> None:
    found: dict[str, list[Any]] = defaultdict(list)
    for name, *facts in servers(version).execute(FUNCTIONS_SQL, "postgres"):
        found[str(name)].append(facts)
    assert len(found) > 2000
    taken = set(filter(can_be_called, found))
    # No unlisted function; "like" and its kind are words of SQL that are listed too.
    assert taken - ALLOWED == set()
    assert len(taken) > 200
    for name in taken:
        for *facts, types in found[name]:
            assert is_harmless(name, *facts), (name, facts)
            odd = {its for its in types if its.endswith("(pseudo)")} - PSEUDO
            assert not odd, (name, odd)
            assert not [its for its in types if its.startswith("reg")], (name, types)


@pytest.mark.parametrize(
    "text",
    [
        *("pg_read_file('/etc/passwd')", "pg_sleep(9)::text", "lo_import('/etc/passwd')"),
        *("lo_get(1)", "dblink('', 'select 1')", "set_config('a', 'b', false)", "pg_ls_dir('.')"),
        *("query_to_xml('select 1', true, true, '')", "pg_notify('a', 'b')", '"pg_sleep" (1)'),
        *("case when pg_advisory_lock(1) is null then 1 end", "lower(pg_read_file('x'))"),
        *("ts_rewrite('a', 'select 1')", "pg_terminate_backend(1)", "currval('s')"),
    ],
)
def test_an_expression_that_needs_more_than_the_row_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError, match=r"function|is not immutable"):
        parse_expression(text)
