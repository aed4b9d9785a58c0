"""Bytes of the destination that changed outside of the blocks that a transfer names."""

from collections.abc import Sequence

import numpy as np
import torch

from pdtx.cache import KVCaches, RankMemory
from pdtx.cache.contents import locate_byte
from pdtx.check.pairs import BufferPair
from pdtx.check.report import Stray


class MemoryWatch:
    """The destination's memory as it was before a transfer, and which bytes of it the transfer may change."""

    def __init__(self, caches: KVCaches, pairs: Sequence[BufferPair]) -> None:
        """Take a copy of all of the memory."""
        self._pairs = pairs
        self._memories = [(buffer, rank) for buffer in caches.buffers for rank in range(buffer.tp_size)]
        self._before = [buffer.ranks[rank].memory.clone() for buffer, rank in self._memories]

    def strays(self, limit: int) -> tuple[int, int, list[Stray]]:
        """Return bytes that changed without leave, how many runs they make up, and the first limit of these."""
        total, count, found = 0, 0, list[Stray]()
        for number, before in enumerate(self._before):
            buffer, rank = self._memories[number]
            memory = buffer.ranks[rank].memory
            changed = memory != before
            if not changed.any():
                continue
            offsets = (changed & ~self._allowed(number)).nonzero()[:, 0].cpu().numpy()
            if not len(offsets):
                continue
            starts = np.flatnonzero(np.diff(offsets, prepend=-2) != 1)
            lengths = np.diff(np.append(starts, len(offsets)))
            total, count = total + len(offsets), count + len(starts)
            for start, nbytes in zip(starts[: limit - len(found)], lengths, strict=False):
                found.append(self._stray(number, int(offsets[start]), int(nbytes)))
        return total, count, found

    def _allowed(self, number: int) -> torch.Tensor:
        """Return which bytes of a memory may change: bool, (bytes,). Others' blocks may lie in it, too.

        What an earlier memory has as well is left out: it has been counted there.
        """
        memory = self._memory(number)
        allowed = torch.zeros(memory.numel(), dtype=torch.bool, device=memory.device)
        for other in range(len(self._memories)):
            theirs = self._memory(other)
            apart = theirs.data_ptr() - memory.data_ptr()
            first, last = max(0, apart), min(memory.numel(), apart + theirs.numel())
            if theirs.device == memory.device and first < last:
                allowed[first:last] |= other < number or self._named(other)[first - apart : last - apart]
        return allowed

    def _memory(self, number: int) -> torch.Tensor:
        buffer, rank = self._memories[number]
        return buffer.ranks[rank].memory

    def _named(self, number: int) -> torch.Tensor:
        """Return which bytes of a memory the blocks named have: without padding."""
        buffer, _ = self._memories[number]
        pair = next((pair for pair in self._pairs if pair.destination is buffer), None)
        marks = torch.zeros_like(self._memory(number))
        if pair is not None and len(pair.there.named):
            steps = torch.from_numpy(buffer.layout.block_steps(pair.there.named)).to(buffer.device)
            # Poison has no byte that is zero.
            for part in RankMemory(buffer.layout, marks).poisoned:
                part.fill(steps)
        return marks != 0

    def _stray(self, number: int, offset: int, nbytes: int) -> Stray:
        buffer, rank = self._memories[number]
        at = locate_byte(buffer.layout, offset)
        block = at["block"] // buffer.layout.blocks_per_manager_block
        pair = next((pair for pair in self._pairs if pair.destination is buffer), None)
        name, padding = f"buffer {buffer.name}", ""
        if pair is not None:
            name = pair.naming(buffer, pair.there.group).where
            padding = "padding of " if block in pair.there.named else ""
        words = [f"rank {rank}" if buffer.tp_size > 1 else "", name, f"layer {at['layer']} {padding}block {block}"]
        return Stray(rank, offset, nbytes, " ".join(word for word in words if word))
