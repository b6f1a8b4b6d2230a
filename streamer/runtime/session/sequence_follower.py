"""Keeps sequences of the target ahead of the sequences of a source, while the source streams.

Every few seconds streamer reads the values at the source. A sequence of the target moves when the
source's sequence has used up half of the margin. Sequences are independent of rows, so a sequence
that cannot follow stops no table: log and status show the reason. From the beginning of a cut-over
on streamer follows no sequence: the cut-over sets the exact values.
"""

import asyncio
from typing import TYPE_CHECKING, Final

import structlog

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.cutovers import is_cutting_over
from streamer.bookkeeping.followed_sequences import SequenceRecord, store_sequences
from streamer.errors.error_classes import (
    SOURCE_LOCK_LOST,
    SourceContentionError,
    StreamerError,
    TargetConnectionError,
    TargetError,
)
from streamer.errors.remedies import Remedy, at_source, at_target
from streamer.mapping.rules import SourceMapping
from streamer.mapping.sequence_places import places, value_ahead
from streamer.runtime.tables.relations import Relations
from streamer.source.connection import Connection, translating
from streamer.source.tables.source_sequences import SourceSequence, read_sequences
from streamer.target.target_sequences import TargetSequence, find_sequences, set_ahead

if TYPE_CHECKING:
    from streamer.mapping.relation_names import RelationName

log = structlog.get_logger()

CHECK_SECONDS: Final = 3.0


class SequenceFollower:
    """Follows the sequences of a source, for one attempt to stream the source."""

    def __init__(
        self,
        source: SourceMapping,
        source_id: int,
        bookkeeping: Bookkeeping,
        relations: Relations,
        target_namespace: str,
    ) -> None:
        self._source = source
        self._source_id = source_id
        self._bookkeeping = bookkeeping
        self._relations = relations
        self._target_namespace = target_namespace
        self._stored: list[SequenceRecord] | None = None
        self._values: dict[RelationName, int] = {}

    async def run(self, plain: Connection) -> None:
        """Follow until cancelled; return at once if the source's rules exclude sequences.

        Raises SourceConnectionError when the source is lost.
        """
        if not self._source.sequences:
            await self._store([])
            return
        while True:
            try:
                with translating(self._source.label):
                    sequences = await read_sequences(plain)
                if not await is_cutting_over(self._bookkeeping, self._source_id):
                    await self._store(await self._follow(sequences))
            except SOURCE_LOCK_LOST:
                raise
            except (SourceContentionError, TargetError) as exc:
                log.debug(
                    "sequences will be read again later", source=self._source.label, reason=str(exc)
                )
            await asyncio.sleep(CHECK_SECONDS)

    async def _follow(self, sequences: list[SourceSequence]) -> list[SequenceRecord]:
        mappings = [mapped.mapping for mapped in self._relations]
        target_places = places(sequences, mappings, self._target_namespace)
        async with self._bookkeeping.connection() as connection:
            targets = await find_sequences(connection, target_places)
            records = []
            for sequence in sequences:
                if (target := targets.get(sequence.name)) is None:
                    continue
                value = target.range.last_value if target.range else None
                error, remedy = obstacle_of(sequence, target)
                try:
                    ahead = None if error is not None else self._value_ahead(sequence, target)
                    if ahead is not None:
                        await set_ahead(connection, target, ahead)
                        value = ahead
                except ValueError as exc:
                    error = str(exc)
                except TargetConnectionError:
                    raise
                except StreamerError as exc:
                    error, remedy = exc.message, exc.remedy
                names = str(sequence.name), str(target.name)
                records.append(SequenceRecord(*names, sequence.last_value, value, error, remedy))
        return records

    def _value_ahead(self, sequence: SourceSequence, target: TargetSequence) -> int | None:
        """Return the value to set, if any. Raises ValueError if the sequence cannot follow."""
        value = sequence.last_value
        if value is None or target.range is None:
            return None
        former = self._values.get(sequence.name, value)
        self._values[sequence.name] = value
        drawn = abs(value - former) // abs(sequence.increment)
        return value_ahead(value, sequence.increment, drawn, target.range)

    async def _store(self, records: list[SequenceRecord]) -> None:
        if records == self._stored:
            return
        former = {record.source: record.error for record in self._stored or ()}
        await store_sequences(self._bookkeeping, self._source_id, records)
        self._stored = records
        for record in records:
            if record.error is not None and former.get(record.source) != record.error:
                log.warning(
                    "cannot advance a sequence at the target",
                    source=self._source.label,
                    sequence=record.source,
                    target=record.target,
                    error=record.error,
                    hint=record.remedy and str(record.remedy),
                )


def obstacle_of(
    sequence: SourceSequence, target: TargetSequence
) -> tuple[str, Remedy] | tuple[None, None]:
    """Return why the target's sequence cannot follow, and the SQL that removes the obstacle."""
    if sequence.grants:
        fix = Remedy.of("run at the source: ", at_source(*sequence.grants))
        return "the role may not read the source's sequence", fix
    if target.grants:
        fix = Remedy.of("run at the target: ", at_target(*target.grants))
        return "the role may not set the target's sequence", fix
    return None, None
