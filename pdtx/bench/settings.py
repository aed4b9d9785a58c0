"""What rates are measured with."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from pdtx.bench.scene import TierScene

PageCache = Literal["auto", "direct", "dropped", "cached"]
PAGE_CACHES: tuple[PageCache, ...] = get_args(PageCache)


@dataclass(frozen=True)
class RateSettings:
    """layouts, tier_layouts: of caches and tiers, see pdtx.layout.parse_layouts; None lets the tiers choose theirs.

    factor, blocks: see TierScene.
    rounds: of which the median counts. directory: for the disk tier; None for the system's temporary one.
    page_cache: what the system may remember of files: nothing that is written or read (direct), nothing that is read
    (dropped), everything (cached); auto is direct where the file system can, or else dropped.
    """

    layouts: tuple[str, ...] = ("flash_attn_nhd",)
    tier_layouts: tuple[str, ...] | None = None
    factor: int = 1
    blocks: int = 128
    rounds: int = 9
    directory: Path | None = None
    page_cache: PageCache = "auto"


def room_for(scene: TierScene) -> int:
    """Return bytes for all blocks of a prompt, the null block, and one more, should there be gaps in the layout."""
    return scene.nbytes // scene.tier_blocks * (scene.tier_blocks + 2)
