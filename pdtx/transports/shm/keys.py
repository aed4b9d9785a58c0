"""What two links tell each other, as msgpack: who they are, and how a region is reached."""

from typing import Annotated, TypeVar

import msgspec

from pdtx.errors import ProtocolError

VERSION = 1

NONCE_BYTES = 32

Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]

_Short = Annotated[bytes, msgspec.Meta(max_length=256)]

_Told = TypeVar("_Told")


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class Greeting(_Message, frozen=True):
    """address: where the sender has nonce in its memory, for the peer to try whether it can read there."""

    version: int
    address: Size
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class InFile(_Message, frozen=True, tag="file"):
    """A region from byte offset of the file whose descriptor comes along."""

    offset: Size


class InProcess(_Message, frozen=True, tag="process"):
    """A region at an address of the sender's."""

    address: Size


class OnDevice(_Message, frozen=True, tag="cuda"):
    """A region from byte offset of a CUDA allocation that its driver, and torch, let other processes open.

    device: its UUID. The other fields are torch's, see pdtx.transports.shm.cuda.
    """

    device: Annotated[str, msgspec.Meta(max_length=64)]
    offset: Size
    handle: Annotated[bytes, msgspec.Meta(max_length=32 << 10)]
    storage_bytes: Size
    storage_offset: Size
    counter: _Short
    counter_offset: Size
    event: _Short
    event_needed: bool


Key = InFile | InProcess | OnDevice

_encoder = msgspec.msgpack.Encoder()
_keys: msgspec.msgpack.Decoder[Key] = msgspec.msgpack.Decoder(Key)
_greetings = msgspec.msgpack.Decoder(Greeting)


def pack(message: Greeting | Key) -> bytes:
    """Return a message as bytes."""
    return _encoder.encode(message)


def unpack_greeting(data: bytes) -> Greeting:
    """Return a peer's greeting. Raises ProtocolError."""
    greeting = _unpack(_greetings, data, "greeting")
    if greeting.version != VERSION:
        raise ProtocolError(
            f"the peer speaks version {greeting.version} of the shm mover's protocol, this side {VERSION}"
        )
    return greeting


def unpack_key(data: bytes) -> Key:
    """Return how a peer's region is reached. Raises ProtocolError."""
    return _unpack(_keys, data, "region")


def _unpack(decoder: msgspec.msgpack.Decoder[_Told], data: bytes, what: str) -> _Told:
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"the peer's {what} cannot be read: {error}") from None
