"""Whether time grows with the number of blocks and no faster: 16 to 8,192 blocks of a Llama-3-8B cache.

A request has as many layers as memory allows, 32 at most; a block is compared by the time of one of its layers.
All sizes are measured in turns, in the same memory of the same two processes.
"""

import os
from dataclasses import replace

from benchmarks.contest import Measured, measure_in_turns
from benchmarks.pair import MoverPair
from benchmarks.peers import Peer
from benchmarks.rows import Row
from benchmarks.settings import Settings
from benchmarks.workload import LLAMA_CASE, Case
from pdtx.errors import PdtxError

BLOCKS = (16, 64, 256, 1_024, 4_096, 8_192)
_QUICK_BLOCKS = (2, 5)
FLAT = 0.85

_CACHE = (
    "the processor's caches, which hold small requests; for the smallest, what every transfer costs whatever its size"
)


def growth(settings: Settings) -> list[Row]:
    """One row for each mover."""
    return [_row(mover, settings) for mover in ("tcp", "shm")]


def cases(memory_bytes: int, settings: Settings) -> list[Case]:
    """Return a request of each size; with memory of 24 GiB that of 8,192 blocks has 4 layers, 2 GiB.

    A request may have a tenth of the memory: there are two caches of twice as much, and what checking needs.
    """
    found = list[Case]()
    for blocks in _QUICK_BLOCKS if settings.quick else BLOCKS:
        one_layer = replace(LLAMA_CASE, blocks=blocks, layers=1).nbytes
        layers = 1 << max(0, (memory_bytes // 10 // one_layer).bit_length() - 1)
        found.append(replace(LLAMA_CASE, blocks=blocks, layers=min(layers, 2 if settings.quick else LLAMA_CASE.layers)))
    return found


class _Point(Peer):
    """One size, moved by a pair that all sizes share."""

    def __init__(self, pair: MoverPair, case: Case) -> None:
        super().__init__(f"{pair.name} {case.blocks} blocks", "", case.nbytes)
        self._pair, self._case = pair, case

    def start(self) -> None:
        """The pair has been started."""

    def round(self) -> float:
        """Let the pair move this size once."""
        before = self._pair.wrong
        self._pair.lay(self._case)
        seconds = self._pair.round()
        self.wrong += self._pair.wrong - before
        self.detail = self._pair.detail
        return seconds

    def stop(self) -> None:
        """The pair is stopped by who has started it."""


def _row(mover: str, settings: Settings) -> Row:
    sizes = cases(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), settings)
    name = f"{mover} growth {sizes[0].blocks}..{sizes[-1].blocks} blocks, slowest : fastest"
    pair = MoverPair(mover, sizes[0], room=max(case.room for case in sizes))
    try:
        with pair:
            got = measure_in_turns({f"{case.blocks}": _Point(pair, case) for case in sizes}, settings.rounds)
    except PdtxError as error:
        failed = Measured(name)
        failed.give_up(error)
        return Row(name=name, unit="GB/s", at_least=FLAT, missing=failed.missing, failed=failed.failed)
    return row_of_sizes(name, sizes, list(got.values()))


def row_of_sizes(name: str, sizes: list[Case], got: list[Measured]) -> Row:
    """Compare the rate of the slowest size with that of the fastest: the bytes of a block of a layer are the same."""
    missing = [f"{one.name}: {one.missing}" for one in got if one.missing]
    if missing:
        failed = any(one.failed for one in got)
        return Row(name=name, unit="GB/s", at_least=FLAT, missing="; ".join(missing), failed=failed)
    per_block = [one.typical / (case.blocks * case.layers) for one, case in zip(got, sizes, strict=True)]
    fastest, slowest = (got[per_block.index(pick(per_block))] for pick in (min, max))
    points = [
        f"{case.blocks} x {case.layers} {seconds * 1e6:.4g} us" for seconds, case in zip(per_block, sizes, strict=True)
    ]
    return Row(
        name=name,
        unit="GB/s",
        ours=slowest.rates,
        reference=fastest.rates,
        at_least=FLAT,
        wrong=sum(one.wrong for one in got),
        against=fastest.name,
        detail=f"{slowest.name}; blocks x layers, time a block and layer: {', '.join(points)}; {slowest.detail}",
        limit=_CACHE,
    )
