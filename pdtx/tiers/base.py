"""What a tier is: one more cache with a layout of its own, in which blocks are kept under keys and come back from.

The life of a block: store() takes it from a cache once its writer is done; lookup() finds it by key and pins it, and
nothing evicts it before the lease's release(); load() on the lease copies it into a cache. What cannot be loaded is a
miss that names the block, never a block of something else.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from pdtx.cache import KVCaches
from pdtx.errors import TierError
from pdtx.plan.runs import Int64s
from pdtx.tiers.counters import TierUsage
from pdtx.tiers.holds import Held, Hold
from pdtx.tiers.keys import PrefixKeys

Bools = npt.NDArray[np.bool_]

Fence = Callable[[], None]
"""Returns once the device has written all that is to be stored, see record_fence()."""

ContentHashes = Callable[[int, Int64s], list[bytes]]
"""Returns the content hashes of blocks of a group, for places of the prompt; b"" where one is not known."""

_UNFENCED = (
    "a store without a fence copies nothing, for the device may still be writing the blocks; "
    "give record_fence() of their cache, taken after the last write"
)


def unfenced() -> None:
    """Stand for the fence that a caller does not have: a store that is given it is refused. Raises TierError."""
    raise TierError(_UNFENCED)


def check_fence(fence: Fence) -> None:
    """Raise TierError for unfenced."""
    if fence is unfenced:
        raise TierError(_UNFENCED)


@dataclass(frozen=True)
class Side:
    """Where blocks come from or go to: a cache, and a request's block table for each of its groups, in positions.

    Tier block i of a group lies in the table's places i * k .. (i + 1) * k, where k blocks of the cache make one of the
    tier; of a group of states it is the state in place 0. Null blocks are never touched.
    of_tier: the cache is another tier's, whose tables have one block for each place, of states too.
    hold: of a source, what keeps its blocks from reuse until they are copied. contents: of a source, the content hashes
    that are stored with the blocks; asked for once the fence has returned. Of a block without one nothing can be
    verified when it is loaded.
    """

    cache: KVCaches
    tables: tuple[Int64s, ...]
    of_tier: bool = False
    hold: Hold | Held | None = None
    contents: ContentHashes | None = None


@dataclass(frozen=True)
class Failed:
    """A block that was not stored or loaded: the place in the prompt, counted in tier blocks, and why."""

    group: str
    place: int
    reason: str

    def __str__(self) -> str:
        return f"group {self.group} block {self.place}: {self.reason}"


@dataclass(frozen=True)
class Moved:
    """What a store or a load came to: for each group the places that were moved, and those that were not.

    present: blocks that were there before and were not stored again. seconds: from the begin of the work to its end;
    waited: in the queue before. sources: of a load, names of the tiers that gave blocks, where that is not the one
    asked.
    """

    places: tuple[Int64s, ...]
    failed: tuple[Failed, ...] = ()
    present: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    sources: tuple[str, ...] = ()

    @property
    def num_blocks(self) -> int:
        """Blocks of all groups that were moved."""
        return sum(len(places) for places in self.places)


class Lease(ABC):
    """Blocks that a lookup found, pinned until release(). A context manager that releases.

    found: for each group, for each place that was asked for, whether it is here.
    """

    found: tuple[Bools, ...]

    @abstractmethod
    def load(self, into: Side, places: Sequence[Int64s]) -> "Future[Moved]":
        """Copy blocks into a cache, in the background. places: for each group some of those that were found.

        The result names what failed; nothing was written where it should have gone. The blocks stay pinned until it is
        there, whatever release() was told meanwhile. Raises TierError for places that were not found; TierBusy where
        the tier has too much to do already.
        """

    def contents(self, group: int, places: Int64s) -> list[bytes]:
        """Return the content hashes of found blocks of a group, see pdtx.tiers.contents; b"" where none is known.

        To be asked before release(). Raises TierError for places that were not found.
        """
        return [b""] * len(places)

    @abstractmethod
    def release(self) -> None:
        """Let the blocks be evicted, once loads of this lease have ended. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Tier(ABC):
    """Blocks kept under keys. Safe to use from several threads.

    name: in messages and results. block_tokens: of a block of every group that counts tokens.
    """

    name: ClassVar[str]
    block_tokens: int

    @abstractmethod
    def lookup(self, keys: PrefixKeys, places: Sequence[Int64s]) -> Lease:
        """Find and pin blocks. places: for each group the blocks that are asked for, counted in tier blocks.

        A block that is still being stored is not found. Raises TierError for keys of another block size.
        """

    @abstractmethod
    def store(self, keys: PrefixKeys, source: Side, places: Sequence[Int64s], fence: Fence) -> "Future[Moved]":
        """Take copies of blocks, in the background, once fence() has returned; those that are here count as present.

        fence: of what writes the blocks; unfenced is refused. source: its hold is taken here, until the last byte is
        copied, so that no other request gets the blocks meanwhile. A block for which there is no room fails, and so
        does one of which a part is a null block. Raises TierBusy where the tier has too much to do already;
        TierError as lookup() does, and without a fence or a hold; StaleBlocks for blocks that have been freed.
        """

    @abstractmethod
    def usage(self) -> TierUsage:
        """Return what the tier holds, and what it has done."""

    @abstractmethod
    def seconds_for(self, nbytes: int, num_runs: int) -> float:
        """Estimate how long a load of so many bytes and runs takes."""

    @abstractmethod
    def close(self) -> None:
        """Finish what is under way, refuse what is waiting, and let everything go. Idempotent."""
