"""What of a request has arrived, is arriving and is missing: for every buffer and every pair of ranks."""

from collections.abc import Sequence
from enum import Enum
from itertools import islice

import numpy as np
import numpy.typing as npt

from pdtx.engine.matching import BufferMatch
from pdtx.errors import TransferRefused
from pdtx.transports import TransferKey

_ABSENT, _EXPECTED, _ARRIVED, _NOTICED = 0, 1, 2, 3
_MOST_NAMED = 4
"""Buffers that one message says to be incomplete."""


class Notice(Enum):
    """What a producer's word that a payload has been delivered is worth."""

    NEW = "new"
    DUPLICATE = "it was said before"
    UNKNOWN = "no such payload has been received"


class Arrivals:
    """The slices (layer x position) that a request's payloads bring. Changed only under its Landing's lock.

    matches: of all buffers; positions: of each of them, those that must be moved.
    """

    def __init__(self, matches: Sequence[BufferMatch], positions: Sequence[range]) -> None:
        self._buffers = tuple(_Buffer(*pair) for pair in zip(matches, positions, strict=True))

    def expect(self, key: TransferKey) -> tuple[BufferMatch, int]:
        """Note that key's payload is coming; return its buffer, and which of its moves it is.

        Raises TransferRefused if it is outside the request, or any of it came before.
        """
        if not 0 <= key.buffer < len(self._buffers):
            raise TransferRefused(f"{key} is for buffer {key.buffer} of {len(self._buffers)}")
        buffer = self._buffers[key.buffer]
        return buffer.match, buffer.expect(key)

    def arrive(self, key: TransferKey, nbytes: int) -> None:
        """Note that key's payload, which was expected, lies in the cache."""
        self._buffers[key.buffer].arrive(key, nbytes)

    def notice(self, key: TransferKey) -> Notice:
        """Take the producer's word that key's payload has been delivered. It counts only for what lies here."""
        if not 0 <= key.buffer < len(self._buffers):
            return Notice.UNKNOWN
        return self._buffers[key.buffer].notice(key)

    def unnoticed(self) -> str | None:
        """Say what has arrived without the producer's word that it was delivered, as missing() does."""
        lacking = (text for buffer in self._buffers if (text := buffer.unnoticed()) is not None)
        named = list(islice(lacking, _MOST_NAMED))
        return "; ".join(named) if named else None

    def missing(self) -> str | None:
        """Say which groups and buffers are not complete, and where the first of each begins; None if all are."""
        lacking = (text for buffer in self._buffers if (text := buffer.missing()) is not None)
        named = list(islice(lacking, _MOST_NAMED))
        return "; ".join(named) if named else None


class _Buffer:
    """One buffer's slices, apart for each move."""

    def __init__(self, match: BufferMatch, positions: range) -> None:
        self.match, self._positions = match, positions
        shape = (len(match.layers), len(positions))
        # Zeros cost no memory before they are written, so a great request costs what has come of it.
        self._states: tuple[npt.NDArray[np.uint8], ...] = tuple(np.zeros(shape, np.uint8) for _ in match.moves)
        self._left = sum(states.size for states in self._states)
        self._nbytes = 0

    def expect(self, key: TransferKey) -> int:
        match, positions = self.match, self._positions
        move = match.move_index.get((key.src_rank, key.dst_rank))
        if move is None:
            raise TransferRefused(f"{key}: rank {key.dst_rank} takes nothing of buffer {match.name} from there")
        layers = len(match.layers)
        if not self._holds(key):
            raise TransferRefused(
                f"{key} is not a part of {layers} layers x positions {positions.start}..{positions.stop} "
                f"of buffer {match.name}"
            )
        if not match.consecutive(range(key.layer_start, key.layer_stop)):
            raise TransferRefused(f"{key}: these layers do not lie one after another at the producer")
        part = self._part(move, key)
        if part.any():
            raise TransferRefused(f"{key} was received before")
        part[:] = _EXPECTED
        return move

    def arrive(self, key: TransferKey, nbytes: int) -> None:
        part = self._part(self.match.move_index[key.src_rank, key.dst_rank], key)
        part[:] = _ARRIVED
        self._left -= part.size
        self._nbytes += nbytes

    def notice(self, key: TransferKey) -> Notice:
        move = self.match.move_index.get((key.src_rank, key.dst_rank))
        if move is None or not self._holds(key):
            return Notice.UNKNOWN
        part = self._part(move, key)
        if (part == _NOTICED).all():
            return Notice.DUPLICATE
        if (part != _ARRIVED).any():
            return Notice.UNKNOWN
        part[:] = _NOTICED
        return Notice.NEW

    def _holds(self, key: TransferKey) -> bool:
        """Whether key's ranges lie inside what is moved of this buffer."""
        positions = self._positions
        return (
            0 <= key.layer_start < key.layer_stop <= len(self.match.layers)
            and positions.start <= key.token_start < key.token_stop <= positions.stop
        )

    def _part(self, move: int, key: TransferKey) -> npt.NDArray[np.uint8]:
        first = self._positions.start
        return self._states[move][key.layer_start : key.layer_stop, key.token_start - first : key.token_stop - first]

    def missing(self) -> str | None:
        if not self._left:
            return None
        match, total = self.match, sum(states.size for states in self._states)
        where = f"group {match.group_name}, buffer {match.name}"
        if not self._nbytes:
            return f"{where}: 0 of {self._nbytes_expected()} bytes arrived"
        first = self._first([states < _ARRIVED for states in self._states])
        return f"{where}: {self._left} of {total} layer x position slices have not arrived, {first}"

    def unnoticed(self) -> str | None:
        silent = [states == _ARRIVED for states in self._states]
        count = sum(int(each.sum()) for each in silent)
        if not count:
            return None
        where = f"group {self.match.group_name}, buffer {self.match.name}"
        return f"{where}: no notice of {count} layer x position slices that have arrived, {self._first(silent)}"

    def _first(self, which: list[npt.NDArray[np.bool_]]) -> str:
        """Name the first slice of those that are marked, and its ranks where it could be several."""
        match = self.match
        place, marked = next((place, marked) for place, marked in enumerate(which) if marked.any())
        layer, position = (int(x) for x in np.unravel_index(int(marked.argmax()), marked.shape))
        first = f"first {match.naming.layer(layer)} position {self._positions.start + position}"
        if len(match.moves) > 1:
            first += f" from rank {match.moves[place].src_rank} to rank {match.moves[place].dst_rank}"
        return first

    def _nbytes_expected(self) -> int:
        layout = self.match.consumer.layout
        ranks = len({move.dst_rank for move in self.match.moves})
        slices = ranks * len(self.match.layers) * len(self._positions)
        return slices * layout.bytes_per_block // layout.block_size
