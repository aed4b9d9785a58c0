"""What crosses the control stream of a one-sided mover, as msgpack, each message after its length.

Every Ask and every Notice has a sequence number, counted from 0, and gets exactly one answer in the end: Refused or
Done. Between them lie Go (the acceptor has placed it) and End (the initiator has moved it, or given it up).
"""

import math
import threading

import msgspec
import numpy as np

from pdtx.errors import PdtxError, ProtocolError, TransferError, TransferRefused
from pdtx.plan import Slices
from pdtx.text import printable
from pdtx.transports.base import MAX_NOTICE_BYTES, TransferHandle, TransferKey
from pdtx.transports.handshake import MAX_ID_BYTES
from pdtx.transports.wire import FOREVER, Wire

VERSION = 1

MAX_FRAME_BYTES = 64 << 20
"""One message: at 16 bytes a range, four million ranges."""

MAX_DESCRIPTORS = 4
MAX_TEXT_BYTES = 512

_MAX_LINK_BYTES = 64 << 10
_MAX_NUMBER = 1 << 62
"""Of bytes, positions and the like: sums of two still fit into int64."""

_LENGTH_BYTES = 4


class _Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    pass


class Greeting(_Message, tag=1, frozen=True):
    """What a link says to the other side's."""

    link: bytes


class Share(_Message, tag=2, frozen=True):
    """A region that messages may name from now on. descriptors: how many file descriptors follow."""

    region: int
    nbytes: int
    key: bytes
    descriptors: int


class Ranges(_Message, frozen=True):
    """Slices, int64 in little-endian order; nbytes is one number where all are alike."""

    offsets: bytes
    nbytes: bytes | int


class Ask(_Message, tag=3, frozen=True):
    """The initiator wants to put or get. region, ranges: where it has the bytes, for engines that pull."""

    sequence: int
    is_get: bool
    key: tuple[str, int, int, int, int, int, int, int]
    nbytes: int
    region: int | None = None
    ranges: Ranges | None = None


class Go(_Message, tag=4, frozen=True):
    """The acceptor has placed it. region, ranges: where, for what the initiator moves."""

    sequence: int
    region: int | None = None
    ranges: Ranges | None = None


class Refused(_Message, tag=5, frozen=True):
    """The acceptor will have none of it."""

    sequence: int
    text: str


class End(_Message, tag=6, frozen=True):
    """The initiator has moved nbytes, or has given up because of error: it will not touch the memory any more.

    good_for_s: for engines that pull: seconds from the Go until the source may change. The initiator counts from when
    it heard that, the acceptor from before it said so, which is earlier: no clocks are compared.
    """

    sequence: int
    nbytes: int
    error: str | None = None
    good_for_s: float = 0.0


class Done(_Message, tag=7, frozen=True):
    """The acceptor has heard of the end; error says why it failed there."""

    sequence: int
    nbytes: int
    error: str | None = None


class Notice(_Message, tag=8, frozen=True):
    """A message for the acceptor's receiver."""

    sequence: int
    data: bytes


Message = Greeting | Share | Ask | Go | Refused | End | Done | Notice

_decoder = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


