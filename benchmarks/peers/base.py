"""What a yardstick is, and the bytes that all of them move."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.peers.child import Child, awake
from pdtx.bench.turns import MOVES_A_ROUND
from pdtx.cache.memory import allocate
from pdtx.errors import InputError
from pdtx.plan import Runs
from pdtx.plan.runs import Int64s

Words = npt.NDArray[np.uint64]

_WORD = 8
_CODE = np.uint64(0x9E3779B97F4A7C15)
_POISON = 0xEE
_POISON_WORD = np.uint64(0xEEEE_EEEE_EEEE_EEEE)
_CHECKED_AT_ONCE = 4 << 20


@dataclass(frozen=True, eq=False)
class Workload:
    """Blocks of a paged cache: in each of so many regions, one run of unit bytes for each block.

    unit: a multiple of 8. pool: blocks that a region holds. src_ids, dst_ids: the blocks moved and where they go;
    int64, shape (blocks,).
    """

    unit: int
    regions: int
    pool: int
    src_ids: Int64s
    dst_ids: Int64s

    def __post_init__(self) -> None:
        if self.unit <= 0 or self.unit % _WORD:
            raise InputError(f"a workload's runs have {self.unit} bytes, which is no multiple of {_WORD}")

    @classmethod
    def random(
        cls, *, unit: int = 32 << 10, regions: int = 64, blocks: int = 128, pool: int = 257, seed: int = 1
    ) -> "Workload":
        """Return random blocks on both sides; by default of Llama-3-8B, K and V of 32 layers, 256 MiB."""
        generator = np.random.default_rng(seed)
        src, dst = (generator.permutation(pool)[:blocks].astype(np.int64) for _ in range(2))
        return cls(unit, regions, pool, src, dst)

    @classmethod
    def bulk(cls, nbytes: int) -> "Workload":
        """Return one contiguous buffer of nbytes, a multiple of 8, moved as a whole."""
        unit = math.gcd(nbytes, 32 << 10)
        ids = np.arange(nbytes // unit, dtype=np.int64)
        return cls(unit, 1, len(ids), ids, ids)

    @property
    def nbytes(self) -> int:
        """Bytes moved."""
        return self.regions * len(self.src_ids) * self.unit

    @property
    def memory_bytes(self) -> int:
        """Bytes of a cache."""
        return self.regions * self.pool * self.unit

    @property
    def src_units(self) -> Int64s:
        """Which units of the source's cache are moved, region by region; int64, shape (regions * blocks,)."""
        return self._units(self.src_ids)

    @property
    def dst_units(self) -> Int64s:
        """Which units of the destination's cache they become, in the same order."""
        return self._units(self.dst_ids)

    @property
    def runs(self) -> Runs:
        """The same as runs of bytes, joined where they touch on both sides."""
        src, dst = self.src_units * self.unit, self.dst_units * self.unit
        return Runs(src, dst, np.full(len(src), self.unit, np.int64)).merged()

    def _units(self, ids: Int64s) -> Int64s:
        units: Int64s = (np.arange(self.regions, dtype=np.int64)[:, None] * self.pool + ids[None, :]).reshape(-1)
        return units


class CacheMemory:
    """One side's cache. Every word of the source says where it lies, so that nothing misplaced looks right."""

    def __init__(self, workload: Workload) -> None:
        torch.set_num_threads(1)
        self.workload = workload
        # The same allocator as pdtx's own caches, so both sides of a comparison have pages of the same kind.
        self.tensor = allocate(workload.memory_bytes, torch.device("cpu"))
        # Shape (units, words of a unit).
        self.words: Words = self.tensor.numpy().view(np.uint64).reshape(-1, workload.unit // _WORD)
        self.poison()

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self.tensor.data_ptr()

    def fill(self) -> None:
        """Write the source's words."""
        for first, stop in self._pieces():
            self.words[first:stop] = self._codes(np.arange(first, stop))

    def poison(self) -> None:
        """Make sure that nothing of an earlier round is left."""
        self.tensor.fill_(_POISON)

    def wrong(self) -> int:
        """Count the words that are not what the destination must hold; those that must not change count as well."""
        origins, wrong = np.full(len(self.words), -1, np.int64), 0
        origins[self.workload.dst_units] = self.workload.src_units
        for first, stop in self._pieces():
            here = origins[first:stop]
            expected = np.where(here[:, None] < 0, _POISON_WORD, self._codes(here))
            wrong += int(np.count_nonzero(self.words[first:stop] != expected))
        return wrong

    def _pieces(self) -> list[tuple[int, int]]:
        step, total = max(1, _CHECKED_AT_ONCE // self.workload.unit), len(self.words)
        return [(first, min(first + step, total)) for first in range(0, total, step)]

    def _codes(self, units: Int64s) -> Words:
        """Return the words of units, shape (units, words of a unit)."""
        per_unit = self.words.shape[1]
        numbers = (units[:, None] * per_unit + np.arange(1, per_unit + 1)).astype(np.uint64)
        codes: Words = np.multiply(numbers, _CODE)
        return codes


class Peer(ABC):
    """A yardstick, used as a context manager: its processes start on entry and are gone on exit.

    name: what it is, for a row. detail: what it runs with. nbytes: what one round moves. wrong: words that did not
    arrive as they were sent, over all rounds so far.
    """

    wrong = 0

    def __init__(self, name: str, detail: str, nbytes: int) -> None:
        self.name, self.detail, self.nbytes = name, detail, nbytes

    @abstractmethod
    def start(self) -> None:
        """Start the processes and connect them. Raises InputError if a package is missing, PdtxError if one fails."""

    @abstractmethod
    def round(self) -> float:
        """Move the bytes a few times and verify them; return the seconds of a move alone, the median.

        Raises PdtxError.
        """

    @abstractmethod
    def stop(self) -> None:
        """End the processes. Idempotent."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


Cache = TypeVar("Cache", bound=CacheMemory)


class PairPeer(Peer, Generic[Cache]):
    """A yardstick of two processes, each with a cache. Between rounds both are stopped. repeat: moves in a round."""

    def __init__(self, name: str, detail: str, workload: Workload, *, repeat: int = MOVES_A_ROUND) -> None:
        super().__init__(name, detail, workload.nbytes)
        self.workload, self._repeat = workload, repeat
        self._children = list[Child[Cache]]()

    @abstractmethod
    def children(self) -> Sequence[Child[Cache]]:
        """Start the two processes, the source's first."""

    @abstractmethod
    def connect(self, source: Child[Cache], destination: Child[Cache]) -> None:
        """Make the two ready to move."""

    @abstractmethod
    def move(self, source: Child[Cache], destination: Child[Cache]) -> float:
        """Move once, return the seconds."""

    def start(self) -> None:
        """Start and connect both processes, see Peer."""
        self._children = list(self.children())
        for child in self._children:
            child.ready()
        source, destination = self._children
        source.call(CacheMemory.fill)
        self.connect(source, destination)
        for child in self._children:
            child.pause()

    def round(self) -> float:
        """Move and verify, see Peer."""
        source, destination = self._children
        with awake(source, destination):
            destination.call(CacheMemory.poison)
            seconds = median(self.move(source, destination) for _ in range(self._repeat))
            self.wrong += destination.call(CacheMemory.wrong)
        return seconds

    def stop(self) -> None:
        """End both processes, see Peer."""
        while self._children:
            self._children.pop().end()
