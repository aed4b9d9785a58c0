"""Regions that one side shares with the other over a control stream: numbered, each told once."""

import os
import threading
import time
from typing import Any

from pdtx.errors import ProtocolError
from pdtx.transports.base import Region
from pdtx.transports.onesided.fabric import Link, Shared
from pdtx.transports.onesided.frames import ControlStream, Message, Share

MAX_REGIONS = 4096

_ROOM_S = 30.0


class SharedRegions:
    """What this side has shared. Regions are the same if they begin and end at the same addresses."""

    def __init__(self, link: Link[Any], stream: ControlStream) -> None:
        self._link, self._stream = link, stream
        self._numbers = dict[tuple[int, int], tuple[int, Region]]()

    def number(self, region: Region) -> int:
        """Return the number of a region, told to the peer before anything that this thread sends later.

        Raises TransferError if the region cannot be shared.
        """
        place = region.address, region.nbytes
        if place in self._numbers:
            return self._numbers[place][0]
        shared = self._link.share(region)
        number = len(self._numbers)
        share = Share(number, region.nbytes, shared.key, len(shared.descriptors))
        self._stream.send(share, time.monotonic() + _ROOM_S, shared.descriptors)
        self._numbers[place] = number, region
        return number


class Opened:
    """What the peer has shared. Told by one thread and used by another, which alone calls the link."""

    def __init__(self, link: Link[Any], stream: ControlStream) -> None:
        self._link, self._stream = link, stream
        self._lock = threading.Lock()
        self._told = dict[int, tuple[Shared, int]]()  # not opened yet
        self._open = dict[int, tuple[object, int]]()
        self._count = 0

    def accept(self, message: Message, deadline: float) -> bool:
        """Take a Share; False if the message is something else. Raises ProtocolError, PeerLost or DeadlineExceeded."""
        if not isinstance(message, Share):
            return False
        if message.region != self._count or message.region >= MAX_REGIONS:
            raise ProtocolError(f"{self._stream.wire.peer} shared region {message.region} out of turn")
        descriptors = self._stream.receive_descriptors(message.descriptors, deadline)
        with self._lock:
            self._told[message.region] = Shared(message.key, descriptors), message.nbytes
            self._count += 1
        return True

    def region(self, number: int | None) -> tuple[object, int]:
        """Return a region of the peer's and its size. Raises ProtocolError for one that was never shared."""
        with self._lock:
            told = self._told.pop(number, None) if number is not None else None
        if told is not None and number is not None:
            shared, nbytes = told
            self._open[number] = self._link.open(shared, nbytes), nbytes
        if number is None or number not in self._open:
            raise ProtocolError(f"{self._stream.wire.peer} named region {number}, which it has not shared")
        return self._open[number]

    def close(self) -> None:
        """Forget all regions; the link gives back what it made of them."""
        with self._lock:
            unused = [shared for shared, _ in self._told.values()]
            self._told.clear()
        for shared in unused:
            for descriptor in shared.descriptors:
                os.close(descriptor)
        self._open.clear()
