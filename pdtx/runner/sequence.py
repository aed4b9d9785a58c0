"""A request's place in a paged cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pdtx.cache import CacheGroup, KVCaches
from pdtx.errors import CacheError
from pdtx.plan import NULL_BLOCK


@dataclass
class PagedSequence:
    """The block tables of one request, one for each group, and how many tokens are computed into them.

    tables: int64, 1-D; NULL_BLOCK where a table has no block; moved to the cache's device.
    num_tokens: tokens whose K/V are in the cache.
    Raises CacheError for tables that are not one a group, blocks that the cache does not have or that are given twice
    in a group, or tokens that do not fit.
    """

    cache: KVCaches
    tables: Sequence[torch.Tensor | npt.NDArray[np.int64]]
    num_tokens: int = 0

    def __post_init__(self) -> None:
        groups = self.cache.groups
        if len(self.tables) != len(groups):
            raise CacheError(f"{len(self.tables)} block tables for {len(groups)} groups")
        self.tables = tuple(self._checked(*pair) for pair in zip(groups, self.tables, strict=True))
        if not 0 <= self.num_tokens <= self.capacity:
            raise CacheError(f"{self.num_tokens} tokens are not 0..{self.capacity}, what the blocks can hold")

    def table(self, group: int) -> torch.Tensor:
        """Return a group's block table, int64, on the cache's device."""
        table = self.tables[group]
        return table if isinstance(table, torch.Tensor) else torch.as_tensor(table)

    @property
    def capacity(self) -> int:
        """Tokens that the tables have places for: the fewest of all groups that grow."""
        growing = [
            len(table) * group.block_size
            for group, table in zip(self.cache.groups, self.tables, strict=True)
            if group.counts_tokens
        ]
        return min(growing, default=1 << 62)

    def extend(self, group: int, block_ids: torch.Tensor | Sequence[int]) -> None:
        """Add blocks behind a group's last one. Raises CacheError as the class does, and then adds none."""
        added = torch.as_tensor(block_ids, dtype=torch.int64, device="cpu")
        extended = self._checked(self.cache.groups[group], torch.cat([self.table(group).cpu(), added]))
        self.tables = tuple(extended if at == group else table for at, table in enumerate(self.tables))

    def _checked(self, group: CacheGroup, table: torch.Tensor | npt.NDArray[np.int64]) -> torch.Tensor:
        # Checked once here rather than on every token: an index that wraps round would read another request's pages.
        ids = torch.as_tensor(table).cpu()
        if ids.dtype != torch.int64 or ids.dim() != 1:
            raise CacheError(f"block ids must be 1-D int64, not {ids.dim()}-D {ids.dtype}")
        wrong = ids[(ids < 0) | (ids >= group.num_blocks)]
        if len(wrong):
            raise CacheError(f"block {int(wrong[0])} is not one of group {group.name}'s 0..{group.num_blocks - 1}")
        real = ids[ids != NULL_BLOCK].tolist()
        if len(set(real)) != len(real):
            raise CacheError(f"a block appears twice among the sequence's {len(real)} of group {group.name}")
        return ids.to(self.cache.device)
