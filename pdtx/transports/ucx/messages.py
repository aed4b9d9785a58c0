"""What two nodes tell each other about their UCX: the greetings of a connection, and the keys of regions."""

import struct

import msgspec

from pdtx.errors import ProtocolError
from pdtx.transports.base import PathKind

VERSION = 1

_MAX_ADDRESS_BYTES = 48 << 10
_MAX_KEY_BYTES = 8 << 10
_MAX_HOST_BYTES = 64
_PADDING = bytes(64 << 10)
"""UCX reads keys and addresses up to where they themselves say that they end: what is cut short ends in zeros."""

_PLACE = struct.Struct("<QQ")


class Greeting(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a node says about its side of a connection.

    address: its worker's. host: the same for all processes of one host. kinds: what its UCX could use with some peer.
    scratch: key of memory that peers may try the connection with.
    """

    version: int
    address: bytes
    host: bytes
    kinds: list[PathKind]
    scratch: bytes


class Key(msgspec.Struct, frozen=True):
    """How to reach a region: where it lies at its owner's, and UCX's packed key."""

    address: int
    nbytes: int
    packed: bytes

    def padded(self) -> bytes:
        """The packed key, fit to be given to UCX."""
        return self.packed + _PADDING


def pack_greeting(greeting: Greeting) -> bytes:
    """Return a greeting's bytes."""
    return msgspec.msgpack.encode(greeting)


def unpack_greeting(data: bytes) -> Greeting:
    """Read a greeting. Raises ProtocolError for what is none."""
    try:
        greeting = msgspec.msgpack.decode(data, type=Greeting)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"the peer's UCX greeting cannot be read: {error}") from None
    if greeting.version != VERSION:
        raise ProtocolError(f"the peer speaks version {greeting.version} of the ucx mover, this side {VERSION}")
    if not 0 < len(greeting.address) <= _MAX_ADDRESS_BYTES or len(greeting.host) > _MAX_HOST_BYTES:
        raise ProtocolError(
            f"the peer's UCX address has {len(greeting.address)} bytes; up to {_MAX_ADDRESS_BYTES} are read"
        )
    return greeting


def padded_address(greeting: Greeting) -> bytes:
    """Return the worker's address of a greeting, fit to be given to UCX."""
    return greeting.address + _PADDING


def pack_key(key: Key) -> bytes:
    """Return a key's bytes."""
    return _PLACE.pack(key.address, key.nbytes) + key.packed


def unpack_key(data: bytes, nbytes: int) -> Key:
    """Read the key of a region of nbytes. Raises ProtocolError for what is none."""
    packed = data[_PLACE.size :]
    if not 0 < len(packed) <= _MAX_KEY_BYTES:
        raise ProtocolError(f"the peer's UCX key has {len(data)} bytes; up to {_MAX_KEY_BYTES} are read")
    address, size = _PLACE.unpack_from(data)
    if size != nbytes or address + size > 1 << 64:
        raise ProtocolError(f"the peer's UCX key is for {size} bytes at {address:#x}, its region has {nbytes} bytes")
    return Key(address, size, packed)
