"""What is compared with what: the buffers of two caches, their blocks and positions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from pdtx.cache import (
    CacheGroup,
    CoordinateCodes,
    KVCaches,
    PagedBuffer,
    PagedKVCache,
    PagedQuantizedCache,
    PagedStateCache,
)
from pdtx.cache.aliasing import share_bytes
from pdtx.cache.codes import POISON_BYTES, WORDS, Words
from pdtx.cache.contents import codes_for
from pdtx.cache.verify import Coordinate, Naming
from pdtx.errors import InputError
from pdtx.parallel import heads_of_rank, rank_spec
from pdtx.plan import NULL_BLOCK
from pdtx.plan.runs import Int64s
from pdtx.units import ceil_div

Table = Sequence[int] | Int64s | torch.Tensor
Tables = Table | Mapping[str, Table]
"""A request's block table: of the only group, or of each group by its name."""


def _poison_words(itemsize: int) -> tuple[int, int]:
    pattern = POISON_BYTES * itemsize
    low, high = sorted(int.from_bytes(pattern[first : first + itemsize], "little") for first in (0, 1))
    return low, high


_POISON_WORDS = {itemsize: _poison_words(itemsize) for itemsize in WORDS}
"""By bytes of an element: what one of poison can be, by where it begins; ascending."""


