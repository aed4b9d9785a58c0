"""The movers that are held to the contract. One more is one line here."""

from collections.abc import Collection, Iterable
from dataclasses import replace

import pytest

from pdtx.errors import InputError, PdtxError
from pdtx.testing import GrantingReceiver, Subject
from pdtx.transports import make_mover

SUBJECTS = {
    "inproc": Subject.named("inproc"),
    "tcp": Subject.named("tcp"),
    "tcp-v6": Subject.named("tcp", "[::1]:0"),
    "tcp-2": Subject.named("tcp", streams=2, part_bytes=100),
    "tcp-5-bounce": Subject.named("tcp", streams=5, part_bytes=4096, bounce=True, bounce_bytes=20_000),
    "tcp-bounce": Subject.named("tcp", bounce=True, bounce_bytes=20_000),
    "shm": Subject.named("shm"),
    "nixl": replace(Subject.named("nixl"), connections=50),
    "nixl-tcp": replace(Subject.named("nixl", tls="tcp", num_threads=1), connections=50),
}


_WITH_PROCESSES = {
    "tcp-bounce-1MiB": Subject.named("tcp", bounce=True, bounce_bytes=1 << 20),
    "shm-mapped": replace(Subject.named("shm"), shared=True),
}
"""Of interest only where the peer is another process."""

FAULT_SUBJECTS = ("tcp", "tcp-2", "tcp-bounce-1MiB", "shm", "shm-mapped", "nixl-tcp")

THOROUGH = ("tcp-bounce", "tcp-bounce-1MiB", "tcp-v6", "nixl-tcp")
"""Variants of movers that are held to the whole contract with -m thorough only."""


def sampled(names: Iterable[str], thorough: Collection[str] = THOROUGH) -> list[object]:
    """Return the names as parameters of a test, some of them for -m thorough."""
    return [pytest.param(name, marks=pytest.mark.thorough) if name in thorough else name for name in names]


def usable_mover(name: str) -> str:
    """Return a mover's name, or skip the test with the reason why there is none."""
    try:
        make_mover(name).close()
    except InputError as error:
        pytest.skip(f"mover {name}: {error}")
    return name


def usable(name: str) -> Subject:
    """Return a subject, or skip the test with the reason why there is none."""
    subject = (SUBJECTS | _WITH_PROCESSES)[name]
    try:
        mover = subject.make()
    except InputError as error:
        pytest.skip(f"{name}: {error}")
    try:
        mover.listen(subject.listen_at, GrantingReceiver())
    except (PdtxError, OSError) as error:
        pytest.skip(f"{name} cannot listen at {subject.listen_at}: {error}")
    finally:
        mover.close()
    return subject
