"""From memory to the tier below it: blocks as they are stored there (through), or when they leave (back)."""

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from pdtx.cache import record_fence
from pdtx.errors import PdtxError
from pdtx.plan.runs import Int64s
from pdtx.tiers.base import Moved, Side, Tier
from pdtx.tiers.counters import Count
from pdtx.tiers.cpu import CpuTier
from pdtx.tiers.holds import Held
from pdtx.tiers.keys import PrefixKeys
from pdtx.tiers.shelved import ShelfLease

logger = logging.getLogger(__name__)

_SHARE = 2
"""While one in so many of a memory's blocks waits for the tier below, which pins them, no more are taken."""


@dataclass
class Behind:
    """What has become of blocks on their way down: on it still, written, there before, failed, and refused.

    refused: the tier below had too much to do already, or too much of the memory was waiting for it.
    """

    under_way: int = 0
    written: Count = field(default_factory=Count)
    present: int = 0
    failed: int = 0
    refused: int = 0


class WriteBehind:
    """Takes blocks from memory down to the tier below, straight from where they are. Safe to use from several threads.

    No call waits for the tier below, and no queue grows: what it cannot take is refused, and counted.
    """

    def __init__(self, memory: CpuTier, below: Tier) -> None:
        self._memory, self._below = memory, below
        self._most = [max(1, group.capacity.blocks // _SHARE) for group in memory.usage().groups]
        self._waiting = [0] * len(self._most)
        self._behind, self._changed = Behind(), threading.Condition()
        self._announced = 0  # stores into the memory that have yet to keep() their blocks

    @property
    def counts(self) -> Behind:
        """Return a copy of the counters."""
        with self._changed:
            return replace(self._behind, written=replace(self._behind.written))

    def announce(self) -> None:
        """Expect a store into the memory to keep() blocks, until withdraw(): its result may be seen before it does."""
        with self._changed:
            self._announced += 1

    def withdraw(self) -> None:
        """Expect no more of an announced store: what it had to keep() is under way, or there is nothing."""
        with self._changed:
            self._announced -= 1
            self._changed.notify_all()

    def keep(self, keys: PrefixKeys, places: Sequence[Int64s]) -> None:
        """Begin to write blocks that the memory has; they are pinned there until it is done."""
        chosen = self._admit(places)
        if not any(map(len, chosen)):
            return
        lease: ShelfLease | None = None
        try:
            lease = self._memory.hold(keys, chosen)
            here = [each[found] for each, found in zip(chosen, lease.found, strict=True)]
            tables = tuple(lease.tables(group) for group in range(len(chosen)))
            # The lease pins them until the result is there.
            side = Side(self._memory.cache, tables, of_tier=True, hold=Held.BY_CALLER, contents=lease.contents)
            future = self._below.store(keys, side, here, record_fence(self._memory.cache.device))
        except PdtxError as error:
            if lease is not None:
                lease.release()
            self._ended(chosen, refused=True)
            logger.info("%d blocks are not written behind: %s", sum(map(len, chosen)), error)
            return
        future.add_done_callback(partial(self._written, chosen, lease))

    def leaving(self, keys: PrefixKeys, side: Side, places: Sequence[Int64s]) -> "Future[Moved] | None":
        """Begin to write blocks that leave the memory, whose own hook this is; it waits for the Future."""
        with self._changed:
            self._behind.under_way += sum(map(len, places))
        try:
            future = self._below.store(keys, side, places, record_fence(self._memory.cache.device))
        except PdtxError as error:
            self._ended(None, refused=True, blocks=sum(map(len, places)))
            logger.info("%d blocks leave unwritten: %s", sum(map(len, places)), error)
            return None
        future.add_done_callback(partial(self._left, sum(map(len, places))))
        return future

    def _admit(self, places: Sequence[Int64s]) -> list[Int64s]:
        """Choose those of groups of which not too many are waiting now; one store is taken whole, however large."""
        with self._changed:
            chosen = []
            for group, each in enumerate(places):
                taken = each if self._waiting[group] < self._most[group] else each[:0]
                self._waiting[group] += len(taken)
                self._behind.under_way += len(taken)
                self._behind.refused += len(each) - len(taken)
                chosen.append(np.asarray(taken, np.int64))
        return chosen

    def _written(self, chosen: Sequence[Int64s], lease: ShelfLease, future: "Future[Moved]") -> None:
        lease.release()
        self._note(future)
        self._ended(chosen)

    def _left(self, blocks: int, future: "Future[Moved]") -> None:
        self._note(future)
        self._ended(None, blocks=blocks)

    def _note(self, future: "Future[Moved]") -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None or future.cancelled():
            logger.warning("blocks are not written behind: %s", error or "cancelled")
            return
        moved = future.result()
        with self._changed:
            self._behind.written.add(moved.num_blocks, moved.nbytes)
            self._behind.present += moved.present
            self._behind.failed += len(moved.failed)
        for failed in moved.failed[:1]:
            logger.warning("%d blocks are not written behind: %s", len(moved.failed), failed)

    def _ended(self, chosen: Sequence[Int64s] | None, *, refused: bool = False, blocks: int = 0) -> None:
        with self._changed:
            for group, each in enumerate(chosen or ()):
                self._waiting[group] -= len(each)
                blocks += len(each)
            self._behind.under_way -= blocks
            self._behind.refused += blocks if refused else 0
            self._changed.notify_all()

    def flush(self, deadline: float) -> int:
        """Write all that the memory holds, to a deadline in time.monotonic(); return how many blocks were not."""
        self.drain(deadline)
        before = self.counts
        for keys, places in self._memory.contents():
            self.keep(keys, places)
        self.drain(deadline)
        now = self.counts
        return now.under_way + now.refused - before.refused + now.failed - before.failed

    def drain(self, deadline: float) -> bool:
        """Wait until nothing is on its way down, to a deadline in time.monotonic(). Returns whether that is so."""

        def drained() -> bool:
            return not self._behind.under_way and not self._announced

        with self._changed:
            return self._changed.wait_for(drained, max(0.0, deadline - time.monotonic()))
