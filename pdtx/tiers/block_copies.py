"""Copies of one tier block at a time between two caches: planned once, and then placed by multiplication."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pdtx.cache import KVCaches
from pdtx.errors import PlanError
from pdtx.parallel import RankTransfer
from pdtx.plan.runs import Int64s, Runs
from pdtx.tiers.copies import Copier, Pair, Regions, regions_of


@dataclass(frozen=True)
class _Places:
    """Where runs lie on one side, whatever its blocks: each in the block row[which], at first + step * block.

    All int64, shape (runs,).
    """

    which: Int64s
    first: Int64s
    step: Int64s

    @classmethod
    def between(cls, which: int, tables: tuple[Int64s, Int64s], offsets: tuple[Int64s, Int64s]) -> "_Places":
        """Tell from the offsets that runs have with two tables; all of them are in one block of a table, `which`."""
        block, other = (int(table[which]) for table in tables)
        # Where there is no other block, it is this one always.
        step = (offsets[1] - offsets[0]) // ((other - block) or 1)
        return cls(np.full(len(step), which, np.int64), offsets[0] - step * block, step)

    @classmethod
    def joined(cls, parts: "Sequence[_Places]") -> "_Places":
        """Put runs one behind the other."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("which", "first", "step")))

    def of(self, row: Int64s) -> Int64s:
        """Return the runs' offsets in the side's region."""
        places: Int64s = self.first + self.step * row[self.which]
        return places


@dataclass(frozen=True)
class _Mould:
    """The runs of one tier block between two ranks of a buffer. nbytes: int64, shape (runs,)."""

    regions: Regions
    src: _Places
    dst: _Places
    nbytes: Int64s


class BlockCopier(Copier):
    """Copies single blocks, for each of which a plan would cost more than the copy. See Copier."""

    def __init__(self, src: KVCaches, dst: KVCaches) -> None:
        """Raise what Copier does."""
        super().__init__(src, dst)
        self._moulds, self._lock = dict[tuple[int, int, int, int], list[_Mould]](), threading.Lock()

    def copy_block(self, group: int, src: Int64s, dst: Int64s, positions: int, *, past_caches: bool = False) -> None:
        """Copy the positions of one tier block: it is one block of one side, and one or several of the other.

        src, dst: either side's blocks, int64. past_caches: see Native.copy_runs. Returns when the bytes are there.
        Raises PlanError for blocks that cannot be; nothing was written then.
        """
        _check_row(self._src, group, src)
        _check_row(self._dst, group, dst)
        for mould in self._moulds_of(group, len(src), len(dst), positions):
            runs = Runs(mould.src.of(src), mould.dst.of(dst), mould.nbytes)
            mould.regions.copy(runs, past_caches=past_caches)
        self._finish()

    def _moulds_of(self, group: int, num_src: int, num_dst: int, positions: int) -> list[_Mould]:
        key = group, num_src, num_dst, positions
        with self._lock:
            if key not in self._moulds:
                tables = _tables(self._src, group, num_src), _tables(self._dst, group, num_dst)
                self._moulds[key] = [
                    self._mould(pair, move, *tables, positions) for pair in self._pairs[group] for move in pair.moves
                ]
            return self._moulds[key]

    def _mould(
        self,
        pair: Pair,
        move: RankTransfer,
        src: tuple[Int64s, Int64s],
        dst: tuple[Int64s, Int64s],
        positions: int,
    ) -> _Mould:
        """Plan with two tables on either side: how far the runs have moved from one to the other tells of all."""
        pieces = max(len(src[0]), len(dst[0]))
        there, here, nbytes = list[_Places](), list[_Places](), list[Int64s]()
        for piece in range(pieces):
            # One block at a time: runs that go on in the next would do so with these tables only.
            span = range(positions * piece // pieces, positions * (piece + 1) // pieces)
            one, other = (self._plan(pair, move, *each, span).flat for each in zip(src, dst, strict=True))
            there.append(_Places.between(piece * len(src[0]) // pieces, src, (one.src, other.src)))
            here.append(_Places.between(piece * len(dst[0]) // pieces, dst, (one.dst, other.dst)))
            nbytes.append(one.nbytes)
        return _Mould(regions_of(pair, move), _Places.joined(there), _Places.joined(here), np.concatenate(nbytes))


def _tables(cache: KVCaches, group: int, count: int) -> tuple[Int64s, Int64s]:
    """Return two tables of so many blocks that differ in every place, if there is a block to differ with."""
    table = np.arange(1, count + 1, dtype=np.int64)
    if count > 1:
        return table, np.roll(table, 1)
    return table, table + 1 if cache.groups[group].num_blocks > 2 else table


def _check_row(cache: KVCaches, group: int, row: Int64s) -> None:
    """Raise PlanError for a block that is not there, or twice."""
    blocks, most = row.tolist(), cache.groups[group].num_blocks
    if min(blocks) < 1 or max(blocks) >= most or len(set(blocks)) < len(blocks):
        raise PlanError(
            f"blocks {blocks} of group {cache.groups[group].name}: each must be one of 1..{most - 1}, and none twice "
            "(0 is the null block)"
        )
