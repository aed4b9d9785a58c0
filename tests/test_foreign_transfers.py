"""Caches over others' memory, moved: a hybrid's groups from one memory into one other, and a producer's requests."""

import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from pdtx.cache import CacheGroup, ForeignBuffer, GroupAllocator, KVCaches
from pdtx.engine.registering import regions_of, register_cache
from pdtx.kvspec import FullAttentionSpec
from pdtx.plan import Endpoint, build_plan
from pdtx.plan.runs import Int64s
from pdtx.testing import MoverPair
from pdtx.transports import Placement, TransferKey, make_mover
from pdtx.units import ceil_div
from tests.contract_subjects import usable_mover
from tests.engine_pair import Pair, arrived, begin, bits, make_cache, ship
from tests.foreign_scenes import Pages, group_of, hybrid_bytes, hybrid_over

TOKENS, LAYERS, HEADS, CHANNELS = 21, (3, 3, 2), 2, 8
MOVERS = ["inproc", "tcp", "shm", "ucx", "nixl"]


@dataclass
class Side:
    """A cache in foreign memory, and a request's tables, one a group."""

    pages: Pages
    cache: KVCaches
    tables: list[Int64s]


class HybridSide(Side):
    """A hybrid's cache in one memory, and a request's tables: blocks of one pool, in an order by chance."""

    def __init__(self, layout: str, block_size: int, num_blocks: int, seed: int) -> None:
        self.size, self.num_blocks = block_size, num_blocks
        pages = Pages(hybrid_bytes(num_blocks, block_size=block_size), seed)
        memory = pages.memory
        cache = hybrid_over(memory, num_blocks=num_blocks, layers=LAYERS, layout=layout, block_size=block_size)
        super().__init__(pages, cache, [])
        self.owner = memory.bytes.view(torch.bfloat16)
        self.pool, chance = GroupAllocator.of(self.cache.groups), np.random.default_rng(seed)
        blocks = self.pool.allocate([ceil_div(TOKENS, block_size)] * 3)
        places = [group.table_blocks(TOKENS, group.positions(TOKENS).start) for group in self.cache.groups]
        everything = chance.permutation(np.concatenate([own.ids for own in blocks.groups]))
        parts = np.split(everything, len(places))
        for place, part in zip(places, parts, strict=True):
            table = np.zeros(place.stop, np.int64)
            table[place.start :] = part[: len(place)]
            self.tables.append(table)

    @property
    def lbhnc(self) -> torch.Tensor:
        """As its owner sees it: (layer, block, head, token, K then V)."""
        return self.owner.view(3, self.num_blocks, HEADS, self.size, 2 * CHANNELS)

    @property
    def lbnhc(self) -> torch.Tensor:
        """The same of the other order: (layer, block, token, head, K then V)."""
        return self.owner.view(3, self.num_blocks, self.size, HEADS, 2 * CHANNELS)


def move(pair: MoverPair, src: Side, dst: Side) -> None:
    """Register both caches, and put what each group needs of the request, buffer by buffer."""
    for end, side in ((pair.producer, src), (pair.consumer, dst)):
        assert register_cache(end, side.cache).nbytes in (0, side.pages.nbytes), "once, or not at all"
    connection, deadline = pair.connect(), time.monotonic() + 10
    handles = []
    for index, (here, there) in enumerate(zip(src.cache.buffers, dst.cache.buffers, strict=True)):
        positions = src.cache.groups[here.group].positions(TOKENS)
        ours = Endpoint.of(here.layout, src.tables[here.group])
        plan = build_plan(ours, Endpoint.of(there.layout, dst.tables[there.group]), positions)
        key = TransferKey("r", 0, here.num_layers, positions.start, positions.stop, index)
        place = Placement(regions_of(dst.cache)[index][0], plan.flat.destination(), deadline)
        pair.grants.grant("session", key, place)
        handles.append(connection.put(key, regions_of(src.cache)[index][0], plan.flat, deadline))
    for handle in handles:
        handle.wait()


@pytest.fixture(params=MOVERS)
def mover(request: pytest.FixtureRequest) -> str:
    """Each mover that is to be had here."""
    return usable_mover(request.param)


