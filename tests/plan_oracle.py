"""What a transfer must do, told by coordinates of the whole model, and carrying one out in simulated memory.

The oracle computes no run, box or byte offset.

Memory has one int32 for each byte. In a source every byte of the request holds a number of its own,
counted over the whole model, so one comparison tells every misplaced byte; padding and foreign blocks hold FILLER.
A destination begins as POISON. Where bytes lie is read from a layout's axes alone, with numpy's as_strided.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdtx.kvspec import KVCacheSpec, StateSharding
from pdtx.layout import Layout, QuantizedLayout, RecordLayout, StridedLayout
from pdtx.parallel import RankTransfer, transfers
from pdtx.plan import Endpoint, Runs, Slices, TransferPlan, build_plan

Cells = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

FILLER, POISON = np.int32(-1), np.int32(-2)
_CELL = np.dtype(np.int32).itemsize


@dataclass(frozen=True)
class Node:
    """One side: a layout that all ranks have, and a block table that all ranks share (0 is the null block).

    steps_per_block: steps of the positions' axis in one of the manager's blocks.
    """

    layout: Layout
    table: Int64s
    tp_size: int
    steps_per_block: int

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint.of(self.layout, self.table)

    @property
    def num_layers(self) -> int:
        return self.layout.parts[0].layout.extent("layer")

    @property
    def steps_per_page(self) -> int:
        """Steps in a kernel's block."""
        layout = self.layout.parts[0].layout
        return layout.extent("token") if "token" in layout.by_name else 1

    def places(self, steps: Int64s) -> tuple[Int64s, Int64s]:
        """Return the kernel block of each step, and the step's number in it."""
        pages = self.steps_per_block // self.steps_per_page
        place = steps % self.steps_per_block
        return self.table[steps // self.steps_per_block] * pages + place // self.steps_per_page, (
            place % self.steps_per_page
        )


@dataclass(frozen=True)
class Content:
    """What the whole model keeps in one part of one layer for one step: units that ranks share, each of the same kind.

    segments: (units, width) of each run of units; a unit is width steps wide. replicated: whole on every rank.
    moved_steps: steps, counted from the start of a block, that move together.
    """

    inner: int
    itemsize: int
    segments: tuple[tuple[int, int], ...]
    replicated: bool = False
    moved_steps: int = 1

    @property
    def width(self) -> int:
        return sum(units * width for units, width in self.segments)

    def on_rank(self, rank: int, tp_size: int) -> list[int]:
        """Return the whole model's unit steps that a rank holds, in the order in which it holds them."""
        if self.replicated:
            return list(range(self.width))
        found, first = list[int](), 0
        for units, width in self.segments:
            for unit in range(units):
                # The owner of a unit; of many owners, those whose number times the units falls onto it.
                if (tp_size <= units and unit // (units // tp_size) == rank) or (
                    tp_size > units and rank // (tp_size // units) == unit
                ):
                    found += range(first + unit * width, first + (unit + 1) * width)
            first += units * width
        return found


