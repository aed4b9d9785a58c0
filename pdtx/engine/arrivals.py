"""What of a request has arrived, is arriving and is missing: for every buffer and every pair of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice

import numpy as np
import numpy.typing as npt

from pdtx.cache.verify import Naming
from pdtx.engine.describe import CacheFacts
from pdtx.engine.matching import ABSENT, BufferMatch, all_moves
from pdtx.errors import TransferRefused
from pdtx.layout import AnyLayout
from pdtx.protocol import MAX_PARTS, Part
from pdtx.transports import TransferKey

_ABSENT, _EXPECTED, _ARRIVED, _NOTICED, _NEVER = 0, 1, 2, 3, 4
_MOST_NAMED = 4
"""Buffers that one message says to be incomplete."""

States = npt.NDArray[np.uint8]


class Notice(Enum):
    """What a producer's word that a payload has been delivered is worth."""

    NEW = "new"
    DUPLICATE = "it was said before"
    UNKNOWN = "no such payload has been received"


@dataclass(frozen=True)
class ExpectedBuffer:
    """What comes of one of this node's buffers.

    pairs: (source rank, rank here), of all that moves. comes: for each layer, whether it does.
    """

    name: str
    group: int
    group_name: str
    naming: Naming
    layout: AnyLayout
    pairs: tuple[tuple[int, int], ...]
    comes: tuple[bool, ...]


def expected_buffers(consumer: CacheFacts, src_tp: int, not_transferred: frozenset[str]) -> tuple[ExpectedBuffer, ...]:
    """Return what comes of each buffer of a consumer's process from all processes of a producer.

    not_transferred: layers that the producer declares so; those of the consumer are left out, too.
    Raises IncompatiblePeer for ranks that cannot share a layer.
    """
    kept = not_transferred | set(consumer.description.not_transferred)
    found = list[ExpectedBuffer]()
    for buffer in consumer.buffers:
        moves = all_moves(buffer, src_tp, consumer.tp_size)
        pairs = tuple((move.src_rank, move.dst_rank) for move in moves if move.dst_rank in consumer.ranks)
        group = consumer.groups[buffer.group].name
        naming = Naming(buffer.name, group, buffer.layer_names)
        comes = tuple(name not in kept for name in buffer.layer_names)
        found.append(ExpectedBuffer(buffer.name, buffer.group, group, naming, buffer.layout, pairs, comes))
    return tuple(found)


class Arrivals:
    """The slices (layer x position) that a request's payloads bring. Changed only under its Landing's lock.

    buffers: of the node; positions: of each of them, those that must be moved.
    received_bytes, noticed_bytes: of payloads that have arrived, and of those whose delivery was noticed.
    """

    def __init__(self, buffers: Sequence[ExpectedBuffer], positions: Sequence[range]) -> None:
        self._buffers = tuple(_Buffer(*pair) for pair in zip(buffers, positions, strict=True))
        self.received_bytes = self.noticed_bytes = 0

    def expect(self, key: TransferKey, match: BufferMatch) -> int:
        """Note that key's payload is coming, from a process whose buffer match is; return which of its moves it is.

        Raises TransferRefused if it is outside the request, or of what that process sends, or any of it came before.
        """
        return self._buffers[key.buffer].expect(key, match)

    def arrive(self, key: TransferKey, nbytes: int) -> None:
        """Note that key's payload, which was expected, lies in the cache."""
        self._buffers[key.buffer].arrive(key, nbytes)
        self.received_bytes += nbytes

    def notice(self, key: TransferKey, nbytes: int) -> Notice:
        """Take the producer's word that key's payload has been delivered. It counts only for what lies here."""
        if not 0 <= key.buffer < len(self._buffers):
            return Notice.UNKNOWN
        found = self._buffers[key.buffer].notice(key, nbytes)
        self.noticed_bytes += nbytes if found is Notice.NEW else 0
        return found

    def keep_noticed(self, matches: dict[int, BufferMatch]) -> list[Part]:
        """Forget what has come from one process, but for what was noticed; return that, in few parts.

        matches: of that process, by buffer. Called when nothing of it is being written.
        """
        parts = list[Part]()
        for index, match in matches.items():
            buffer = self._buffers[index]
            layers = np.array(match.layers) != ABSENT
            for pair in match.move_index:
                lost = buffer.forget(pair, layers, noticed=False)
                kept = buffer.parts(index, pair, layers)
                if len(parts) + len(kept) > MAX_PARTS:  # it comes again
                    kept = []
                    lost += buffer.forget(pair, layers, noticed=True)
                self.received_bytes -= sum(piece.nbytes for piece in lost)
                self.noticed_bytes -= sum(piece.said or 0 for piece in lost)
                parts += kept
        return parts

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


@dataclass
class _Piece:
    """A payload that has arrived. said: the bytes that the producer's notice of it names, once that is here.

    A payload's bytes are not those of its slices: what moves by groups of tokens or by whole blocks lies in the
    payload that brings it, and in none of the others that share it.
    """

    nbytes: int
    said: int | None = None


_Box = tuple[int, int, int, int]


def _box(key: TransferKey) -> _Box:
    return key.layer_start, key.layer_stop, key.token_start, key.token_stop


