"""What a peer says about its NIXL is read with care."""

import msgspec
import pytest

from pdtx.errors import ProtocolError
from pdtx.transports.nixl.messages import VERSION, Greeting, Key, Place, pack, unpack_greeting, unpack_key

PLACE = Place(4096, 100, "DRAM", 0)
GREETING = Greeting(VERSION, "agent", "NIXL 1", "UCX", b"metadata", b"host", ["tcp"], PLACE)


def test_round_trips() -> None:
    assert unpack_greeting(pack(GREETING)) == GREETING
    key = Key(Place(1 << 63, 5, "VRAM", 7), b"m")
    assert unpack_key(pack(key), 5) == key


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "speaks version 2"),
        ({"agent": ""}, "names of more than 64 bytes, or none"),
        ({"agent": "a" * 65}, "names of more than 64 bytes"),
        ({"host": b"h" * 65}, "names of more than 64 bytes"),
        ({"metadata": b""}, "metadata has 0 bytes"),
        ({"metadata": bytes(50_000)}, "metadata has 50000 bytes"),
        ({"scratch": Place(-1, 5, "DRAM", 0)}, "is none"),
        ({"scratch": Place((1 << 64) - 1, 5, "DRAM", 0)}, "is none"),
        ({"scratch": Place(1, 5, "FILE", 0)}, "memory of kind 'FILE' on device 0"),
        ({"scratch": Place(1, 5, "VRAM", -1)}, "on device -1"),
        ({"kinds": ["pigeon"]}, "cannot be read"),
    ],
)
def test_greetings_that_are_none(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        unpack_greeting(pack(msgspec.structs.replace(GREETING, **changes)))


@pytest.mark.parametrize("data", [b"", b"\x90", b"nonsense", pack(GREETING)[:-1]])
def test_bytes_that_are_no_greeting(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot be read"):
        unpack_greeting(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pack(Key(PLACE, b"m")), "for 100 bytes, its region has 5"),
        (pack(Key(Place(0, 5, "DRAM", 1 << 16), b"m")), "on device 65536"),
        (pack(Key(Place(0, 5, "DRAM", 0), b"")), "metadata has 0 bytes"),
        (b"\xc1", "cannot be read"),
    ],
)
def test_keys_that_are_none(data: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        unpack_key(data, 5)
