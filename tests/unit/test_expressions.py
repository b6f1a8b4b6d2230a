"""Valid expressions with their inputs, and rejected expressions."""

import pytest

from streamer.mapping.expressions import (
    ExpressionError,
    check_functions,
    functions_sql,
    over_row,
    parse_expression,
    tokenize,
)

TAKEN = {
    "region = 'EU'": {"region"},
    "md5(email)": {"email"},
    "Region = 'EU' and \"Region\" > 1": {"region", "Region"},
    '"a ""b" is distinct from c': {'a "b', "c"},
    "extract(year from ts) > 2020": {"ts"},
    "a collate \"C\" < 'b'": {"a"},
    "(x at time zone 'UTC')::date > d": {"x", "d"},
    "ts::timestamp with time zone > '2020-01-01'": {"ts"},
    "j ->> 'a' = 'b' and j @> '{\"a\": 1}'::jsonb": {"j"},
    "a ~* 'x' or a !~ 'y' or a like any (array['x', b])": {"a", "b"},
    "tags[1:2] && array[b, c]": {"tags", "b", "c"},
    "(address).city = 'x'": {"address"},
    "status = 'open'::public.mood": {"status"},
    "case a when 1 then b else c end": {"a", "b", "c"},
    "substring(a from 2 for 3) || trim(both 'x' from b)": {"a", "b"},
    "pg_catalog.lower(a)": {"a"},
    "age(a, b) > interval '1 day'": {"a", "b"},
    "e'a\\'b' = c": {"c"},
    "note = 'call me now, or tomorrow'": {"note"},
    "'constant'": set(),
    "größe > 1": {"größe"},
    "a\n=\n1": {"a"},
}

REFUSED = [
    "",
    "  \n",
    "a = 1;",
    "a = 1; drop table t",
    "a = 1 -- comment",
    "a /* comment */ = 1",
    "a <-- 1\n b",
    "true) or (true",
    "true)) union select (1",
    "(a = 1",
    "a[1",
    "'open",
    '"open',
    "$1",
    "$$text$$",
    "a = $x$b$x$",
    "a \\gexec",
    "U&'\\0061'",
    'U&"a" = 1',
    "E'\\x6eow'::date",
    "a\0b",
    "(select 1)",
    "a in (select b from c)",
    "exists (select 1)",
    "array(select 1)",
    "select 1",
    "with x as (select 1) select 1",
    "(values (1))",
    "a, b",
    "a as b",
    "a b",
    "*",
    "t.*",
    "count(*)",
    "sum(a)",
    "string_agg(a, ',')",
    "rank() over ()",
    "sum(a) filter (where b)",
    "percentile_cont(0.5) within group (order by a)",
    "t.a",
    "other.f(a)",
    "a operator(other.+) b",
    "now()",
    "NOW()",
    "current_date > d",
    "Current_User = a",
    "localtimestamp",
    "random() < 0.5",
    "nextval('s')",
    "clock_timestamp()",
    "age(a)",
    "age(greatest(a, b))",
    "ts > 'now'",
    "ts > ' Yesterday '::timestamp",
    "d = 'today'",
    "'now'::text::date",
    "'t'::regclass",
    "a := 1",
    "f(x => 1)",
    "1a",
    "a = 1 group by a",
    "a order by b",
    "a limit 1",
    "a into b",
    "default",
    "x" * 20_000,
]


@pytest.mark.parametrize("text", TAKEN)
def test_an_expression_is_taken_with_the_columns_it_uses(text: str) -> None:
    expression = parse_expression(text)
    assert expression.text == text.strip()
    assert expression.columns == TAKEN[text]
    assert expression.columns <= expression.names


@pytest.mark.parametrize("text", REFUSED)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        parse_expression(text)


def test_refusals_name_the_reason() -> None:
    with pytest.raises(ExpressionError, match="SELECT is not allowed"):
        parse_expression("a = (select 1)")
    with pytest.raises(ExpressionError, match=r"now\(\) is not immutable"):
        parse_expression("a < now()")
    with pytest.raises(ExpressionError, match=r"not an SQL expression: .* near"):
        parse_expression("a = = 1")


def test_conditions_joined_with_and_are_split_only_if_the_split_is_certain() -> None:
    def parts(text: str) -> list[str]:
        return [conjunct.text for conjunct in parse_expression(text).conjuncts]

    assert parts("a = 1 and (b or c)  AND not d") == ["a = 1", "(b or c)", "not d"]
    for whole in ("a or b and c", "a between 1 and 2 and b", "case when a and b then c end and d"):
        assert parts(whole) == [whole]
    assert [c.names for c in parse_expression("a = 1 and b").conjuncts] == [{"a"}, {"b"}]


def test_plain_conditions_are_those_that_fail_on_no_row() -> None:
    for text in ("region = 'EU'", "a > 1 and not (b is null or c in (1, 2))", "a between 1 and b"):
        assert parse_expression(text).is_plain, text
    for text in ("1 / a > 1", "a like b", "lower(a) = 'x'", "a::int = 1", "date '2020-01-01' < a"):
        assert not parse_expression(text).is_plain, text


def test_functions_are_asked_for_by_name_and_types_are_not() -> None:
    expression = parse_expression(
        "md5(lower(a)) || coalesce(b::varchar(3), cast(c as numeric(4, 2))::text)"
    )
    assert expression.functions == {"md5", "lower"}
    assert "('lower', 'md5')" in (functions_sql([expression]) or "")
    assert functions_sql([parse_expression("a = 1")]) is None


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({}, None),
        ({"is_stable": True}, "is not immutable"),
        ({"is_volatile": True}, "is not immutable"),
        ({"needs_rows": True}, "aggregate"),
        ({"returns_rows": True}, "set of rows"),
        (None, "not one of PostgreSQL's own"),
    ],
)
def test_functions_are_judged_by_the_catalogs_of_the_server(
    flags: dict[str, bool] | None, problem: str | None
) -> None:
    names = ("is_volatile", "is_stable", "needs_rows", "returns_rows")
    rows = [] if flags is None else [{"name": "lower", **dict.fromkeys(names, False), **flags}]
    expression = parse_expression("lower(a)")
    if problem is None:
        check_functions(expression, rows)
    else:
        with pytest.raises(ExpressionError, match=problem):
            check_functions(expression, rows)


def test_a_stable_function_that_settings_pin_is_allowed() -> None:
    row = {"is_volatile": False, "is_stable": True, "needs_rows": False, "returns_rows": False}
    check_functions(parse_expression("to_char(a, 'YYYY')"), [{"name": "to_char", **row}])


def test_an_expression_sees_the_named_columns_only() -> None:
    sql = over_row("a + 1", [("a", "s.i_0"), ('b"', "s.i_1")], cast="::bigint")
    assert sql == '(select (a + 1)::bigint from (select s.i_0 as "a", s.i_1 as "b""") streamer_row)'


def test_tokens_cover_the_text() -> None:
    text = "a<>'it''s' and \"b\"\"c\"::text ~ e'\\\\' and x'ff' is not null"
    tokens = tokenize(text)
    assert "".join(text[t.start : t.end] for t in tokens) == "".join(text.split())
