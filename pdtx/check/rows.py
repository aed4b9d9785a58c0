"""Where whole rows come from, after a single transfer: they are looked for among the source's."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pdtx.check.pairs import BufferPair
from pdtx.check.runs import AMBIGUOUS, UNKNOWN
from pdtx.plan.runs import Int64s

_Hashes = npt.NDArray[np.uint64]
_WORD = 8


class RowIndex:
    """The rows of the source, one head of one position each, by what they contain."""

    def __init__(self, pairs: Sequence[BufferPair]) -> None:
        """Compute the hash of every row."""
        hashes, indices, sizes = list[_Hashes](), list[Int64s](), list[Int64s]()
        for pair in pairs:
            for layer in range(pair.source.num_layers):
                which = range(layer, layer + 1), pair.here.whole
                words = np.ascontiguousarray(pair.values(*which)[0][: pair.parts])
                rows = words.reshape(-1, words.shape[-1]).view(np.uint8)
                hashes.append(_hashes(rows))
                first = pair.codes.index(*which)[0][: pair.parts, ..., 0]
                indices.append(first.reshape(-1).astype(np.int64))
                sizes.append(np.full(len(rows), rows.shape[1], np.int64))
        order = np.argsort(np.concatenate(hashes), kind="stable")
        self._hashes = np.concatenate(hashes)[order]
        self._indices, self._sizes = np.concatenate(indices)[order], np.concatenate(sizes)[order]

    def find(self, rows: npt.NDArray[np.uint8]) -> Int64s:
        """Return the index of the first element of each row, UNKNOWN or AMBIGUOUS; rows: shape (n, bytes of a head)."""
        wanted = _hashes(rows)
        at = self._hashes.searchsorted(wanted)
        after = self._hashes.searchsorted(wanted, side="right")
        inside = np.minimum(at, len(self._hashes) - 1)
        known = (after > at) & (self._sizes[inside] == rows.shape[1])
        found = np.where(known, self._indices[inside], UNKNOWN)
        return np.where(known & (after - at > 1), AMBIGUOUS, found)


def _hashes(rows: npt.NDArray[np.uint8]) -> _Hashes:
    """Return a 64-bit hash of each row's bytes, shape (n,)."""
    padded = np.zeros((len(rows), rows.shape[1] + -rows.shape[1] % _WORD), np.uint8)
    padded[:, : rows.shape[1]] = rows
    words = padded.view(np.uint64)
    odd = np.random.default_rng(rows.shape[1]).integers(0, 1 << 63, words.shape[1], np.uint64) * np.uint64(
        2
    ) + np.uint64(1)
    with np.errstate(over="ignore"):
        mixed = words ^ (words >> np.uint64(29))
        found: _Hashes = (mixed * odd).sum(1, dtype=np.uint64)
    return found ^ (found >> np.uint64(32))
