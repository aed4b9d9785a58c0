"""A node's cache made known to its mover, once and before the first transfer."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from pdtx.cache import KVCaches, Memory
from pdtx.transports import Mover, Region
from pdtx.units import format_bytes, format_seconds

logger = logging.getLogger(__name__)


def regions_of(cache: KVCaches) -> tuple[dict[int, Region], ...]:
    """Return the memory of a cache as movers take it: for each buffer, by the number of a rank.

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
        {
            number: longest[str(rank.memory.device), rank.memory.data_ptr()]
            for number, rank in zip(buffer.tp_ranks, buffer.ranks, strict=True)
        }
        for buffer in cache.buffers
    )


def unions(regions: Sequence[Region]) -> list[Region]:
    """Return regions in which all of the given ones lie, and which share no byte with one another.

    Those that overlap become one, if their memory is one storage's or the host's.
    """
    joined = list[Region]()
    for region in sorted(regions, key=lambda one: (str(one.memory.device), one.address)):
        last = joined[-1] if joined else None
        if last is not None and _overlap(last, region) and (union := _union(last, region)) is not None:
            joined[-1] = union
        else:
            joined.append(region)
    return joined


def _overlap(one: Region, behind: Region) -> bool:
    return one.memory.device == behind.memory.device and behind.address < one.address + one.nbytes


def _union(one: Region, behind: Region) -> Region | None:
    """Return the region from the first byte of one to the last of both; None if no tensor reaches over both."""
    last = max(one.address + one.nbytes, behind.address + behind.nbytes)
    for region in (one, behind):
        storage = region.memory.untyped_storage()
        if storage.data_ptr() <= one.address and last <= storage.data_ptr() + storage.nbytes():
            whole = Memory.storage_of(region.memory).bytes
            return Region(whole[one.address - storage.data_ptr() : last - storage.data_ptr()])
    return Region(Memory.at(one.address, last - one.address, keep=(one, behind)).bytes) if one.on_cpu else None


@dataclass(frozen=True)
class CacheRegistration:
    """What was registered of a cache: bytes and seconds of all regions; zeros where a mover needs none."""

    nbytes: int = 0
    seconds: float = 0.0


def register_cache(mover: Mover, cache: KVCaches) -> CacheRegistration:
    """Register all regions of a cache; bytes that lie in several once. Raises TransferError where that fails."""
    regions = {id(region): region for ranks in regions_of(cache) for region in ranks.values()}
    answers = [mover.register(region) for region in unions(list(regions.values()))]
    found = [answer for answer in answers if answer is not None]
    total = CacheRegistration(sum(one.nbytes for one in found), sum(one.seconds for one in found))
    if found:
        size, time = format_bytes(total.nbytes), format_seconds(total.seconds)
        logger.info("%s registered %d regions, %s in %s", mover.name, len(found), size, time)
    return total
