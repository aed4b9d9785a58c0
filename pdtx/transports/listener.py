"""A listening socket and the connections it has accepted, one thread each."""

import contextlib
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol

from pdtx.address import join_address
from pdtx.transports.wire import Wire

logger = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
MAX_UNPROVEN = 64
"""Connections that have not proved their session yet; one more pushes out the oldest."""

_JOIN_S = 0.8


class Served(Protocol):
    """One accepted connection."""

    @property
    def unproven(self) -> bool:
        """Whether it still has to prove its session, and has not been told to stop."""

    def serve(self) -> None:
        """Serve the connection to its end, and close it."""

    def stop(self, reason: str) -> None:
        """Make serve() return soon."""


class Listener:
    """Accepts connections until closed. Owns sock.

    address: for messages. name: of the mover, for threads. make: makes what serves a connection.
    """

    def __init__(self, sock: socket.socket, address: str, name: str, make: Callable[[Wire], Served]) -> None:
        self._sock, self.address, self._name, self._make = sock, address, name, make
        self._lock = threading.Lock()
        self._closing = False
        self._inbound = dict[Served, threading.Thread]()
        self._thread = threading.Thread(target=self._accept, name=f"pdtx-{name}-listen", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with self._sock:
            while not self._closing:
                try:
                    sock, address = self._sock.accept()
                except OSError as error:
                    if self._closing or error.errno in (errno.EBADF, errno.EINVAL):
                        return
                    # Out of descriptors, or a peer that left in the queue: no reason to stop serving the others.
                    logger.warning("cannot accept a connection at %s: %s", self.address, error)
                    time.sleep(0.05)
                    continue
                try:
                    self._serve(Wire(sock, _peer_name(sock, address)))
                except (OSError, RuntimeError) as error:
                    # The peer has gone already, or no thread can be had for it.
                    logger.warning("cannot serve a connection at %s: %s", self.address, error)
                    sock.close()

    def _serve(self, wire: Wire) -> None:
        inbound = self._make(wire)
        thread = threading.Thread(target=self._run, args=(inbound,), name=f"pdtx-{self._name}-inbound", daemon=True)
        with self._lock:
            unproven = [other for other in self._inbound if other.unproven]
            if len(unproven) >= MAX_UNPROVEN:
                unproven[0].stop("pushed out by newer connections")
            if self._closing:
                wire.close()
                return
            thread.start()
            self._inbound[inbound] = thread

    def _run(self, inbound: Served) -> None:
        try:
            inbound.serve()
        except Exception:
            logger.exception("a connection at %s failed", self.address)
        finally:
            with self._lock:
                self._inbound.pop(inbound)

    def close(self) -> None:
        """Stop accepting, end all connections. Idempotent."""
        with self._lock:
            self._closing = True
            inbound = dict(self._inbound)
        with contextlib.suppress(OSError):  # closed before
            self._sock.shutdown(socket.SHUT_RDWR)
        for connection in inbound:
            connection.stop("the consumer closed")
        limit = time.monotonic() + _JOIN_S
        for thread in (self._thread, *inbound.values()):
            if thread is not threading.current_thread():
                thread.join(max(0.0, limit - time.monotonic()))
                if thread.is_alive():
                    logger.warning("%s at %s is stuck in its receiver and left behind", thread.name, self.address)


def _peer_name(sock: socket.socket, address: object) -> str:
    if sock.family == socket.AF_UNIX or not isinstance(address, tuple):
        return "a process of this host"
    return join_address(*address[:2])
