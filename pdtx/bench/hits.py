"""How much of a trace tiers of some sizes would have: the index and the policies of pdtx.tiers, without memory."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pdtx.bench.sizes import UNBOUNDED, TierSize
from pdtx.bench.trace import TraceRequest
from pdtx.errors import InputError
from pdtx.plan.runs import Int64s
from pdtx.tiers.shelf import Shelf

NO_POLICY = "-"
MOST_BLOCKS = 1 << 24
"""Of all tiers that are simulated at once: an index of so many takes more than a gigabyte."""
_ID_BYTES = 8

Record = dict[str, object]


@dataclass
class HitRow:
    """What one tier had of a trace. A block is found where all before it in the prompt are found as well.

    tokens: of all prompts; hit_tokens: of them, in blocks that were found. evicted: blocks.
    """

    policy: str
    size: TierSize
    requests: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    evicted: int = 0

    @property
    def block_rate(self) -> float:
        """Share of the blocks that were found, 0 to 1."""
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def token_rate(self) -> float:
        """Share of the tokens that were found, 0 to 1."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0

    def count(self, request: TraceRequest, found: int, block_tokens: int) -> None:
        """Count a request of which the first blocks were found."""
        self.requests += 1
        self.blocks += len(request.hash_ids)
        self.hit_blocks += found
        self.tokens += request.input_length
        self.hit_tokens += min(found * block_tokens, request.input_length)

    def as_json(self) -> Record:
        """Return the row for a result file."""
        return {
            "policy": self.policy,
            "size_bytes": self.size.nbytes,
            "size_blocks": self.size.blocks,
            "hit_blocks": self.hit_blocks,
            "hit_tokens": self.hit_tokens,
            "block_rate": self.block_rate,
            "token_rate": self.token_rate,
            "evicted_blocks": self.evicted,
        }


@dataclass
class _Bounded:
    """A tier of some blocks: what a node does with it for each request, one request after the other."""

    row: HitRow
    shelf: Shelf

    def take(self, keys: Sequence[bytes]) -> int:
        blocks = self.shelf.lookup(keys, keys)
        self.shelf.unpin(blocks[blocks > 0])
        given = self.shelf.reserve(keys, keys).blocks
        self.shelf.commit(given[given > 0])
        return _leading(blocks)

    def finish(self) -> HitRow:
        self.row.evicted = self.shelf.usage().evicted.blocks
        return self.row


@dataclass
class _Unbounded:
    """A tier that nothing ever leaves: what no policy can be better than."""

    row: HitRow
    seen: set[bytes] = field(default_factory=set)

    def take(self, keys: Sequence[bytes]) -> int:
        found = next((place for place, key in enumerate(keys) if key not in self.seen), len(keys))
        self.seen.update(keys)
        return found

    def finish(self) -> HitRow:
        return self.row


def _leading(blocks: Int64s) -> int:
    """Return how many blocks from the first one on were found."""
    missing = np.flatnonzero(blocks == 0)
    return int(missing[0]) if len(missing) else len(blocks)


def simulate(
    requests: Iterable[TraceRequest], policies: Sequence[str], sizes: Sequence[TierSize], block_tokens: int
) -> list[HitRow]:
    """Have every policy with every size, and a tier without end, look for each request's blocks and then store them.

    Requests come one after the other: what one stores, the next one finds. requests are gone through once.
    Returns a row for each policy and size, the one without end last. Raises TierError for an unknown policy, InputError
    for more blocks than MOST_BLOCKS.
    """
    total = len(policies) * sum(size.blocks or 0 for size in sizes)
    if total > MOST_BLOCKS:
        raise InputError(
            f"the tiers have {total:,} blocks in all, and at most {MOST_BLOCKS:,} are simulated at once; give smaller "
            "sizes or fewer policies"
        )
    tiers: list[_Bounded | _Unbounded] = [
        _Bounded(HitRow(policy, size), Shelf("trace", size.blocks or 0, policy))
        for policy in policies
        for size in sizes
    ]
    tiers.append(_Unbounded(HitRow(NO_POLICY, UNBOUNDED)))
    for request in requests:
        keys = [number.to_bytes(_ID_BYTES, "little") for number in request.hash_ids]
        for tier in tiers:
            tier.row.count(request, tier.take(keys), block_tokens)
    return [tier.finish() for tier in tiers]
