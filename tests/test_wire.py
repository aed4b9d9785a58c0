"""Open files that travel over a wire."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pdtx.errors import DeadlineExceeded
from pdtx.transports.wire import Wire


@contextmanager
def wires() -> Iterator[tuple[Wire, Wire]]:
    here, there = socket.socketpair(socket.AF_UNIX)
    with Wire(here, "there") as one, Wire(there, "here") as other:
        yield one, other


def fill(wire: Wire) -> int:
    """Send until there is no room; return how many bytes that took."""
    sent = 0
    while more := wire.send_some(bytes(1 << 16)):
        sent += more
    while more := wire.send_some(b"\0"):
        sent += more
    return sent


def test_descriptors_wait_for_room() -> None:
    with wires() as (one, other), open(os.devnull) as file:
        before, received = fill(one), list[int]()

        def read() -> None:
            time.sleep(0.3)  # longer than a call of the kernel waits
            other.receive(before, "what came before", time.monotonic() + 10)
            received.extend(other.receive_descriptors(1, "a descriptor", time.monotonic() + 10))

        reading = threading.Thread(target=read)
        reading.start()
        try:
            one.send_descriptors((file.fileno(),), "room for a descriptor", time.monotonic() + 10)
        finally:
            reading.join()
        (descriptor,) = received
        assert os.path.samestat(os.fstat(descriptor), os.fstat(file.fileno()))
        os.close(descriptor)


def test_descriptors_wait_for_room_until_the_deadline() -> None:
    with wires() as (one, _), open(os.devnull) as file:
        fill(one)
        with pytest.raises(DeadlineExceeded, match="room for a descriptor"):
            one.send_descriptors((file.fileno(),), "room for a descriptor", time.monotonic() + 0.2)


def test_received_descriptors_are_not_inherited() -> None:
    with wires() as (one, other), open(os.devnull) as file:
        one.send_descriptors((file.fileno(), file.fileno()), "room for descriptors", time.monotonic() + 10)
        descriptors = other.receive_descriptors(2, "descriptors", time.monotonic() + 10)
        inheritable = [os.get_inheritable(descriptor) for descriptor in descriptors]
        for descriptor in descriptors:
            os.close(descriptor)
        assert inheritable == [False, False]
