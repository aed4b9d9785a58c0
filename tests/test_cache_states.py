"""States over tensor-parallel ranks in memory: what is written whole lies in parts, and is read whole again."""

from itertools import product

import numpy as np
import pytest
import torch

from pdtx.cache import BufferShape, CacheGroup, KVCaches, PagedKVCache, PagedStateCache
from pdtx.errors import CacheError, ParallelError
from pdtx.kvspec import FullAttentionSpec, Segment, StateSharding
from pdtx.parallel import transfers
from pdtx.plan import Endpoint, build_plan
from pdtx.ranges import copy_ranges
from tests.state_families import FAMILIES, elements_of, on_rank, share_of, state_cache

RANKS = (1, 2, 4)
LAYOUTS = ("mamba_sd", "mamba_ds")
BLOCKS = torch.tensor([3, 1, 4])


def filled(cache: PagedStateCache, seed: int = 0) -> torch.Tensor:
    """Write random bytes into all layers of BLOCKS; return them, (layers, 1, blocks, 1, bytes)."""
    chance = torch.Generator().manual_seed(seed)
    shape = cache.num_layers, *cache.rows_shape(len(BLOCKS))
    rows = torch.randint(256, shape, dtype=torch.uint8, generator=chance)
    for layer in range(cache.num_layers):
        cache.write_canonical(layer, BLOCKS, 0, rows[layer])
    return rows


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tp_size", RANKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_rank_has_the_channels_and_heads_of_the_table(family: str, tp_size: int, layout: str) -> None:
    cache = state_cache(family, tp_size, layout)
    rows = filled(cache)
    for layer in range(cache.num_layers):
        for place, block in enumerate(BLOCKS.tolist()):
            whole = elements_of(family, rows[layer, 0, place, 0].numpy())
            for rank in range(tp_size):
                meant, found = share_of(family, tp_size, rank, whole), on_rank(cache, rank, layer, block)
                assert all(np.array_equal(one, other) for one, other in zip(found, meant, strict=True)), f"rank {rank}"
        assert torch.equal(cache.canonical(layer, BLOCKS, 0, 3), rows[layer])
        assert torch.equal(cache.canonical(layer, BLOCKS, 1, 2), rows[layer, :, 1:2])
        assert cache.replicas_differ(layer, BLOCKS, 0, 3) == 0
    untouched = torch.tensor([0, 2])
    assert cache.unpoisoned(untouched) == 0
    assert cache.canonical(0, BLOCKS, 1, 1).shape == cache.rows_shape(0)