@dataclass(frozen=True)
class GroupSide:
    """What a request has of a group on one side. table: block ids, int64; positions: that are asked for.

    whole: all positions of the blocks that hold any of them.
    """

    group: CacheGroup
    table: Int64s
    positions: range

    @property
    def whole(self) -> range:
        """All positions of the blocks that hold any of positions."""
        size, asked = self.group.block_size, self.positions
        return range(asked.start // size * size, ceil_div(asked.stop, size) * size) if asked else asked

    @property
    def named(self) -> Int64s:
        """The ids of the blocks that hold any of positions."""
        size, asked = self.group.block_size, self.positions
        found: Int64s = self.table[asked.start // size : ceil_div(asked.stop, size)] if asked else self.table[:0]
        return found

    def check(self, side: str) -> None:
        """Raise InputError unless there is a block of its own for each of positions."""
        what = f"{side} group {self.group.name}"
        needed = ceil_div(self.positions.stop, self.group.block_size) if self.positions else 0
        if len(self.table) < needed:
            raise InputError(
                f"{what} has {len(self.table)} blocks of {self.group.block_size}; positions "
                f"{self.positions.start}..{self.positions.stop} need {needed}"
            )
        outside = self.named[(self.named <= NULL_BLOCK) | (self.named >= self.group.num_blocks)]
        if len(outside):
            raise InputError(f"{what}: block {outside[0]} is none of 1..{self.group.num_blocks - 1}")
        if len(np.unique(self.named)) < len(self.named):
            raise InputError(f"{what} names a block twice: {self.named.tolist()}")


@dataclass(frozen=True)
class RankView:
    """What one rank holds of a buffer, as a buffer of its own. heads: of the model, that it holds.

    channels: of each head, in the order in which it holds them. Of states these are bytes.
    """

    rank: int
    buffer: PagedBuffer
    heads: range
    channels: Int64s


@dataclass(frozen=True)
class BufferPair:
    """A buffer of the destination, and the one of the source that has the same layers.

    codes: of the source's elements; they count its layers, and positions from 0. alone: whether there is no other pair.
    """

    source: PagedBuffer
    destination: PagedBuffer
    here: GroupSide
    there: GroupSide
    codes: CoordinateCodes
    alone: bool

    @property
    def parts(self) -> int:
        """2 for keys and values, 1 for anything else."""
        return self.source.rows_shape(1)[0]

    @property
    def rounds(self) -> int:
        """How many digits it takes to tell all indices from one another, and from poison."""
        poison, base, digits = _POISON_WORDS[self.codes.itemsize][0], 1 << (8 * self.codes.itemsize), 1
        reach = poison
        while reach < self.codes.stop:
            reach, digits = reach * base + poison, digits + 1
        return digits

    def values(self, layers: range, tokens: range) -> Words:
        """Return what codes.of() returns, but for poison: what was never written must not look right.

        Codes that are all different stay so, unless there are as many as an element has values.
        """
        codes, (low, high) = self.codes, _POISON_WORDS[self.codes.itemsize]
        words = codes.of(layers, tokens)
        if codes.plain and codes.stop + 2 <= 1 << (8 * codes.itemsize):
            if codes.stop > low:
                words += words >= low
                words += words >= high
            return words
        words[(words == low) | (words == high)] ^= 1
        return words

    def source_layer(self, layer: int) -> int:
        """Return the index at the source of a layer of the destination."""
        return self.source.layer_names.index(self.destination.layer_names[layer])

    @property
    def layers(self) -> range:
        """The destination's layers."""
        return range(self.destination.num_layers)

    def naming(self, buffer: PagedBuffer, group: CacheGroup) -> Naming:
        """Return how coordinates are called."""
        name = "" if self.alone else buffer.name  # the only one there is needs no name
        return Naming(
            name,
            group.name,
            buffer.layer_names,
            buffer.row_kind,
            self.codes.heads,
            states=buffer.state_names,
            fields=buffer.row_fields,
        )

    @cached_property
    def views(self) -> tuple[RankView, ...]:
        """The destination's ranks."""
        buffer = self.destination
        every = np.arange(self.codes.channels)
        if buffer.tp_size == 1:
            return (RankView(0, buffer, range(self.codes.heads), every),)
        split = buffer.layout.blocks_per_manager_block > 1
        found = list[RankView]()
        for rank, memory in enumerate(buffer.ranks):
            heads = range(self.codes.heads)
            if isinstance(buffer, PagedKVCache):
                heads = heads_of_rank(rank, buffer.tp_size, buffer.spec.num_kv_heads)
            own = type(buffer)(
                rank_spec(buffer.spec, buffer.tp_size, buffer.sharding),
                layout=buffer.layout.name,
                num_layers=buffer.num_layers,
                num_blocks=buffer.num_blocks,
                name=buffer.name,
                layer_names=buffer.layer_names,
                kernel_block_size=buffer.layout.block_size if split else None,
                memories=[memory.memory],
            )
            channels = buffer.bytes_of_rank(rank).numpy() if isinstance(buffer, PagedStateCache) else every
            found.append(RankView(rank, own, heads, channels))
        return tuple(found)


def pair_caches(
    source: KVCaches, destination: KVCaches, source_blocks: Tables, destination_blocks: Tables, tokens: int | range
) -> list[BufferPair]:
    """Pair the destination's buffers with the source's by their names.

    tokens: how many the request has, of which each group needs what a decoder would; or the positions themselves.
    Raises InputError, naming the field and both values, where the two keep different things, or blocks do not fit.
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int | np.integer | range):
        raise InputError(f"tokens is a number of tokens or a range of positions, not {tokens!r}")
    tokens = tokens if isinstance(tokens, range) else int(tokens)
    for cache in (source, destination):
        cache.require_all_ranks("check_transfer()")
        if any(isinstance(buffer, PagedQuantizedCache) and buffer.tp_size > 1 for buffer in cache.buffers):
            raise InputError("check_transfer() compares quantized heads on one rank only; give caches with tp_size 1")
    _check_apart(source, destination)
    here = _sides("source", source, source_blocks, tokens)
    there = _sides("destination", destination, destination_blocks, tokens)
    pairs, first = list[BufferPair](), 0
    alone = len(source.buffers) == len(destination.buffers) == 1
    for buffer in destination.buffers:
        ours = next((one for one in source.buffers if one.name == buffer.name), None)
        if ours is None:
            names = ", ".join(one.name for one in source.buffers)
            raise InputError(f"the source has no buffer {buffer.name}; it has {names}")
        _check_alike(ours, buffer)
        codes = codes_for(ours, here[ours.group].whole.stop, first)
        pairs.append(BufferPair(ours, buffer, here[ours.group], there[buffer.group], codes, alone))
        if pairs[-1].here.positions != pairs[-1].there.positions:
            raise InputError(
                f"buffer {buffer.name}: the source has positions {pairs[-1].here.positions} of the request, the "
                f"destination {pairs[-1].there.positions}"
            )
        first = codes.stop
    if not any(pair.here.positions for pair in pairs):
        raise InputError(f"{tokens} tokens leave nothing to be moved; give 1 or more")
    return pairs


def coordinate_of(pairs: Sequence[BufferPair], index: int) -> Coordinate:
    """Return the coordinate of the source that has an index."""
    pair = next(pair for pair in reversed(pairs) if pair.codes.first <= index)
    codes, rest = pair.codes, index - pair.codes.first
    shape = (codes.layers, 2, codes.tokens, codes.heads, codes.channels)
    layer, kv, token, head, channel = (int(at) for at in np.unravel_index(rest, shape))
    return Coordinate(layer, kv, token, head, channel, pair.naming(pair.source, pair.here.group))


def _sides(name: str, caches: KVCaches, tables: Tables, tokens: int | range) -> list[GroupSide]:
    if not isinstance(tables, Mapping):
        if len(caches.groups) > 1:
            names = ", ".join(group.name for group in caches.groups)
            raise InputError(f"the {name} has the groups {names}: give its blocks as a dict with a table for each")
        tables = {caches.groups[0].name: tables}
    groups = [group.name for group in caches.groups]
    wrong = next((key for key in (*tables, *groups) if key not in tables or key not in groups), None)
    if wrong is not None:
        raise InputError(f"the {name}'s blocks are of {', '.join(tables)}; its groups are {', '.join(groups)}")
    found = [
        GroupSide(group, _table(f"{name} group {group.name}", tables[group.name]), _positions(group, tokens))
        for group in caches.groups
    ]
    for side in found:
        side.check(name)
    _check_pools(name, found)
    return found


def _table(what: str, given: Table) -> Int64s:
    """Return a block table as an array; a tensor of any device is one, too. Raises InputError for what is no ids."""
    try:
        array = given.cpu().numpy() if isinstance(given, torch.Tensor) else np.asarray(given)
    except (ValueError, TypeError) as error:  # lists of different lengths, for example
        raise InputError(f"{what}: a block table is a list of ids: {error}") from None
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise InputError(f"{what}: a block table is a list of ids, not {array.dtype} of shape {array.shape}")
    return array.astype(np.int64)


def _check_pools(name: str, sides: Sequence[GroupSide]) -> None:
    """Raise InputError where two groups of one pool, whose buffers may lie in the same bytes, name one block."""
    users = dict[tuple[str, int], str]()
    for side in sides:
        for block in side.named.tolist() if side.group.pool else ():
            user = users.setdefault((side.group.pool, block), side.group.name)
            if user != side.group.name:
                raise InputError(
                    f"{name} groups {user} and {side.group.name} both name block {block} of pool {side.group.pool}, "
                    "which one of them at a time can use"
                )


def _positions(group: CacheGroup, tokens: int | range) -> range:
    if isinstance(tokens, int):
        return group.positions(tokens)
    if tokens.step != 1 or not 0 <= tokens.start <= tokens.stop:
        raise InputError(f"tokens {tokens} are no range of positions")
    return tokens if group.counts_tokens else group.positions(tokens.stop)


def _check_alike(source: PagedBuffer, destination: PagedBuffer) -> None:
    missing = next((name for name in destination.layer_names if name not in source.layer_names), None)
    if missing is not None:
        raise InputError(f"buffer {destination.name}: the source has no layer {missing}")
    ours, theirs = source.rows_shape(1), destination.rows_shape(1)
    for what, one, other in (
        ("kind", type(source).__name__, type(destination).__name__),
        ("K/V parts", ours[0], theirs[0]),
        ("KV heads of the model", ours[2], theirs[2]),
        ("bytes of a head", ours[3], theirs[3]),
        ("bytes of an element", source.itemsize, destination.itemsize),
    ):
        if one != other:
            raise InputError(f"buffer {destination.name}: {what} differ: source {one}, destination {other}")
    if source.itemsize not in _POISON_WORDS:
        sizes = ", ".join(map(str, _POISON_WORDS))
        raise InputError(
            f"buffer {destination.name}: elements of {source.itemsize} bytes cannot be checked; their size is one of "
            f"{sizes}"
        )


def _check_apart(source: KVCaches, destination: KVCaches) -> None:
    for ours in (rank.memory for buffer in source.buffers for rank in buffer.ranks):
        for theirs in (rank.memory for buffer in destination.buffers for rank in buffer.ranks):
            if share_bytes(ours, theirs):
                raise InputError(
                    "source and destination share memory; give each its own, for one is filled and one poisoned"
                )


def on_device(ids: Int64s, buffer: PagedBuffer) -> torch.Tensor:
    """Return block ids as a buffer takes them."""
    return torch.from_numpy(np.ascontiguousarray(ids)).to(buffer.device)
