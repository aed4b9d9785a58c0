"""The threads of one connection: what ends one of them ends all, and the last one out gives everything back."""

import logging
import threading
from collections.abc import Callable, Sequence

from pdtx.errors import PdtxError, PeerLost, TransferError

logger = logging.getLogger(__name__)

_JOIN_S = 1.0


def lost_by(error: PdtxError, peer: str) -> PeerLost:
    """Return what the transfers of a connection fail with that error has ended."""
    return error if isinstance(error, PeerLost) else PeerLost(f"connection to {peer} broke: {error}")


class Crew:
    """Threads that have something to do until the connection ends.

    works: names and what to do. broken: called with what ended a thread in error, as PeerLost. left: called with the
    name of a thread that ends, after broken. gone: called once, by the last one.
    """

    def __init__(
        self,
        mover: str,
        peer: str,
        works: Sequence[tuple[str, Callable[[], None]]],
        *,
        broken: Callable[[PeerLost], None],
        gone: Callable[[], None],
        left: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._peer, self._broken, self._left, self._gone = peer, broken, left, gone
        self._lock = threading.Lock()
        self._running = len(works)
        self._threads = [
            threading.Thread(target=self._run, args=(name, work), name=f"pdtx-{mover}-{name}", daemon=True)
            for name, work in works
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def _run(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except PdtxError as error:
            self._broken(lost_by(error, self._peer))
        except Exception as error:
            logger.exception("the connection to %s failed", self._peer)
            self._broken(lost_by(TransferError(str(error)), self._peer))
        finally:
            self._left(name)
            with self._lock:
                self._running -= 1
                last = self._running == 0
            if last:
                self._gone()

    def join(self) -> None:
        """Wait for the threads to end, a bearable time; the connection has been told to end."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)
                if thread.is_alive():
                    logger.warning("%s to %s is stuck in a callback and left behind", thread.name, self._peer)