class ControlStream:
    """Messages over a wire. Any thread may send, one at a time receive."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._sending = threading.Lock()

    def send(self, message: Message, deadline: float = FOREVER, descriptors: tuple[int, ...] = ()) -> None:
        """Send a message. Raises PeerLost or DeadlineExceeded, or TransferError for one that is too large."""
        data = _encoder.encode(message)
        if len(data) > MAX_FRAME_BYTES:
            raise TransferError(
                f"a message of {len(data)} bytes, at most {MAX_FRAME_BYTES} are sent; use smaller parts"
            )
        with self._sending:
            self.wire.send(len(data).to_bytes(_LENGTH_BYTES, "big") + data, "room to send a message", deadline)
            if descriptors:
                self.wire.send_descriptors(descriptors, "room to send descriptors", deadline)

    def receive(self, deadline: float = FOREVER) -> Message:
        """Receive a message, once it has begun to come. Raises PeerLost, ProtocolError or DeadlineExceeded."""
        phase = "the rest of a message"
        length = int.from_bytes(self.wire.receive(_LENGTH_BYTES, phase, deadline), "big")
        if length > MAX_FRAME_BYTES:
            raise ProtocolError(f"{self.wire.peer} announced a message of {length} bytes, at most {MAX_FRAME_BYTES}")
        try:
            message: Message = _decoder.decode(self.wire.receive(length, phase, deadline))
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"{self.wire.peer} sent what is no message: {error}") from None
        self._check(message)
        return message

    def receive_descriptors(self, count: int, deadline: float) -> tuple[int, ...]:
        """Receive the descriptors that a Share announces."""
        if not 0 <= count <= MAX_DESCRIPTORS:
            raise ProtocolError(f"{self.wire.peer} announced {count} descriptors, at most {MAX_DESCRIPTORS}")
        return self.wire.receive_descriptors(count, "descriptors", deadline) if count else ()

    def _check(self, message: Message) -> None:
        """Raise ProtocolError for sizes and numbers that no honest peer sends."""
        numbers = [getattr(message, name, 0) or 0 for name in ("sequence", "nbytes", "region")]
        match message:
            case Greeting():
                fits = len(message.link) <= _MAX_LINK_BYTES
            case Share():
                fits = len(message.key) <= _MAX_LINK_BYTES
            case Ask():
                numbers += message.key[1:]
                fits = len(message.key[0].encode()) <= MAX_ID_BYTES
            case Refused():
                fits = len(message.text) <= MAX_TEXT_BYTES
            case End():
                fits = len(message.error or "") <= MAX_TEXT_BYTES and math.isfinite(message.good_for_s)
            case Done():
                fits = len(message.error or "") <= MAX_TEXT_BYTES
            case Notice():
                fits = len(message.data) <= MAX_NOTICE_BYTES
            case _:
                fits = True
        if not fits or min(numbers) < 0 or max(numbers) > _MAX_NUMBER:
            raise ProtocolError(f"{self.wire.peer} sent a {type(message).__name__} with a field beyond its limit")


def pack_slices(slices: Slices) -> Ranges:
    """Return slices as a message carries them."""
    nbytes = slices.nbytes
    if len(nbytes) and (nbytes == nbytes[0]).all():
        return Ranges(slices.offsets.astype("<i8").tobytes(), int(nbytes[0]))
    return Ranges(slices.offsets.astype("<i8").tobytes(), nbytes.astype("<i8").tobytes())


def unpack_slices(ranges: Ranges | None, peer: str) -> Slices:
    """Return a peer's slices; they may still lie outside its region. Raises ProtocolError."""
    if ranges is None or len(ranges.offsets) % 8:
        raise ProtocolError(f"{peer} sent no ranges where some are needed")
    offsets = np.frombuffer(ranges.offsets, "<i8").astype(np.int64)
    if isinstance(ranges.nbytes, int):
        if not 0 <= ranges.nbytes <= _MAX_NUMBER // max(1, len(offsets)):
            raise ProtocolError(f"{peer} sent {len(offsets)} ranges of {ranges.nbytes} bytes")
        return Slices(offsets, np.full(len(offsets), ranges.nbytes, np.int64))
    if len(ranges.nbytes) != len(ranges.offsets):
        raise ProtocolError(f"{peer} sent {len(offsets)} ranges with {len(ranges.nbytes) // 8} sizes")
    lengths = np.frombuffer(ranges.nbytes, "<i8").astype(np.int64)
    if len(lengths) and (lengths.min() < 0 or lengths.max() > _MAX_NUMBER // len(lengths)):
        raise ProtocolError(f"{peer} sent ranges of {lengths.min()} to {lengths.max()} bytes")
    return Slices(offsets, lengths)


def pack_key(key: TransferKey) -> tuple[str, int, int, int, int, int, int, int]:
    """Return a key as a message carries it."""
    return (
        key.request_id,
        key.layer_start,
        key.layer_stop,
        key.token_start,
        key.token_stop,
        key.buffer,
        key.src_rank,
        key.dst_rank,
    )


def unpack_key(fields: tuple[str, int, int, int, int, int, int, int], peer: str) -> TransferKey:
    """Return a peer's key. Raises ProtocolError."""
    key = TransferKey(*fields)
    if min(fields[1:]) < 0 or key.layer_start > key.layer_stop or key.token_start > key.token_stop:
        raise ProtocolError(f"{peer} sent a key whose ranges end before they start")
    return key


def short(error: PdtxError | str) -> str:
    """Return an error's text at a length that a message carries."""
    return str(error)[:MAX_TEXT_BYTES]


def told(text: str) -> str:
    """Return a peer's text fit for terminals and logs: one line, printable."""
    return printable(text, " ") or "no reason given"


def refusal(text: str, handle: TransferHandle) -> PdtxError:
    """Return the error of a transfer that the acceptor has refused."""
    return TransferRefused(f"{handle.peer} refused {handle.key}: {told(text)}")


def failure(text: str, handle: TransferHandle) -> PdtxError:
    """Return the error of a transfer that has failed at the acceptor."""
    return TransferError(f"{handle.peer} could not take {handle.key}: {told(text)}")
