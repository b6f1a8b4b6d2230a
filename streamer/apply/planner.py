"""Plans for relations, made from the target's catalogs when a definition is first met."""

import asyncio
import itertools

from streamer.apply.catalog import read_relation
from streamer.apply.lane import MappedRelation, Share
from streamer.apply.plan import ApplyPlan, make_plan
from streamer.apply.target import TargetAddress, TargetConnection
from streamer.decode.pgoutput import Relation
from streamer.errors import TargetError


class Planner:
    """Makes plans and keeps the newest of each relation. Shared by all who apply changes."""

    def __init__(self, address: TargetAddress) -> None:
        self._address = address
        self._connection: TargetConnection | None = None
        self._lock = asyncio.Lock()
        self._numbers = itertools.count(1)

    async def plans(self, share: Share) -> list[ApplyPlan]:
        """Return a plan for each of a share's changes.

        Raises TargetSchemaError when the target does not fit, TargetConnectionError.
        """
        plans = []
        for mapped, changes in share.changes:
            plan = mapped.plan_for(changes.relation)
            if plan is None:
                plan = await self._make(mapped, changes.relation)
            plans.append(plan)
        return plans

    async def _make(self, mapped: MappedRelation, relation: Relation) -> ApplyPlan:
        async with self._lock:
            if self._connection is None or self._connection.is_closed:
                self._connection = await TargetConnection.connect(self._address, "streamer planner")
            try:
                target = await read_relation(self._connection, mapped.mapping.target)
            except TargetError:
                self._connection.terminate()
                raise
        mapped.plan = make_plan(
            relation,
            mapped.mapping,
            target,
            sid=mapped.source.sid,
            primary_key=mapped.source.primary_key,
            has_partial_key=mapped.source.has_partial_key,
            type_names=mapped.source.types,
            binary=mapped.source.binary,
            number=next(self._numbers),
        )
        return mapped.plan

    @staticmethod
    def forget(share: Share) -> None:
        """The target refused a plan of *share*: its tables may have changed."""
        for mapped, _ in share.changes:
            mapped.plan = None

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()
            self._connection = None


def known_plans(share: Share) -> list[ApplyPlan] | None:
    """Return the plans of a share if all are known, without waiting."""
    plans = []
    for mapped, changes in share.changes:
        plan = mapped.plan_for(changes.relation)
        if plan is None:
            return None
        plans.append(plan)
    return plans
