"""The numbers of attributes in the texts of composite values, as PostgreSQL writes them."""

import pytest

from streamer.schema.composite_values import attribute_counts
from streamer.schema.indexes_constraints_types import DefinedType

INNER = DefinedType(1, "public", "inner", "c", attributes=((1, "a", "text"), (2, "b", "integer")))
OUTER = DefinedType(2, "s", "Out", "c", attributes=((1, "i", "public.inner"), (2, "t", "text[]")))
STRICT = DefinedType(3, "public", "strict", "d", base="public.inner")
TYPES = {each.quoted: each for each in (INNER, OUTER, STRICT)}


@pytest.mark.parametrize(
    ("text", "name", "counts"),
    [
        ("(x,1)", "public.inner", [(1, 2)]),
        ("(,)", "public.inner", [(1, 2)]),
        (r'("a,""b"" \\ ) (",1,)', "public.inner", [(1, 3)]),
        ("(x,1)", "public.strict", [(1, 2)]),
        (r'("(""x,"",1)","{a,b}")', 's."Out"', [(2, 2), (1, 2)]),
        (r'{"(x,1)","(\"a,\\\"\\\"b\",1,2)",NULL}', "public.inner[]", [(1, 2), (1, 3)]),
        ('[0:0][2:2]={{"(x,1)"}}', "public.inner[]", [(1, 2)]),
        ('{"(\\"(x,1,2)\\",{},z)"}', 's."Out"[]', [(2, 3), (1, 3)]),
        ("{}", "public.inner[]", []),
        ("(x,1)", "text", []),
    ],
)
def test_attributes_are_counted_in_every_composite_value(
    text: str, name: str, counts: list[tuple[int, int]]
) -> None:
    assert list(attribute_counts(text, name, TYPES)) == counts
