"""The changes of one source transaction that one lane applies. Pure."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamer.apply.lane import MappedRelation
    from streamer.decode.transactions import Changes, Transaction
    from streamer.lsn import Lsn


@dataclass(slots=True)
class LaneTransaction:
    """The changes of one source transaction that one lane applies: the lane's share of it.

    Without ``end_lsn`` it is a piece, and more pieces of the transaction follow.
    """

    transaction: "Transaction"
    changes: list[tuple["MappedRelation", "Changes"]]
    end_lsn: "Lsn | None"
    size: int
    is_lead: bool = True
    """Whether this is the share by which the transaction is counted."""
