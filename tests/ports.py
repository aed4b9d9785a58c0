"""Ports for servers that are started later, by this process or another one."""

import os
import socket

_FIRST, _COUNT = 20_000, 500
"""Below those that Linux gives to whoever asks for any, which could have it before its server does."""

_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw") or 0) % 24
_picked = set[int]()


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody uses, never twice; each worker of one test run has its own to pick from.

    Where among them it begins is another place in every process, for test runs beside this one.
    """
    begin = os.getpid() * 37
    for step in range(_COUNT):
        port = _FIRST + _WORKER * _COUNT + (begin + step) % _COUNT
        if port in _picked:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _picked.add(port)
        return port
    raise AssertionError(f"no free port from {_FIRST + _WORKER * _COUNT} on")
