"""A request over a link of 900 kB/s that is cancelled at a fifth of it: a proxy that is such a link, and the run."""

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from pdtx.address import parse_address
from pdtx.plan import Runs, Slices
from pdtx.testing import FaultyReceiver, GrantingReceiver, MoverPair
from pdtx.transports import Connection, Placement, Region, TransferHandle, TransferKey
from pdtx.transports.tcp import TcpMover

PIECES, PIECE_BYTES, CANCELLED_AT = 31, 4_000_000 // 31, 6
RATE = 900_000
_STEP_BYTES = 9_000
_BUFFER_BYTES = 8 << 10
_LIMIT_S = 60.0


def _pump(source: socket.socket, target: socket.socket) -> None:
    due = time.monotonic()
    with contextlib.suppress(OSError):
        while data := source.recv(_STEP_BYTES):
            target.sendall(data)
            due = max(due, time.monotonic() - 0.02) + len(data) / RATE
            time.sleep(max(0.0, due - time.monotonic()))
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def slow_proxy(address: str) -> Iterator[str]:
    """Forward connections to address at RATE each way, with little in between; yields where to connect to."""
    ends: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def accept(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = server.accept()[0]
                far = socket.socket()
                ends.extend((near, far))
                for end in (near, far):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
                far.connect(parse_address(address))
                for pair in ((near, far), (far, near)):
                    threads.append(threading.Thread(target=_pump, args=pair))
                    threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        threads.append(threading.Thread(target=accept, args=(server,)))
        threads[-1].start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            threads[0].join()
            for end in ends:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
            for end in ends:
                end.close()


@dataclass(frozen=True)
class Cancelled:
    """moving: the transfers that could not be cancelled and had not ended. after: what the peer was asked for later."""

    moving: int
    after: list[str]


def cancel_at_a_fifth(
    connection: Connection, grants: GrantingReceiver, asked: list[TransferKey], *, gets: bool
) -> Cancelled:
    """Start a request of 31 pieces, cancel it once 6 have arrived, and move one piece of another request.

    asked: what the peer has been asked for so far, in order.
    """
    region, runs = (
        Region(torch.zeros(PIECE_BYTES, dtype=torch.uint8)),
        Runs(*(np.array([n]) for n in (0, 0, PIECE_BYTES))),
    )
    there = Placement(Region(torch.zeros(PIECE_BYTES, dtype=torch.uint8)), Slices(runs.dst, runs.nbytes))
    deadline = time.monotonic() + _LIMIT_S

    def begin(request_id: str, piece: int) -> TransferHandle:
        key = TransferKey(request_id, 0, 1, piece, piece + 1)
        (grants.grant_get if gets else grants.grant)("session", key, there)
        return (connection.get if gets else connection.put)(key, region, runs, deadline)

    handles = [begin("cancelled", piece) for piece in range(PIECES)]
    handles[CANCELLED_AT - 1].wait()
    before = len(asked)
    begun = [handle for handle in handles if not handle.cancel()]
    moving = sum(not handle.state.final for handle in begun)
    begin("next", 0).wait()
    return Cancelled(moving, [key.request_id for key in asked[before:]])


def run(*, gets: bool, proxy: bool, **options: object) -> Cancelled:
    """Carry all of it out over tcp between two nodes of this process."""
    grants, asked = GrantingReceiver(), list[TransferKey]()
    receiver = FaultyReceiver(grants, before_place=asked.append, before_offer=asked.append)
    make_mover = partial(TcpMover, **options)  # type: ignore[arg-type]
    with MoverPair(make_mover, receiver=receiver, grants=grants) as pair, contextlib.ExitStack() as stack:
        if proxy:
            pair.address = stack.enter_context(slow_proxy(pair.address))
        stack.callback(pair.producer.close)
        return cancel_at_a_fifth(pair.connect(), grants, asked, gets=gets)


if __name__ == "__main__":
    sys.stdout.write(" ".join(run(gets=sys.argv[1] == "gets", proxy=False).after))
