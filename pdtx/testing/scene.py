"""Two small buffers and one request, to be moved from one to the other."""

from dataclasses import dataclass

import numpy as np
import torch

from pdtx.cache import PagedBuffer, PagedKVCache
from pdtx.kvspec import FullAttentionSpec
from pdtx.plan import Endpoint, TransferPlan, build_plan
from pdtx.plan.runs import Int64s
from pdtx.testing.codes import check_codes, codes_for, fill_codes
from pdtx.testing.pair import require
from pdtx.transports import Placement, Region, TransferKey
from pdtx.units import ceil_div


@dataclass(frozen=True)
class Side:
    """A buffer of one rank, and the request's blocks in it, in table order."""

    cache: PagedBuffer
    block_ids: Int64s

    @property
    def memory(self) -> torch.Tensor:
        """All of the buffer."""
        return self.cache.ranks[0].memory

    @property
    def region(self) -> Region:
        """All of the buffer, for movers."""
        return Region(self.memory)

    @property
    def endpoint(self) -> Endpoint:
        """For plans."""
        return Endpoint.of(self.cache.layout, self.block_ids)


class BufferScene:
    """A source filled with coordinate codes and a poisoned destination, with the request's blocks in random places.

    source, destination: buffers of one rank and of one kind. positions: of the request.
    Keys name a buffer and ranks that depend on seed, so that a mover that loses them is found out.
    """

    def __init__(self, source: PagedBuffer, destination: PagedBuffer, positions: int, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.request_id, self.tokens, self.num_layers = f"request-{seed}", positions, source.num_layers
        self._key_numbers = seed % 5, seed % 3, seed % 2

        def side(cache: PagedBuffer) -> Side:
            needed = ceil_div(positions, cache.block_size)
            return Side(cache, random.permutation(cache.num_blocks - 1)[:needed].astype(np.int64) + 1)

        self.src, self.dst = side(source), side(destination)
        self.codes = codes_for(source, positions)
        fill_codes(source, self.src.block_ids, self.codes)
        self._source_before = self.src.memory.clone()
        self._moved = list[tuple[range, range]]()

    def plan(self, layers: range | None = None, tokens: range | None = None) -> TransferPlan:
        """Plan the transfer of layers x tokens, by default of everything."""
        return build_plan(
            self.src.endpoint, self.dst.endpoint, range(self.tokens) if tokens is None else tokens, layers
        )

    def key(self, plan: TransferPlan) -> TransferKey:
        """Name what a plan moves."""
        layers, tokens = plan.layers, plan.tokens
        return TransferKey(self.request_id, layers.start, layers.stop, tokens.start, tokens.stop, *self._key_numbers)

    def placement(self, plan: TransferPlan) -> Placement:
        """Where a plan's bytes go."""
        return Placement(self.dst.region, plan.flat.destination())

    def moved(self, plan: TransferPlan) -> None:
        """Expect from now on what plan moves."""
        self._moved.append((plan.layers, plan.tokens))

    def require_exact(self) -> None:
        """Raise ContractViolation unless the destination holds what moved() named, and poison everywhere else."""
        for layers, tokens in self._moved:
            found = check_codes(self.dst.cache, self.dst.block_ids, self.codes, layers=layers, tokens=tokens)
            where = found.first.coordinate if found.first else ""
            require(found.wrong == 0, f"{found.wrong} of {found.compared} elements are wrong, the first at {where}")
        require(torch.equal(self.src.memory, self._source_before), "the transfer changed the source")
        outside = int((self._meant() != self.dst.memory).sum())
        require(outside == 0, f"{outside} bytes were written that belong to no transfer")

    def _meant(self) -> torch.Tensor:
        """Return what the destination's memory should be; it is left as it was."""
        there = self.dst.memory.clone()
        self.dst.cache.poison()
        for layers, tokens in self._moved:
            fill_codes(self.dst.cache, self.dst.block_ids, self.codes, layers=layers, tokens=tokens)
        meant = self.dst.memory.clone()
        self.dst.memory.copy_(there)
        return meant


class Scene(BufferScene):
    """A BufferScene of keys and values. layouts, block_sizes: of source and destination."""

    def __init__(
        self,
        layouts: tuple[str, str] = ("flash_attn_nhd", "flashinfer_hnd"),
        *,
        block_sizes: tuple[int, int] = (4, 8),
        num_layers: int = 3,
        tokens: int = 19,
        heads: int = 2,
        head_size: int = 8,
        dtype: str = "bfloat16",
        seed: int = 0,
    ) -> None:
        def cache(layout: str, block_size: int) -> PagedKVCache:
            spec = FullAttentionSpec(block_size=block_size, num_kv_heads=heads, head_size=head_size, dtype=dtype)
            num_blocks = 2 * ceil_div(tokens, block_size) + 1
            return PagedKVCache(spec, layout=layout, num_layers=num_layers, num_blocks=num_blocks)

        source, destination = (cache(*of) for of in zip(layouts, block_sizes, strict=True))
        super().__init__(source, destination, tokens, seed)
