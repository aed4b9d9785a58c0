"""What crosses a TCP connection after the handshake: requests one way, acknowledgements the other.

A request is a header. PUT and NOTICE are followed by nbytes of data; GET asks for nbytes, which follow its
acknowledgement if that is OFFERED. Each of the three gets exactly one acknowledgement, in order. TAKEN and DROPPED tell
what became of a get's payload, by its sequence number, and get none. Integers are in network order.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

from pdtx.errors import InputError, ProtocolError
from pdtx.transports.base import TransferKey
from pdtx.transports.handshake import MAX_ID_BYTES, Dialect, bounded_id

DIALECT = Dialect("TCP", b"pdtx-tcp", 2)

MAX_TEXT_BYTES = 512

_HEADER_MAGIC, _ACK_MAGIC = b"KVpt", b"KVak"
_HEADER = struct.Struct(f"!4sBQQIIQQHHHH{MAX_ID_BYTES}s")
_SEQUENCE, _SEQUENCE_AT = struct.Struct("!Q"), struct.calcsize("!4sB")
_ACK = struct.Struct("!4sQBH")

HEADER_BYTES = _HEADER.size
ACK_BYTES = _ACK.size


class Status(IntEnum):
    """What became of a request; OFFERED: its payload follows."""

    DELIVERED = 0
    REFUSED = 1
    FAILED = 2
    OFFERED = 3


class Kind(IntEnum):
    """What a header asks for, or tells."""

    PUT = 1
    GET = 2
    NOTICE = 3
    TAKEN = 4
    DROPPED = 5


@dataclass(frozen=True)
class Header:
    """The head of one request. sequence counts the requests of a connection from 0."""

    kind: Kind
    sequence: int
    nbytes: int
    key: TransferKey

    def pack(self) -> bytes:
        """Return HEADER_BYTES. Raises InputError if a field does not fit."""
        key = self.key
        request_id = bounded_id(key.request_id, "request id")
        try:
            return _HEADER.pack(
                _HEADER_MAGIC,
                self.kind,
                self.sequence,
                self.nbytes,
                key.layer_start,
                key.layer_stop,
                key.token_start,
                key.token_stop,
                key.buffer,
                key.src_rank,
                key.dst_rank,
                len(request_id),
                request_id,
            )
        except struct.error:
            raise InputError(f"{key} has a number that no header holds") from None

    @classmethod
    def unpack(cls, data: bytes) -> "Header":
        """Read HEADER_BYTES. Raises ProtocolError."""
        magic, kind, sequence, nbytes, *numbers, length, raw = _HEADER.unpack(data)
        if magic != _HEADER_MAGIC or kind not in tuple(Kind) or length > MAX_ID_BYTES:
            raise ProtocolError("what should be a request's header is none")
        try:
            request_id = raw[:length].decode()
        except UnicodeDecodeError:
            raise ProtocolError("a header whose request id is not UTF-8") from None
        key = TransferKey(request_id, *numbers)
        if key.layer_start > key.layer_stop or key.token_start > key.token_stop:
            raise ProtocolError("a header whose ranges end before they start")
        return cls(Kind(kind), sequence, nbytes, key)


def number(header: bytearray, sequence: int) -> None:
    """Write the sequence into a packed header."""
    _SEQUENCE.pack_into(header, _SEQUENCE_AT, sequence)


@dataclass(frozen=True)
class Ack:
    """The head of an acknowledgement; text_bytes of UTF-8 follow, the reason where the payload was not delivered."""

    sequence: int
    status: Status
    text_bytes: int

    @classmethod
    def unpack(cls, data: bytes) -> "Ack":
        """Read ACK_BYTES. Raises ProtocolError."""
        magic, sequence, status, text_bytes = _ACK.unpack(data)
        if magic != _ACK_MAGIC or status not in tuple(Status) or text_bytes > MAX_TEXT_BYTES:
            raise ProtocolError("what should be an acknowledgement is none")
        return cls(sequence, Status(status), text_bytes)


def pack_ack(sequence: int, status: Status, text: str = "") -> bytes:
    """Return an acknowledgement with its text, which is cut at MAX_TEXT_BYTES."""
    data = text.encode()[:MAX_TEXT_BYTES]
    return _ACK.pack(_ACK_MAGIC, sequence, status, len(data)) + data
