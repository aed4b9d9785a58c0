"""The plan against an independent oracle: any spec, pair of layouts, block sizes, block tables and ranges.

The oracle is numpy's as_strided over the layout's own axes; it knows nothing of runs, atoms or segments.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import event, given
from hypothesis import strategies as st

from pdtx.kvspec import FullAttentionSpec, dtype_size
from pdtx.layout import LAYOUT_ORDERS, KVCacheLayout, make_layout
from pdtx.plan import Endpoint, Runs, TransferPlan, build_plan

Bytes = npt.NDArray[np.uint8]
LOGICAL = ("layer", "block", "token", "kv", "head", "channel")
POISON = 0xA5


@dataclass(frozen=True)
class Scenario:
    """One transfer: both sides, and what of the request moves."""

    src: Endpoint
    dst: Endpoint
    tokens: range
    layers: range


@st.composite
def endpoints(draw: st.DrawFn, spec: FullAttentionSpec, layers: int, tokens: int) -> Endpoint:
    """A cache in any layout, and a shuffled, sometimes consecutive, block table that holds tokens."""
    needed = -(-tokens // spec.block_size) + draw(st.integers(0, 1))
    pool = needed + draw(st.integers(1, 4))
    layout = make_layout(draw(st.sampled_from(sorted(LAYOUT_ORDERS))), spec, num_layers=layers, num_blocks=pool)
    if draw(st.booleans()):
        first = draw(st.integers(0, pool - needed))
        return Endpoint.of(layout, range(first, first + needed))
    return Endpoint.of(layout, draw(st.permutations(range(pool)))[:needed])


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    small = draw(st.sampled_from([1, 2, 3, 4]))
    sizes = (small, small * draw(st.sampled_from([1, 2, 3, 4])))
    if draw(st.booleans()):
        sizes = (sizes[1], sizes[0])
    heads, head_size = draw(st.integers(1, 4)), draw(st.sampled_from([4, 8]))
    dtype = draw(st.sampled_from(["uint8", "float16", "float32"]))
    layers, stop = draw(st.integers(1, 3)), draw(st.integers(0, 3 * max(sizes) + 1))
    src_spec, dst_spec = (
        FullAttentionSpec(block_size=size, num_kv_heads=heads, head_size=head_size, dtype=dtype) for size in sizes
    )
    src, dst = draw(endpoints(src_spec, layers, stop)), draw(endpoints(dst_spec, layers, stop))
    first_layer = draw(st.integers(0, layers - 1))
    last_layer = draw(st.integers(first_layer, layers))
    event(f"block sizes {'equal' if sizes[0] == sizes[1] else 'differ'}")
    return Scenario(src, dst, range(draw(st.integers(0, stop)), stop), range(first_layer, last_layer))


def logical_view(memory: Bytes, layout: KVCacheLayout) -> Bytes:
    """The memory with its axes in logical order and the bytes of an element last."""
    shape = [layout.extent(axis) for axis in LOGICAL] + [layout.itemsize]
    strides = [layout.stride(axis) for axis in LOGICAL] + [1]
    return np.lib.stride_tricks.as_strided(memory, shape, strides)


def tokens_of(memory: Bytes, side: Endpoint) -> Bytes:
    """The request's elements, by position: shape (layer, token, kv, head, channel, byte); a copy."""
    by_block = logical_view(memory, side.layout)[:, side.block_ids]
    layers, blocks, places, *rest = by_block.shape
    return by_block.reshape(layers, blocks * places, *rest)


def source_memory(side: Endpoint, first_digit: int = 0) -> Bytes:
    """Memory in which every element holds its number in base 160, from first_digit on; no byte is POISON.

    With 1-byte elements it takes the fills of digits 0 and 1 together to tell all elements apart.
    """
    layout = side.layout
    memory = np.zeros(layout.size_bytes, np.uint8)
    view = logical_view(memory, layout)
    index = np.arange(view[..., 0].size).reshape(view.shape[:-1])
    for byte in range(layout.itemsize):
        view[..., byte] = index // 160 ** (first_digit + byte) % 160 + byte
    return memory


