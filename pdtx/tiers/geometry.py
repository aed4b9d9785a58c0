"""What a tier's memory looks like: the groups and buffers of a cache, in blocks and layouts of the tier's own."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from pdtx.cache import CacheGroup, GroupKind, KVCaches, PagedBuffer, group_kind
from pdtx.errors import LayoutError, PlanError, TierError
from pdtx.kvspec import AttentionSpec, KVCacheSpec, MambaSpec
from pdtx.layout import ELEMENT_ORDERS, PARTED_ORDERS, RECORD_ORDERS, STATE_ORDERS, Layout, any_layout, layout_for
from pdtx.parallel import rank_spec
from pdtx.plan import Endpoint, build_plan
from pdtx.units import ceil_div

TOKENS_PER_STATE = 512
"""A tier has room for one state for so many tokens, unless told otherwise: a prompt leaves one, at its end."""

MOST_OVERHEAD = 1.05
"""Bytes mapped for each byte asked for, above which a tier is at fault."""

_ORDERS = (ELEMENT_ORDERS, PARTED_ORDERS, RECORD_ORDERS, STATE_ORDERS)
_NULL_BLOCKS = 1
_NOT_KEPT = 2
"""Blocks of a group that a tier does not keep: a cache has no fewer."""


def tier_caches(
    like: KVCaches,
    *,
    block_tokens: int,
    nbytes: int,
    layouts: tuple[str, ...] | None = None,
    tokens_per_state: int | None = None,
    shared: bool = False,
    device: str | torch.device = "cpu",
) -> KVCaches:
    """Allocate a tier for the blocks of a cache: the same groups, buffers, layers and ranks, in at most nbytes.

    block_tokens: of every group that counts tokens; a block of a group of states holds one state. layouts: see
    pdtx.layout.layout_for; where None, of each buffer the one in which a block of all layers lies in one piece and a
    copy from the cache has the fewest runs, or the cache's own where there is none. Groups of cross attention are there
    but not kept: what the encoder made has no tokens to be named by.

    Raises TierError where block_tokens does not hold whole blocks, or nbytes none; InputError for a cache of some ranks
    only; what PagedBuffer raises.
    """
    like.require_all_ranks("a tier")
    check_block_tokens(like, block_tokens)
    chosen = [_layout_name(buffer, block_tokens, layouts) for buffer in like.buffers]
    sizes = np.zeros(len(like.groups), np.int64)
    for buffer, name in zip(like.buffers, chosen, strict=True):
        two, three = (_layout(buffer, name, block_tokens, count).size_bytes for count in (2, 3))
        sizes[buffer.group] += (three - two) * buffer.tp_size
    kept = share_out(
        like,
        sizes.tolist(),
        block_tokens=block_tokens,
        nbytes=nbytes,
        tokens_per_state=tokens_per_state,
        with_null=True,
    )
    groups = [
        _group(group, block_tokens, count + _NULL_BLOCKS if count else _NOT_KEPT)
        for group, count in zip(like.groups, kept, strict=True)
    ]
    buffers = [
        (buffer.group, _buffer(buffer, name, block_tokens, groups[buffer.group].num_blocks, shared, device))
        for buffer, name in zip(like.buffers, chosen, strict=True)
    ]
    cache = KVCaches(groups, buffers)
    if cache.nbytes > MOST_OVERHEAD * nbytes:
        raise TierError(f"a tier of {nbytes} bytes came to {cache.nbytes}, more than {MOST_OVERHEAD} times as many")
    return cache


def check_block_tokens(like: KVCaches, block_tokens: int) -> None:
    """Raise TierError unless a tier's block holds a whole number of every group's blocks."""
    for group in like.groups:
        if group.counts_tokens and (block_tokens < 1 or block_tokens % group.block_size):
            raise TierError(
                f"tier blocks of {block_tokens} tokens are no whole number of group {group.name}'s, which have "
                f"{group.block_size}; choose a multiple of {group.block_size}"
            )


def capacities(cache: KVCaches) -> tuple[int, ...]:
    """Return for each group of a tier's cache how many blocks it keeps."""
    return tuple(0 if group.kind == "cross" else group.num_blocks - _NULL_BLOCKS for group in cache.groups)


def share_out(
    like: KVCaches,
    sizes: Sequence[int],
    *,
    block_tokens: int,
    nbytes: int,
    tokens_per_state: int | None = None,
    with_null: bool = False,
) -> tuple[int, ...]:
    """Return how many blocks each group has: equally many where they hold tokens, and states for as many tokens.

    sizes: bytes of a tier block of each group. with_null: memory of a null block for each group is needed besides, and
    of groups that are not kept. Raises TierError where nbytes holds no block.
    """
    per_state = tokens_per_state or TOKENS_PER_STATE
    spare = 0
    if with_null:
        counts = (_NOT_KEPT if group.kind == "cross" else _NULL_BLOCKS for group in like.groups)
        spare = sum(size * count for size, count in zip(sizes, counts, strict=True))

    def counts_for(blocks: int) -> tuple[int, ...]:
        states = ceil_div(blocks * block_tokens, per_state)
        kinds = {"state": states, "cross": 0}
        return tuple(kinds.get(group.kind, blocks) for group in like.groups)

    def total(blocks: int) -> int:
        return spare + sum(size * count for size, count in zip(sizes, counts_for(blocks), strict=True))

    if min(total(1) - spare, nbytes - total(1) + 1) < 1:
        raise TierError(
            f"a tier of {nbytes} bytes holds no block of {block_tokens} tokens, which needs {total(1)}; give it more"
        )
    low, high = 1, nbytes
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if total(middle) <= nbytes else (low, middle - 1)
    return counts_for(low)


