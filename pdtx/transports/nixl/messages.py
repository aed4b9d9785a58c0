"""What two nodes tell each other about their NIXL: the greetings of a connection, and the keys of regions."""

import msgspec

from pdtx.errors import ProtocolError
from pdtx.transports.base import PathKind, Region

VERSION = 1

_MAX_METADATA_BYTES = 48 << 10
_MAX_TEXT_BYTES = 64
_MAX_DEVICE = 1 << 16
_DRAM, _VRAM = "DRAM", "VRAM"


class Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a region lies at its owner's. device: of VRAM, 0 for DRAM."""

    address: int
    nbytes: int
    memory: str
    device: int

    @classmethod
    def of(cls, region: Region) -> "Place":
        """Return where a region of this process lies."""
        if region.on_cpu:
            return cls(region.address, region.nbytes, _DRAM, 0)
        return cls(region.address, region.nbytes, _VRAM, region.memory.device.index or 0)


class Key(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How to reach a region: where it lies, and what NIXL's agent tells about it."""

    place: Place
    metadata: bytes


class Greeting(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a node says about its side of a connection.

    agent: its NIXL agent's name. library, backend: what it runs. metadata: how to reach the agent, and the scratch
    memory that peers may try the connection with. host: the same for all processes of one host. kinds: what it could
    use with some peer.
    """

    version: int
    agent: str
    library: str
    backend: str
    metadata: bytes
    host: bytes
    kinds: list[PathKind]
    scratch: Place


def pack(message: Greeting | Key) -> bytes:
    """Return a message's bytes."""
    return msgspec.msgpack.encode(message)


def unpack_greeting(data: bytes) -> Greeting:
    """Read a greeting. Raises ProtocolError for what is none."""
    try:
        greeting = msgspec.msgpack.decode(data, type=Greeting)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"the peer's NIXL greeting cannot be read: {error}") from None
    if greeting.version != VERSION:
        raise ProtocolError(f"the peer speaks version {greeting.version} of the nixl mover, this side {VERSION}")
    texts = (greeting.agent, greeting.library, greeting.backend, greeting.host)
    if any(len(text) > _MAX_TEXT_BYTES for text in texts) or not greeting.agent:
        raise ProtocolError(f"the peer's NIXL greeting has names of more than {_MAX_TEXT_BYTES} bytes, or none")
    _check_metadata(greeting.metadata)
    _check_place(greeting.scratch)
    return greeting


def unpack_key(data: bytes, nbytes: int) -> Key:
    """Read the key of a region of nbytes. Raises ProtocolError for what is none."""
    try:
        key = msgspec.msgpack.decode(data, type=Key)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"the peer's key of a region cannot be read by NIXL's mover: {error}") from None
    _check_metadata(key.metadata)
    _check_place(key.place)
    if key.place.nbytes != nbytes:
        raise ProtocolError(f"the peer's NIXL key is for {key.place.nbytes} bytes, its region has {nbytes}")
    return key


def _check_metadata(metadata: bytes) -> None:
    if not 0 < len(metadata) <= _MAX_METADATA_BYTES:
        raise ProtocolError(f"the peer's NIXL metadata has {len(metadata)} bytes; up to {_MAX_METADATA_BYTES} are read")


def _check_place(place: Place) -> None:
    if place.memory not in (_DRAM, _VRAM) or not 0 <= place.device < _MAX_DEVICE:
        raise ProtocolError(f"the peer has memory of kind {place.memory[:16]!r} on device {place.device}")
    if place.address < 0 or place.nbytes < 0 or place.address + place.nbytes > 1 << 64:
        raise ProtocolError(f"the peer's region of {place.nbytes} bytes at {place.address:#x} is none")
