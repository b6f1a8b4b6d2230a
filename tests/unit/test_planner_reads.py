"""When the planner reads a source's catalogs, and which source waits for the read."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from streamer.apply.lanes.lane import MappedRelation
from streamer.apply.write.planner import Planner
from streamer.decode.pgoutput import next_number
from streamer.mapping.relation_names import RelationName
from tests.unit.build import mapped_relation, relation


def of_database(database: str) -> MappedRelation:
    mapped = mapped_relation()
    mapped.source = replace(mapped.source, database=database)
    return mapped


async def test_no_source_waits_for_the_catalogs_of_another_one() -> None:
    asked: list[str] = []
    is_asked = asyncio.Event()

    async def ask(database: str, _: str | None, names: Sequence[RelationName]) -> dict[Any, Any]:
        asked.append(database)
        is_asked.set()
        if database == "frozen":
            await asyncio.Event().wait()
        return {}

    nothing: Any = None
    planner = Planner(nothing, nothing, nothing, nothing, ask, nothing)
    frozen = asyncio.create_task(planner._read_definition(of_database("frozen")))
    async with asyncio.timeout(5):
        await is_asked.wait()
        await planner._read_definition(of_database("shop"))
    assert asked == ["frozen", "shop"]
    frozen.cancel()


def test_one_read_of_the_catalogs_confirms_all_messages_that_came_before() -> None:
    mapped, first = mapped_relation(), relation(["a"])
    repeated = [replace(first, number=next_number()) for _ in range(9)]
    plan: Any = SimpleNamespace(relation=first)
    mapped.set_plan(plan)
    assert all(mapped.plan_for(each) is None for each in repeated)
    mapped.confirm(next_number())
    assert all(mapped.plan_for(each) is mapped.plan for each in repeated)
    assert mapped.plan_for(replace(first, number=next_number())) is None, "it came after the read"
    assert mapped.plan_for(relation(["b"])) is None
    changed: Any = mapped.plan
    changed.relation = mock.MagicMock(
        __eq__=mock.Mock(side_effect=AssertionError("compared again"))
    )
    assert mapped.plan_for(repeated[-1]) is plan, "the last message needs no comparison"
    changed.relation = first
    other = replace(repeated[0], columns=())
    assert mapped.plan_for(other) is None, "it has another definition"
