"""What every paged buffer has: layers with one spec, a region for each tensor-parallel rank, and poison."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import ClassVar

import torch

from pdtx.cache.device import open_device
from pdtx.cache.memory import allocate
from pdtx.cache.poison import PoisonedPart, fill_with_poison
from pdtx.cache.verify import Kind, StateNaming
from pdtx.errors import CacheError, ParallelError
from pdtx.kvspec import KVCacheSpec, MambaSpec, StateSharding
from pdtx.layout import AnyLayout, Part, RecordLayout, any_layout
from pdtx.parallel import rank_spec
from pdtx.plan import NULL_BLOCK
from pdtx.plan.runs import Int64s
from pdtx.units import ceil_div

_NOWHERE: Mapping[str, int] = {}


@dataclass(frozen=True)
class RankMemory:
    """What one tensor-parallel rank keeps of a buffer. memory: uint8, (layout.size_bytes,).

    Memory of others may be shorter by the last page's padding.
    """

    layout: AnyLayout
    memory: torch.Tensor = field(repr=False)

    def view(
        self, part: Part, order: Sequence[str], dtype: torch.dtype, at: Mapping[str, int] = _NOWHERE
    ) -> torch.Tensor:
        """Return a part's elements with the axes of order, whatever lies in memory; other axes stand where at says.

        dtype: as wide as the layout's elements; for records of bytes any type that they hold whole numbers of.
        """
        axes, item = part.layout.by_name, dtype.itemsize
        size, stride = [axes[name].extent for name in order], [axes[name].stride for name in order]
        offset = part.offset + sum(axes[name].stride * step for name, step in at.items())
        if isinstance(part.layout, RecordLayout):
            size[-1], stride[-1] = size[-1] // item, item
        elements = self.memory[: self.memory.numel() // item * item].view(dtype)
        # as_strided counts from the start of the storage, not from where the aligned region begins in it.
        first = elements.storage_offset() + offset // item
        return elements.as_strided(size, [step // item for step in stride], first)

    @cached_property
    def poisoned(self) -> tuple[PoisonedPart, ...]:
        """The parts, as what poison is looked for in."""
        return tuple(PoisonedPart(self.memory, part) for part in self.layout.parts)


class PagedBuffer(ABC):
    """num_blocks blocks for each of num_layers layers with one spec, poisoned at the start if it owns its memory.

    spec: of one layer with all KV heads of the model. layer_names: one for each layer. group: index of the buffer's
    group in its KVCaches. ranks: of equal layouts, each with memory of its own. block_size: positions in a block.
    itemsize: bytes of an element when comparing. owned: whether the memory was allocated here.
    sharding: how ranks share states, None where there are none or one rank has all.
    usual_name, usual_layout: of a buffer that is given none. kind: what a layer keeps of a position, see row_kind.
    """

    usual_name: ClassVar[str]
    usual_layout: ClassVar[str]
    kind: ClassVar[Kind]
    itemsize: int

    def __init__(
        self,
        spec: KVCacheSpec,
        *,
        layout: str | None = None,
        num_layers: int,
        num_blocks: int,
        device: str | torch.device = "cpu",
        name: str | None = None,
        layer_names: Sequence[str] | None = None,
        tp_size: int = 1,
        tp_ranks: range | None = None,
        sharding: StateSharding | None = None,
        kernel_block_size: int | None = None,
        shared: bool = False,
        memories: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Allocate. layout: a preset's name, see pdtx.layout. layer_names: "layers.0", "layers.1", ... where None.

        tp_size: tensor-parallel ranks of the model; tp_ranks: those of them that this process has, None for all.
        sharding: of states, see pdtx.parallel.rank_spec; needed if tp_size is more than 1.
        shared: in memory that other processes of this host can be let map.
        memories: of each rank, uint8, shape (layout.size_bytes,), where others have allocated it; then nothing is
        written here, and device and shared say nothing. See KVCaches.over.

        Raises LayoutError, SpecError or ParallelError for impossible numbers, InputError if the memory cannot be had.
        """
        self.spec, self.name, self.group = spec, name or self.usual_name, 0
        self.num_layers, self.num_blocks, self.tp_size = num_layers, num_blocks, tp_size
        self.tp_ranks = range(tp_size) if tp_ranks is None else tp_ranks
        if not (self.tp_ranks.step == 1 and 0 <= self.tp_ranks.start < self.tp_ranks.stop <= tp_size):
            raise ParallelError(f"buffer {self.name}: ranks {self.tp_ranks} of tensor_parallel_size {tp_size}")
        self.sharding = sharding
        if sharding is not None and not isinstance(spec, MambaSpec):
            raise ParallelError(f"buffer {self.name} keeps no states that ranks could share; leave out its sharding")
        self.layer_names = tuple(layer_names or (f"layers.{layer}" for layer in range(num_layers)))
        if len(self.layer_names) != num_layers:
            raise CacheError(f"buffer {self.name} has {num_layers} layers and {len(self.layer_names)} names for them")
        if len(set(self.layer_names)) < num_layers:
            raise CacheError(f"buffer {self.name} has two layers of one name: {', '.join(self.layer_names)}")
        self.layout = any_layout(
            layout or self.usual_layout,
            rank_spec(spec, tp_size, sharding),
            num_layers=num_layers,
            num_blocks=num_blocks,
            kernel_block_size=kernel_block_size,
        )
        self._check_layout()
        self.owned = memories is None
        self.device = open_device(device) if memories is None else memories[0].device
        if memories is None:
            memories = [allocate(self.layout.size_bytes, self.device, shared=shared) for _ in self.tp_ranks]
        self.ranks = tuple(RankMemory(self.layout, memory) for memory in memories)
        self.block_size = self.layout.block_size * self.layout.blocks_per_manager_block
        self._open()
        if self.owned:
            self.poison()

    @abstractmethod
    def _check_layout(self) -> None:
        """Raise LayoutError for a layout of another kind."""

    @abstractmethod
    def _open(self) -> None:
        """Make the views of the memory, which is there now. Raises LayoutError or SpecError for impossible numbers."""

    @property
    def memory(self) -> torch.Tensor:
        """The memory of the first rank here, which is all there is without tensor parallelism."""
        return self.ranks[0].memory

    @property
    def nbytes(self) -> int:
        """Bytes of all ranks that are here."""
        return sum(rank.layout.size_bytes for rank in self.ranks)

    # -- what ranks have ----------------------------------------------------------------------------------------------

    def place_of(self, rank: int) -> int:
        """Return the index in ranks of a rank. Raises CacheError for one that is not here."""
        if rank not in self.tp_ranks:
            raise CacheError(f"buffer {self.name}: rank {rank} is not here; {self._held}")
        return rank - self.tp_ranks.start

    @property
    def _held(self) -> str:
        held = self.tp_ranks
        which = f"rank {held.start}" if len(held) == 1 else f"ranks {held.start} to {held.stop - 1}"
        return f"this process has {which} of {self.tp_size}"

    def require_all_ranks(self) -> None:
        """Raise CacheError unless all ranks are here, as what is about the whole model needs."""
        if len(self.tp_ranks) < self.tp_size:
            raise CacheError(f"buffer {self.name} does not hold the whole model: {self._held}")

    @abstractmethod
    def common_units(self, rank: int, other_rank: int, other_tp: int) -> range:
        """Return the model's numbers of the units (KV heads) that a rank here and one of another side both hold.

        It follows from where the model's units lie, not from any plan. What has no units that ranks share is unit 0.
        """

    @property
    def row_fields(self) -> Sequence[tuple[str, int]]:
        """Names and bytes of what a row consists of; empty where that is elements, or one record."""
        return ()

    def common_shape(self, rank: int, other_rank: int, other_tp: int, positions: int) -> tuple[int, int, int, int]:
        """Return the shape of what common_rows() returns of so many positions."""
        planes, _, _, nbytes = self.rows_shape(positions)
        return planes, positions, len(self.common_units(rank, other_rank, other_tp)), nbytes

    def common_bytes(self, rank: int, other_rank: int, other_tp: int) -> Int64s | None:
        """Return which byte of a unit each byte of common_rows() is; None where they are whole units, in order."""
        return None

    @abstractmethod
    def common_rows(
        self, rank: int, other_rank: int, other_tp: int, layer: int, block_ids: torch.Tensor, start: int, stop: int
    ) -> torch.Tensor:
        """Return what a rank of this side holds of common_units() at positions start..stop of a layer, as bytes.

        other_tp: the tensor-parallel size of the other side. The order is that of canonical(), so that both sides
        return the same bytes exactly if they hold the same: uint8, on the CPU, (K and V, positions, units, bytes of a
        unit).
        Raises CacheError for a rank that is not here, or if the blocks are too few.
        """

    # -- the canonical form -----------------------------------------------------------------------------------------

    @abstractmethod
    def rows_shape(self, positions: int) -> tuple[int, int, int, int]:
        """Return the shape of positions of a layer in canonical form: (K and V, positions, heads, bytes of a head)."""

    @property
    def row_kind(self) -> Kind:
        """What canonical rows are: of keys and values in one row, whose sizes differ, a record."""
        return "record" if self.kind == "kv" and self.rows_shape(1)[0] == 1 else self.kind

    @property
    def state_names(self) -> tuple[StateNaming, ...]:
        """How the bytes of a row of states are called in messages; empty for other rows."""
        return ()

    @abstractmethod
    def canonical(self, layer: int, block_ids: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return the bytes of positions start..stop in the order that every layout agrees on: all heads of the model.

        block_ids: a block table, int64, on the cache's device. The result: rows_shape(stop - start), uint8, on the CPU.
        Raises CacheError if the blocks are too few.
        """

    @abstractmethod
    def write_canonical(self, layer: int, block_ids: torch.Tensor, start: int, rows: torch.Tensor) -> None:
        """Store what canonical() returns as positions start... Raises CacheError if the blocks are too few."""

    @abstractmethod
    def block_tensors(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Return shape and dtype of each tensor that read_block() returns."""

    @abstractmethod
    def read_block(self, layer: int, block_id: int) -> tuple[torch.Tensor, ...]:
        """Return copies of what a layer keeps in a block: key and value, or vectors, or states; of the whole model.

        (positions of a block, heads, channels) each; (vectors, channels); of states the spec's shapes.
        """

    @abstractmethod
    def replicas_differ(self, layer: int, block_ids: torch.Tensor, start: int, stop: int) -> int:
        """Count elements in which a rank's copy is not that of the first rank that holds them."""

    @property
    def bytes_per_position(self) -> int:
        """Bytes of one position of one layer in canonical form."""
        return prod(self.rows_shape(1))

    def _check_fit(self, block_ids: torch.Tensor, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= len(block_ids) * self.block_size:
            raise CacheError(
                f"tokens {start}..{stop} do not fit into {len(block_ids)} blocks of {self.block_size} tokens"
            )

    # -- spare blocks -----------------------------------------------------------------------------------------------

    def save_blocks(self, block_ids: torch.Tensor) -> list[torch.Tensor]:
        """Return copies of all that the layout has in blocks, in every layer and rank, for restore_blocks()."""
        steps = self._steps(block_ids)
        return [part.view[:, steps] for rank in self.ranks for part in rank.poisoned]

    def restore_blocks(self, block_ids: torch.Tensor, saved: Sequence[torch.Tensor]) -> None:
        """Store what save_blocks() returned for the same blocks."""
        steps, parts = self._steps(block_ids), [part for rank in self.ranks for part in rank.poisoned]
        for part, elements in zip(parts, saved, strict=True):
            part.view[:, steps] = elements

    # -- poison -----------------------------------------------------------------------------------------------------

    def poison(self, block_ids: torch.Tensor | None = None) -> None:
        """Fill blocks (default: everything) with POISON, so that a byte that never arrived shows.

        Raises CacheError, in memory that others own, for everything, the null block, or ids that no block has.
        """
        if not self.owned:
            self._check_named(block_ids)
        for rank in self.ranks:
            if block_ids is None:
                fill_with_poison(rank.memory)
                continue
            for part in rank.poisoned:
                part.fill(self._steps(block_ids))

    def _check_named(self, block_ids: torch.Tensor | None) -> None:
        if block_ids is None:
            raise CacheError(
                f"buffer {self.name} lies in memory of others: only blocks that a request names are poisoned"
            )
        outside = block_ids[(block_ids <= NULL_BLOCK) | (block_ids >= self.num_blocks)]
        if len(outside):
            raise CacheError(f"buffer {self.name}: block {int(outside[0])} is none of 1..{self.num_blocks - 1}")

    def unpoisoned(self, block_ids: torch.Tensor, from_position: int = 0, to_position: int | None = None) -> int:
        """Count the 2-byte words that are not POISON in blocks, over all ranks.

        from_position, to_position: positions of each block that are looked at. Of tokens that only move together none
        is, unless all are.
        """
        steps, count, size = self._steps(block_ids), self.layout.blocks_per_manager_block, self.layout.block_size
        until, found = self.block_size if to_position is None else to_position, 0
        for place in range(count):
            first, stop = (min(max(position - place * size, 0), size) for position in (from_position, until))
            for rank in self.ranks:
                for part, poisoned in zip(rank.layout.parts, rank.poisoned, strict=True):
                    unit = max(part.layout.tokens_per_step, part.layout.tokens_together)
                    per_unit = unit // part.layout.tokens_per_step
                    inside = slice(ceil_div(first, unit) * per_unit, stop // unit * per_unit)
                    found += poisoned.count(steps[place::count], inside)
        return found

    def written_blocks(self) -> torch.Tensor:
        """Which blocks hold anything but POISON on any rank: bool, shape (num_blocks,). Reads the buffer once."""
        written = torch.zeros(self.num_blocks, dtype=torch.bool, device=self.device)
        for rank in self.ranks:
            for part in rank.poisoned:
                written |= part.written().reshape(self.num_blocks, -1).any(-1)
        return written

    def _steps(self, block_ids: torch.Tensor) -> torch.Tensor:
        """The steps of the block axis that blocks of the manager's are; the same where a kernel does not split them."""
        count = self.layout.blocks_per_manager_block
        if count == 1:
            return block_ids
        return (block_ids[:, None] * count + torch.arange(count, device=block_ids.device)).reshape(-1)
