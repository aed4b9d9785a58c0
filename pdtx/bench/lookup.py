"""How long it takes to find blocks, whatever they hold."""

import time
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np

from pdtx.bench.caches import model_caches
from pdtx.bench.ways import DEADLINE_S
from pdtx.cache import record_fence
from pdtx.kvspec import FullAttentionSpec
from pdtx.tiers import Held, Side, prefix_keys
from pdtx.tiers.cpu import CpuTier

BLOCKS = 8_192
LAYOUT = "flash_attn_nhd"
_SPEC = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype="bfloat16")
_FINGERPRINT = bytes(32)


@dataclass(frozen=True)
class Lookup:
    """Seconds are medians. lookup_s: finding and pinning all blocks; keys_s: naming the blocks of a prompt.

    wrong: blocks that are there and were not found, in all rounds.
    """

    blocks: int
    tokens: int
    lookup_s: float
    release_s: float
    keys_s: float
    wrong: int
    rounds: tuple[float, ...]

    def as_json(self) -> dict[str, object]:
        """Return the figures for a result file."""
        return asdict(self)


def measure_lookup(rounds: int, blocks: int = BLOCKS) -> Lookup:
    """Look blocks up in a CPU tier that is full of them. One more round comes first and does not count."""
    tokens = range(blocks * _SPEC.block_size)
    # Small blocks, for what is looked at are names.
    cache, memory = (model_caches({"layers.0": _SPEC}, layouts=(LAYOUT,), num_blocks=blocks + 1) for _ in range(2))
    places = (np.arange(blocks, dtype=np.int64),)
    tier = CpuTier(memory, like=cache)
    try:
        keys = prefix_keys(tokens, _SPEC.block_size, _FINGERPRINT)
        side = Side(cache, (places[0] + 1,), hold=Held.BY_CALLER)
        tier.store(keys, side, places, record_fence(cache.device)).result(DEADLINE_S)
        times, wrong = list[tuple[float, float, float]](), 0
        for _ in range(rounds + 1):
            begun = time.perf_counter()
            keys = prefix_keys(tokens, _SPEC.block_size, _FINGERPRINT)
            named = time.perf_counter()
            lease = tier.lookup(keys, places)
            found = time.perf_counter()
            lease.release()
            times.append((found - named, time.perf_counter() - found, named - begun))
            wrong += blocks - int(lease.found[0].sum())
    finally:
        tier.close()
    lookups, releases, namings = (tuple(one) for one in zip(*times[1:], strict=True))
    return Lookup(blocks, len(tokens), median(lookups), median(releases), median(namings), wrong, lookups)
