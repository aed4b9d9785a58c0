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
        self._work: queue.SimpleQueue[tuple[Sequence[Int64s], Callable[[], None]] | None] = queue.SimpleQueue()  # noqa: TID251  # no timeouts
        self._thread = threading.Thread(target=self._run, name="pdtx-scrubber", daemon=True)
        self._thread.start()

    def scrub(self, ids: Sequence[Int64s], done: Callable[[], None]) -> None:
        """Fill blocks of each group; returns at once. done: called on this object's thread."""
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
                # Blocks that may hold anything must not be granted to a consumer that verifies: they stay out.
                logger.exception("blocks could not be filled with poison, and are lost to the pool")
                continue
            done()
