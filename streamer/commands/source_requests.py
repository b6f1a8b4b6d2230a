"""``streamer sources restart``: a request to the process that streams a source."""

from dataclasses import dataclass

from streamer.bookkeeping.bookkeeping_schema import installed
from streamer.bookkeeping.requests import request_restart
from streamer.bookkeeping.sources import read_source_records
from streamer.errors.error_classes import MappingError
from streamer.target.connection import TargetAddress


@dataclass(frozen=True, slots=True)
class RequestedRestart:
    """``expects_process``: the source was not stopped, so a process can run the source."""

    request_id: int
    label: str
    expects_process: bool


async def restart(address: TargetAddress, label: str, actor: str) -> RequestedRestart:
    """Request a new attempt from the process that streams source *label*.

    *label*: ``DATABASE`` or ``DATABASE:SID``. Raises MappingError for an unknown source.
    """
    async with installed(address, "streamer sources restart") as bookkeeping:
        records = await read_source_records(bookkeeping)
        for record in records:
            if record.label != label:
                continue
            number = await request_restart(bookkeeping, record.source_id, actor=actor)
            if number is not None:
                runs = record.holder is not None or record.state != "stopped"
                return RequestedRestart(number, label, expects_process=runs)
    labels = ", ".join(record.label for record in records)
    raise MappingError(f'no source "{label}" is streamed', hint=f"the sources are: {labels}")
