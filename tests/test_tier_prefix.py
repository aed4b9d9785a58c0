"""Fetching and keeping, with random contents: what counts as cached really lies in the request's blocks."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from pdtx.cache import GroupAllocator, GroupBlocks, KVCaches
from pdtx.errors import DeadlineExceeded, TierBusy, TierError
from pdtx.kvspec import FullAttentionSpec, SlidingWindowSpec
from pdtx.plan.runs import Int64s
from pdtx.tiers import Failed, Fence, Moved, PrefixKeys, Side
from pdtx.tiers.cpu import CpuTier
from pdtx.tiers.geometry import tier_caches
from pdtx.tiers.prefix import Fetched, PrefixCache, Request
from pdtx.tiers.shelf import WRITE_BACK_S
from pdtx.tiers.shelved import ShelfLease
from tests.engine_pair import all_free, attention, join, states, wait_until
from tests.tier_scenes import FENCE

BLOCK, TOKENS, WINDOW = 32, 140, 40
PROMPT = list(range(TOKENS))
FINGERPRINT = b"f" * 32


def caches(layout: str = "flash_attn_nhd", block_size: int = 16) -> KVCaches:
    count = 2 * (TOKENS // block_size + 2)
    return join(
        [attention(FullAttentionSpec, "full", layout, block_size, num_blocks=count)],
        [attention(SlidingWindowSpec, "window", layout, block_size, num_blocks=count, sliding_window=WINDOW)],
        [states()],
    )


class Node:
    """A cache with an allocator, and requests in it."""

    def __init__(self, cache: KVCaches) -> None:
        self.cache = cache
        self.allocator = GroupAllocator({group.name: group.num_blocks for group in cache.groups})

    def request(self, prefix: PrefixCache, tokens: Sequence[int] = PROMPT) -> Request:
        places = [group.table_blocks(len(tokens)) for group in self.cache.groups]
        blocks = self.allocator.allocate([len(place) for place in places])
        return Request(prefix.keys(tokens), blocks.tables(places), blocks, self)

    def hold(self, blocks: GroupBlocks) -> None:
        self.allocator.hold(blocks)

    def unhold(self, blocks: GroupBlocks) -> None:
        self.allocator.unhold(blocks)

    def fill(self, request: Request, tokens: int) -> list[torch.Tensor]:
        """Write random contents, and return them: of each buffer all layers, of states the one in place 0."""
        contents = list[torch.Tensor]()
        for buffer in self.cache.buffers:
            count = 1 if self.cache.groups[buffer.group].kind == "state" else tokens
            rows = torch.randint(256, buffer.rows_shape(count), dtype=torch.uint8)
            for layer in range(buffer.num_layers):
                buffer.write_canonical(layer, torch.as_tensor(request.tables[buffer.group]), 0, rows)
            contents.append(rows)
        return contents

    def rows(self, request: Request, index: int, start: int, stop: int) -> torch.Tensor:
        buffer = self.cache.buffers[index]
        table = torch.as_tensor(request.tables[buffer.group])
        layers = [buffer.canonical(layer, table, start, stop) for layer in range(buffer.num_layers)]
        assert all(torch.equal(layers[0], each) for each in layers)
        return layers[0]


class Odd(CpuTier):
    """A tier that can be told to fail at some blocks, to take its time, or to have none."""

    def __init__(self, like: KVCaches) -> None:
        super().__init__(tier_caches(like, block_tokens=BLOCK, nbytes=1 << 20, tokens_per_state=BLOCK), like=like)
        self.bad: set[tuple[int, int]] = set()  # (group, place)
        self.gate = threading.Event()
        self.gate.set()
        self.busy = False

    def store(
        self,
        keys: PrefixKeys,
        source: Side,
        places: Sequence[Int64s],
        fence: Fence,
        *,
        patience_s: float = WRITE_BACK_S,
    ) -> "Future[Moved]":
        def gated() -> None:
            assert self.gate.wait(20)
            fence()

        return super().store(keys, source, places, gated, patience_s=patience_s)

    def load(self, lease: ShelfLease, into: Side, places: Sequence[Int64s]) -> "Future[Moved]":
        if self.busy:
            raise TierBusy("too much to do")
        kept = [
            np.array([place for place in each.tolist() if (group, place) not in self.bad], np.int64)
            for group, each in enumerate(places)
        ]
        inner = super().load(lease, into, kept)
        outer = Future[Moved]()

        def pass_on() -> None:
            assert self.gate.wait(20)
            moved = inner.result()
            lost = [
                Failed(into.cache.groups[group].name, place, "lost")
                for group, each in enumerate(places)
                for place in each.tolist()
                if (group, place) in self.bad
            ]
            outer.set_result(Moved(moved.places, (*moved.failed, *lost), nbytes=moved.nbytes))

        threading.Thread(target=pass_on).start()
        return outer


def test_nothing_is_written_to_blocks_after_their_request_has_ended() -> None:
    """A load fails in part, and the request ends meanwhile: who gets its blocks next must not be poisoned by it."""
    node = Node(caches())
    tier = Odd(node.cache)
    prefix, _, _ = kept(node, tier, [32, 64, 96, 128])
    request = node.request(prefix)
    free = [pool.num_free for pool in node.allocator.pools]
    tier.bad = {(0, 2)}
    inner, at_the_end = prefix._clear, list[bool]()

    def clear(work: Any, places: Sequence[Int64s]) -> None:  # noqa: ANN401 - the fetch under way
        time.sleep(0.2)  # whoever has waited for blocks has had the time to get them
        at_the_end.append([pool.num_free for pool in node.allocator.pools] == free)
        inner(work, places)

    prefix._clear = clear  # type: ignore[method-assign]
    tier.gate.clear()
    with ThreadPoolExecutor(1) as thread:
        fetching = thread.submit(prefix.fetch, request, TOKENS, soon(), resume=False)
        wait_until(lambda: any(group.pinned.blocks for group in tier.usage().groups), "the load")
        node.allocator.free(request.blocks)
        tier.gate.set()
        fetching.result(10)
    assert at_the_end == [True]
    wait_until(lambda: all_free(node.allocator), "the blocks back")


def test_a_request_that_has_ended_fetches_nothing() -> None:
    node = Node(caches())
    tier = Odd(node.cache)
    prefix, _, _ = kept(node, tier, [128])
    request = node.request(prefix)
    node.allocator.free(request.blocks)
    assert prefix.fetch(request, TOKENS, soon(), resume=False) == Fetched()


def soon() -> float:
    return time.monotonic() + 10.0


def kept(
    node: Node, tier: CpuTier, stops: Sequence[int]
) -> tuple[PrefixCache, dict[int, torch.Tensor], list[torch.Tensor]]:
    """Keep a prompt whose states are seen at stops; return them, and the contents of the buffers of tokens."""
    prefix = PrefixCache(node.cache, tier, FINGERPRINT)
    request = node.request(prefix)
    seen = dict[int, torch.Tensor]()
    contents = node.fill(request, TOKENS)
    for stop in stops:
        rows = torch.randint(256, contents[2].shape, dtype=torch.uint8)
        node.cache.buffers[2].write_canonical(0, torch.as_tensor(request.tables[2]), 0, rows)
        future = prefix.keep(request, [0, 0, 0], stop, FENCE)
        if future is not None:
            assert not future.result(10).failed
        seen[stop] = rows
    node.allocator.free(request.blocks)
    wait_until(lambda: all_free(node.allocator), "its blocks")
    return prefix, seen, contents


def require_prefix(
    node: Node, request: Request, fetched: Fetched, states: dict[int, torch.Tensor], contents: list[torch.Tensor]
) -> None:
    """Compare all that computing on after fetched.num_tokens reads with what was kept."""
    reached = fetched.num_tokens
    for index in (0, 1):
        first = node.cache.groups[index].first_read(reached)
        assert torch.equal(node.rows(request, index, first, reached), contents[index][:, first:reached])
    assert torch.equal(node.rows(request, 2, 0, 1), states[reached])


@pytest.mark.parametrize("other", [("flashinfer_hnd", 32), ("flash_attn_hnd", 8)], ids=str)
def test_what_counts_as_cached_is_there_in_another_layout(other: tuple[str, int]) -> None:
    node, reader = Node(caches()), Node(caches(*other))
    tier = Odd(node.cache)
    _, seen, contents = kept(node, tier, [96, 128, 140])
    prefix = PrefixCache(reader.cache, tier, FINGERPRINT)
    for bad, reached in (
        (set(), 128),
        ({(0, 3)}, 96),  # the last block that full attention needs
        ({(1, 2)}, 0),  # within the window's reach after 128, and after 96 too
        ({(1, 0)}, 128),  # long before it
        ({(2, 3)}, 96),  # the state after 128
        ({(2, 3), (2, 2)}, 0),
        ({(0, 0)}, 0),
    ):
        tier.bad = bad
        request = reader.request(prefix)
        fetched = prefix.fetch(request, TOKENS, soon(), resume=True)
        assert fetched.num_tokens == reached, bad
        if reached:
            require_prefix(reader, request, fetched, seen, contents)
            assert fetched.sources == ("cpu",)
        else:
            # What was loaded in vain does not lie about.
            for buffer in reader.cache.buffers:
                ids = torch.as_tensor(request.blocks.groups[buffer.group].ids)
                assert buffer.unpoisoned(ids) == 0
        reader.allocator.free(request.blocks)
        wait_until(lambda: all_free(reader.allocator), "its blocks")
        for buffer in reader.cache.buffers:
            buffer.poison()
    tier.close()


def test_a_decoder_needs_no_states() -> None:
    node = Node(caches())
    tier = Odd(node.cache)
    prefix, _, contents = kept(node, tier, [140])
    request = node.request(prefix)
    fetched = prefix.fetch(request, TOKENS, soon(), resume=False)
    assert fetched.num_tokens == 128
    assert torch.equal(node.rows(request, 0, 0, 128), contents[0][:, :128])
    assert torch.equal(node.rows(request, 1, 101, 128), contents[1][:, 101:128])
    assert fetched.places[2].tolist() == []
    tier.close()


def test_blocks_are_held_until_their_store_has_ended() -> None:
    node = Node(caches())
    tier = Odd(node.cache)
    prefix = PrefixCache(node.cache, tier, FINGERPRINT)
    request = node.request(prefix)
    contents = node.fill(request, TOKENS)
    tier.gate.clear()
    future = prefix.keep(request, [0, 0, 0], 128, FENCE)
    assert future is not None
    node.allocator.free(request.blocks)
    # Whoever takes all blocks that there are and writes them must not get those.
    taken = node.allocator.allocate(list(node.allocator.num_free))
    for buffer in node.cache.buffers:
        buffer.poison(torch.as_tensor(taken.groups[buffer.group].ids))
    tier.gate.set()
    assert not future.result(10).failed
    node.allocator.free(taken)
    wait_until(lambda: all_free(node.allocator), "its blocks")
    again = node.request(prefix)
    fetched = prefix.fetch(again, TOKENS, soon(), resume=True)
    require_prefix(node, again, fetched, {128: contents[2]}, contents)
    tier.close()


def test_a_load_that_takes_too_long_keeps_its_blocks() -> None:
    node = Node(caches())
    tier = Odd(node.cache)
    prefix, _, _ = kept(node, tier, [128])
    tier.gate.clear()
    request = node.request(prefix)
    with pytest.raises(DeadlineExceeded, match="tier cpu"):
        prefix.fetch(request, TOKENS, time.monotonic() + 0.2, resume=True)
    node.allocator.free(request.blocks)
    assert not all_free(node.allocator)
    tier.gate.set()
    wait_until(lambda: all_free(node.allocator), "its blocks")
    tier.close()


def test_a_tier_that_is_busy_or_closed_is_a_miss() -> None:
    node = Node(caches())
    tier = Odd(node.cache)
    prefix, _, _ = kept(node, tier, [128])
    request = node.request(prefix)
    tier.busy = True
    assert prefix.fetch(request, TOKENS, soon(), resume=True).num_tokens == 0
    tier.close()
    assert prefix.keep(request, [0, 0, 0], 128, FENCE) is None
    node.allocator.free(request.blocks)
    assert all_free(node.allocator)


def test_the_tier_that_is_quicker_is_asked_first() -> None:
    node = Node(caches())
    mine, theirs = Odd(node.cache), Odd(node.cache)
    _, seen, contents = kept(node, mine, [128])
    theirs_prefix = PrefixCache(node.cache, theirs, FINGERPRINT)
    request = node.request(theirs_prefix)
    for index, rows in enumerate([*contents[:2], seen[128]]):
        table = torch.as_tensor(request.tables[index])
        for layer in range(node.cache.buffers[index].num_layers):
            node.cache.buffers[index].write_canonical(layer, table, 0, rows)
    future = theirs_prefix.keep(request, [0, 0, 0], 128, FENCE)
    assert future is not None
    future.result(10)
    node.allocator.free(request.blocks)
    prefix = PrefixCache(node.cache, mine, FINGERPRINT, peers=[theirs])
    mine.seconds_for = lambda nbytes, num_runs: 0.0  # type: ignore[method-assign]
    mine.bad = {(0, 1)}
    request = node.request(prefix)
    # The first is asked alone, for it seems to have all; what it loses shortens the prefix to nothing.
    assert prefix.fetch(request, TOKENS, soon(), resume=True).num_tokens == 0
    mine.seconds_for = lambda nbytes, num_runs: 1e9  # type: ignore[method-assign]
    mine.bad, theirs.bad = set(), set()
    fetched = prefix.fetch(request, TOKENS, soon(), resume=True)
    assert fetched.num_tokens == 128
    assert sum(group.loaded.blocks for group in theirs.usage().groups) == fetched_blocks(fetched)
    require_prefix(node, request, fetched, seen, contents)
    mine.close()
    theirs.close()


def fetched_blocks(fetched: Fetched) -> int:
    return sum(map(len, fetched.places))


def test_other_tokens_and_other_models_find_nothing() -> None:
    node = Node(caches())
    tier = Odd(node.cache)
    prefix, _, _ = kept(node, tier, [96, 128])
    changed = [*PROMPT[:100], 7, *PROMPT[101:]]
    request = node.request(prefix, changed)
    assert prefix.fetch(request, TOKENS, soon(), resume=True).num_tokens == 96
    node.allocator.free(request.blocks)
    other = PrefixCache(node.cache, tier, b"g" * 32)
    request = node.request(other)
    assert other.fetch(request, TOKENS, soon(), resume=True).num_tokens == 0
    tier.close()


def test_parts_of_blocks_and_states_between_blocks_are_not_kept() -> None:
    node = Node(caches())
    tier = Odd(node.cache)
    prefix = PrefixCache(node.cache, tier, FINGERPRINT)
    request = node.request(prefix)
    node.fill(request, TOKENS)
    request.tables[1][:3] = 0  # a window that has moved on
    future = prefix.keep(request, [0, 0, 0], 100, FENCE)
    assert future is not None
    moved = future.result(10)
    assert [places.tolist() for places in moved.places] == [[0, 1, 2], [2], []]
    assert not moved.failed
    tier.close()


def test_a_cache_whose_blocks_do_not_divide_the_tiers_is_refused() -> None:
    tier = Odd(caches())
    with pytest.raises(TierError, match="blocks of 32 tokens are not whole blocks of group full, which hold 24"):
        PrefixCache(caches(block_size=24), tier, FINGERPRINT)
    tier.close()
