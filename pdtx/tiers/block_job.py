"""A row of blocks that several threads work off, and which whoever waits for them may give up."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdtx.errors import TierBusy
from pdtx.plan.runs import Int64s
from pdtx.tiers.files import Header


@dataclass(frozen=True)
class Block:
    """A block to be moved: its place in the prompt, its file's header, and the cache's blocks that make it up.

    header: without the checksum. blocks: int64, shape (k,).
    """

    place: int
    header: Header
    blocks: Int64s


@dataclass(frozen=True)
class Failure:
    """Why a block was not moved. bad_file: because of its file, which is of no use to anybody."""

    reason: str
    bad_file: bool = False


Failures = dict[int, Failure]
"""Blocks that were not moved, by place."""


class BlockJob:
    """Blocks to be moved. Each of its threads takes one after another, until there are none or the job is given up.

    threads: that are going to work on it; for each left() is called in the end. failed: complete once wait() has
    returned True, or give_up() has been called.
    """

    def __init__(self, blocks: Sequence[Block], threads: int) -> None:
        self.threads, self._left = threads, threads
        self._todo, self._under_way = deque(blocks), dict[int, Block]()
        self.failed: Failures = {}
        self._changed, self._inside, self._given_up = threading.Condition(), 0, False
        self._moved_at = time.monotonic()

    # -- for its threads ----------------------------------------------------------------------------------------------

    def take(self) -> Block | None:
        """Return a block to be moved, None where there is no more."""
        with self._changed:
            if not self._todo:
                return None
            block = self._todo.popleft()
            self._under_way[block.place] = block
            return block

    @contextlib.contextmanager
    def at_cache(self) -> Iterator[None]:
        """Read and write the cache within this. Raises TierBusy once the job is given up: it is another's then."""
        with self._changed:
            if self._given_up:
                raise TierBusy("the job was given up before")
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._tell_who_gives_up()

    def check_wanted(self) -> None:
        """Raise TierBusy once the job is given up."""
        with self._changed:
            if self._given_up:
                raise TierBusy("the job was given up before")

    def ended(self, block: Block, failure: Failure | None) -> bool:
        """Note what has become of a block that was taken. Returns whether anybody still wants to know."""
        with self._changed:
            if self._given_up:
                return False
            self._moved_at = time.monotonic()
            del self._under_way[block.place]
            if failure is not None:
                self.failed[block.place] = failure
            if self._is_over():
                self._changed.notify_all()
            return True

    def left(self, reason: str) -> None:
        """Let a thread go. What no thread is left for has failed for this reason."""
        with self._changed:
            self._left -= 1
            if not self._left and self._todo:
                self._fail(Failure(reason))
                self._changed.notify_all()

    # -- for who waits ------------------------------------------------------------------------------------------------

    def wait(self, silence_s: float) -> bool:
        """Wait until all blocks have ended. Returns False once none has for so long."""
        with self._changed:
            while not self._is_over():
                left = self._moved_at + silence_s - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return True

    def give_up(self, reason: str) -> int:
        """Fail all that has not ended, and let nobody to the cache any more; return how many blocks that are.

        Waits for who is at the cache, which takes no longer than a copy.
        """
        with self._changed:
            self._given_up = True
            count = len(self._todo) + len(self._under_way)
            self._fail(Failure(reason))
            self._changed.wait_for(lambda: not self._inside)
            return count

    def _tell_who_gives_up(self) -> None:
        # Otherwise nobody waits for this, and wait() is not to be woken for every block.
        if self._given_up:
            self._changed.notify_all()

    def _is_over(self) -> bool:
        return not self._todo and not self._under_way

    def _fail(self, failure: Failure) -> None:
        self.failed |= dict.fromkeys([*self._under_way, *(block.place for block in self._todo)], failure)
        self._todo.clear()
        self._under_way.clear()