def expected_memory(scenario: Scenario, source: Bytes) -> Bytes:
    """What the destination must hold in the end: every coordinate of the request, and poison everywhere else."""
    memory = np.full(scenario.dst.layout.size_bytes, POISON, np.uint8)
    view, layout = logical_view(memory, scenario.dst.layout), scenario.dst.layout
    wanted = tokens_of(source, scenario.src)
    for token in scenario.tokens:
        block = int(scenario.dst.block_ids[token // layout.block_size])
        for layer in scenario.layers:
            view[layer, block, token % layout.block_size] = wanted[layer, token]
    return memory


def plan_of(scenario: Scenario, *, merge: bool = True) -> TransferPlan:
    return build_plan(scenario.src, scenario.dst, scenario.tokens, scenario.layers, merge=merge)


def move(runs: Runs, source: Bytes, size: int) -> Bytes:
    memory = np.full(size, POISON, np.uint8)
    for src, dst, nbytes in zip(runs.src.tolist(), runs.dst.tolist(), runs.nbytes.tolist(), strict=True):
        memory[dst : dst + nbytes] = source[src : src + nbytes]
    return memory


def move_as_stream(runs: Runs, source: Bytes, size: int) -> Bytes:
    """As a scatter/gather mover does: each side knows its own ranges only."""
    gather, scatter = runs.source(), runs.destination()
    pieces = [source[o : o + n] for o, n in zip(gather.offsets.tolist(), gather.nbytes.tolist(), strict=True)]
    stream = np.concatenate([np.zeros(0, np.uint8), *pieces])
    memory, position = np.full(size, POISON, np.uint8), 0
    for offset, nbytes in zip(scatter.offsets.tolist(), scatter.nbytes.tolist(), strict=True):
        memory[offset : offset + nbytes] = stream[position : position + nbytes]
        position += nbytes
    assert position == len(stream)
    return memory


@given(scenarios())
def test_every_element_arrives_and_nothing_else_changes(scenario: Scenario) -> None:
    plan = plan_of(scenario)
    for first_digit in (0, 1):
        source = source_memory(scenario.src, first_digit)
        assert POISON not in source
        expected = expected_memory(scenario, source)
        assert np.array_equal(move(plan.flat, source, len(expected)), expected)
        assert np.array_equal(move_as_stream(plan.flat, source, len(expected)), expected)


@given(scenarios())
def test_merging_changes_the_pieces_and_not_the_bytes(scenario: Scenario) -> None:
    merged, unmerged = plan_of(scenario).flat, plan_of(scenario, merge=False).flat
    source, size = source_memory(scenario.src), scenario.dst.layout.size_bytes
    assert len(merged) <= len(unmerged)
    assert merged.total == unmerged.total
    assert np.array_equal(move(merged, source, size), move(unmerged, source, size))
    for side in ("source", "destination"):
        one, other = getattr(merged, side)(), getattr(unmerged, side)()
        assert np.array_equal(one.offsets, other.offsets)
        assert np.array_equal(one.nbytes, other.nbytes)


@given(scenarios())
def test_sizes_are_predicted_before_a_byte_moves(scenario: Scenario) -> None:
    plan, layout = plan_of(scenario, merge=False), scenario.src.layout
    elements = len(scenario.layers) * len(scenario.tokens) * 2 * layout.extent("head") * layout.extent("channel")
    assert plan.nbytes == plan.flat.total == elements * layout.itemsize
    assert len(plan.runs) == len(plan.flat)
    assert (plan.flat.nbytes % layout.itemsize == 0).all()


@given(scenarios(), st.data())
def test_parts_add_up_to_the_whole(scenario: Scenario, data: st.DataObject) -> None:
    """Shipped in two chunks of tokens, layer by layer, the destination ends up the same."""
    cut = data.draw(st.integers(scenario.tokens.start, scenario.tokens.stop))
    source = source_memory(scenario.src)
    expected = expected_memory(scenario, source)
    memory = np.full(len(expected), POISON, np.uint8)
    for chunk in (range(scenario.tokens.start, cut), range(cut, scenario.tokens.stop)):
        for layer in scenario.layers:
            flat = build_plan(scenario.src, scenario.dst, chunk, range(layer, layer + 1)).flat
            part = move(flat, source, len(expected))
            memory = np.where(part == POISON, memory, part)
    assert np.array_equal(memory, expected)


def test_the_oracle_agrees_with_a_loop_over_coordinates() -> None:
    """The oracle itself, once, against the definition: an element lies at the sum of coordinate * stride."""
    spec = FullAttentionSpec(block_size=2, num_kv_heads=2, head_size=4, dtype="float16")
    for name in LAYOUT_ORDERS:
        layout = make_layout(name, spec, num_layers=2, num_blocks=3)
        memory = np.arange(layout.size_bytes, dtype=np.uint8)
        view = logical_view(memory, layout)
        for at in np.ndindex(*view.shape[:-1]):
            offset = sum(layout.stride(axis) * step for axis, step in zip(LOGICAL, at, strict=True))
            assert view[at].tolist() == memory[offset : offset + 2].tolist()


def test_dtypes_cover_the_element_sizes() -> None:
    assert {dtype_size(dtype) for dtype in ("uint8", "float16", "float32")} == {1, 2, 4}
