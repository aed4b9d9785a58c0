"""Content hashes: what a tier block held when it was stored, whatever its layout, ranks and block size.

Of each buffer of a group XXH3 with 128 bits over the canonical bytes of all its layers at the block's positions; a
block's content hash is those of its group's buffers in their order. They find flipped bytes and blocks that were
swapped or belong to other tokens, and no forger's. Groups that do not count tokens have none: states and what an
encoder made are sent whole, and verified with their source.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from pdtx.cache import PagedBuffer
from pdtx.plan.runs import Int64s
from pdtx.tiers.base import ContentHashes, Side
from pdtx.tiers.copies import compact

HASH_BYTES = 16
NO_HASH = b""
"""Of a block of which nothing is known."""

_BATCH_BYTES = 16 << 20


def hash_contents(side: Side, block_tokens: int, group: int, places: Int64s) -> list[bytes]:
    """Return the content hashes of tier blocks of a group that lie in a cache; NO_HASH for those that are not whole.

    block_tokens: of a tier block. Every byte is read once, a bounded piece at a time. Raises what compact() does.
    """
    if not len(places) or not side.cache.groups[group].counts_tokens:
        return [NO_HASH] * len(places)
    table, whole = compact(side, group, places, block_tokens)
    rows = table.reshape(len(places), -1)[whole]
    parts = [_hash_buffer(buffer, rows, block_tokens) for buffer in side.cache.buffers_of(group)]
    found = iter([b"".join(each) for each in zip(*parts, strict=True)])
    return [next(found) if is_whole else NO_HASH for is_whole in whole.tolist()]


def _hash_buffer(buffer: PagedBuffer, rows: Int64s, block_tokens: int) -> list[bytes]:
    """Return the hash of one buffer for each row of blocks."""
    per_block = buffer.bytes_per_position * block_tokens * buffer.num_layers
    step, hashes = max(1, _BATCH_BYTES // max(1, per_block)), list[bytes]()
    for first in range(0, len(rows), step):
        gathered = _gather(buffer, rows[first : first + step], block_tokens)
        hashes += [xxhash.xxh3_128_digest(block.data) for block in gathered]
    return hashes


def _gather(buffer: PagedBuffer, rows: Int64s, block_tokens: int) -> "npt.NDArray[np.uint8]":
    """Return canonical bytes, uint8, shape (rows, layers, K and V, positions of a tier block, bytes of a position)."""
    table = torch.as_tensor(rows.reshape(-1), device=buffer.device)
    count, gathered = len(rows), list["npt.NDArray[np.uint8]"]()
    for layer in range(buffer.num_layers):
        found = buffer.canonical(layer, table, 0, count * block_tokens).numpy()
        parts = found.shape[0]
        gathered.append(found.reshape(parts, count, -1, found.shape[2] * found.shape[3]).swapaxes(0, 1))
    return np.ascontiguousarray(np.stack(gathered, axis=1))


def known_contents(places: Sequence[Int64s], hashes: Sequence[Sequence[bytes]]) -> Callable[[int, Int64s], list[bytes]]:
    """Return the ContentHashes of blocks whose hashes are known; of other places they are NO_HASH.

    places, hashes: for each group, as many.
    """
    known = [dict(zip(at.tolist(), each, strict=True)) for at, each in zip(places, hashes, strict=True)]
    return lambda group, wanted: [known[group].get(place, NO_HASH) for place in wanted.tolist()]


def contents_to_keep(
    side: Side, block_tokens: int, loaded: Sequence[Int64s], hashes: Sequence[Sequence[bytes]]
) -> ContentHashes:
    """Return what hashes a side's blocks, but for those that were loaded: these keep the hashes that they had, or none.

    loaded, hashes: for each group; empty where nothing was loaded.
    """
    known = known_contents(loaded, hashes)

    def contents(group: int, places: Int64s) -> list[bytes]:
        of_tier = np.isin(places, loaded[group]) if loaded else np.zeros(len(places), bool)
        computed = iter(hash_contents(side, block_tokens, group, places[~of_tier]))
        had = iter(known(group, places[of_tier]) if of_tier.any() else ())
        return [next(had if was_loaded else computed) for was_loaded in of_tier.tolist()]

    return contents
