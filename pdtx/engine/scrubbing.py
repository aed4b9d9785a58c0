"""Blocks are filled with poison on a thread of its own: it takes as long as they are great."""

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from pdtx.cache import KVCaches, record_fence
from pdtx.plan.runs import Int64s

logger = logging.getLogger(__name__)


class Scrubber:
    """Fills blocks of a cache with poison, in the order in which they come."""

    def __init__(self, cache: KVCaches) -> None:
        self._cache = cache
        self._work: queue.SimpleQueue[tuple[Sequence[Int64s], Callable[[bool], None]] | None] = queue.SimpleQueue()  # noqa: TID251  # no timeouts
        self._thread = threading.Thread(target=self._run, name="pdtx-scrubber", daemon=True)
        self._thread.start()

    def scrub(self, ids: Sequence[Int64s], done: Callable[[bool], None]) -> None:
        """Fill blocks of each group; returns at once. done: called on this object's thread, with whether it worked."""
        self._work.put((ids, done))

    def close(self) -> None:
        """Stop after what was given so far. Idempotent."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            ids, done = item
            try:
                for group, own in enumerate(ids):
                    self._cache.poison(group, own)
                record_fence(self._cache.device)()  # or a kernel could run into what is written next
            except Exception:
                logger.exception("blocks could not be filled with poison")
                done(False)
            else:
                done(True)
