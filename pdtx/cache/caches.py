"""All of a node's caches: groups of layers that share block tables, and their buffers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from pdtx.cache.buffer import PagedBuffer
from pdtx.errors import CacheError
from pdtx.kvspec import ChunkedLocalAttentionSpec, CrossAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from pdtx.plan import STATE, needed_positions, tokens_per_vector
from pdtx.plan.runs import Int64s
from pdtx.units import ceil_div

GroupKind = Literal["full", "window", "chunk", "state", "cross"]


def group_kind(spec: KVCacheSpec) -> GroupKind:
    """Return the kind of group that layers of a spec belong to."""
    kinds: tuple[tuple[type[KVCacheSpec], GroupKind], ...] = (
        (SlidingWindowSpec, "window"),
        (ChunkedLocalAttentionSpec, "chunk"),
        (MambaSpec, "state"),
        (CrossAttentionSpec, "cross"),
    )
    return next((kind for cls, kind in kinds if isinstance(spec, cls)), "full")


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share one block table a request, and one pool of blocks.

    A block table counts positions: tokens; for kind "cross" what the encoder made; a state is position 0 of one block.
    block_size: positions in a block. spec: of one of its layers. encoder_positions: for kind "cross".
    """

    name: str
    kind: GroupKind
    block_size: int
    num_blocks: int
    spec: KVCacheSpec
    encoder_positions: int = 0

    def positions(self, num_tokens: int) -> range:
        """Return the positions that a decoder needs of a prompt of num_tokens, see pdtx.plan.needed_positions."""
        return needed_positions(self.spec, num_tokens, self.encoder_positions)

    def first_read(self, num_tokens: int) -> int:
        """Return the first position that computing the token after num_tokens reads or writes."""
        needed = self.positions(num_tokens)
        return needed.start if self.kind in ("full", "window", "chunk") and num_tokens else 0

    def ready(self, num_tokens: int, start: int, stop: int) -> range:
        """Return the positions to ship once tokens start..stop of a prompt of num_tokens are computed.

        Over a prompt's chunks they are disjoint and make up positions(num_tokens).
        """
        if self.kind == "state":
            return STATE if stop == num_tokens and num_tokens else range(0)
        if self.kind == "cross":
            return self.positions(num_tokens) if start == 0 and stop > 0 else range(0)
        needed, ratio = self.positions(num_tokens), tokens_per_vector(self.spec)
        start, stop = start // ratio * ratio, stop // ratio * ratio
        first, last = max(start, needed.start), min(stop, needed.stop)
        return range(first, max(first, last))

    def uncached(self, positions: range, cached_tokens: int) -> range:
        """Return those of positions that still are to be sent to who has the first cached_tokens of the prompt.

        States and what the encoder made are sent whole.
        """
        if self.kind in ("state", "cross"):
            return positions
        ratio = tokens_per_vector(self.spec)
        first = min(max(positions.start, cached_tokens // ratio * ratio), positions.stop)
        return range(first, positions.stop) if positions else positions

    def table_blocks(self, num_tokens: int, first_position: int = 0) -> range:
        """Return the places of a block table that need blocks for num_tokens, prompt and answer.

        first_position: the first position that is kept; before its block the table holds the null block.
        """
        if self.kind == "state":
            return range(1)
        end = self.encoder_positions if self.kind == "cross" else num_tokens
        last = ceil_div(end, self.block_size)
        return range(min(first_position // self.block_size, last), last)


class KVCaches:
    """A node's groups and their buffers, in an order that both nodes of a model agree on.

    Raises CacheError if buffers do not fit their groups.
    """

    def __init__(self, groups: Sequence[CacheGroup], buffers: Sequence[tuple[int, PagedBuffer]]) -> None:
        """Put buffers, each with the index of its group, together."""
        self.groups = tuple(groups)
        for group, buffer in buffers:
            buffer.group = group
        self.buffers = tuple(buffer for _, buffer in buffers)
        if not self.buffers:
            raise CacheError("a cache needs one buffer at least")
        self._check()

    def _check(self) -> None:
        first = self.buffers[0]
        for buffer in self.buffers:
            group = self.groups[buffer.group]
            for what, ours, theirs in (
                ("blocks", buffer.num_blocks, group.num_blocks),
                ("positions in a block", buffer.block_size, group.block_size),
                ("ranks", buffer.tp_size, first.tp_size),
            ):
                if ours != theirs:
                    raise CacheError(f"buffer {buffer.name} has {ours} {what}, group {group.name} {theirs}")
        for kind, names in (("group", [g.name for g in self.groups]), ("buffer", [b.name for b in self.buffers])):
            if len(set(names)) < len(names):
                raise CacheError(f"two {kind}s have one name: {', '.join(names)}")

    @classmethod
    def single(cls, cache: PagedBuffer) -> "KVCaches":
        """Return the caches of a model whose layers are all in one buffer; the group is named like it."""
        kind = group_kind(cache.spec)
        group = CacheGroup(cache.name, kind, cache.block_size, cache.num_blocks, cache.spec)
        return cls([group], [(0, cache)])

    @property
    def device(self) -> torch.device:
        """Where all memory is."""
        return self.buffers[0].device

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks."""
        return self.buffers[0].tp_size

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers and ranks."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def poison(self, group: int, block_ids: Int64s) -> None:
        """Fill blocks of a group, shape (n,), with POISON in all its buffers."""
        if not len(block_ids):
            return
        ids = torch.as_tensor(block_ids, device=self.device)
        for buffer in self.buffers:
            if buffer.group == group:
                buffer.poison(ids)

    def buffer(self, name: str) -> PagedBuffer:
        """Return a buffer by its name. Raises CacheError."""
        found = next((buffer for buffer in self.buffers if buffer.name == name), None)
        if found is None:
            raise CacheError(f"there is no buffer {name!r}; one of {', '.join(b.name for b in self.buffers)}")
        return found