def test_three_groups_of_one_memory_into_three_of_another(mover: str) -> None:
    src, dst = HybridSide("vllm_lbhnc", 4, 40, 1), HybridSide("vllm_lbnhc", 8, 20, 2)
    meant = dst.pages.memory.bytes.clone().view(torch.bfloat16).view_as(dst.lbnhc)
    for group, layers in enumerate(LAYERS):
        for token in src.cache.groups[group].positions(TOKENS):
            here, there = int(src.tables[group][token // 4]), int(dst.tables[group][token // 8])
            for layer in range(layers):
                meant[layer, there, token % 8] = src.lbhnc[layer, here, :, token % 4]
    with MoverPair(lambda: make_mover(mover)) as pair:
        move(pair, src, dst)
    assert torch.equal(bits(dst.lbnhc), bits(meant)), "another block, or another group's, was written"
    assert src.pages.changed() == set()
    assert all(0 <= at < dst.pages.nbytes for at in dst.pages.changed())
    assert not bits(dst.lbnhc[:, 0]).ne(bits(meant[:, 0])).any()


def test_what_was_poisoned_for_a_request_is_what_arrives(mover: str) -> None:
    """Only the blocks of its table are poisoned; each then holds its positions, and poison behind them."""
    src, dst = HybridSide("vllm_lbhnc", 4, 40, 3), HybridSide("vllm_lbhnc", 8, 20, 4)
    for group, table in enumerate(dst.tables):
        dst.cache.poison(group, table)
    named = {int(block) for table in dst.tables for block in table} - {0}
    page = hybrid_bytes(1, layers=1, block_size=8)
    assert {at // page % dst.num_blocks for at in dst.pages.changed()} == named
    with MoverPair(lambda: make_mover(mover)) as pair:
        move(pair, src, dst)
    for index, (here, there) in enumerate(zip(src.cache.buffers, dst.cache.buffers, strict=True)):
        needed = src.cache.groups[index].positions(TOKENS)
        tables = [torch.from_numpy(side.tables[index]) for side in (src, dst)]
        for layer in range(here.num_layers):
            rows = [
                buffer.canonical(layer, table, needed.start, needed.stop)
                for buffer, table in zip((here, there), tables, strict=True)
            ]
            assert torch.equal(*rows)
        assert there.unpoisoned(tables[1][-1:], TOKENS % 8) == 0


def layers_in_one_block(seed: int, num_blocks: int, size: int, table: list[int]) -> Side:
    """Block-first memory: a block holds one page of each of three layers, and each layer is a buffer of its own."""
    page = 2 * HEADS * CHANNELS * 2 * size
    pages = Pages(num_blocks * 3 * page, seed)
    spec = FullAttentionSpec(
        block_size=size, num_kv_heads=HEADS, head_size=CHANNELS, dtype="bfloat16", page_size_padded=3 * page
    )
    buffers = [
        ForeignBuffer(f"b{at}", "g", spec, "vllm_lbhnc", ["a"], num_blocks, pages.memory, None, 3 * page, at * page)
        for at in range(3)
    ]
    return Side(pages, KVCaches.over([group_of(spec, num_blocks)], buffers), [np.array(table)])


def test_layers_whose_pages_share_each_block(mover: str) -> None:
    """Their memories overlap and begin at different addresses; they are registered as one, and reached in it."""
    src, dst = layers_in_one_block(5, 9, 4, [7, 2, 5, 1, 8, 3]), layers_in_one_block(6, 7, 8, [4, 6, 2])
    here = src.pages.memory.bytes.view(torch.bfloat16).view(9, 3, HEADS, 4, 2 * CHANNELS)
    meant = dst.pages.memory.bytes.clone().view(torch.bfloat16).view(7, 3, HEADS, 8, 2 * CHANNELS)
    for token in range(TOKENS):
        meant[dst.tables[0][token // 8], :, :, token % 8] = here[src.tables[0][token // 4], :, :, token % 4]
    with MoverPair(lambda: make_mover(mover)) as pair:
        move(pair, src, dst)
    assert torch.equal(dst.pages.memory.bytes, bits(meant).reshape(-1))
    assert src.pages.changed() == set()


def test_a_producer_of_foreign_memory(mover: str) -> None:
    """All of the engine's way: granted, shipped, verified; what no request named is as it was."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype="bfloat16")
    page = 2 * 2 * 8 * 2 * 16
    pages = Pages(3 * 9 * page)
    buffer = ForeignBuffer("full", "full", spec, "vllm_lbhnc", [f"layers.{i}" for i in range(3)], 9, pages.memory)
    source = KVCaches.over([CacheGroup("full", "full", 16, 9, spec)], [buffer])
    with Pair(source, make_cache("flashinfer_hnd", 32), mover=mover) as pair:
        request = begin(pair.producer, 50)
        table = set(request.sources[0].tolist())
        sent = ship(pair.producer, request, (20, 20))
        ready = pair.next_ready()
        assert torch.equal(bits(arrived(pair.destination, ready)), bits(sent.data))
        pair.finish(ready)
    assert {at // page % 9 for at in pages.changed()} <= table
    assert 0 not in table
