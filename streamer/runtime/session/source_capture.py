"""The capture of definitions at a source, for one attempt to stream the source."""

from streamer.apply.lanes.lane import MappedRelation
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.relation_definitions import read_definitions, read_without_definition
from streamer.decode.pgoutput import DDL_PREFIX
from streamer.decode.table_messages import TableMessages
from streamer.mapping.rule_options import DdlCapture
from streamer.mapping.rules import SourceMapping
from streamer.schema.definition_message import parts_of
from streamer.source.capture.ddl_capture import (
    ensure_capture,
    message_table,
    publish_messages,
    send_baseline,
    uses_table,
)
from streamer.source.connection import Connection
from streamer.source.server.primary_of_standby import writable


class SourceCapture:
    """``token``: proves messages about definitions, if the source captures definitions."""

    def __init__(self, source: SourceMapping, version: int) -> None:
        """*version*: the version of the source's server."""
        self.token: str | None = None
        self._source = source
        self._version = version

    @property
    def is_on(self) -> bool:
        return self.token is not None

    @property
    def messages(self) -> TableMessages | None:
        """The reader of messages that the source sends as rows; None without such messages."""
        if self.token is None or not uses_table(self._source, self._version):
            return None
        table = message_table(self._source)
        return TableMessages(table.namespace, table.name, DDL_PREFIX)

    async def create(self, plain: Connection) -> None:
        """Create the capture at the source, if the mapping asks for a capture."""
        if self._source.ddl is DdlCapture.CAPTURE:
            async with writable(self._source, plain) as writing:
                self.token = await ensure_capture(writing, self._source)

    async def publish(self, plain: Connection) -> None:
        """Publish the table with the messages, if the source sends messages as rows."""
        if self.messages is not None:
            await publish_messages(plain, self._source)

    async def send_baseline(
        self, plain: Connection, bookkeeping: Bookkeeping, relations: list[MappedRelation]
    ) -> None:
        """Request the definitions of tables that streamer copied before the capture began.

        streamer finds the objects that a command drops by the stored definitions of the tables.
        """
        if self.token is None:
            return
        by_id = {mapped.relation_id: mapped for mapped in relations}
        undefined = await read_without_definition(bookkeeping, list(by_id))
        async with bookkeeping.connection() as connection:
            stored = await read_definitions(connection, list(by_id))
        for relation_id, definition in stored.items():
            mapped = by_id[relation_id]
            mapped.add_parts(parts_of(definition, mapped.mapping.source.namespace))
        if undefined:
            names = {by_id[relation_id].mapping.source: None for relation_id in sorted(undefined)}
            async with writable(self._source, plain) as writing:
                await send_baseline(writing, self._source, names)