@pytest.mark.parametrize("tp_size", RANKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_written_and_read_whole(family: str, tp_size: int) -> None:
    cache = state_cache(family, tp_size, "mamba_ds")
    states = [torch.randn(shape).to(dtype) for shape, dtype in cache.block_tensors()]
    cache.write(1, 2, states)
    for found in (cache.read(1, 2), cache.read_block(1, 2)):
        assert all(torch.equal(one, other) for one, other in zip(found, states, strict=True))
        assert all(one.is_contiguous() for one in found)
    # A convolution comes from a model with its channels first.
    turned = [state.transpose(0, 1).contiguous().transpose(0, 1) for state in states]
    cache.write(0, 1, turned)
    assert all(torch.equal(one, other) for one, other in zip(cache.read(0, 1), states, strict=True))
    with pytest.raises(CacheError, match="are not those of buffer state"):
        cache.write(0, 1, [state[:1] for state in states])


@pytest.mark.parametrize("family", FAMILIES)
def test_copies_that_differ_are_counted(family: str) -> None:
    cache, one = state_cache(family, 4), FAMILIES[family]
    filled(cache)
    assert cache.replicas_differ(0, BLOCKS, 0, 3) == 0
    part = cache.layout.parts[0]
    differing = 0
    for rank in range(1, 4):
        channels = one.channels[4][0]
        earlier = {channel for before in channels[:rank] for channel in before}
        for place in (place for place, channel in enumerate(channels[rank]) if channel in earlier):
            offset = part.offset + 3 * part.layout.stride("block") + place * part.layout.stride("channel")
            cache.ranks[rank].memory[offset] ^= 1  # the first input's
            differing += 1
    assert cache.replicas_differ(0, BLOCKS, 0, 3) == differing == one.copied
    assert cache.replicas_differ(0, BLOCKS, 1, 3) == 0


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (2, 4), (4, 2), (4, 4)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_moves_is_the_same_bytes_on_both_sides(family: str, ranks: tuple[int, int]) -> None:
    """One rank of either side is enough to say what goes between them."""
    source, destination = state_cache(family, ranks[0]), state_cache(family, ranks[1], "mamba_ds")
    rows, there = filled(source), torch.tensor([2, 4, 1])
    moves = transfers(source.spec, *ranks, source.sharding)
    for move in moves:
        src, dst = (
            Endpoint.of(cache.layout, table.numpy()) for cache, table in ((source, BLOCKS), (destination, there))
        )
        plan = build_plan(src, dst, range(3), boxes=move.boxes)
        memories = source.ranks[move.src_rank].memory, destination.ranks[move.dst_rank].memory
        copy_ranges(memories[0], plan.flat.source(), memories[1], plan.flat.destination())
    for layer in range(source.num_layers):
        assert torch.equal(destination.canonical(layer, there, 0, 3), rows[layer])
        assert destination.replicas_differ(layer, there, 0, 3) == 0
        for here, end in {(move.src_rank, move.dst_rank) for move in moves}:
            sent = source.common_rows(here, end, ranks[1], layer, BLOCKS, 1, 3)
            assert torch.equal(sent, destination.common_rows(end, here, ranks[0], layer, there, 1, 3))
            assert tuple(sent.shape) == source.common_shape(here, end, ranks[1], 2)
            at = source.common_bytes(here, end, ranks[1])
            assert np.array_equal(at, destination.common_bytes(end, here, ranks[0]))
            assert torch.equal(sent[0, :, 0], rows[layer][0, 1:3, 0][:, torch.from_numpy(at)])
    # Whatever is copied is sent to each rank that has it.
    for rank in range(ranks[1]):
        parts = [source.common_bytes(move.src_rank, rank, ranks[1]) for move in moves if move.dst_rank == rank]
        assert len(np.unique(np.concatenate(parts))) == len(destination.bytes_of_rank(rank))


def test_one_rank_alone_holds_its_share() -> None:
    one = FAMILIES["mamba2 of 1 group"]
    whole, alone = state_cache("mamba2 of 1 group", 2), PagedStateCache(
        one.spec, num_layers=2, num_blocks=5, tp_size=2, tp_ranks=range(1, 2), sharding=one.sharding
    )  # fmt: skip
    filled(whole)
    for layer, block in product(range(2), BLOCKS.tolist()):
        alone.write(layer, block, whole.read(layer, block))
        table = torch.tensor([block])
        rows = (cache.common_rows(1, 0, 1, layer, table, 0, 1) for cache in (whole, alone))
        assert torch.equal(*rows)
    with pytest.raises(CacheError, match="this process has rank 1 of 2"):
        alone.canonical(0, BLOCKS, 0, 1)
    with pytest.raises(CacheError, match="rank 0 is not here"):
        alone.common_rows(0, 0, 1, 0, BLOCKS, 0, 1)


def test_one_wrong_byte_is_seen_by_the_move_that_brings_it() -> None:
    cache = state_cache("mamba2 of 1 group", 2)
    filled(cache)
    moves = transfers(cache.spec, 2, 4, cache.sharding)
    before = [cache.common_rows(move.src_rank, move.dst_rank, 4, 0, BLOCKS, 0, 3) for move in moves]
    cache.ranks[1].memory[cache.layout.parts[1].offset + 4 * cache.layout.parts[1].layout.stride("block")] ^= 1
    after = [cache.common_rows(move.src_rank, move.dst_rank, 4, 0, BLOCKS, 0, 3) for move in moves]
    changed = [
        move.dst_rank for move, one, other in zip(moves, before, after, strict=True) if not torch.equal(one, other)
    ]
    assert changed == [2]  # head 0 of rank 1, in the third of BLOCKS


class TestRefused:
    def test_more_ranks_need_to_know_how_they_share(self) -> None:
        spec = FAMILIES["mamba1"].spec
        with pytest.raises(ParallelError, match="give its StateSharding, or use 1 rank"):
            PagedStateCache(spec, num_layers=1, num_blocks=2, tp_size=2)
        assert PagedStateCache(spec, num_layers=1, num_blocks=2).sharding is None
        shape = BufferShape("state", "state", spec, "mamba_sd", ["layers.0"], 2, tp_size=2)
        group = CacheGroup("state", "state", 1, 2, spec)
        with pytest.raises(ParallelError, match="StateSharding"):
            KVCaches.allocate([group], [shape])

    @pytest.mark.parametrize("tp_size", [1, 2])
    def test_another_models_sharding(self, tp_size: int) -> None:
        other = FAMILIES["mamba2 of 1 group"].sharding
        with pytest.raises(ParallelError, match="segments of 14 channels do not make up"):
            PagedStateCache(FAMILIES["mamba1"].spec, num_layers=1, num_blocks=2, tp_size=tp_size, sharding=other)

    def test_ranks_that_units_do_not_allow(self) -> None:
        with pytest.raises(ParallelError, match="8 units of x cannot be divided over tensor_parallel_size 3"):
            state_cache("mamba1", 3)

    def test_a_sharding_of_keys_and_values(self) -> None:
        spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=4, dtype="bfloat16")
        sharding = StateSharding(conv=((Segment(name="x", channels=8, units=2),),), heads=2)
        with pytest.raises(ParallelError, match="buffer full keeps no states"):
            PagedKVCache(spec, num_layers=1, num_blocks=2, sharding=sharding)


@pytest.mark.parametrize("tp_size", RANKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bytes_of_a_rank_are_those_of_the_table(family: str, tp_size: int) -> None:
    cache = state_cache(family, tp_size)
    whole = elements_of(family, np.arange(cache.bytes_per_position))
    for rank in range(tp_size):
        meant = np.concatenate([share.reshape(-1) for share in share_of(family, tp_size, rank, whole)])
        assert np.array_equal(cache.bytes_of_rank(rank).numpy(), meant)
