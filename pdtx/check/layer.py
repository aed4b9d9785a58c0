"""One layer of one rank of the destination: what it should hold, and what it holds."""

from dataclasses import dataclass

import numpy as np
import torch

from pdtx.cache.codes import WORDS, Words
from pdtx.cache.contents import word_rows
from pdtx.cache.verify import Coordinate
from pdtx.check.pairs import BufferPair, RankView, on_device
from pdtx.plan.runs import Int64s

Key = tuple[str, int, int]
"""What tells one from others: the buffer's name, the rank, the layer."""


@dataclass(frozen=True)
class RankLayer:
    """One layer of one rank of the destination."""

    pair: BufferPair
    view: RankView
    layer: int

    @property
    def key(self) -> Key:
        """What tells it from others."""
        return self.pair.destination.name, self.view.rank, self.layer

    @property
    def own(self) -> Int64s:
        """The indices that it should hold: (K and V, positions, heads of the rank, channels)."""
        layer, heads = self.pair.source_layer(self.layer), self.view.heads
        found = self.pair.codes.index(range(layer, layer + 1), self.pair.there.positions)[0][: self.pair.parts]
        own: Int64s = found[:, :, heads.start : heads.stop, self.view.channels].astype(np.int64)
        return own

    @property
    def pieces(self) -> Int64s:
        """Which block and, before that, K or V, each row lies in, shape (rows,)."""
        positions, size = self.pair.there.positions, self.pair.there.group.block_size
        blocks = np.arange(positions.start, positions.stop) // size
        pieces = np.arange(self.pair.parts)[:, None] * (len(self.pair.there.table) + 1) + blocks
        return np.repeat(pieces.reshape(-1), len(self.view.heads))

    def words(self) -> Words:
        """The elements that it does hold, unsigned; in the shape of own."""
        found: Words = self.read().contiguous().numpy().view(WORDS[self.pair.codes.itemsize])
        return found

    def expected(self) -> torch.Tensor:
        """The canonical bytes that it should hold in the first round."""
        heads = self.view.heads
        layer = self.pair.source_layer(self.layer)
        rows = word_rows(self.pair.values, layer, self.pair.there.positions, self.pair.parts)
        elements = rows[:, :, heads.start : heads.stop].reshape(
            *rows.shape[:2], len(heads), -1, self.pair.codes.itemsize
        )
        return elements[..., torch.from_numpy(self.view.channels), :].reshape(*elements.shape[:3], -1)

    def read(self, positions: range | None = None) -> torch.Tensor:
        """The canonical bytes that it does hold."""
        positions = self.pair.there.positions if positions is None else positions
        buffer = self.view.buffer
        return buffer.canonical(self.layer, on_device(self.pair.there.table, buffer), positions.start, positions.stop)

    def coordinate(self, row: int, channel: int) -> Coordinate:
        """Name an element by the number of its row."""
        positions, heads = self.pair.there.positions, self.view.heads
        kv, token, head = (int(at) for at in np.unravel_index(row, (self.pair.parts, len(positions), len(heads))))
        naming = self.pair.naming(self.pair.destination, self.pair.there.group)
        channel = int(self.view.channels[channel])
        return Coordinate(self.layer, kv, positions.start + token, heads.start + head, channel, naming)

    def name(self, kv: int) -> str:
        """Name its keys (0), values (1) or records."""
        naming = self.pair.naming(self.pair.destination, self.pair.there.group)
        part = "KV"[kv] if naming.kind == "kv" else ""
        return " ".join(word for word in (naming.where, naming.layer(self.layer), part) if word)
