"""What stands in a synthetic cache: bytes that follow from a token and all before it, as real keys and values do."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from pdtx.cache import KVCaches, PagedBuffer, Verification
from pdtx.cache.verify import NOTHING_COMPARED, Naming, Rows, compare
from pdtx.plan.runs import Int64s

Words = npt.NDArray[np.uint64]

_STEP = np.uint64(0xD1342543DE82EF95)  # odd, so that no token is forgotten however many come after it
_WORD = 8


def mixed(words: Words) -> Words:
    """Return words whose bits all depend on all bits of the given ones; different ones stay different."""
    with np.errstate(over="ignore"):
        for shift, factor in ((32, 0xE9846AF9B1A615D9), (32, 0xE9846AF9B1A615D9)):
            words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return words ^ (words >> np.uint64(28))


def prefix_codes(token_ids: Sequence[int] | Int64s) -> Words:
    """Return a word for each token of a prompt that depends on it and all before it: shape (tokens,)."""
    tokens = np.asarray(token_ids).astype(np.uint64)
    with np.errstate(over="ignore"):
        weights = np.cumprod(np.full(len(tokens), _STEP))
        return mixed(np.cumsum(mixed(tokens + np.uint64(1)) * weights))


class PrefixContents:
    """The contents of a cache, by layers' names: the same on both sides whatever their layouts are."""

    def __init__(self, cache: KVCaches) -> None:
        self.cache = cache
        self._patterns = [[_pattern(buffer, name) for name in buffer.layer_names] for buffer in cache.buffers]

    def rows(self, buffer: int, layer: int, codes: Words) -> Rows:
        """Return what a layer keeps of positions with these codes, in canonical form (see PagedBuffer)."""
        parts, positions, heads, nbytes = self.cache.buffers[buffer].rows_shape(len(codes))
        pattern = self._patterns[buffer][layer]  # (parts, heads, words)
        words = codes[None, :, None, None] ^ pattern[:, None]
        return torch.from_numpy(words.view(np.uint8).reshape(parts, positions, heads, -1)[..., :nbytes])

    def check(self, tables: Sequence[Int64s], codes: Words) -> Verification:
        """Compare all that a decoder needs of a prompt with what its tokens say. tables: for each group."""
        found = NOTHING_COMPARED
        for index, buffer in enumerate(self.cache.buffers):
            group = self.cache.groups[buffer.group]
            needed = group.positions(len(codes))
            table = torch.as_tensor(tables[buffer.group])
            naming = Naming(buffer.name, group.name, buffer.layer_names, heads=buffer.rows_shape(1)[2])
            for layer in range(buffer.num_layers):
                there = buffer.canonical(layer, table, needed.start, needed.stop)
                meant = self.rows(index, layer, codes[needed.start : needed.stop])
                found += compare(there, meant, layer=layer, start=needed.start, itemsize=buffer.itemsize, naming=naming)
        return found


def _pattern(buffer: PagedBuffer, name: str) -> Words:
    """Return what tells a layer, K from V, heads and channels apart: shape (parts, heads, words of a head)."""
    parts, _, heads, nbytes = buffer.rows_shape(1)
    words = -(-nbytes // _WORD)
    salt = np.uint64(xxhash.xxh3_64_intdigest(name.encode()))
    numbers = np.arange(parts * heads * words, dtype=np.uint64)
    with np.errstate(over="ignore"):
        return mixed(numbers + salt).reshape(parts, heads, words)
