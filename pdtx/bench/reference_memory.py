"""Memory of a yardstick: as cold as a cache that has just been written by others, and never much of it."""

from collections.abc import Iterator

import torch

from pdtx.cache.memory import allocate
from pdtx.units import ceil_div

COLD_BYTES = 64 << 20
"""Rounds of fewer bytes take turns over so many: what the last one has touched has left the processor's caches."""

MOST_BYTES = 512 << 20
"""Rounds of more bytes go over so many again and again: the case's own caches need the memory."""


class Rotating:
    """nbytes at a time, in pieces of memory that is all there; every round begins at another one, if there are several.

    piece_bytes: of all pieces but the last one of a round.
    """

    def __init__(self, nbytes: int, most_bytes: int | None = None, max_bytes: int | None = None) -> None:
        """most_bytes: of a piece; MOST_BYTES where None. max_bytes: of all of them; as many as are cold where None.

        Raises InputError if the memory cannot be had.
        """
        room = MOST_BYTES if max_bytes is None else max(1, max_bytes)
        self._nbytes, self.piece_bytes = nbytes, min(nbytes, MOST_BYTES, most_bytes or MOST_BYTES, room)
        self._places = ceil_div(COLD_BYTES, self.piece_bytes)
        if max_bytes is not None:
            self._places = min(self._places, room // self.piece_bytes)
        self._memory, self._turn = allocate(self._places * self.piece_bytes, torch.device("cpu")), 0
        self._memory.fill_(1)  # a page that nobody has written to is no memory yet

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield the pieces of a round, uint8; together they have nbytes."""
        for done in range(0, self._nbytes, self.piece_bytes):
            first = self._turn * self.piece_bytes
            self._turn = (self._turn + 1) % self._places
            yield self._memory[first : first + min(self.piece_bytes, self._nbytes - done)]

    def free(self) -> None:
        """Give the memory back; there are no more rounds. Idempotent."""
        self._memory = self._memory[:0].clone()

    def views(self) -> Iterator[memoryview]:
        """Yield the pieces of a round, for system calls."""
        for piece in self.pieces():
            yield memoryview(piece.numpy())  # type: ignore[arg-type]  # numpy's stubs leave the protocol out
