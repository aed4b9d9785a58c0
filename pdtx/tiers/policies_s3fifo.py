"""S3-FIFO (Yang and others, SOSP 2023): a small queue that most entries leave soon, a main one, and a ghost."""

from collections.abc import Sequence

from pdtx.tiers.policies_base import Line, Pinned, Policy

_MOST_USES = 3
"""A use beyond this counts no more."""


class S3Fifo(Policy):
    """The paper's algorithm 1: queues S of a tenth of the capacity, M of the rest, and G of as many keys as M has.

    An eviction takes one entry: where making an entry of S one of M drives another out of M, that is it.
    """

    name = "s3fifo"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.small, self.main, self.ghost = Line(), Line(), Line()
        self._uses = dict[bytes, int]()
        self._small_size = max(1, capacity // 10)
        self._main_size = max(1, capacity - self._small_size)

    def admit(self, keys: Sequence[bytes], room: int, pinned: Pinned) -> list[bytes]:
        """See Policy."""
        victims = list[bytes]()
        for number, key in enumerate(keys):
            if number >= room:
                victim = self._evict(pinned)
                if victim is None:
                    break
                victims.append(victim)
            (self.main if self.ghost.discard(key) else self.small).push(key)
            self._uses[key] = 0
        for line in (self.small, self.main):
            line.restore()
        return victims

    def _evict(self, pinned: Pinned) -> bytes | None:
        order = (self._evict_small, self._evict_main)
        for evict in order if len(self.small) >= self._small_size else order[::-1]:
            victim = evict(pinned)
            if victim is not None:
                del self._uses[victim]
                return victim
        return None

    def _evict_small(self, pinned: Pinned) -> bytes | None:
        while (key := self.small.take_oldest(pinned)) is not None:
            if self._uses[key] <= 1:
                self.ghost.push(key)
                while len(self.ghost) > self._main_size:
                    self.ghost.take_oldest()
                return key
            # The paper takes the uses away with the queue: what comes to M begins anew.
            self._uses[key] = 0
            victim = self._evict_main(pinned) if len(self.main) >= self._main_size else None
            self.main.push(key)
            if victim is not None:
                return victim
        return None

    def _evict_main(self, pinned: Pinned) -> bytes | None:
        while (key := self.main.take_oldest(pinned)) is not None:
            if not self._uses[key]:
                return key
            self._uses[key] -= 1
            self.main.push(key)
        return None

    def touch(self, keys: Sequence[bytes]) -> None:
        """See Policy."""
        uses = self._uses
        for key in keys:
            count = uses[key]
            if count < _MOST_USES:
                uses[key] = count + 1

    def remove(self, key: bytes) -> None:
        """See Policy."""
        self._uses.pop(key, None)
        for line in (self.small, self.main):
            line.discard(key)
