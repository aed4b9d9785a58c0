"""Rates of the CPU tier against memcpy, and of the disk tier against plain files, all in one run."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pdtx.bench.caches import Layers
from pdtx.bench.cpu_ways import cpu_ways
from pdtx.bench.disk_ways import disk_ways
from pdtx.bench.scene import TierScene
from pdtx.bench.settings import RateSettings
from pdtx.bench.turns import Timed, in_turns
from pdtx.errors import TierError

Told = Callable[[str, int], None]
"""Told what has been measured, and how many rounds of it; 0 is the one that warms up."""


@dataclass(frozen=True)
class Rate:
    """One comparison. seconds, against_seconds: of each round. wrong: elements, of both sides and all rounds."""

    name: str
    nbytes: int
    against: str
    seconds: tuple[float, ...]
    against_seconds: tuple[float, ...]
    rate: float
    against_rate: float
    wrong: int
    detail: str

    @classmethod
    def of(cls, ours: Timed, theirs: Timed) -> "Rate":
        """Compare two ways."""
        return cls(
            ours.way.name,
            ours.way.nbytes,
            theirs.way.name,
            tuple(ours.seconds),
            tuple(theirs.seconds),
            ours.rate,
            theirs.rate,
            ours.way.wrong + theirs.way.wrong,
            "; ".join(one for one in (ours.way.detail, theirs.way.detail) if one),
        )

    @property
    def ratio(self) -> float:
        """How many times as fast as what it is compared with, by the medians."""
        return self.rate / self.against_rate


def measure_rates(layers: Layers, settings: RateSettings, told: Told = lambda *_: None) -> list[Rate]:
    """Measure stores and loads of both tiers, each in turns with what it is compared with.

    Raises TierError where a tier does not do what it is asked for, InputError for a directory that cannot be used.
    """
    scene = TierScene(layers, layouts=settings.layouts, factor=settings.factor, blocks=settings.blocks)
    found = list[Rate]()
    for name, ways in (("CPU tier", cpu_ways), ("disk tier", disk_ways)):
        with ways(scene, settings) as made:
            timed = in_turns(made, settings.rounds, partial(told, name))
        found += [Rate.of(timed["store"], timed["store against"]), Rate.of(timed["load"], timed["load against"])]
    if wrong := scene.wrong_source():
        raise TierError(f"the cache that was stored from was changed: {wrong} elements")
    return found
