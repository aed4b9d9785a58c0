"""Who and where the two sides of a connection are."""

import os
import socket
from pathlib import Path

from pdtx.address import join_address

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> bytes:
    """Return what all processes of this host have in common, containers or not, and no other host."""
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError:
        return os.uname().nodename.encode()[:64]


def peer_name(control: int) -> str:
    """Return the address at the other end of a socket, for messages."""
    try:
        with socket.socket(fileno=os.dup(control)) as sock:
            name = sock.getpeername()
    except OSError:
        return "the peer"
    return join_address(*name[:2]) if isinstance(name, tuple) else "the peer on this host"
