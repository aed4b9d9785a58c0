"""torch's key-value store, with a deadline for every word to it."""

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from pdtx.address import join_address
from pdtx.bench.rendezvous_place import Place
from pdtx.errors import AddressInUse, DeadlineExceeded, PeerLost, PeerUnreachable

Given = TypeVar("Given")

_ASK_S = 5.0
"""Within which the store must answer; it waits for nothing."""

_POLL_S = 0.05


class RunStore:
    """The run's store. Nobody is authenticated there: see pdtx.bench.rendezvous.

    A store that does not answer is given up: the thread that asked it stays behind, and ends with the process.
    Raises PeerUnreachable if nobody has made the store within timeout_s, AddressInUse where it cannot be made.
    """

    def __init__(self, place: Place, timeout_s: float) -> None:
        self.name = f"the run's store at {join_address(place.master, place.port)}"
        self._asked: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="pdtx-store", daemon=True)
        self._thread.start()
        self._store: PrefixStore | None = None
        try:
            self._store = self._ask(lambda: _open(place, timeout_s), "the rendezvous", timeout_s + _ASK_S)
        except DeadlineExceeded:
            raise
        except RuntimeError as error:
            self.close()
            reason = str(error).splitlines()[0]
            if place.hosts_store:
                raise AddressInUse(
                    f"rank 0 cannot serve {self.name}: {reason}; set MASTER_PORT to a free port"
                ) from None
            raise PeerUnreachable(
                f"{self.name} does not answer within {timeout_s:g} s: {reason}; is rank 0 there, at MASTER_ADDR?"
            ) from None

    def put(self, key: str, value: bytes) -> None:
        """Set a key. Raises PeerLost and DeadlineExceeded."""
        # Bytes are what it takes and gives; its type says text.
        self._use(lambda store: store.set(key, value), f"{key} to be set")  # type: ignore[arg-type]

    def get(self, key: str) -> bytes | None:
        """Return a key's value; None where it has not been set. Raises PeerLost and DeadlineExceeded."""
        return self._use(lambda store: bytes(store.get(key)) if store.check([key]) else None, key)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return it. Raises PeerLost and DeadlineExceeded."""
        return self._use(lambda store: int(store.add(key, amount)), key)

    def wait(self, key: str, phase: str, whom: str, deadline: float, look: Callable[[], None] = lambda: None) -> bytes:
        """Wait until somebody has set a key; deadline: time.monotonic(). look: called now and then, may raise.

        Raises DeadlineExceeded, and PeerLost if the store is gone.
        """
        started = time.monotonic()
        while (value := self.get(key)) is None:
            look()
            if time.monotonic() > deadline:
                raise DeadlineExceeded(phase, whom, round(deadline - started, 3))
            time.sleep(_POLL_S)
        return value

    def close(self) -> None:
        """End the store's thread; the store ends with it if it is ours. Idempotent."""
        self._asked.put(None)
        self._thread.join(_ASK_S)
        self._store = None

    def _use(self, function: Callable[[PrefixStore], Given], what: str) -> Given:
        store = self._store
        if store is None:
            raise PeerLost(f"{self.name} is closed")
        try:
            return self._ask(lambda: function(store), what, _ASK_S)
        except RuntimeError as error:  # torch's own errors are
            raise PeerLost(f"{self.name} is gone: {str(error).splitlines()[0]}") from None

    def _ask(self, function: Callable[[], Given], what: str, timeout_s: float) -> Given:
        answers: queue.Queue[Given | Exception] = queue.Queue()

        def run() -> None:
            try:
                answers.put(function())
            except Exception as error:  # noqa: BLE001 - raised again where it was asked
                answers.put(error)

        self._asked.put(run)
        try:
            answer = answers.get(timeout=timeout_s)
        except queue.Empty:
            raise DeadlineExceeded(what, self.name, timeout_s) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _work(self) -> None:
        while (function := self._asked.get()) is not None:
            function()


def _open(place: Place, timeout_s: float) -> PrefixStore:
    store = TCPStore(
        place.master,
        place.port,
        is_master=place.hosts_store,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )
    return PrefixStore(f"pdtx/{place.attempt}", store)
