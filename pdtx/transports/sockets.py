"""Listening and connecting sockets, over TCP or within one host, with our errors."""

import errno
import os
import select
import socket
import time

from pdtx.address import WILDCARDS, join_address, parse_address, resolve
from pdtx.errors import AddressInUse, DeadlineExceeded, InputError, PeerUnreachable
from pdtx.transports.wire import Wire, milliseconds, set_buffers

_BACKLOG = 128
_LOCAL_TRIES = 64


def bind_tcp(
    address: str, *, buffer_bytes: int | None = None, advertise_host: str | None = None
) -> tuple[socket.socket, str]:
    """Return a listening socket and the address to advertise.

    Raises AddressInUse, or InputError for an address that nobody could connect to.
    """
    family, target = resolve(*parse_address(address), passive=True)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        set_buffers(sock, buffer_bytes)
        sock.bind(target)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
            raise AddressInUse(f"cannot listen at {address}: {error.strerror}") from None
        raise
    host, port = sock.getsockname()[:2]
    if host in WILDCARDS and advertise_host is None:
        sock.close()
        raise InputError(f"{address} is every address of this host; give one to advertise, or listen at one")
    return sock, join_address(advertise_host or host, port)


def dial_tcp(address: str, deadline: float, *, buffer_bytes: int | None = None) -> socket.socket:
    """Connect to the first meaning of an address that answers. Raises PeerUnreachable or DeadlineExceeded."""
    reason = "it has no address"
    for family, target in resolve(*parse_address(address)):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            set_buffers(sock, buffer_bytes)
            _connect(sock, target, address, deadline)
        except OSError as error:
            sock.close()
            reason = error.strerror or str(error)
        except DeadlineExceeded:
            sock.close()
            raise
        else:
            return sock
    raise PeerUnreachable(f"nobody answers at {address}: {reason}")


def _connect(sock: socket.socket, target: tuple[str, int], address: str, deadline: float) -> None:
    begun = time.monotonic()
    sock.setblocking(False)
    try:
        sock.connect(target)
    except BlockingIOError:
        poll = select.poll()
        poll.register(sock, select.POLLOUT)
        if not poll.poll(milliseconds(deadline)):
            raise DeadlineExceeded("a connection", address, round(time.monotonic() - begun, 3)) from None
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code)) from None


# A local socket is called after HOST:PORT, so that addresses look alike whatever the mover. The name is abstract (it
# begins with a zero byte): it is in no directory, and gone with the process.


def _local_name(host: str, port: int) -> bytes:
    return b"\0pdtx/" + join_address(host, port).encode()


def bind_local(address: str) -> tuple[socket.socket, str]:
    """Return a listening AF_UNIX socket named after HOST:PORT, port 0 for any, and its address. Raises AddressInUse."""
    host, port = parse_address(address)
    # A number from the kernel is free among TCP's, and so are local names that nobody else has taken after it.
    candidates = [port] if port else [_free_number() for _ in range(_LOCAL_TRIES)]
    for number in candidates:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(_local_name(host, number))
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return sock, join_address(host, number)
    raise AddressInUse(f"cannot listen at {address}: the local name is taken")


def _free_number() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind(("127.0.0.1", 0))
        number: int = sock.getsockname()[1]
        return number


def dial_local(address: str, deadline: float) -> socket.socket:
    """Connect to a socket of bind_local(). Raises PeerUnreachable or DeadlineExceeded."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    begun = time.monotonic()
    try:
        sock.settimeout(max(0.001, deadline - begun) if deadline != float("inf") else None)
        sock.connect(_local_name(*parse_address(address)))
    except TimeoutError:
        sock.close()
        raise DeadlineExceeded("a connection", address, round(time.monotonic() - begun, 3)) from None
    except OSError as error:
        sock.close()
        reason = error.strerror or str(error)
        raise PeerUnreachable(
            f"nobody answers at {address} on this host: {reason}; shm works on one host only"
        ) from None
    return sock


def wire_to(sock: socket.socket, address: str) -> Wire:
    """Return a dialled socket as a wire, which owns it. Raises PeerUnreachable if it is gone again."""
    try:
        return Wire(sock, address)
    except OSError as error:  # before it could be tuned
        sock.close()
        raise PeerUnreachable(f"connection to {address} broke: {error.strerror or error}") from None
