"""HOST:PORT addresses."""

import ipaddress
import socket

from pdtx.errors import InputError

WILDCARDS = ("0.0.0.0", "::")
"""Hosts that mean every address of this machine when listened at."""


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of 'HOST:PORT', '[::1]:PORT' or either with 'tcp://' before it. Raises InputError."""
    host, colon, port = text.removeprefix("tcp://").rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    port_is_number = port.isascii() and port.isdecimal() and int(port) <= 65535
    if not colon or not host or (":" in host and not bracketed) or not port_is_number:
        raise InputError(f"not an address: {text!r}; write HOST:PORT, for example 127.0.0.1:5600 or [::1]:5600")
    return ("0.0.0.0" if host == "*" else host), int(port)


def join_address(host: str, port: int) -> str:
    """Return 'HOST:PORT', the host in brackets where it has colons."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether everything the host resolves to stays on this machine; wildcards do not. Raises InputError if nothing."""
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in _lookup(host))


def numeric_host(host: str) -> str:
    """Return the numeric address to use for a host, IPv4 where there is one. Raises InputError if nothing.

    Left to ZeroMQ, the two ends could choose differently for a name with addresses of both families.
    """
    return min(_lookup(host), key=lambda address: ":" in address)


def resolve(host: str, port: int, *, passive: bool = False) -> list[tuple[int, tuple[str, int]]]:
    """Return (family, socket address) of each meaning of host. Raises InputError if there is none."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE if passive else 0)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"host {host!r} cannot be resolved: {reason}") from None
    return [(family, target) for family, _, _, _, target in found]  # type: ignore[misc]


def _lookup(host: str) -> list[str]:
    return [target[0] for _, target in resolve(host, 0)]
