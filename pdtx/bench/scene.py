"""A cache full of coordinate codes, a poisoned one to load into, and the comparison of the two."""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from pdtx.bench.caches import Layers, model_caches
from pdtx.cache import KVCaches, compare
from pdtx.errors import InputError
from pdtx.plan.runs import Int64s
from pdtx.testing.codes import check_codes, codes_for, fill_codes
from pdtx.tiers import Held, PrefixKeys, Side, prefix_keys
from pdtx.tiers.geometry import block_nbytes

Tables = tuple[Int64s, ...]

_SEEDS = {"source": 1, "destination": 2}


class TierScene:
    """Blocks of a prompt in random places of two caches.

    layers: of one rank, their block size is that of the caches. factor: blocks of a cache that make one of the tier.
    blocks: of the prompt, a multiple of factor.

    Each turn() the prompt is another one: its blocks are the same ones in another order, so that what a tier kept of an
    earlier prompt is wrong now.
    """

    def __init__(self, layers: Layers, *, layouts: tuple[str, ...], factor: int, blocks: int) -> None:
        """Allocate and fill. Raises InputError for numbers that do not go together."""
        if factor < 1 or blocks % factor or blocks < 2 * factor:
            raise InputError(f"{blocks} blocks do not make two or more tier blocks of {factor} each")
        self.factor, self.blocks = factor, blocks
        self.source, self.destination = (
            model_caches(layers, layouts=layouts, num_blocks=2 * blocks + 1) for _ in range(2)
        )
        sizes = {group.block_size for group in self.source.groups}
        if len(sizes) != 1:
            raise InputError("the model's layers have blocks of several sizes; give a --block-size that suits all")
        self.block_size = sizes.pop()
        self.fingerprint = hashlib.sha256(b"pdtx bench").digest()
        self._prompt, self._home = 0, self._table("source")
        self._filled = {buffer.name: codes_for(buffer, self.positions) for buffer in self.source.buffers}
        for buffer in self.source.buffers:
            fill_codes(buffer, self._home, self._filled[buffer.name])
        self.loaded_table = self._table("destination")

    def _table(self, side: str) -> Int64s:
        random = np.random.default_rng(_SEEDS[side])
        return random.permutation(2 * self.blocks)[: self.blocks].astype(np.int64) + 1

    @property
    def positions(self) -> int:
        """Tokens of the prompt."""
        return self.blocks * self.block_size

    @property
    def tier_blocks(self) -> int:
        """Blocks that a tier needs for the prompt, of each group."""
        return self.blocks // self.factor

    @property
    def tier_block_tokens(self) -> int:
        """Tokens of a block of the tier."""
        return self.factor * self.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of the prompt, all groups."""
        return sum(self.tier_block_nbytes) * self.tier_blocks

    @property
    def tier_block_nbytes(self) -> tuple[int, ...]:
        """Bytes of a tier block of each group."""
        return tuple(nbytes * self.factor for nbytes in block_nbytes(self.source))

    @property
    def places(self) -> Tables:
        """All blocks of the prompt, for each group, counted in tier blocks."""
        return tuple(np.arange(self.tier_blocks, dtype=np.int64) for _ in self.source.groups)

    def turn(self) -> None:
        """Make the prompt another one."""
        self._prompt += 1

    def keys(self) -> PrefixKeys:
        """Return the names of the prompt's blocks."""
        tokens = [self._prompt, *range(1, self.positions)]
        return prefix_keys(tokens, self.tier_block_tokens, self.fingerprint)

    @property
    def table(self) -> Int64s:
        """The prompt's blocks in the source."""
        return np.roll(self._home, self._prompt * self.factor)

    @property
    def stored(self) -> Side:
        """The prompt in the source."""
        return Side(self.source, tuple(self.table for _ in self.source.groups), hold=Held.BY_CALLER)

    @property
    def loaded(self) -> Side:
        """Where the prompt is loaded to."""
        return Side(self.destination, tuple(self.loaded_table for _ in self.destination.groups))

    def poison(self) -> None:
        """Make sure that nothing of an earlier load is left."""
        for buffer in self.destination.buffers:
            buffer.poison()

    def wrong_loaded(self) -> int:
        """Count elements of the destination that are not the prompt's, and words elsewhere that are no poison."""
        return self.wrong_in(self.destination, self.loaded.tables)

    def wrong_in(self, found: KVCaches, tables: Sequence[Int64s]) -> int:
        """Do the same for any cache that the prompt was copied to, and that was poisoned before."""
        wrong = 0
        for here, there in zip(self.source.buffers, found.buffers, strict=True):
            home, table = (torch.from_numpy(np.ascontiguousarray(t)) for t in (self.table, tables[there.group]))
            for layer in range(here.num_layers):
                meant = here.canonical(layer, home, 0, self.positions)
                got = there.canonical(layer, table, 0, self.positions)
                wrong += compare(got, meant, layer=layer, start=0, itemsize=here.itemsize).wrong
            others = np.setdiff1d(np.arange(there.num_blocks), tables[there.group])
            wrong += there.unpoisoned(torch.from_numpy(others))
        return wrong

    def wrong_source(self) -> int:
        """Count elements of the source that are not the codes of their coordinates any more."""
        return sum(check_codes(one, self._home, self._filled[one.name]).wrong for one in self.source.buffers)
