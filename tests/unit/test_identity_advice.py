"""The statements that give a table a usable replica identity."""

import pytest

from streamer.mapping.relation_names import RelationName
from streamer.source.identity_advice import advise_identity
from streamer.source.replica_identity import KeyCandidates, RelationIdentity, TableIdentity

ALTER = 'alter table "public"."{}" replica identity {}'
BY_KEY = KeyCandidates({"t_pkey": ["id"], "by_name": ["a", "b"]}, ["id"])
BY_INDEX = KeyCandidates({"by_name": ["a", "b"]})


def table(
    kind: str = "d", *key: str, oid: int = 1, name: str = "t", refuses_full: bool = False
) -> TableIdentity:
    full_name = RelationName("public", name)
    return TableIdentity(oid, full_name, kind, key, refuses_full=refuses_full)


def leaf(kind: str = "d", *key: str) -> TableIdentity:
    return table(kind, *key, oid=2, name="leaf")


@pytest.mark.parametrize(
    ("root", "leaves", "candidates", "statements", "words"),
    [
        (table(), [], {}, [("t", "full")], "or add a primary key, which is faster"),
        (table("n", "id"), [], {1: BY_KEY}, [("t", "default")], None),
        (table(), [], {1: BY_INDEX}, [("t", 'using index "by_name"')], None),
        (table(refuses_full=True), [], {}, [], "add a primary key, or a unique index"),
        # A partition does not inherit the identity of its root.
        (
            table("d", "id"),
            [leaf("n", "id")],
            {2: BY_KEY},
            [("leaf", "default")],
            None,
        ),
        (table("f"), [leaf("f"), table(oid=3, name="last")], {}, [("last", "full")], None),
        (
            table(),
            [leaf()],
            {1: BY_INDEX},
            [("t", 'using index "by_name"')],
            'create a unique index on the columns of that key on partition "public.leaf"',
        ),
    ],
)
def test_each_table_without_a_usable_identity_gets_a_statement(
    root: TableIdentity,
    leaves: list[TableIdentity],
    candidates: dict[int, KeyCandidates],
    statements: list[tuple[str, str]],
    words: str | None,
) -> None:
    identity = RelationIdentity(root, tuple(leaves), bool(leaves), {})
    advice = advise_identity(identity, candidates)
    assert list(advice.statements) == [ALTER.format(*names) for names in statements]
    assert (advice.words or "").startswith(words or "")
    assert advice.is_complete == (words is None or words.startswith("or "))
    assert [list(sql.statements) for sql in advice.remedy.sql] == [
        list(advice.statements) for _ in advice.statements[:1]
    ]
