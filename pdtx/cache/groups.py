"""Groups: layers that share block tables and a pool of blocks."""

from dataclasses import dataclass
from typing import Literal

from pdtx.kvspec import ChunkedLocalAttentionSpec, CrossAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from pdtx.plan import STATE, needed_positions, tokens_per_vector
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


_REACHES = ("sliding_window", "attention_chunk_size")


@dataclass(frozen=True)
class GroupBehaviour:
    """What tells groups apart: their kind, how far back it reaches, tokens that share a vector."""

    kind: GroupKind
    reach: int
    ratio: int

    @classmethod
    def of(cls, spec: KVCacheSpec) -> "GroupBehaviour":
        """Return that of a layer."""
        reach = next((int(getattr(spec, name)) for name in _REACHES if getattr(spec, name, None)), 0)
        return cls(group_kind(spec), reach, tokens_per_vector(spec))

    @property
    def name(self) -> str:
        """What such a group is called: "full", "window1024"."""
        reach, ratio = str(self.reach or ""), f"by{self.ratio}" if self.ratio > 1 else ""
        return f"{self.kind}{reach}{ratio}"


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share one block table a request, and one pool of blocks.

    A block table counts positions: tokens; for kind "cross" what the encoder made; a state is position 0 of one block.
    block_size: positions in a block. spec: of one of its layers. encoder_positions: for kind "cross".
    pool: name of a pool that it shares with the other groups that name it, as a hybrid model's groups do in vLLM: a
    block id of that pool is in use by one of them at a time, and their buffers may lie in the same bytes. "" is a pool
    of its own.
    """

    name: str
    kind: GroupKind
    block_size: int
    num_blocks: int
    spec: KVCacheSpec
    encoder_positions: int = 0
    pool: str = ""

    @property
    def counts_tokens(self) -> bool:
        """Whether its positions are tokens, or vectors of several; states and what an encoder made are not."""
        return self.kind not in ("state", "cross")

    def positions(self, num_tokens: int) -> range:
        """Return the positions that a decoder needs of a prompt of num_tokens, see pdtx.plan.needed_positions."""
        return needed_positions(self.spec, num_tokens, self.encoder_positions)

    def first_read(self, num_tokens: int) -> int:
        """Return the first position that computing the token after num_tokens reads or writes."""
        needed = self.positions(num_tokens)
        return needed.start if self.counts_tokens and num_tokens else 0

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
        if not self.counts_tokens:
            return positions
        ratio = tokens_per_vector(self.spec)
        first = min(max(positions.start, cached_tokens // ratio * ratio), positions.stop)
        return range(first, positions.stop) if positions else positions

    def cached_blocks(self, cached_tokens: int) -> int:
        """Return how many blocks of a table hold something of a prompt's first cached_tokens, the last maybe in part.

        States and what the encoder made are sent whole, so that none of theirs does.
        """
        return ceil_div(cached_tokens, self.block_size) if self.counts_tokens else 0

    def table_blocks(self, num_tokens: int, first_position: int = 0) -> range:
        """Return the places of a block table that need blocks for num_tokens, prompt and answer.

        first_position: the first position that is kept; before its block the table holds the null block.
        """
        if self.kind == "state":
            return range(1)
        end = self.encoder_positions if self.kind == "cross" else num_tokens
        last = ceil_div(end, self.block_size)
        return range(min(first_position // self.block_size, last), last)
