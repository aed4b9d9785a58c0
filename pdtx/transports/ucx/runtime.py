"""The life of UCX's objects behind one small interface: a context, its workers and their endpoints, each with a handle.

ucxx and ucx-py bring them along with their own ideas of how to start and end UCX; raw is pdtx's own way, on any
libucp. Puts, gets and memory go by the handles to the same library in every case.
"""

import ctypes
import threading
from abc import ABC, abstractmethod
from importlib.util import find_spec
from typing import ClassVar

from pdtx.errors import InputError
from pdtx.transports.ucx import library
from pdtx.transports.ucx.environment import prepare
from pdtx.transports.ucx.libucp import Ucp
from pdtx.transports.ucx.status import OK

RUNTIMES = ("auto", "ucxx", "ucx-py", "raw")


class Endpoint(ABC):
    """A connection to another worker, with peer error handling. handle is its address."""

    handle: int
    status: int = OK
    """What has broken it; OK while it is good."""

    @abstractmethod
    def close(self) -> None:
        """Close by force: what is under way is cut off. Idempotent."""


class Worker(ABC):
    """What makes progress, for one thread at a time. address is what others connect to."""

    handle: int
    address: bytes

    @abstractmethod
    def connect(self, address: bytes) -> Endpoint:
        """Return an endpoint to the worker with that address; nothing is known yet of the peer. Raises UcsError."""

    @abstractmethod
    def close(self) -> None:
        """Destroy it, with whatever endpoints it has: peers are cut off. Idempotent."""


class Context(ABC):
    """What workers and registered memory belong to. lock: to be held in calls that name the context's handle."""

    handle: int

    def __init__(self) -> None:
        self.lock = threading.Lock()

    @abstractmethod
    def worker(self) -> Worker:
        """Return a new worker. Raises UcsError."""

    @abstractmethod
    def close(self) -> None:
        """Destroy it; its workers are gone and its memory is unmapped. Idempotent."""


class Runtime(ABC):
    """A way to make contexts. label: its name and version, for people; empty for pdtx's own."""

    name: ClassVar[str]
    ucp: Ucp
    label: str = ""

    @abstractmethod
    def context(self) -> Context:
        """Return a new context. Raises UcsError."""

    def __str__(self) -> str:
        label = f", {self.label}" if self.label else ""
        return f"UCX {self.ucp.version_text} ({self.ucp.origin}{label})"


def make_runtime(name: str = "auto", choice: str | None = None) -> Runtime:
    """Load UCX. name: one of RUNTIMES. choice: which library, see library.load(); None leaves it to the runtime.

    auto is ucxx where it is installed and has the library that was chosen, ucx-py after it, and else raw.
    Raises InputError, with what is missing.
    """
    if name not in RUNTIMES:
        raise InputError(f"unknown UCX runtime {name!r}; one of {', '.join(RUNTIMES)}")
    prepare()
    if name == "auto":
        name = _best(choice)
    # Imported here: each needs a package that may not be there.
    if name == "ucxx":
        from pdtx.transports.ucx.ucxx_runtime import UcxxRuntime

        return UcxxRuntime(choice)
    if name == "ucx-py":
        from pdtx.transports.ucx.ucx_py_runtime import UcxPyRuntime

        return UcxPyRuntime(choice)
    from pdtx.transports.ucx.raw_runtime import RawRuntime

    return RawRuntime(library.load(choice))


def _best(choice: str | None) -> str:
    if choice not in (None, library.WHEEL, library.SYSTEM):
        return "raw"
    if find_spec("ucxx") is not None:
        return "ucxx"
    return "ucx-py" if find_spec("ucp") is not None else "raw"


def keep_for_ever(worker: Worker) -> None:
    """Never destroy a worker, not even when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(worker))
