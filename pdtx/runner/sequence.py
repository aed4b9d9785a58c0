"""A request's place in a paged cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pdtx.cache import PagedKVCache
from pdtx.errors import CacheError


@dataclass
class PagedSequence:
    """The blocks of one request, in token order, and how many tokens' K/V are in them.

    block_ids: int64, 1-D; moved to the cache's device. num_tokens: tokens whose K/V are in the cache.
    Raises CacheError for blocks that the cache does not have or that are given twice, or tokens that do not fit.
    """

    cache: PagedKVCache
    block_ids: torch.Tensor
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self.block_ids = self._checked(self.block_ids)
        if not 0 <= self.num_tokens <= self.capacity:
            raise CacheError(
                f"{self.num_tokens} tokens are not 0..{self.capacity}, what {len(self.block_ids)} blocks of "
                f"{self.cache.spec.block_size} can hold"
            )

    @property
    def capacity(self) -> int:
        """Tokens that the blocks can hold."""
        return len(self.block_ids) * self.cache.spec.block_size

    def extend_blocks(self, block_ids: torch.Tensor | Sequence[int]) -> None:
        """Add blocks behind the last one. Raises CacheError as the class does, and then adds none."""
        added = torch.as_tensor(block_ids, dtype=torch.int64, device="cpu")
        self.block_ids = self._checked(torch.cat([self.block_ids.cpu(), added]))

    def _checked(self, block_ids: torch.Tensor) -> torch.Tensor:
        # Checked once here rather than on every token: an index that wraps round would read another request's pages.
        ids = block_ids.cpu()
        if ids.dtype != torch.int64 or ids.dim() != 1:
            raise CacheError(f"block ids must be 1-D int64, not {ids.dim()}-D {ids.dtype}")
        wrong = ids[(ids < 0) | (ids >= self.cache.num_blocks)]
        if len(wrong):
            raise CacheError(f"block {int(wrong[0])} is not one of the cache's blocks 0..{self.cache.num_blocks - 1}")
        if len(set(ids.tolist())) != len(ids):
            raise CacheError(f"a block appears twice among the sequence's {len(ids)} blocks")
        return block_ids.to(self.cache.device)
