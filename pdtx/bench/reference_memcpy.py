"""Copying runs of the same sizes within one process, on one thread: the limit of everything on one host."""

import time
from collections.abc import Mapping

import numpy as np
import torch

from pdtx.bench.reference_memory import Rotating
from pdtx.native import Memory, library
from pdtx.plan.runs import Int64s

_USUAL_RUN = 32 << 10
"""Bytes of a run where nobody says: 16 tokens of 8 heads of 128 two-byte channels."""

_MOST_RUNS = 1 << 22
"""Laid out at once: runs can be as short as an element, and each takes 24 bytes to tell where it lies."""

_RUN_BYTES = 64
"""Of a run, while it is being laid out."""

_SEED = 1


class Memcpy:
    """Runs lie in random places of both memories, as blocks of caches do. detail: by what they are copied."""

    def __init__(self, nbytes: int, run_sizes: Mapping[int, int] | None = None, max_bytes: int | None = None) -> None:
        """run_sizes: from bytes to how many runs have them; taken as often as fits into nbytes. max_bytes: of memory.

        Raises InputError if the memory cannot be had.
        """
        kinds = {size: count for size, count in (run_sizes or {}).items() if size > 0 and count > 0}
        kinds = kinds or {_USUAL_RUN: 1}
        # A quarter for telling where runs lie, the rest for both memories.
        most_runs = _MOST_RUNS if max_bytes is None else max(1, min(_MOST_RUNS, max_bytes // 4 // _RUN_BYTES))
        room = None if max_bytes is None else max_bytes * 3 // 8
        most = most_runs * max(1, sum(size * count for size, count in kinds.items()) // sum(kinds.values()))
        self._from, self._to = Rotating(nbytes, most, room), Rotating(nbytes, most, room)
        self._sizes = _sizes(self._from.piece_bytes, kinds, most_runs)
        random = np.random.default_rng(_SEED)
        self._src, self._dst = (_scattered(self._sizes, random) for _ in range(2))
        self._native = library()
        how = "a C loop of memcpy" if self._native is not None else "numpy, a slice at a time"
        mean = self._from.piece_bytes // len(self._sizes)
        self.detail = f"runs of {mean:,} B on average, {how}, one thread"

    def round(self) -> float:
        """Copy once; return the seconds."""
        begun = time.perf_counter()
        for destination, source in zip(self._to.pieces(), self._from.pieces(), strict=True):
            self._copy(destination, source)
        return time.perf_counter() - begun

    def _copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        if len(source) < self._from.piece_bytes:  # the rest of a round of several pieces
            destination.copy_(source)
            return
        if self._native is not None:
            here, there = (Memory(each.data_ptr(), each.numel()) for each in (destination, source))
            self._native.copy_runs(here, there, self._dst, self._src, self._sizes)
            return
        to, origin = destination.numpy(), source.numpy()
        for dst, src, size in zip(self._dst.tolist(), self._src.tolist(), self._sizes.tolist(), strict=True):
            to[dst : dst + size] = origin[src : src + size]

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._from.free()
        self._to.free()
        self._sizes = self._src = self._dst = np.zeros(0, np.int64)


def _sizes(nbytes: int, kinds: Mapping[int, int], most: int) -> Int64s:
    """Return sizes of runs that come to nbytes exactly, in the given proportions; the last one is what is left.

    most: about so many of them, where few large ones and very many small ones leave much to the small ones.
    """
    total = sum(size * count for size, count in kinds.items())
    # Proportions are kept by taking all of the case as often as it fits, and then from the largest on.
    whole, rest = divmod(nbytes, total)
    sizes = [np.full(count * whole, size, np.int64) for size, count in kinds.items()] if whole else []
    left = max(0, most - whole * sum(kinds.values()))
    for size in sorted((size for size in kinds if size <= rest), reverse=True):
        count = min(kinds[size], rest // size, left)
        sizes.append(np.full(count, size, np.int64))
        rest, left = rest - count * size, left - count
    return np.concatenate([*sizes, np.full(min(rest, 1), rest, np.int64)])


def _scattered(sizes: Int64s, random: np.random.Generator) -> Int64s:
    """Return offsets of runs that lie in an order by chance, without gaps."""
    order = random.permutation(len(sizes))
    offsets = np.empty(len(sizes), np.int64)
    offsets[order] = np.cumsum(sizes[order]) - sizes[order]
    return offsets
