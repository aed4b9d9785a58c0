"""Addresses: whether they are free to listen at, answer to who connects, and mean something to another host."""

import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from pdtx.address import WILDCARDS, is_loopback, join_address, parse_address, resolve
from pdtx.doctor.finding import Finding
from pdtx.errors import AddressInUse, InputError

_SUBJECT = "address"
_AT_ONCE = 16


def check_addresses(
    *, listen: Sequence[str], reach: Sequence[str], advertise: str | None, two_nodes: bool, timeout_s: float
) -> Iterator[Finding]:
    """Judge addresses as HOST:PORT; advertise: a host. timeout_s: seconds for connecting to all of reach.

    Raises InputError for what is no address.
    """
    for address in (*listen, *reach):
        parse_address(address)
    for address in listen:
        yield _free(address)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield from pool.map(lambda address: _answers(address, timeout_s), reach)
    if two_nodes or advertise is not None:
        yield from _advertised(listen, advertise, two_nodes=two_nodes)


def _problem(name: str, value: str, fix: str) -> Finding:
    return Finding(subject=_SUBJECT, name=name, value=value, level="problem", fix=fix)


def _free(address: str) -> Finding:
    from pdtx.transports.sockets import bind_tcp

    name = f"listen {address}"
    try:
        # Whatever is advertised, it is only asked whether the port can be had.
        sock, bound = bind_tcp(address, advertise_host="this host")
    except AddressInUse as error:
        return _problem(
            name, str(error), "end who listens there (ss -ltnp), or take another port or an address of this host"
        )
    except (InputError, OSError) as error:
        return _problem(name, str(error), "give an address of this host")
    sock.close()
    return Finding(subject=_SUBJECT, name=name, value=f"free, port {parse_address(bound)[1]}")


def _answers(address: str, timeout_s: float) -> Finding:
    name, began, host_port = f"reach {address}", time.monotonic(), parse_address(address)
    try:
        with socket.create_connection(host_port, timeout_s):
            took = time.monotonic() - began
        return Finding(subject=_SUBJECT, name=name, value=f"answers after {took * 1e3:.1f} ms")
    except TimeoutError:
        fix = "packets are dropped on the way: see firewalls and security groups on both hosts for this port"
        return _problem(name, f"no answer within {timeout_s:g} s", fix)
    except ConnectionRefusedError:
        fix = "the host is there and nobody listens: start the node first, and see that it listens at this address"
        return _problem(name, "refused", fix)
    except OSError as error:
        return _problem(name, error.strerror or str(error), "see name, route and network (ip route get HOST)")


def _advertised(listen: Sequence[str], advertise: str | None, *, two_nodes: bool) -> Iterator[Finding]:
    """Judge what others are told to connect to: --advertise, else where the node listens."""
    hosts = [advertise] if advertise is not None else [parse_address(address)[0] for address in listen]
    if not hosts:
        fix = "give --listen HOST:PORT or --advertise HOST as the node will have it"
        yield Finding(subject=_SUBJECT, name="advertise", value="nothing given to judge", level="warning", fix=fix)
    for host in hosts:
        yield _meaning(host, two_nodes=two_nodes)


def _meaning(host: str, *, two_nodes: bool) -> Finding:
    name, fix = f"advertise {host}", "give --advertise HOST: an address of this host that the other one reaches"
    if host in (*WILDCARDS, "*"):
        return _problem(name, "every address of this host, which is none to connect to", fix)
    try:
        local = is_loopback(host)
        addresses = sorted({target[0] for _, target in resolve(host, 0)})
    except InputError as error:
        return _problem(name, str(error), fix)
    if local and two_nodes:
        return _problem(name, f"{', '.join(addresses)} stays on this host", fix)
    return Finding(subject=_SUBJECT, name=name, value=", ".join(join_address(one, 0)[:-2] for one in addresses))
