"""Tiers of blocks: stores and loads of a Llama-3-8B request of 256 MiB, in random blocks, and how long finding takes.

The CPU tier against memcpy of the same runs; the disk tier against plain files of the same sizes, past the page cache
where the file system can. All in one process, in turns; `pdtx bench tier` does the same for other models and layouts.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

from benchmarks.contest import compare, measure_in_turns
from benchmarks.peers import Peer
from benchmarks.rows import Row
from benchmarks.settings import Settings
from benchmarks.workload import LLAMA_CASE
from pdtx.bench.cpu_ways import cpu_ways
from pdtx.bench.disk_ways import disk_ways
from pdtx.bench.lookup import BLOCKS, measure_lookup
from pdtx.bench.scene import TierScene
from pdtx.bench.settings import RateSettings
from pdtx.bench.turns import Way
from pdtx.errors import InputError, PdtxError

CPU_BAR, DISK_BAR, LOOKUP_MS = 0.85, 0.9, 5.0
_QUICK_BLOCKS = 64
_CPU_LIMIT = "memory bandwidth of one core"
_DISK_LIMIT = "the disk, and a checksum of every byte"

MakeWays = Callable[[TierScene, RateSettings], AbstractContextManager[dict[str, Way]]]


class _Peer(Peer):
    """A way of pdtx.bench among the yardsticks; it lives in this process, and whoever makes it ends it."""

    def __init__(self, way: Way) -> None:
        super().__init__(way.name, way.detail, way.nbytes)
        self._way = way

    def start(self) -> None:
        """See Peer."""

    def round(self) -> float:
        """See Peer."""
        seconds = self._way.round()
        self.wrong = self._way.wrong
        return seconds

    def stop(self) -> None:
        """See Peer."""


def tiers(settings: Settings) -> list[Row]:
    """Return the rows of both tiers, then that of looking up."""
    case = settings.case(LLAMA_CASE)
    layers = {f"layers.{layer}": case.spec for layer in range(case.layers)}
    scene = TierScene(layers, layouts=(case.layouts[0],), factor=1, blocks=case.blocks)
    return [
        *_rates("cpu tier", ("memcpy", "memcpy"), CPU_BAR, _CPU_LIMIT, cpu_ways, scene, settings),
        *_rates("disk tier", ("raw pwrite", "raw pread"), DISK_BAR, _DISK_LIMIT, disk_ways, scene, settings),
        _lookup(settings),
    ]


def _rates(
    name: str,
    against: tuple[str, str],
    bar: float,
    limit: str,
    make: MakeWays,
    scene: TierScene,
    settings: Settings,
) -> list[Row]:
    """Measure one tier."""
    titles = {what: f"{name} {what} : {other}" for what, other in zip(("store", "load"), against, strict=True)}
    rates = RateSettings(blocks=scene.blocks, rounds=settings.rounds)
    try:
        with make(scene, rates) as ways:
            got = measure_in_turns({key: _Peer(way) for key, way in ways.items()}, settings.rounds)
    except PdtxError as error:
        failed = not isinstance(error, InputError)
        return [
            Row(name=title, unit="GB/s", at_least=bar, missing=str(error), failed=failed) for title in titles.values()
        ]
    return [
        compare(title, got[what], got[f"{what} against"], at_least=bar, limit=limit) for what, title in titles.items()
    ]


def _lookup(settings: Settings) -> Row:
    """Hold the time of a lookup to its bar."""
    found = measure_lookup(settings.rounds, _QUICK_BLOCKS if settings.quick else BLOCKS)
    return Row(
        name=f"lookup of {found.blocks:,} blocks : {LOOKUP_MS:g} ms",
        unit="ms",
        ours=[seconds * 1e3 for seconds in found.rounds],
        reference=[LOOKUP_MS],
        at_least=1.0,
        wrong=found.wrong,
        less_is_better=True,
        against="the bar itself",
        detail=f"naming {found.tokens:,} tokens {found.keys_s * 1e3:.1f} ms; release {found.release_s * 1e3:.2f} ms",
        limit="Python's look-ups, one a block",
    )
