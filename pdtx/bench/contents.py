"""What is moved, told by coordinates: one rank's buffer filled with codes, compared with them, or poisoned."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np
import torch

from pdtx.bench.contents_plane import Chunk, Codes, Plane, as_bytes, count_unpoisoned, poison_hex
from pdtx.cache.buffer import RankMemory
from pdtx.cache.contents import locate_byte
from pdtx.cache.poison import fill_with_poison
from pdtx.cache.verify import Coordinate, Kind, Naming
from pdtx.plan.runs import Int64s
from pdtx.units import ceil_div

_CHUNK_BYTES = 1 << 20
"""Bytes looked at at once, of one layer: they stay in the processor's caches."""

_WORD = 8
_ODD = np.uint64(0x9E3779B97F4A7C15)
"""Its products with all numbers below 2^64 differ."""
_HALF = np.uint64(32)


@dataclass(frozen=True)
class Written:
    """Which iteration of a case wrote something, and for which request: a part of every code."""

    seed: int
    iteration: int
    request: int

    def base(self, buffer: int, layer: int, plane: int) -> np.uint64:
        """Return what the codes of one layer's keys (plane 0), values (plane 1) or other parts begin from."""
        text = f"{self.seed} {self.iteration} {self.request} {buffer} {layer} {plane}"
        return np.uint64(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_WORD).digest(), "little"))


@dataclass(frozen=True)
class Place:
    """What a request has in a buffer of a rank: its block table, positions, and heads as the rank counts them."""

    table: Int64s
    positions: range
    heads: range


@dataclass(frozen=True)
class Found:
    """What a comparison found. wrong: elements; first: the first of them by coordinates, in one line."""

    wrong: int = 0
    first: str = ""

    def __add__(self, other: "Found") -> "Found":
        return Found(self.wrong + other.wrong, self.first or other.first)