class _Buffer:
    """One buffer's slices, and the payloads that brought them, apart for each pair of ranks."""

    def __init__(self, facts: ExpectedBuffer, positions: range) -> None:
        self.facts, self._positions = facts, positions
        shape = (len(facts.comes), len(positions))
        # Zeros cost no memory before they are written, so a great request costs what has come of it.
        self._states: dict[tuple[int, int], States] = {pair: np.zeros(shape, np.uint8) for pair in facts.pairs}
        for states in self._states.values():
            states[[at for at, comes in enumerate(facts.comes) if not comes]] = _NEVER
        self._total = len(facts.pairs) * sum(facts.comes) * len(positions)
        self._left = self._total
        self._pieces: dict[tuple[int, int], dict[_Box, _Piece]] = {pair: {} for pair in facts.pairs}

    def expect(self, key: TransferKey, match: BufferMatch) -> int:
        move = match.move_index.get((key.src_rank, key.dst_rank))
        if move is None:
            raise TransferRefused(f"{key}: rank {key.dst_rank} takes nothing of buffer {match.name} from there")
        if not self._holds(key):
            positions = self._positions
            raise TransferRefused(
                f"{key} is not a part of {len(match.layers)} layers x positions {positions.start}..{positions.stop} "
                f"of buffer {match.name}"
            )
        if not match.consecutive(range(key.layer_start, key.layer_stop)):
            raise TransferRefused(f"{key}: these layers do not lie one after another at the producer")
        part = self._part(key)
        if part.any():
            raise TransferRefused(f"{key} was received before")
        part[:] = _EXPECTED
        return move

    def arrive(self, key: TransferKey, nbytes: int) -> None:
        part = self._part(key)
        part[:] = _ARRIVED
        self._left -= part.size
        self._pieces[key.src_rank, key.dst_rank][_box(key)] = _Piece(nbytes)

    def notice(self, key: TransferKey, nbytes: int) -> Notice:
        piece = self._pieces.get((key.src_rank, key.dst_rank), {}).get(_box(key))
        if piece is None:
            return Notice.UNKNOWN
        if piece.said is not None:
            return Notice.DUPLICATE
        piece.said = nbytes
        self._part(key)[:] = _NOTICED
        return Notice.NEW

    def forget(self, pair: tuple[int, int], layers: npt.NDArray[np.bool_], *, noticed: bool) -> list[_Piece]:
        """Forget what has come of some layers: of what was noticed, or all else; return what had arrived of it."""
        states, pieces = self._states[pair], self._pieces[pair]
        chosen = states == _NOTICED if noticed else (states == _EXPECTED) | (states == _ARRIVED)
        chosen &= layers[:, None]
        self._left += int((states[chosen] >= _ARRIVED).sum())
        states[chosen] = _ABSENT
        lost = [box for box, piece in pieces.items() if layers[box[0]] and (piece.said is not None) == noticed]
        return [pieces.pop(box) for box in lost]

    def parts(self, index: int, pair: tuple[int, int], layers: npt.NDArray[np.bool_]) -> list[Part]:
        """Return what was noticed of some layers: of each layer runs of positions as long as they are.

        Layers one after another with the same runs are one part.
        """
        noticed = (self._states[pair] == _NOTICED) & layers[:, None]
        edges = np.diff(noticed.astype(np.int8), axis=1, prepend=0, append=0)
        changes = np.flatnonzero((edges[1:] != edges[:-1]).any(1)) + 1
        found, first = list[Part](), self._positions.start
        for rows in np.split(np.arange(len(noticed)), changes):
            row = edges[rows[0]]
            for start, stop in zip(np.flatnonzero(row == 1), np.flatnonzero(row == -1), strict=True):
                found.append(
                    Part(
                        buffer=index,
                        src_rank=pair[0],
                        dst_rank=pair[1],
                        layer_start=int(rows[0]),
                        layer_stop=int(rows[-1]) + 1,
                        token_start=first + int(start),
                        token_stop=first + int(stop),
                    )
                )
        return found

    def _holds(self, key: TransferKey) -> bool:
        """Whether key's ranges lie inside what is moved of this buffer."""
        positions = self._positions
        return (
            0 <= key.layer_start < key.layer_stop <= len(self.facts.comes)
            and positions.start <= key.token_start < key.token_stop <= positions.stop
        )

    def _part(self, key: TransferKey) -> States:
        first, states = self._positions.start, self._states[key.src_rank, key.dst_rank]
        return states[key.layer_start : key.layer_stop, key.token_start - first : key.token_stop - first]

    def missing(self) -> str | None:
        if not self._left:
            return None
        facts = self.facts
        where = f"group {facts.group_name}, buffer {facts.name}"
        if not any(self._pieces.values()):
            return f"{where}: 0 of {self._nbytes_expected()} bytes arrived"
        first = self._first({pair: states < _ARRIVED for pair, states in self._states.items()})
        return f"{where}: {self._left} of {self._total} layer x position slices have not arrived, {first}"

    def unnoticed(self) -> str | None:
        silent = {pair: states == _ARRIVED for pair, states in self._states.items()}
        count = sum(int(each.sum()) for each in silent.values())
        if not count:
            return None
        where = f"group {self.facts.group_name}, buffer {self.facts.name}"
        return f"{where}: no notice of {count} layer x position slices that have arrived, {self._first(silent)}"

    def _first(self, which: dict[tuple[int, int], npt.NDArray[np.bool_]]) -> str:
        """Name the first slice of those that are marked, and its ranks where it could be several."""
        pair, marked = next((pair, marked) for pair, marked in which.items() if marked.any())
        layer, position = (int(x) for x in np.unravel_index(int(marked.argmax()), marked.shape))
        first = f"first {self.facts.naming.layer(layer)} position {self._positions.start + position}"
        if len(self.facts.pairs) > 1:
            first += f" from rank {pair[0]} to rank {pair[1]}"
        return first

    def _nbytes_expected(self) -> int:
        layout = self.facts.layout
        ranks = len({dst_rank for _, dst_rank in self.facts.pairs})
        slices = ranks * sum(self.facts.comes) * len(self._positions)
        return slices * layout.bytes_per_block // layout.block_size
