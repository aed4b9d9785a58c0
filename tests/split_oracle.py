"""Engines of several processes, told by coordinates of the whole model: what each holds, and what must reach it.

As in tests.plan_oracle, no run, box or byte offset is computed, and no process knows more than its own part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pdtx.engine.describe import CacheFacts, facts_of
from pdtx.kvspec import ChunkedLocalAttentionSpec, KVCacheSpec, SlidingWindowSpec
from pdtx.protocol import CacheDescription
from tests.plan_oracle import FILLER, POISON, Cells, Content, Int64s, Node, views


@dataclass(frozen=True)
class ModelBuffer:
    """Layers of one kind of the whole model, and what of a request moves of them.

    kept: layers that do not move. num_tokens: of the prompt; cached_tokens: of its beginning, that the destination has.
    encoder_positions: for cross attention. is_state, is_cross: whether positions are not tokens.
    tokens_per_step, together: see tests.plan_oracle.Scene.
    """

    name: str
    spec: KVCacheSpec
    contents: Mapping[str, Content]
    num_layers: int
    kept: frozenset[int]
    num_tokens: int
    cached_tokens: int
    encoder_positions: int = 0
    is_state: bool = False
    is_cross: bool = False
    tokens_per_step: int = 1
    together: bool = False

    def layer_name(self, layer: int) -> str:
        return f"{self.name}.{layer}"

    @cached_property
    def positions(self) -> list[int]:
        """The positions that move, by the mask of the token after the prompt: of vectors all their tokens."""
        if self.is_state or self.is_cross:
            return [0] if self.is_state else list(range(self.encoder_positions))
        ratio, found = self.tokens_per_step, list[int]()
        for vector in range(self.num_tokens // ratio):
            tokens = range(vector * ratio, vector * ratio + ratio)
            if any(self._seen(token) for token in tokens) and tokens.stop > self.cached_tokens:
                found += tokens
        return found

    def _seen(self, token: int) -> bool:
        if isinstance(self.spec, SlidingWindowSpec):
            return self.num_tokens - token < self.spec.sliding_window
        if isinstance(self.spec, ChunkedLocalAttentionSpec):
            return self.num_tokens // self.spec.attention_chunk_size == token // self.spec.attention_chunk_size
        return True

    def steps(self, page: int) -> Int64s:
        """Return the steps that move. page: steps of a kernel's block, which may have to stay together."""
        unit = page if self.together else 1
        first = np.unique(np.array(self.positions, np.int64) // self.tokens_per_step // unit) * unit
        return (first[:, None] + np.arange(unit)).reshape(-1)

    def whole(self, first: int, num_steps: int) -> dict[str, Cells]:
        """Return each byte's number, counted from first: (layer, step, unit, inner, byte) by part."""
        found = dict[str, Cells]()
        for name, content in self.contents.items():
            shape = (self.num_layers, num_steps, content.width, content.inner, content.itemsize)
            count = int(np.prod(shape))
            found[name] = np.arange(first, first + count, dtype=np.int32).reshape(shape)
            first += count
        return found


@dataclass(frozen=True)
class Held:
    """A process's part of a buffer. number: of the model's buffer. layers: the model's, in the order of the process."""

    number: int
    layers: tuple[int, ...]
    node: Node


@dataclass(frozen=True)
class Process:
    """A process of an engine: some layers of some buffers, in its own order and blocks, of some of the ranks."""

    description: CacheDescription
    held: tuple[Held, ...]

    @cached_property
    def facts(self) -> CacheFacts:
        return facts_of(self.description)

    @property
    def ranks(self) -> range:
        return self.description.ranks

    def memory(self, fill: np.int32) -> dict[tuple[int, int], Cells]:
        """Return a memory for each of its buffers and ranks."""
        return {
            (index, rank): np.full(held.node.layout.size_bytes, fill, np.int32)
            for index, held in enumerate(self.held)
            for rank in self.ranks
        }


@dataclass(frozen=True)
class SplitScene:
    """One request between two engines."""

    buffers: tuple[ModelBuffer, ...]
    sources: tuple[Process, ...]
    destinations: tuple[Process, ...]
    seed: int

    @cached_property
    def whole(self) -> list[dict[str, Cells]]:
        """Every byte's number: of each buffer, part by part."""
        found, first = list[dict[str, Cells]](), 0
        for number, buffer in enumerate(self.buffers):
            nodes = [held.node for side in self._sides for each in side for held in each.held if held.number == number]
            steps = max((len(node.table) * node.steps_per_block for node in nodes), default=0)
            found.append(buffer.whole(first, steps))
            first += sum(cells.size for cells in found[-1].values())
        return found

    @property
    def _sides(self) -> tuple[Sequence[Process], Sequence[Process]]:
        return self.sources, self.destinations

    def source(self, process: Process) -> dict[tuple[int, int], Cells]:
        """Return a source process's memory: every real block of its tables is full."""
        memory = process.memory(FILLER)
        for (index, rank), cells in memory.items():
            held = process.held[index]
            steps = np.arange(len(held.node.table) * held.node.steps_per_block)
            steps = steps[held.node.table[steps // held.node.steps_per_block] != 0]
            self._fill(cells, held, rank, held.layers, steps)
        return memory

    def expected(self, process: Process) -> dict[tuple[int, int], Cells]:
        """Return what a destination process holds in the end: nothing of cached positions and layers that are kept."""
        memory = process.memory(POISON)
        for (index, rank), cells in memory.items():
            held = process.held[index]
            buffer = self.buffers[held.number]
            moved = [layer for layer in held.layers if layer not in buffer.kept]
            self._fill(cells, held, rank, moved, buffer.steps(held.node.steps_per_page))
        return memory

    def _fill(self, cells: Cells, held: Held, rank: int, layers: Sequence[int], steps: Int64s) -> None:
        for name, view in views(cells, held.node.layout).items():
            content = self.buffers[held.number].contents[name]
            unit = content.moved_steps
            together = (np.unique(steps // unit)[:, None] * unit + np.arange(unit)).reshape(-1)
            block, place = held.node.places(together)
            units = content.on_rank(rank, held.node.tp_size)
            for layer in layers:
                view[held.layers.index(layer)][block, place] = self.whole[held.number][name][layer][together][:, units]
