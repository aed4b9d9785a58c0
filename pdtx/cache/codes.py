"""Coordinate codes: a fill in which every element says where it belongs."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

POISON = np.array(0xDEAD, np.uint16).astype(np.int16).item()
"""The 2-byte word that a destination is filled with before a transfer."""

POISON_BYTES = POISON.to_bytes(2, "little", signed=True)
"""Its bytes, as they lie in memory."""

Words = npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
"""Unsigned types by the bytes of an element."""


@dataclass(frozen=True)
class CoordinateCodes:
    """Codes of the elements (layer, kv, token, head, channel) of one request.

    The index of an element is ((((layer * 2 + kv) * tokens + token) * heads + head) * channels + channel). Where every
    index fits into an element its code is the index itself; otherwise the index is mixed into all bits of
    the element, so that rows which are far apart do not look alike (plain truncation would repeat every 65,536
    elements, and with round shapes a swapped K and V would pass).

    first: added to every index, so that several buffers have different ones.
    """

    layers: int
    tokens: int
    heads: int
    channels: int
    itemsize: int
    first: int = 0

    @property
    def plain(self) -> bool:
        """Whether a code is the element's index itself."""
        return self.stop <= 1 << (8 * self.itemsize)

    @property
    def stop(self) -> int:
        """One more than the last index."""
        return self.first + self.layers * 2 * self.tokens * self.heads * self.channels

    def of(self, layers: range, tokens: range) -> Words:
        """Return the codes of layers x tokens: shape (layers, 2, tokens, heads, channels), unsigned, itemsize bytes."""
        index = self.index(layers, tokens)
        return (index if self.plain else _mix(index)).astype(WORDS[self.itemsize])

    def digits(self, layers: range, tokens: range, place: int) -> Words:
        """Return digit number place (0: the lowest) of each index, written in digits of itemsize bytes; see of()."""
        shift = np.uint64(8 * self.itemsize * place)
        return (self.index(layers, tokens) >> shift).astype(WORDS[self.itemsize])

    def index(self, layers: range, tokens: range) -> npt.NDArray[np.uint64]:
        """Return the indices of layers x tokens: shape (layers, 2, tokens, heads, channels)."""
        layer = np.arange(layers.start, layers.stop, dtype=np.uint64)[:, None, None, None, None]
        kv = np.arange(2, dtype=np.uint64)[None, :, None, None, None]
        token = np.arange(tokens.start, tokens.stop, dtype=np.uint64)[None, None, :, None, None]
        head = np.arange(self.heads, dtype=np.uint64)[:, None]
        channel = np.arange(self.channels, dtype=np.uint64)
        sizes = (np.uint64(n) for n in (2, self.tokens, self.heads, self.channels))
        index = layer
        for size, coordinate in zip(sizes, (kv, token, head, channel), strict=True):
            index = index * size + coordinate
        return index + np.uint64(self.first)


def _mix(index: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spread an index over 64 bits (the finaliser of splitmix64); distinct indices stay distinct."""
    with np.errstate(over="ignore"):
        index = index + np.uint64(0x9E3779B97F4A7C15)
        index = (index ^ (index >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        index = (index ^ (index >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (index ^ (index >> np.uint64(31))) >> np.uint64(32)
