"""Registers relations with the bookkeeping, and adds each relation to the stream of its source."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamer.apply.lanes.lane import MappedRelation
from streamer.bookkeeping.registered_relations import register_relations
from streamer.bookkeeping.relation_columns import set_transports
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import Initial
from streamer.mapping.rules import RelationMapping
from streamer.runtime.guards.publications import Publishing
from streamer.runtime.services import Services
from streamer.runtime.session.choose_transport import ChosenTransport
from streamer.runtime.tables.relations import relation_source
from streamer.runtime.tables.table_events import TableEvents
from streamer.source.catalog import SourceRelation

if TYPE_CHECKING:
    from streamer.decode.text_conversion import TextConversion


@dataclass(frozen=True, slots=True)
class Registrar:
    """``transport`` and ``conversion``: how the stream sends values."""

    services: Services
    tables: TableEvents
    publishing: Publishing
    transport: ChosenTransport
    conversion: "TextConversion | None"

    async def register(
        self,
        mappings: Iterable[RelationMapping],
        definitions: dict[RelationName, SourceRelation],
        *,
        may_resume: bool = False,
    ) -> list[MappedRelation]:
        """Create and return relations with their records, lanes and states.

        *may_resume*: true at a start; relations that join while the source streams do not
        continue at a former position.
        """
        expected, added, tables = list(mappings), [], self.tables
        bookkeeping = self.services.bookkeeping
        records = await register_relations(
            bookkeeping,
            tables.fence.source_id,
            expected,
            may_resume=may_resume,
            definitions=definitions,
        )
        for mapping, record in zip(expected, records, strict=True):
            definition = definitions.get(mapping.source)
            mapped = MappedRelation(
                record.relation_id,
                mapping,
                record.end_lsn,
                relation_source(
                    tables.source, definition, self.transport.types, tables.fence, self.conversion
                ),
            )
            mapped.decided, mapped.outlives = record.mass_delete, record.outlives
            if definition is not None:
                mapped.size_bytes = definition.size_bytes
            is_to_mark_synced = mapping.rule.initial is Initial.NONE and not record.declared
            tables.relations.add(mapped, record, is_to_mark_synced=is_to_mark_synced)
            added.append(mapped)
            self.publishing.load(record)
        transports = {m.relation_id: self.transport.transport_of(m.mapping.source) for m in added}
        await set_transports(bookkeeping, transports)
        return added
