"""Yardsticks between two stations: what the same machines do without pdtx, measured in turns with the samples."""

from collections.abc import Callable, Mapping
from typing import Protocol, Self

from pdtx.bench.reference_memcpy import Memcpy
from pdtx.bench.reference_socket import SocketReceiver, SocketSender
from pdtx.bench.reference_ucx import UcxServer, UcxSide
from pdtx.errors import InputError

REFERENCE_NAMES = ("memcpy", "socket", "ucx_perftest")

MAX_REFERENCE_BYTES = 1 << 37
"""Of a round. Nobody has a case that is larger; a number of another kind is refused before memory is taken."""


class _Server(Protocol):
    address: str
    token: bytes
    detail: str

    def close(self) -> None: ...


class _Client(Protocol):
    detail: str

    def round(self) -> float: ...

    def close(self) -> None: ...


class ReferenceServer:
    """The side of a reference that listens, next to the station that is written to. Serves until close().

    address: where the client connects, "HOST:PORT"; token: what it proves itself by. Both empty for memcpy, which needs
    one process only. detail: what is done, for people.
    """

    def __init__(self, server: _Server) -> None:
        """See open()."""
        self._server = server
        self.address, self.token, self.detail = server.address, server.token, server.detail

    @classmethod
    def open(cls, name: str, host: str, nbytes: int, *, max_bytes: int | None = None) -> "ReferenceServer":
        """Make the server of a reference, one of REFERENCE_NAMES, at any free port of host. max_bytes: of its memory.

        Raises InputError, saying why, for one that cannot be had here, AddressInUse.
        """
        _check(name, nbytes)
        makers: dict[str, Callable[[], _Server]] = {
            "memcpy": _NoServer,
            "socket": lambda: SocketReceiver(host, nbytes, max_bytes),
            "ucx_perftest": lambda: UcxServer(host),
        }
        return cls(makers[name]())

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ReferenceClient:
    """The side of a reference that measures, next to the station that posts. detail: what is done, for people."""

    def __init__(
        self,
        name: str,
        address: str,
        token: bytes,
        nbytes: int,
        *,
        timeout_s: float = 60.0,
        run_sizes: Mapping[int, int] | None = None,
        max_bytes: int | None = None,
    ) -> None:
        """Connect. run_sizes: from bytes to how many runs of the case have them, for memcpy. max_bytes: of its memory.

        Raises InputError, saying why, for a reference that cannot be had here; PeerError, DeadlineExceeded.
        """
        _check(name, nbytes)
        makers: dict[str, Callable[[], _Client]] = {
            "memcpy": lambda: Memcpy(nbytes, run_sizes, max_bytes),
            "socket": lambda: SocketSender(address, token, nbytes, timeout_s, max_bytes),
            "ucx_perftest": lambda: UcxSide(address, nbytes, timeout_s),
        }
        self._client = makers[name]()
        self.detail = self._client.detail

    def round(self) -> float:
        """Move nbytes once; return the seconds. Raises PeerLost, TransferError, or DeadlineExceeded after timeout_s."""
        return self._client.round()

    def close(self) -> None:
        """End it. Idempotent."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _NoServer:
    address, token, detail = "", b"", "within one process"

    def close(self) -> None:
        """There is nothing to close."""


def _check(name: str, nbytes: int) -> None:
    if name not in REFERENCE_NAMES:
        raise InputError(f"there is no reference {name!r}; one of {', '.join(REFERENCE_NAMES)}")
    if not 1 <= nbytes <= MAX_REFERENCE_BYTES:
        raise InputError(f"a round of {name} moves 1 to {MAX_REFERENCE_BYTES:,} bytes, not {nbytes:,}")