def block_nbytes(cache: KVCaches) -> tuple[int, ...]:
    """Return the payload of one block of each group: all buffers, layers and ranks."""
    found = [0] * len(cache.groups)
    for buffer in cache.buffers:
        layout = buffer.layout
        pages = layout.blocks_per_manager_block * buffer.num_layers * buffer.tp_size
        found[buffer.group] += layout.bytes_per_block * pages
    return tuple(found)


def _group(group: CacheGroup, block_tokens: int, num_blocks: int) -> CacheGroup:
    size = block_tokens if group.counts_tokens else group.block_size
    return replace(group, block_size=size, num_blocks=num_blocks, spec=_spec(group.spec, group.kind, size))


def _spec(spec: KVCacheSpec, kind: GroupKind, block_tokens: int) -> KVCacheSpec:
    """Return the spec with another block size, and without padding, which was for the old one."""
    own = replace(spec, page_size_padded=None) if isinstance(spec, AttentionSpec | MambaSpec) else spec
    return own if kind in ("state", "cross") else own.copy_with_new_block_size(block_tokens)


def _kernel_block_size(buffer: PagedBuffer, block_tokens: int) -> int | None:
    """Tokens in a page, where those of a page must stay together: a block of the tier is then several such pages."""
    if isinstance(buffer.spec, MambaSpec) or "token" in buffer.layout.sliceable:
        return None
    return buffer.layout.block_size if buffer.layout.block_size < block_tokens else None


def _kind(buffer: PagedBuffer) -> GroupKind:
    return group_kind(buffer.spec)


def _layout(buffer: PagedBuffer, name: str, block_tokens: int, num_blocks: int) -> Layout:
    """Return the layout of one rank of a buffer in the tier."""
    return any_layout(
        name,
        rank_spec(_spec(buffer.spec, _kind(buffer), block_tokens), buffer.tp_size, buffer.sharding),
        num_layers=buffer.num_layers,
        num_blocks=num_blocks,
        kernel_block_size=_kernel_block_size(buffer, block_tokens),
    )


def _buffer(
    buffer: PagedBuffer, name: str, block_tokens: int, num_blocks: int, shared: bool, device: str | torch.device
) -> PagedBuffer:
    return type(buffer)(
        _spec(buffer.spec, _kind(buffer), block_tokens),
        layout=name,
        num_layers=buffer.num_layers,
        num_blocks=num_blocks,
        device=device,
        name=buffer.name,
        layer_names=buffer.layer_names,
        tp_size=buffer.tp_size,
        sharding=buffer.sharding,
        kernel_block_size=_kernel_block_size(buffer, block_tokens),
        shared=shared,
    )


def _layout_name(buffer: PagedBuffer, block_tokens: int, layouts: tuple[str, ...] | None) -> str:
    first = buffer.layer_names[0]
    if layouts is not None:
        return layout_for(buffer.spec, first, layouts)
    names = (name for orders in _ORDERS for name, order in orders.items() if order[0] == "block")
    named = [name for name in names if layout_for(buffer.spec, first, (name,)) == name]
    costs = {name: runs for name in named if (runs := _num_runs(buffer, name, block_tokens)) is not None}
    own = buffer.layout.name
    return min(costs, key=lambda name: (costs[name], name != own), default=own)


def _num_runs(buffer: PagedBuffer, name: str, block_tokens: int) -> int | None:
    """Return the runs in which a block goes from a cache to a layout; None where it cannot, or is cut into pages."""
    if _kernel_block_size(buffer, block_tokens) is not None:
        return None
    try:
        there = _layout(buffer, name, block_tokens, 2)
        size = buffer.layout.block_size * buffer.layout.blocks_per_manager_block
        # Every second block, where there are so many: what a pool looks like that has been in use.
        pages = ceil_div(there.block_size * there.blocks_per_manager_block, size)
        table = np.arange(1, pages + 1, dtype=np.int64)
        if buffer.num_blocks > 2 * pages:
            table = 2 * table - 1
        if buffer.num_blocks <= pages:
            table = np.ones(pages, np.int64)
        src = Endpoint.of(buffer.layout, table)
        return build_plan(src, Endpoint.of(there, [1]), range(min(pages, buffer.num_blocks - 1) * size)).num_runs
    except (LayoutError, PlanError):
        return None