@dataclass(frozen=True)
class Scene:
    """One transfer. spec: of the whole model. tokens: positions; layers: the source's, to dst_layer, ...

    contents: by the names of the parts. tokens_per_step: tokens in a step. together: whether the tokens of a kernel's
    block stay together. compatible: whether the two layouts can be exchanged at all.
    """

    spec: KVCacheSpec
    src: Node
    dst: Node
    tokens: range
    layers: range
    dst_layer: int
    contents: Mapping[str, Content]
    sharding: StateSharding | None = None
    tokens_per_step: int = 1
    together: bool = False
    compatible: bool = True

    def steps(self, tokens: range) -> Int64s:
        """Return the steps that move with tokens."""
        unit = self.src.steps_per_page if self.together else 1
        return np.array(sorted({
            step
            for token in tokens
            for step in range(token // self.tokens_per_step // unit * unit,
                              token // self.tokens_per_step // unit * unit + unit)
        }), np.int64)  # fmt: skip

    def whole(self) -> dict[str, Cells]:
        """Return the number of each byte of the whole model: (layer, step, unit, inner, byte) by part."""
        steps = max(len(node.table) * node.steps_per_block for node in (self.src, self.dst))
        found, first = dict[str, Cells](), 0
        for name, content in self.contents.items():
            shape = (self.src.num_layers, steps, content.width, content.inner, content.itemsize)
            count = int(np.prod(shape))
            found[name] = np.arange(first, first + count, dtype=np.int32).reshape(shape)
            first += count
        return found

    def source(self, whole: Mapping[str, Cells], rank: int) -> Cells:
        """Return a source rank's memory, filled with all of the table's real blocks."""
        memory = np.full(self.src.layout.size_bytes, FILLER, np.int32)
        steps = np.arange(len(self.src.table) * self.src.steps_per_block)
        steps = steps[self.src.table[steps // self.src.steps_per_block] != 0]
        block, place = self.src.places(steps)
        for name, view in views(memory, self.src.layout).items():
            held = self.contents[name].on_rank(rank, self.src.tp_size)
            view[:, block, place] = whole[name][:, steps][:, :, held]
        return memory

    def poisoned(self) -> Cells:
        """Return a destination rank's memory before anything arrives."""
        return np.full(self.dst.layout.size_bytes, POISON, np.int32)

    def expected(self, whole: Mapping[str, Cells], rank: int, tokens: range | None = None) -> Cells:
        """Return what a destination rank holds in the end."""
        memory, needed = self.poisoned(), self.steps(self.tokens if tokens is None else tokens)
        layers = slice(self.dst_layer, self.dst_layer + len(self.layers))
        for name, view in views(memory, self.dst.layout).items():
            held, unit = self.contents[name].on_rank(rank, self.dst.tp_size), self.contents[name].moved_steps
            steps = (np.unique(needed // unit)[:, None] * unit + np.arange(unit)).reshape(-1)
            block, place = self.dst.places(steps)
            chosen = whole[name][self.layers.start : self.layers.stop]
            view[layers, block, place] = chosen[:, steps][:, :, held]
        return memory


def views(memory: Cells, layout: Layout) -> dict[str, Cells]:
    """Return each part of a layout as (layer, block, place, unit, inner, byte), writable; keys and values apart."""
    if isinstance(layout, QuantizedLayout):
        return dict(_quantized_views(memory, layout.whole))
    return {
        name: np.lib.stride_tricks.as_strided(memory[offset:], *_strides(strided))
        for name, offset, strided in _parts(layout)
    }


_NVFP4_RECORD, _NVFP4_ELEMENTS = 9, 8
"""Of so many bytes of a head, so many are elements, and the rest scales."""


def _quantized_views(memory: Cells, pages: RecordLayout) -> Iterator[tuple[str, Cells]]:
    """Elements of all tokens and heads of K or V of a page, then the scales of all: told by the pages alone."""
    record = pages.extent("byte")
    elements = record // _NVFP4_RECORD * _NVFP4_ELEMENTS
    scales_at = pages.extent("token") * pages.extent("head") * elements
    axes = ["layer", "block", "token", "head"]
    for part, at, nbytes in (("elements", 0, elements), ("scales", scales_at, record - elements)):
        strides = [pages.stride(name) for name in axes[:2]]
        strides += [pages.stride(name) // record * nbytes for name in axes[2:]]
        shape = [pages.extent(name) for name in axes] + [nbytes, 1]
        for kv, name in enumerate(("key", "value")):
            first = memory[at + kv * pages.stride("kv") :]
            cells = [stride * _CELL for stride in (*strides, 1, 1)]
            yield f"{part} {name}", np.lib.stride_tricks.as_strided(first, shape, cells)


def _parts(layout: Layout) -> Iterator[tuple[str, int, StridedLayout]]:
    for part in layout.parts:
        if "kv" in part.layout.by_name and part.layout.extent("kv") == 2:
            name = f"{part.name} " if part.name else ""
            yield f"{name}key", part.offset, part.layout
            yield f"{name}value", part.offset + part.layout.stride("kv"), part.layout
        else:
            yield part.name, part.offset, part.layout


def _strides(layout: StridedLayout) -> tuple[list[int], list[int]]:
    unit = "head" if "head" in layout.by_name else "channel"
    (inner,) = set(layout.by_name) & {"channel", "byte", "step", "element"} - {unit}
    names = ["layer", "block", "token", unit, inner]
    shape = [layout.extent(name) if name in layout.by_name else 1 for name in names] + [layout.itemsize]
    strides = [layout.stride(name) * _CELL if name in layout.by_name else 0 for name in names] + [_CELL]
    return shape, strides


def byte_indices(slices: Slices) -> Int64s:
    """Return the offset of every byte of some ranges, in their order."""
    ends = np.cumsum(slices.nbytes)
    return np.repeat(slices.offsets - (ends - slices.nbytes), slices.nbytes) + np.arange(slices.nbytes.sum())


def copy(source: Cells, gather: Slices, target: Cells, scatter: Slices) -> None:
    """Copy one stream of bytes, as a mover would that knows the ranges of either side."""
    read, write = byte_indices(gather), byte_indices(scatter)
    assert len(read) == len(write)
    assert not len(read) or (read.min() >= 0 and write.min() >= 0), "numpy would count from the end"
    target[write] = source[read]


def copy_runs(source: Cells, target: Cells, runs: Runs) -> None:
    """Copy run by run."""
    copy(source, Slices(runs.src, runs.nbytes), target, Slices(runs.dst, runs.nbytes))


def moves_of(scene: Scene) -> tuple[RankTransfer, ...]:
    return transfers(scene.spec, scene.src.tp_size, scene.dst.tp_size, scene.sharding)


def plan_of(scene: Scene, move: RankTransfer, *, source: Endpoint | None = None, merge: bool = True) -> TransferPlan:
    return build_plan(
        source or scene.src.endpoint,
        scene.dst.endpoint,
        scene.tokens,
        scene.layers,
        dst_layer=scene.dst_layer,
        merge=merge,
        boxes=move.boxes,
    )


def check_arrival(scene: Scene) -> None:
    """Carry a scene out between all ranks: run by run, and as a stream whose receiver does not know the source's table.

    Every byte of every destination rank is compared.
    """
    whole, moves = scene.whole(), moves_of(scene)
    sources = [scene.source(whole, rank) for rank in range(scene.src.tp_size)]
    stand_in = Endpoint.stand_in(scene.src.layout, scene.tokens.stop)
    for rank in range(scene.dst.tp_size):
        expected, by_run, by_stream, nbytes = scene.expected(whole, rank), scene.poisoned(), scene.poisoned(), 0
        for move in (move for move in moves if move.dst_rank == rank):
            plan, source = plan_of(scene, move), sources[move.src_rank]
            copy_runs(source, by_run, plan.flat)
            receiver = plan_of(scene, move, source=stand_in)
            copy(source, plan.flat.source(), by_stream, receiver.flat.destination())
            nbytes += plan.nbytes
        assert np.array_equal(by_run, expected)
        assert np.array_equal(by_stream, expected)
        assert nbytes == np.count_nonzero(expected != POISON), "a byte was moved twice"
