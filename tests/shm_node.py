"""A node in a process of its own that shares one region over a link: python -m tests.shm_node NAME KIND NBYTES.

It connects to the abstract socket NAME, joins links, shares and then waits until its stdin ends.
KIND: shared or private memory, or cuda.
"""

import socket
import struct
import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pdtx.cache.memory import allocate
from pdtx.transports.base import Region
from pdtx.transports.shm.fabric import ShmFabric

_LENGTH = struct.Struct("!II")


def payload(nbytes: int) -> npt.NDArray[np.uint8]:
    """The bytes that a node shares."""
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)


def send(sock: socket.socket, data: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send bytes with descriptors."""
    socket.send_fds(sock, [_LENGTH.pack(len(data), len(descriptors))], list(descriptors))
    sock.sendall(data)


def receive(sock: socket.socket) -> tuple[bytes, tuple[int, ...]]:
    """Receive what send() sends."""
    head, descriptors, _, _ = socket.recv_fds(sock, _LENGTH.size, 4)
    return sock.recv(_LENGTH.unpack(head)[0], socket.MSG_WAITALL), tuple(descriptors)


def main() -> None:
    """Share, and wait."""
    name, kind, nbytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect("\0" + name)
        link = ShmFabric().link(sock.fileno())
        send(sock, link.greeting())
        link.join(receive(sock)[0], float("inf"))
        memory = allocate(nbytes, torch.device("cuda" if kind == "cuda" else "cpu"), shared=kind == "shared")
        memory.copy_(torch.from_numpy(payload(nbytes)))
        shared = link.share(Region(memory))
        send(sock, shared.key, shared.descriptors)
        sys.stdin.read()
        link.close()


if __name__ == "__main__":
    main()
