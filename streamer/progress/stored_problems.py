"""The problems that only the bookkeeping knows: a running process reads them now and then."""

import json
from typing import Final

from streamer.mapping.rules import SourceLabel
from streamer.progress.bookkeeping import Bookkeeping
from streamer.progress.sequences import read_sequences
from streamer.report.facts import LackingDefinition, ReportedSequence, StoredFacts

_SOURCES_SQL: Final = "select id, database, sid from streamer.source"
_INSERTS_ONLY_SQL: Final = """
select source_id, source, identity from streamer.relation where identity = 'none'
"""
_GIVEN_UP_SQL: Final = """
select r.source_id, r.source, d.kind, d.name, d.sql, d.reason, d.online::text
from streamer.definition d join streamer.relation r on r.id = d.relation_id
where d.state in ('failed', 'unmade') order by d.id
"""


async def read_stored_facts(bookkeeping: Bookkeeping) -> dict[str, StoredFacts]:
    """Return those facts by the label of their source. Raises TargetError."""
    async with bookkeeping.connection() as connection:
        sources = await connection.fetch(_SOURCES_SQL)
        insert_only = await connection.fetch(_INSERTS_ONLY_SQL)
        given_up = await connection.fetch(_GIVEN_UP_SQL)
    by_id = {row["id"]: StoredFacts() for row in sources}
    for row in insert_only:
        facts = by_id.setdefault(row["source_id"], StoredFacts())
        facts.identities[row["source"]] = row["identity"]
    for row in given_up:
        label = f'{row["kind"]} "{row["name"]}"'
        statements = tuple(json.loads(row["online"]))
        lacking = LackingDefinition(label, row["sql"], row["reason"], True, statements)
        facts = by_id.setdefault(row["source_id"], StoredFacts())
        facts.definitions.setdefault(row["source"], []).append(lacking)
    for source_id, records in (await read_sequences(bookkeeping)).items():
        by_id.setdefault(source_id, StoredFacts()).sequences.extend(
            ReportedSequence(record.source, record.target, record.error, record.remedy)
            for record in records
            if record.error is not None
        )
    labels = {row["id"]: SourceLabel(row["database"], row["sid"]) for row in sources}
    return {label: by_id[number] for number, label in labels.items()}
