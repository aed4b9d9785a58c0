"""Where the bytes of a tier's blocks lie in its memory, as iovec arrays for reading and writing files."""

from hashlib import blake2b

import numpy as np

from pdtx.cache import KVCaches, PagedBuffer
from pdtx.errors import TierError
from pdtx.plan import Endpoint, build_plan
from pdtx.ranges import Iovecs
from pdtx.ranges.iovec import iovecs


class Extents:
    """The ranges of one group's blocks in host memory: every buffer, then every rank of it, then as its layout has it.

    The order follows from the layouts, their pages and how ranks share states alone (byte_order), so that bytes written
    from one memory can be read into another. nbytes: payload of a block; what a layout leaves between is in no range.
    """

    def __init__(self, cache: KVCaches, group: int) -> None:
        """Plan one block. Raises TierError for memory of a device, or too few blocks; PlanError as build_plan does."""
        if cache.device.type != "cpu":
            raise TierError(f"files are read and written from host memory, not from {cache.device}")
        self._blocks = cache.groups[group].num_blocks
        if self._blocks < 2:
            raise TierError(f"group {cache.groups[group].name} has {self._blocks} blocks, the null block and no other")
        first, step = self._ranges(cache, group, 1), None
        if self._blocks > 2:
            # Every range lies as many bytes further in block b + 1 as in block b: two plans tell of all blocks.
            step = self._ranges(cache, group, 2)[:, 0] - first[:, 0]
        self._first, self._step = first, np.zeros(len(first), np.uint64) if step is None else step
        self.nbytes = int(first[:, 1].sum())
        self._unit = int(np.gcd.reduce(np.concatenate([self._first.reshape(-1), self._step])))

    @staticmethod
    def _ranges(cache: KVCaches, group: int, block: int) -> Iovecs:
        positions, table = range(cache.groups[group].block_size), np.array([block], np.int64)
        found = [np.empty((0, 2), np.uint64)]
        for buffer in cache.buffers_of(group):
            end = Endpoint.of(buffer.layout, table)
            slices = build_plan(end, end, positions).source()
            found += [iovecs(rank.memory.data_ptr(), slices) for rank in buffer.ranks]
        return np.concatenate(found)

    def __len__(self) -> int:
        """Ranges of a block."""
        return len(self._first)

    def of(self, block: int) -> Iovecs:
        """Return a block's ranges, uint64, shape (ranges, 2). Raises TierError for the null block and beyond."""
        if not 0 < block < self._blocks:
            raise TierError(f"block {block} is none of 1..{self._blocks - 1}")
        vectors = self._first.copy()
        vectors[:, 0] += self._step * np.uint64(block - 1)
        return vectors

    def aligned(self, unit: int) -> bool:
        """Whether all ranges of all blocks begin and end at multiples of unit bytes, as O_DIRECT asks for."""
        return self._unit % unit == 0


def byte_order(buffer: PagedBuffer) -> str:
    """Name the order in which a block's bytes lie in a file: the layout, and the pages that make up a block.

    Of states of several ranks also how they share them, as a digest.
    """
    pages = buffer.layout.blocks_per_manager_block
    name = buffer.layout.name if pages == 1 else f"{buffer.layout.name} in {pages} pages"
    if buffer.sharding is None or buffer.tp_size == 1:
        return name
    return f"{name} shared {blake2b(repr(buffer.sharding).encode(), digest_size=8).hexdigest()}"


def same_blocks(ours: KVCaches, theirs: KVCaches, group: int) -> bool:
    """Whether a block of a group has the same bytes in the same order in both, as far as Extents goes."""
    if theirs.device.type != "cpu" or ours.groups[group].block_size != theirs.groups[group].block_size:
        return False
    pairs = [cache.buffers_of(group) for cache in (ours, theirs)]
    return len(pairs[0]) == len(pairs[1]) and all(
        (a.name, a.spec, a.layer_names, a.tp_size, byte_order(a))
        == (b.name, b.spec, b.layer_names, b.tp_size, byte_order(b))
        for a, b in zip(*pairs, strict=True)
    )
