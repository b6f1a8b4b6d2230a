"""The problems that only the bookkeeping records, which a running process reads periodically."""

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.followed_sequences import read_sequences
from streamer.bookkeeping.partition_errors import read_partition_errors
from streamer.bookkeeping.planned_definitions import read_given_up
from streamer.bookkeeping.relation_records import read_insert_only
from streamer.bookkeeping.sources import read_source_labels
from streamer.report.problem_facts import LackingDefinition, ReportedSequence, StoredFacts


async def read_stored_facts(bookkeeping: Bookkeeping) -> dict[str, StoredFacts]:
    """Return the stored facts by the label of their source. Raises TargetError."""
    async with bookkeeping.connection() as connection:
        labels = await read_source_labels(connection)
        by_id = {source_id: StoredFacts() for source_id in labels}
        for record in await read_insert_only(connection):
            by_id[record.source_id].insert_only[record.source] = record.identity_remedy
        for record in await read_partition_errors(connection):
            assert record.partition_error is not None
            by_id[record.source_id].partition_errors[record.source] = record.partition_error
        for definition in await read_given_up(connection):
            lacking = LackingDefinition(
                definition.label, definition.sql, definition.reason, True, definition.online
            )
            of_source = by_id[definition.source_id].definitions
            of_source.setdefault(definition.source, []).append(lacking)
        for source_id, sequences in (await read_sequences(connection)).items():
            by_id[source_id].sequences.extend(
                ReportedSequence(record.source, record.target, record.error, record.remedy)
                for record in sequences
                if record.error is not None
            )
    return {label: by_id[source_id] for source_id, label in labels.items()}
