"""A real mover in which a test lets one thing go wrong: on the side that puts, or on the side that receives."""

import threading
from collections.abc import Callable

from pdtx.errors import PdtxError
from pdtx.plan import Runs
from pdtx.testing.wrapped import WrappedConnection
from pdtx.transports import Connection, Mover, Placement, Receiver, Region, Registration, TransferHandle, TransferKey

Post = Callable[[], TransferHandle]
"""Puts what was to be put, over the real connection."""

OnPut = Callable[[TransferKey, TransferHandle, Post], TransferHandle]
"""Decides what becomes of a put: post() is the real one; the handle given is one that only the test ends."""


class FaultyConnection(WrappedConnection):
    """Asks on_put what to do with each put, and keeps every handle that it gave."""

    def __init__(self, inner: Connection, on_put: OnPut, handles: list[TransferHandle]) -> None:
        super().__init__(inner)
        self._on_put, self._handles = on_put, handles

    def put(
        self, key: TransferKey, region: Region, runs: Runs, deadline: float, *, staged: bool = False
    ) -> TransferHandle:
        def post() -> TransferHandle:
            handle = self.inner.put(key, region, runs, deadline, staged=staged)
            self._handles.append(handle)
            return handle

        idle = TransferHandle(key, runs.total, "the consumer", deadline)
        idle.post()
        return self._on_put(key, idle, post)


class FaultyReceiver:
    """Hands every call to inner; what a test changes, it overrides."""

    def __init__(self, inner: Receiver) -> None:
        self.inner = inner

    def admit(self, session_id: str) -> bytes:
        return self.inner.admit(session_id)

    def place(self, session_id: str, key: TransferKey) -> Placement:
        return self.inner.place(session_id, key)

    def placed(self, session_id: str, key: TransferKey, nbytes: int, error: PdtxError | None) -> None:
        self.inner.placed(session_id, key, nbytes, error)

    def offer(self, session_id: str, key: TransferKey) -> Placement:
        return self.inner.offer(session_id, key)

    def offered(self, session_id: str, key: TransferKey, nbytes: int, error: PdtxError | None) -> None:
        self.inner.offered(session_id, key, nbytes, error)

    def notified(self, session_id: str, data: bytes) -> None:
        self.inner.notified(session_id, data)

    def closed(self, session_id: str, reason: str) -> None:
        self.inner.closed(session_id, reason)


class FaultyMover(Mover):
    """The mover around which these are: make one by faulty()."""

    def __init__(
        self, inner: Mover, wrap: Callable[[Connection], Connection], receive: Callable[[Receiver], Receiver]
    ) -> None:
        self.inner, self._wrap, self._receive = inner, wrap, receive

    def listen(self, address: str, receiver: Receiver) -> str:
        return self.inner.listen(address, self._receive(receiver))

    def connect(self, address: str, session_id: str, token: bytes, deadline: float) -> Connection:
        return self._wrap(self.inner.connect(address, session_id, token, deadline))

    def register(self, region: Region) -> Registration | None:
        return self.inner.register(region)

    def close(self) -> None:
        self.inner.close()


def faulty(
    inner: Mover,
    *,
    wrap: Callable[[Connection], Connection] = lambda connection: connection,
    receive: Callable[[Receiver], Receiver] = lambda receiver: receiver,
) -> Mover:
    """Return inner, under its own name, with other connections or another receiver."""

    class Named(FaultyMover):
        name = inner.name

    return Named(inner, wrap, receive)


class Timers:
    """Things to do later; at the end of the with block all have been done."""

    def __init__(self) -> None:
        self._timers = list[threading.Timer]()

    def after(self, seconds: float, work: Callable[[], object]) -> None:
        timer = threading.Timer(seconds, work)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def __enter__(self) -> "Timers":
        return self

    def __exit__(self, *_: object) -> None:
        for timer in self._timers:
            timer.join()
