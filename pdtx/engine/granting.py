"""The consumer's queue for blocks: what a request needs of each group, and which one gets it first."""

from collections.abc import Sequence
from math import lcm

import numpy as np

from pdtx.cache import AllocatingBlockPool, CacheGroup, KVCaches
from pdtx.engine.inbound import Expectation, GroupNeed, InboundRequest
from pdtx.errors import InputError, OutOfBlocks
from pdtx.plan import NULL_BLOCK
from pdtx.plan.runs import Int64s
from pdtx.protocol import GrantedBlocks, TransferRequest
from pdtx.units import ceil_div


def needs_of(groups: Sequence[CacheGroup], ask: TransferRequest, align: int = 1) -> tuple[GroupNeed, ...]:
    """Return what a request needs of each group, for its prompt and for the tokens to come.

    align: positions of which the first that has a block is a multiple: a tier loads whole blocks of its own.
    """
    prompt = ask.num_tokens
    needs = list[GroupNeed]()
    for group in groups:
        positions = group.positions(prompt)
        blocks = group.table_blocks(prompt + ask.max_tokens, positions.start // align * align)
        last = ceil_div(positions.stop, group.block_size) if positions else blocks.start
        needs.append(GroupNeed(positions, blocks, range(blocks.start, last)))
    return tuple(needs)


def needs_of_tables(groups: Sequence[CacheGroup], expected: Expectation) -> tuple[GroupNeed, ...]:
    """Return what an expected request needs of each group: what lies behind what is cached, in the caller's blocks.

    Raises InputError for a table that is too short, or has the null block where something is to be written.
    """
    needs = list[GroupNeed]()
    for group, blocks in zip(groups, expected.blocks.groups, strict=True):
        positions = group.uncached(group.positions(expected.num_tokens), expected.cached_tokens)
        last = ceil_div(positions.stop, group.block_size) if positions else 0
        first = positions.start // group.block_size if positions else 0
        if last > len(blocks):
            raise InputError(
                f"request {expected.request_id}: the block table of group {group.name} has {len(blocks)} blocks; "
                f"positions up to {positions.stop} take {last}"
            )
        absent = np.flatnonzero(blocks.ids[first:last] == NULL_BLOCK)
        if len(absent):
            raise InputError(
                f"request {expected.request_id}: the block table of group {group.name} has the null block at "
                f"{first + int(absent[0])}, where positions {positions.start}..{positions.stop} are to be written"
            )
        needs.append(GroupNeed(positions, range(first, max(first, len(blocks))), range(first, last)))
    return tuple(needs)


def check_cached_tokens(cache: KVCaches, num_tokens: int, cached_tokens: int) -> None:
    """Raise InputError for a cached beginning that ends between tokens that only move together.

    Bytes of a cached token would come with the next one's; its scales would not fit the elements that are there.
    """
    for buffer in cache.buffers:
        layout = buffer.layout
        unit = lcm(*(part.layout.tokens_together for part in layout.parts))
        if cache.groups[buffer.group].counts_tokens and "token" not in layout.sliceable:
            unit = layout.block_size
        if cached_tokens % unit and cached_tokens < num_tokens:
            raise InputError(
                f"cached_tokens={cached_tokens}: buffer {buffer.name} has {unit} tokens that only move together; "
                f"say {cached_tokens // unit * unit}, a multiple of {unit}"
            )


def kept_blocks(group: CacheGroup, request: InboundRequest) -> int:
    """Return how many blocks of an expected request's table hold a cached beginning, so that nothing touched them."""
    return group.cached_blocks(request.fetched.num_tokens) if request.expected else 0


def blocks_to_poison(groups: Sequence[CacheGroup], expected: Expectation) -> list[Int64s]:
    """Return the blocks of an expected request that hold nothing of what is cached, for each group."""
    return [
        blocks.ids[group.cached_blocks(expected.cached_tokens) :]
        for group, blocks in zip(groups, expected.blocks.groups, strict=True)
    ]


class GrantQueue:
    """Requests that wait for blocks, first come first served. Used by the consumer's control thread alone."""

    def __init__(self, groups: Sequence[CacheGroup], allocator: AllocatingBlockPool) -> None:
        self._groups, self._allocator = groups, allocator
        self._waiting: dict[InboundRequest, None] = {}  # in order, and quick to leave for thousands at once

    def __len__(self) -> int:
        return len(self._waiting)

    def impossible(self, needs: Sequence[GroupNeed]) -> str | None:
        """Say why a request can never be granted, if it cannot."""
        for group, need in zip(self._groups, needs, strict=True):
            needed, most = len(need.blocks), group.num_blocks - 1
            if needed > most:
                pool = f"the pool of group {group.name}" if len(self._groups) > 1 else "the pool"
                advice = "start the decode node with more --num-blocks"
                return f"it needs {needed} blocks and {pool} has {most}; {advice}"
        return None

    def add(self, request: InboundRequest) -> None:
        """Queue a request."""
        self._waiting[request] = None

    def remove(self, request: InboundRequest) -> None:
        """Take a request out, if it waits."""
        self._waiting.pop(request, None)

    def next(self) -> InboundRequest | None:
        """Return the first waiting request with blocks in all groups, if there are enough; none of them otherwise."""
        request = next(iter(self._waiting), None)
        if request is None:
            return None
        try:
            request.take(self._allocator.allocate([len(need.blocks) for need in request.needs]))
        except OutOfBlocks:
            return None
        del self._waiting[request]
        return request


def granted_blocks(request: InboundRequest) -> list[GrantedBlocks]:
    """Return the block tables that the producer may write; null where it must not."""
    found = list[GrantedBlocks]()
    for group, need in enumerate(request.needs):
        ids = request.granted(group)
        generations = [0] * len(ids)
        if request.blocks is not None and not request.expected:
            generations[need.granted.start :] = request.blocks.groups[group].generations[: len(need.granted)].tolist()
        found.append(GrantedBlocks(block_ids=ids.tolist(), generations=generations))
    return found
