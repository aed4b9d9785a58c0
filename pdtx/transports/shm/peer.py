"""The process at the other end of a local socket: which it is, by the kernel's word, and whether it lets us read it."""

import contextlib
import hmac
import os
import select
import socket
import struct

from pdtx.transports.shm.attach import read_bytes

_CREDENTIALS = struct.Struct("iII")  # struct ucred


class Peer:
    """Whoever had the other end of the socket when it was connected.

    pid: 0 if it is in another pid namespace. closed_to_us: why its memory cannot be read; None if it can be.
    """

    def __init__(self, control: int) -> None:
        with socket.fromfd(control, socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid: int = _CREDENTIALS.unpack(credentials)[0]
        self.closed_to_us: str | None = "it has not been tried"
        # Held so that a number that another process has got meanwhile is not taken for the peer.
        self._handle: int | None = None
        with contextlib.suppress(OSError):
            if self.pid > 0:
                self._handle = os.pidfd_open(self.pid)

    def __str__(self) -> str:
        return f"process {self.pid}" if self.pid > 0 else "a process of another container"

    def try_reading(self, address: int, expected: bytes) -> None:
        """Find out whether its memory can be read: it says that expected lies at address."""
        self.closed_to_us = self._try(address, expected)

    def _try(self, address: int, expected: bytes) -> str | None:
        if self._handle is None:
            return "its number is not known here" if self.pid <= 0 else "the kernel gives no handle of it"
        try:
            found = read_bytes(self.pid, address, len(expected))
        except OSError as error:
            return error.strerror or str(error)
        if not hmac.compare_digest(found, expected) or self.has_gone:
            return "what it says is in its memory is not there"
        return None

    @property
    def has_gone(self) -> bool:
        """Whether the process has ended. False where that cannot be told."""
        if self._handle is None:
            return False
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Give back the handle. Idempotent."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