class BufferContents:
    """One rank's memory of a buffer.

    The code of each 8 bytes of a head (or record, or state) is its number in the order (position, head of the model,
    bytes), times an odd number, moved by a hash of all the other coordinates. So no two of a layer are equal, and those
    of another layer, part, buffer, request or iteration are equal by chance only.

    buffer: its number. first_head, num_heads: the first head of the model that this rank holds, of how many.
    layers: the number that codes know each layer of the buffer by. whole: whether blocks hold their tokens together, so
    that they are written and moved as a whole.
    """

    def __init__(
        self,
        memory: RankMemory,
        naming: Naming,
        *,
        buffer: int,
        layers: Sequence[int],
        first_head: int = 0,
        num_heads: int = 1,
        whole: bool = False,
    ) -> None:
        self._memory, self._buffer, self._layers = memory, buffer, tuple(layers)
        self._first_head, self._num_heads, self._whole = first_head, num_heads, whole
        parts = memory.layout.parts
        self._block_size = memory.layout.block_size
        axes = parts[0].layout.by_name
        self._kind: Kind = "kv" if "kv" in axes else "record" if "token" in axes else "state"
        self._naming = replace(naming, kind=self._kind, heads=num_heads)

    @cached_property
    def _planes(self) -> tuple[Plane, ...]:
        """Keys and values of all layers in turn, or whatever the layout's parts are."""
        parts = self._memory.layout.parts
        kvs = range(parts[0].layout.by_name["kv"].extent if self._kind == "kv" else 1)
        return tuple(
            Plane(self._memory, part, layer, kv, number * len(kvs) + kv)
            for layer in range(len(self._layers))
            for number, part in enumerate(parts)
            for kv in kvs
        )

    @property
    def num_heads_here(self) -> int:
        """Heads that this rank holds."""
        by_name = self._memory.layout.parts[0].layout.by_name
        return by_name["head"].extent if "head" in by_name and self._kind != "state" else 1

    # -- what is done to it -----------------------------------------------------------------------------------------

    def fill(self, place: Place, written: Written) -> None:
        """Write the codes."""
        for plane, chunk, codes in self._coded(place, written):
            plane.put(chunk, place.heads, codes)

    def compare(self, place: Place, written: Written) -> Found:
        """Compare every element with its code."""
        found = Found()
        for plane, chunk, codes in self._coded(place, written):
            here = plane.take(chunk, place.heads)
            if not torch.equal(here, codes):
                found += self._differing(plane, chunk, place, here, codes)
        return found

    def poison(self, place: Place) -> None:
        """Make a request's positions what they were before anything was written, and touch nothing else."""
        for chunk in self._chunks(place):
            for plane in self._planes:
                plane.poison(chunk, place.heads)

    def poison_all(self) -> None:
        """Poison all of the memory."""
        fill_with_poison(self._memory.memory)

    def strays(self, places: Sequence[Place]) -> Found:
        """Count the bytes outside of places that are not poison any more. Places must not overlap."""
        memory = self._memory.memory
        written = sum(count_unpoisoned(memory[at : at + _CHUNK_BYTES]) for at in range(0, len(memory), _CHUNK_BYTES))
        meant = sum(
            plane.unpoisoned(chunk, place.heads)
            for place in places
            for chunk in self._chunks(place)
            for plane in self._planes
        )
        return Found(written - meant, self._first_stray(places)) if written != meant else Found()

    def _first_stray(self, places: Sequence[Place]) -> str:
        """Name the first of them. Slow, and with a copy of the memory: there are none but after a fault."""
        left = self._of(RankMemory(self._memory.layout, self._memory.memory.clone()))
        for place in places:
            left.poison(place)
        meant = torch.empty_like(left._memory.memory)
        fill_with_poison(meant)
        return self._stray(int((left._memory.memory != meant).nonzero()[0, 0]))

    def _of(self, memory: RankMemory) -> "BufferContents":
        """Return the same of other memory."""
        return BufferContents(
            memory,
            self._naming,
            buffer=self._buffer,
            layers=self._layers,
            first_head=self._first_head,
            num_heads=self._num_heads,
            whole=self._whole,
        )

    # -- coordinates ------------------------------------------------------------------------------------------------

    def _coded(self, place: Place, written: Written) -> Iterator[tuple[Plane, Chunk, torch.Tensor]]:
        bases = [written.base(self._buffer, self._layers[plane.layer], plane.number) for plane in self._planes]
        for chunk in self._chunks(place):
            numbers = dict[int, Codes]()
            for plane, base in zip(self._planes, bases, strict=True):
                nbytes = plane.row_bytes
                if nbytes not in numbers:
                    numbers[nbytes] = self._numbers(chunk, place.heads, ceil_div(nbytes, _WORD))
                yield plane, chunk, plane.shaped(_codes(numbers[nbytes], base), len(place.heads))

    def _numbers(self, chunk: Chunk, heads: range, words: int) -> Codes:
        """The numbers of a chunk's words times an odd number: shape (blocks, steps, heads, words)."""
        steps = chunk.first_step + np.arange(len(chunk.blocks) * chunk.per_block).reshape(-1, chunk.per_block)
        rows = steps[:, chunk.steps.start : chunk.steps.stop, None] * self._num_heads
        rows = rows + (self._first_head + heads.start + np.arange(len(heads)))
        return (rows[..., None] * words + np.arange(1, words + 1)).astype(np.uint64) * _ODD

    def _chunks(self, place: Place) -> Iterator[Chunk]:
        """Cut positions into chunks of blocks of which the same steps are meant."""
        layout, positions = self._memory.layout, place.positions
        if not positions:
            return
        size, token = self._block_size, layout.parts[0].layout.tokens_per_step
        first, last = positions.start // size, ceil_div(positions.stop, size)
        steps = torch.from_numpy(layout.block_steps(place.table)).to(self._memory.memory.device)
        start, stop = (positions.start - first * size) // token, (positions.stop - (last - 1) * size) // token
        per_block = size // token
        if self._whole:
            start, stop = 0, per_block
        # The first and the last block may be cut; all between them are whole.
        cuts = [(first, last, range(start, stop))] if last - first == 1 else []
        if not cuts:
            inner = range(first + (start > 0), last - (stop < per_block))
            cuts += [(first, first + 1, range(start, per_block))] if start > 0 else []
            at_once = max(1, _CHUNK_BYTES // max(1, self._block_bytes))
            for block in range(inner.start, inner.stop, at_once):
                cuts.append((block, min(block + at_once, inner.stop), range(per_block)))
            cuts += [(last - 1, last, range(stop))] if stop < per_block else []
        for begin, end, inside in cuts:
            yield Chunk(steps[begin:end], begin * per_block, per_block, inside)

    @property
    def _block_bytes(self) -> int:
        plane = self._planes[0]
        return plane.row_bytes * prod(plane.view.shape[1:3])

    def _differing(self, plane: Plane, chunk: Chunk, place: Place, here: torch.Tensor, codes: torch.Tensor) -> Found:
        item = plane.itemsize
        found, meant = (as_bytes(one).reshape(*one.shape[:3], -1, item).cpu() for one in (here, codes))
        differs = (found != meant).any(-1)
        block, step, head, element = (int(at) for at in differs.nonzero()[0])
        token = self._memory.layout.parts[0].layout.tokens_per_step
        position = (chunk.first_step + block * chunk.per_block + chunk.steps.start + step) * token
        at = Coordinate(
            plane.layer,
            plane.kv,
            position,
            self._first_head + place.heads.start + head,
            element if self._kind != "state" else element * item,
            self._naming,
        )
        got, wanted = (one[block, step, head, element].numpy()[::-1].tobytes().hex() for one in (found, meant))
        ids = place.table[position // self._block_size]
        poison = ", which is poison: it was never written" if got == poison_hex(item) else ""
        text = f"{at} (block {ids}) is 0x{got}{poison}, should be 0x{wanted}"
        return Found(int(differs.sum()), text)

    def _stray(self, offset: int) -> str:
        """Say where a byte lies that should not have been written."""
        at = locate_byte(self._memory.layout, offset)
        layer, block = self._naming.layer(at["layer"]), at["block"]
        return f"{self._naming.where} {layer} block {block} was written at byte {offset}, which nobody asked for"


def _codes(numbers: Codes, base: np.uint64) -> Codes:
    codes = numbers + base
    # The upper half of a product depends on all of the number; the lower one must, too, for elements are short.
    codes ^= codes >> _HALF
    return codes
