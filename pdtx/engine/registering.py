"""A node's cache made known to its mover, once and before the first transfer."""

import logging
from dataclasses import dataclass

from pdtx.cache import KVCaches
from pdtx.transports import Mover, Region
from pdtx.units import format_bytes, format_seconds

logger = logging.getLogger(__name__)


def regions_of(cache: KVCaches) -> tuple[tuple[Region, ...], ...]:
    """Return the memory of a cache as movers take it: for each buffer, for each rank.

    Buffers that begin at one address, as those of groups that share a pool do, have one Region in common, as long as
    the longest of them: plans count from the beginning, and movers know regions by their address and size.
    """
    longest = dict[tuple[str, int], Region]()
    for buffer in cache.buffers:
        for rank in buffer.ranks:
            key, region = (str(rank.memory.device), rank.memory.data_ptr()), Region(rank.memory)
            if key not in longest or longest[key].nbytes < region.nbytes:
                longest[key] = region
    return tuple(
        tuple(longest[str(rank.memory.device), rank.memory.data_ptr()] for rank in buffer.ranks)
        for buffer in cache.buffers
    )


@dataclass(frozen=True)
class CacheRegistration:
    """What was registered of a cache: bytes and seconds of all regions; zeros where a mover needs none."""

    nbytes: int = 0
    seconds: float = 0.0


def register_cache(mover: Mover, cache: KVCaches) -> CacheRegistration:
    """Register all regions of a cache, each once. Raises TransferError for memory that cannot be registered."""
    regions = {id(region): region for ranks in regions_of(cache) for region in ranks}
    answers = [mover.register(region) for region in regions.values()]
    found = [answer for answer in answers if answer is not None]
    total = CacheRegistration(sum(one.nbytes for one in found), sum(one.seconds for one in found))
    if found:
        size, time = format_bytes(total.nbytes), format_seconds(total.seconds)
        logger.info("%s registered %d regions, %s in %s", mover.name, len(found), size, time)
    return total
