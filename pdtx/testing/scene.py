"""Two small caches and one request, to be moved from one to the other."""

from dataclasses import dataclass

import numpy as np
import torch

from pdtx.cache import PagedKVCache
from pdtx.kvspec import FullAttentionSpec
from pdtx.plan import Endpoint, TransferPlan, build_plan
from pdtx.plan.runs import Int64s
from pdtx.testing.codes import check_codes, codes_for, fill_codes
from pdtx.testing.pair import require
from pdtx.transports import Placement, Region, TransferKey


@dataclass(frozen=True)
class Side:
    """A cache and the request's blocks in it, in token order."""

    cache: PagedKVCache
    block_ids: Int64s

    @property
    def region(self) -> Region:
        """The whole cache."""
        return Region(self.cache.memory)

    @property
    def endpoint(self) -> Endpoint:
        """For plans."""
        return Endpoint(self.cache.layout, self.block_ids)


class Scene:
    """A source filled with coordinate codes and a poisoned destination, with the request's blocks in random places.

    layouts, block_sizes: of source and destination.
    """

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
        random = np.random.default_rng(seed)
        self.request_id, self.tokens, self.num_layers = f"request-{seed}", tokens, num_layers

        def side(layout: str, block_size: int) -> Side:
            spec = FullAttentionSpec(block_size=block_size, num_kv_heads=heads, head_size=head_size, dtype=dtype)
            needed = -(-tokens // block_size)
            cache = PagedKVCache(spec, layout=layout, num_layers=num_layers, num_blocks=2 * needed + 1)
            return Side(cache, random.permutation(2 * needed)[:needed].astype(np.int64) + 1)

        self.src, self.dst = (side(*of) for of in zip(layouts, block_sizes, strict=True))
        self.codes = codes_for(self.src.cache, tokens)
        fill_codes(self.src.cache, self.src.block_ids, self.codes)
        self._source_before = self.src.cache.memory.clone()
        self._moved = list[tuple[range, range]]()

    def plan(self, layers: range | None = None, tokens: range | None = None) -> TransferPlan:
        """Plan the transfer of layers x tokens, by default of everything."""
        return build_plan(
            self.src.endpoint, self.dst.endpoint, range(self.tokens) if tokens is None else tokens, layers
        )

    def key(self, plan: TransferPlan) -> TransferKey:
        """Name what a plan moves."""
        layers, tokens = plan.layers, plan.tokens
        return TransferKey(self.request_id, layers.start, layers.stop, tokens.start, tokens.stop)

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
        require(torch.equal(self.src.cache.memory, self._source_before), "the transfer changed the source")
        cache = self.dst.cache
        meant = PagedKVCache(
            cache.spec, layout=cache.layout.name, num_layers=cache.num_layers, num_blocks=cache.num_blocks
        )
        for layers, tokens in self._moved:
            fill_codes(meant, self.dst.block_ids, self.codes, layers=layers, tokens=tokens)
        outside = int((meant.memory != cache.memory).sum())
        require(outside == 0, f"{outside} bytes were written that belong to no transfer")
