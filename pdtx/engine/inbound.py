"""The consumer's record of one request: what was granted, what has arrived, what is missing."""

import queue
import time
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from pdtx.cache import Blocks
from pdtx.errors import PdtxError, TransferRefused
from pdtx.layout import KVCacheLayout
from pdtx.plan.runs import Int64s
from pdtx.protocol import Complete, Reference, TransferRequest
from pdtx.transports import TransferKey


@dataclass(frozen=True)
class Session:
    """One producer: its side-channel address, data token and layout."""

    session_id: str
    peer: bytes = field(repr=False)
    engine_id: str
    token: bytes = field(repr=False)
    layout: KVCacheLayout = field(repr=False)


class InboundState(Enum):
    """What a request waits for, in words that fit an error message."""

    QUEUED = "free blocks"
    RECEIVING = "payload"
    READY = "the decoder"
    ENDED = "nothing"


@dataclass
class InboundRequest:
    """One request on its way in. Changed only under the consumer's lock, but for what the decode loop owns.

    blocks: the prompt's blocks, then those for the tokens to come; the producer is granted the first num_granted.
    """

    session: Session
    ask: TransferRequest
    arrived: npt.NDArray[np.bool_]  # (layers, tokens): bytes are in the cache
    expected: npt.NDArray[np.bool_]  # the same: placed, perhaps still arriving
    deadline: float
    begun: float = field(default_factory=time.monotonic)
    blocks: Blocks | None = None
    num_granted: int = 0
    state: InboundState = InboundState.QUEUED
    received_bytes: int = 0
    received_runs: int = 0
    noticed_bytes: int = 0
    complete: Complete | None = None
    error: PdtxError | None = None
    references: "queue.SimpleQueue[Reference | PdtxError]" = field(default_factory=queue.SimpleQueue)

    @property
    def request_id(self) -> str:
        """The producer's name for the request."""
        return self.ask.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.ask.token_ids)

    @property
    def granted_ids(self) -> Int64s:
        """The blocks the producer may write."""
        return self.blocks.ids[: self.num_granted] if self.blocks is not None else np.zeros(0, np.int64)

    def expect(self, key: TransferKey) -> None:
        """Note that key's payload is coming. Raises TransferRefused if it is outside the request or came before."""
        layers, tokens = self.arrived.shape
        if not (0 <= key.layer_start < key.layer_stop <= layers and 0 <= key.token_start < key.token_stop <= tokens):
            raise TransferRefused(f"{key} is not a part of {layers} layers x {tokens} tokens")
        part = self.expected[key.layer_start : key.layer_stop, key.token_start : key.token_stop]
        if part.any():
            raise TransferRefused(f"{key} was received before")
        part[:] = True

    def arrive(self, key: TransferKey, nbytes: int) -> None:
        """Note that key's payload lies in the cache."""
        self.arrived[key.layer_start : key.layer_stop, key.token_start : key.token_stop] = True
        self.received_bytes += nbytes

    def missing(self) -> str | None:
        """Name the first part that has not arrived, if any."""
        absent = np.argwhere(~self.arrived)
        if not len(absent):
            return None
        layer, token = (int(x) for x in absent[0])
        return f"{len(absent)} of {self.arrived.size} layer x token slices, first layer {layer} token {token}"
