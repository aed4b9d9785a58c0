"""Codes by coordinate: what they tell apart, and what is found where something went to a wrong place."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pdtx.bench.contents import BufferContents, Place, Written
from pdtx.cache.buffer import RankMemory
from pdtx.cache.verify import Naming
from pdtx.kvspec import FullAttentionSpec, KVCacheSpec, MambaSpec, MLAAttentionSpec
from pdtx.layout import KVCacheLayout, any_layout

SPEC = FullAttentionSpec(block_size=4, num_kv_heads=4, head_size=8, dtype="bfloat16")
BYTES = MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=13, dtype="uint8")
STATE = MambaSpec(block_size=64, shapes=((3, 10), (4, 2, 3)), dtypes=("bfloat16", "float32"))
LAYERS, BLOCKS = 3, 9
TABLE = np.array([7, 2, 5, 4], np.int64)
BY = Written(seed=3, iteration=7, request=0)

LAYOUTS = [
    (SPEC, "flash_attn_nhd"),
    (SPEC, "flash_attn_hnd"),
    (SPEC, "flashinfer_hnd"),
    (SPEC, "flashinfer_nhd_cross_layer"),
    (SPEC, "vllm_bhlnc"),
    (SPEC, "cpu_attn_lbhnc"),
    (replace(SPEC, dtype="uint8"), "flash_attn_hnd"),
    (BYTES, "mla"),
    (STATE, "mamba_sd"),
    (STATE, "mamba_ds"),
]


def contents(spec: KVCacheSpec, layout: str, *, first_head: int = 0, buffer: int = 0) -> BufferContents:
    found = any_layout(layout, spec, num_layers=LAYERS, num_blocks=BLOCKS)
    memory = RankMemory(found, torch.zeros(found.size_bytes, dtype=torch.uint8))
    heads = spec.num_kv_heads if isinstance(spec, FullAttentionSpec) else 1
    made = BufferContents(
        memory, Naming("full"), buffer=buffer, layers=range(LAYERS), first_head=first_head, num_heads=heads
    )
    made.poison_all()
    return made


def memory_of(made: BufferContents) -> torch.Tensor:
    return made._memory.memory


def place_in(made: BufferContents, spec: KVCacheSpec, positions: range = range(3, 15)) -> Place:
    if isinstance(spec, MambaSpec):
        return Place(TABLE[:1], range(1), range(1))
    return Place(TABLE, positions, range(made.num_heads_here))


@pytest.mark.parametrize(("spec", "layout"), LAYOUTS)
def test_what_was_filled_is_found_and_nothing_beside_it(spec: KVCacheSpec, layout: str) -> None:
    made = contents(spec, layout)
    place = place_in(made, spec)
    made.fill(place, BY)
    assert made.compare(place, BY).wrong == 0
    assert made.strays([place]).wrong == 0
    assert made.strays([]).wrong > 0
    made.poison(place)
    assert made.strays([]).wrong == 0
    assert made.compare(place, BY).wrong > 0


@pytest.mark.parametrize(("spec", "layout"), LAYOUTS)
def test_every_flipped_byte_shows_as_wrong_or_as_stray(spec: KVCacheSpec, layout: str) -> None:
    made = contents(spec, layout)
    place = place_in(made, spec)
    made.fill(place, BY)
    memory, random = memory_of(made), np.random.default_rng(1)
    for at in random.integers(0, len(memory), 60).tolist():
        memory[at] ^= 0x40
        found = made.compare(place, BY).wrong, made.strays([place]).wrong
        memory[at] ^= 0x40
        assert sorted(found) == [0, 1], f"byte {at}"


@pytest.mark.parametrize(
    "other",
    [replace(BY, iteration=6), replace(BY, request=1), replace(BY, seed=4)],
    ids=["stale iteration", "another request", "another seed"],
)
def test_nearly_every_element_of_another_origin_is_wrong(other: Written) -> None:
    made = contents(SPEC, "flash_attn_nhd")
    place = place_in(made, SPEC)
    made.fill(place, other)
    elements = LAYERS * 2 * len(place.positions) * 4 * 8
    assert made.compare(place, BY).wrong > 0.99 * elements


@pytest.mark.parametrize(("first", "second"), [("head", "token"), ("kv", "layer"), ("head", "channel")])
def test_a_wrong_reading_of_the_layout_shows(first: str, second: str) -> None:
    made = contents(SPEC, "flash_attn_nhd")
    place = place_in(made, SPEC, range(16))
    made.fill(place, BY)
    layout = made._memory.layout
    assert isinstance(layout, KVCacheLayout)
    swapped = layout.with_swapped(first, second)
    read = BufferContents(
        RankMemory(swapped, memory_of(made)), Naming("full"), buffer=0, layers=range(LAYERS), num_heads=4
    )
    assert read.compare(place, BY).wrong > 0


def test_all_coordinates_have_codes_of_their_own() -> None:
    made = contents(SPEC, "flash_attn_nhd")
    place = place_in(made, SPEC, range(16))
    made.fill(place, BY)
    rows = memory_of(made).view(torch.int64).view(LAYERS * 2, BLOCKS, -1)[:, torch.from_numpy(TABLE)]
    assert len(set(rows.reshape(-1).tolist())) == rows.numel()


def test_ranks_write_what_the_whole_model_has_there() -> None:
    whole = contents(SPEC, "flash_attn_nhd")
    all_heads = place_in(whole, SPEC, range(16))
    whole.fill(all_heads, BY)
    half = replace(SPEC, num_kv_heads=2)
    layout = any_layout("flashinfer_hnd", half, num_layers=LAYERS, num_blocks=BLOCKS)
    memory = RankMemory(layout, torch.zeros(layout.size_bytes, dtype=torch.uint8))
    rank = BufferContents(memory, Naming("full"), buffer=0, layers=range(LAYERS), first_head=2, num_heads=4)
    rank.fill(Place(TABLE, range(16), range(2)), BY)
    ours = whole._memory.view(whole._memory.layout.parts[0], ("block", "token", "head", "channel"), torch.int16)
    theirs = memory.view(layout.parts[0], ("block", "token", "head", "channel"), torch.int16)
    assert torch.equal(ours[torch.from_numpy(TABLE)][:, :, 2:], theirs[torch.from_numpy(TABLE)])


def test_a_fault_is_told_by_its_coordinate() -> None:
    made = contents(SPEC, "flash_attn_nhd")
    place = place_in(made, SPEC)
    made.fill(place, BY)
    view = made._memory.view(
        made._memory.layout.parts[0], ("layer", "kv", "block", "token", "head", "channel"), torch.int16
    )
    view[2, 1, 5, 1, 3, 6] ^= 1  # block 5 is the third of the table: positions 8 to 11
    found = made.compare(place, BY)
    assert found.wrong == 1
    assert "layer 2 V token 9 head 3 channel 6 (block 5)" in found.first
    view[1, 0, 2, 0, 0, 0] = -8531  # 0xdead
    assert "layer 1 K token 4 head 0 channel 0 (block 2) is 0xdead, which is poison" in made.compare(place, BY).first


def test_a_stray_is_told_by_layer_and_block() -> None:
    made = contents(SPEC, "flash_attn_nhd")
    place = place_in(made, SPEC)
    made.fill(place, BY)
    view = made._memory.view(
        made._memory.layout.parts[0], ("layer", "kv", "block", "token", "head", "channel"), torch.int16
    )
    view[1, 0, 4, 3, 0, 0] = 0  # token 15 of a request that ends with token 14
    found = made.strays([place])
    assert found.wrong == 2
    assert "layer 1 block 4" in found.first


def test_some_heads_are_compared_and_poisoned_without_the_others() -> None:
    made = contents(SPEC, "flashinfer_hnd")
    all_heads = place_in(made, SPEC)
    some = replace(all_heads, heads=range(1, 3))
    made.fill(some, BY)
    assert made.compare(some, BY).wrong == 0
    assert made.strays([some]).wrong == 0
    assert made.compare(all_heads, BY).wrong == LAYERS * 2 * len(some.positions) * 2 * 8
