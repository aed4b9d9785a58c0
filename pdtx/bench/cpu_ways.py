"""The CPU tier's ways, and copies of the same runs."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np

from pdtx.bench.scene import Tables, TierScene
from pdtx.bench.settings import RateSettings, room_for
from pdtx.bench.turns import Way
from pdtx.bench.ways import CopyRuns, TierLoad, TierStore, fill
from pdtx.cache import KVCaches
from pdtx.tiers.cpu import CpuTier
from pdtx.tiers.geometry import tier_caches


@contextmanager
def cpu_ways(scene: TierScene, settings: RateSettings) -> Iterator[dict[str, Way]]:
    """Make the CPU tier's ways, "store" and "load", and what they are compared with, "store against" and so on."""
    memory, yardstick = (_tier_caches(scene, settings) for _ in range(2))
    tables: Tables = tuple(np.arange(1, scene.tier_blocks + 1, dtype=np.int64) for _ in memory.groups)
    with closing(CpuTier(memory, like=scene.source)) as tier:
        fill(tier, scene)
        detail = ", ".join(f"{name} {value}" for name, value in tier.usage().details.items())
        yield {
            "store": TierStore("CPU tier store", detail, scene, tier),
            "store against": CopyRuns(scene, yardstick, tables),
            "load": TierLoad("CPU tier load", "", scene, tier),
            "load against": CopyRuns(scene, yardstick, tables, load=True),
        }


def _tier_caches(scene: TierScene, settings: RateSettings) -> KVCaches:
    return tier_caches(
        scene.source,
        block_tokens=scene.tier_block_tokens,
        nbytes=room_for(scene),
        layouts=settings.tier_layouts,
    )
