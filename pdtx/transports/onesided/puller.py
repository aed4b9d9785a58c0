"""A thread of the acceptor's for engines that pull: it copies while the acceptor's own sees to what comes next."""

import logging
import queue
import threading
from collections.abc import Callable

from pdtx.errors import PdtxError

logger = logging.getLogger(__name__)


class Puller:
    """Does work in the order in which it is handed in. broken: called when a piece of work raises."""

    def __init__(self, broken: Callable[[], None]) -> None:
        self._broken = broken
        self._work = queue.SimpleQueue[Callable[[], None] | None]()  # noqa: TID251  # no timeouts
        self._thread: threading.Thread | None = None
        self.closing = False

    def do(self, work: Callable[[], None]) -> None:
        """Have work done after what was handed in before; returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pdtx-puller", daemon=True)
            self._thread.start()
        self._work.put(work)

    def _run(self) -> None:
        while (work := self._work.get()) is not None and not self.closing:
            try:
                work()
            except PdtxError as error:
                logger.info("stopped pulling: %s", error)
                self._broken()
            except Exception:
                logger.exception("pulling failed")
                self._broken()

    def close(self) -> None:
        """Wait for the work under way, which looks at closing; what has not been begun never is. Idempotent."""
        self.closing = True
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None
