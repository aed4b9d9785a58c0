"""A paged cache of states: one block holds all states of a request in a layer."""

from collections.abc import Sequence
from math import prod
from typing import ClassVar

import numpy as np
import torch

from pdtx.cache.buffer import PagedBuffer, RankMemory
from pdtx.cache.device import torch_dtype
from pdtx.cache.state_boxes import boxes_of
from pdtx.cache.verify import Kind, StateNaming
from pdtx.errors import CacheError, LayoutError
from pdtx.kvspec import MambaSpec
from pdtx.layout import StateLayout
from pdtx.parallel import held_units, require_sharding, transfers
from pdtx.plan.runs import Int64s


class PagedStateCache(PagedBuffer):
    """A buffer of layers that keep states of fixed shapes; position 0 of a table of one block is a request's.

    layout: a preset of STATE_ORDERS. In canonical form all states of a layer are bytes one after another, each in the
    order of its spec's shape (a convolution's inputs before its channels), whatever lies in memory, and on which ranks.
    Ranks have what pdtx.parallel.transfers would send them from one rank with all; of several with a copy, the one that
    would send it to such a rank speaks for it.
    Raises LayoutError, SpecError or ParallelError for impossible numbers, InputError if the memory cannot be had.
    """

    spec: MambaSpec
    layout: StateLayout
    itemsize = 1

    usual_name, usual_layout = "state", "mamba_sd"
    kind: ClassVar[Kind] = "state"

    def _open(self) -> None:
        spec = self.spec
        if self.sharding is not None:
            require_sharding(spec, self.sharding)
        self.dtypes = tuple(torch_dtype(dtype) for dtype in spec.dtypes)
        self._nbytes = [prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, self.dtypes, strict=True)]
        self._views = [[self._states(rank, layer) for layer in range(self.num_layers)] for rank in self.ranks]
        one, tp = 1, self.tp_size
        self._scattered = [
            (move.dst_rank, box)
            for move in transfers(spec, one, tp, self.sharding)
            for box in boxes_of(self.layout, move)
            if move.dst_rank in self.tp_ranks
        ]
        self._common = dict[tuple[int, int, int], tuple[tuple[torch.Tensor, torch.Tensor], ...]]()
        self._gathered = [
            (move.src_rank, box)
            for move in transfers(spec, tp, one, self.sharding)
            for box in boxes_of(self.layout, move)
        ]
        spoken_for = set(self._gathered)
        self._copies = [(rank, box) for rank, box in self._scattered if (rank, box.reversed) not in spoken_for]

    def _check_layout(self) -> None:
        if not isinstance(self.layout, StateLayout):
            raise LayoutError(f"{self.layout.name} does not hold states, as buffer {self.name} needs")

    def _states(self, rank: RankMemory, layer: int) -> list[torch.Tensor]:
        """A rank's states of a layer, each (blocks, first dimension of its shape, the rest)."""
        return [
            rank.view(part, ("block", *part.layout.names[2:]), dtype, {"layer": layer})
            for part, dtype in zip(rank.layout.parts, self.dtypes, strict=True)
        ]

    # -- whole states, cut for ranks and joined ----------------------------------------------------------------------

    def _scatter(self, layer: int, blocks: torch.Tensor | slice, states: Sequence[torch.Tensor]) -> None:
        """Store the model's states, each (blocks, first dimension of its shape, the rest), on all ranks here."""
        for rank, box in self._scattered:
            box.of(self._views[self.place_of(rank)][layer], "dst")[blocks] = box.of(states, "src")

    def _gather(self, layer: int, blocks: torch.Tensor | slice, count: int) -> list[torch.Tensor]:
        """Return copies of the model's states in so many blocks, as _scatter takes them."""
        self.require_all_ranks()
        states = [
            torch.empty((count, shape[0], prod(shape[1:])), dtype=dtype, device=self.device)
            for shape, dtype in self.block_tensors()
        ]
        for rank, box in self._gathered:
            box.of(states, "dst").copy_(box.of(self._views[rank][layer], "src")[blocks])
        return states

    def write(self, layer: int, block_id: int, states: Sequence[torch.Tensor]) -> None:
        """Store a layer's states of the whole model, each in the shape and dtype that the spec gives it.

        Raises CacheError for others.
        """
        shapes, dtypes = tuple(tuple(state.shape) for state in states), tuple(state.dtype for state in states)
        if shapes != self.spec.shapes or dtypes != self.dtypes:
            raise CacheError(
                f"states of shapes {shapes} and types {dtypes} are not those of buffer {self.name}, "
                f"{self.spec.shapes} and {self.dtypes}"
            )
        flat = [state.reshape(1, state.shape[0], -1) for state in states]
        self._scatter(layer, slice(block_id, block_id + 1), flat)

    def read(self, layer: int, block_id: int) -> tuple[torch.Tensor, ...]:
        """Return contiguous copies of a layer's states of the whole model, each in the shape that the spec gives it."""
        states = self._gather(layer, slice(block_id, block_id + 1), 1)
        return tuple(state.reshape(shape) for state, shape in zip(states, self.spec.shapes, strict=True))

    def block_tensors(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Return shape and dtype of each state, see PagedBuffer."""
        return tuple(zip(self.spec.shapes, self.dtypes, strict=True))

    def read_block(self, layer: int, block_id: int) -> tuple[torch.Tensor, ...]:
        """Return the states of a block, see PagedBuffer."""
        return self.read(layer, block_id)

    # -- the canonical form ------------------------------------------------------------------------------------------

    def rows_shape(self, positions: int) -> tuple[int, int, int, int]:
        """Return (1, positions, 1, bytes of all states)."""
        return 1, positions, 1, sum(self._nbytes)

    @property
    def state_names(self) -> tuple[StateNaming, ...]:
        """The states' names and axes as the layout has them, see PagedBuffer."""
        parts, found = self.layout.parts, list[StateNaming]()
        for part, (shape, dtype) in zip(parts, self.block_tensors(), strict=True):
            axes = zip(part.layout.names[2:], (shape[0], prod(shape[1:])), strict=True)
            found.append(StateNaming(part.name, tuple(axes), dtype.itemsize))
        return tuple(found)

    def canonical(self, layer: int, block_ids: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return the bytes of the states, see PagedBuffer."""
        self._check_fit(block_ids, start, stop)
        return _bytes(self._gather(layer, block_ids[start:stop], stop - start)).cpu()[None, :, None]

    def write_canonical(self, layer: int, block_ids: torch.Tensor, start: int, rows: torch.Tensor) -> None:
        """Store the bytes of the states, see PagedBuffer."""
        count = rows.shape[1]
        self._check_fit(block_ids, start, start + count)
        pieces = torch.split(rows[0, :, 0].to(self.device), self._nbytes, -1)
        # A slice may begin where no element of its type may lie; a copy does not.
        states = [
            piece.clone(memory_format=torch.contiguous_format).view(dtype).reshape(count, shape[0], -1)
            for piece, (shape, dtype) in zip(pieces, self.block_tensors(), strict=True)
        ]
        self._scatter(layer, block_ids[start : start + count], states)

    def replicas_differ(self, layer: int, block_ids: torch.Tensor, start: int, stop: int) -> int:
        """Count bytes in which a rank's copy of a unit is not that of the rank that speaks for it."""
        self._check_fit(block_ids, start, stop)
        if not self._copies:
            return 0
        blocks = block_ids[start:stop]
        states, differing = self._gather(layer, blocks, len(blocks)), 0
        for rank, box in self._copies:
            meant, found = box.of(states, "src"), box.of(self._views[rank][layer], "dst")[blocks]
            differing += int(torch.ne(_bytes([meant]), _bytes([found])).sum())
        return differing

    def bytes_of_rank(self, rank: int) -> torch.Tensor:
        """Return which bytes of a canonical row a rank has, in the order of its own states: int64, (bytes,)."""
        firsts = [sum(self._nbytes[:state]) for state in range(len(self._nbytes))]
        whole = [
            torch.arange(first, first + nbytes).reshape(1, shape[0], -1, dtype.itemsize)
            for first, nbytes, (shape, dtype) in zip(firsts, self._nbytes, self.block_tensors(), strict=True)
        ]
        own = [
            torch.empty((1, *(part.layout.extent(name) for name in part.layout.names[2:]), dtype.itemsize)).long()
            for part, dtype in zip(self.layout.parts, self.dtypes, strict=True)
        ]
        for box in (box for other, box in self._scattered if other == rank):
            box.of(own, "dst").copy_(box.of(whole, "src"))
        return torch.cat([state.reshape(-1) for state in own])

    # -- what two ranks both have --------------------------------------------------------------------------------------

    def common_units(self, rank: int, other_rank: int, other_tp: int) -> range:
        """Return unit 0: what two ranks share of states is one row of bytes."""
        return range(1)

    def common_shape(self, rank: int, other_rank: int, other_tp: int, positions: int) -> tuple[int, int, int, int]:
        """Return (1, positions, 1, bytes that both ranks hold), see PagedBuffer."""
        kept = zip(self._shared(rank, other_rank, other_tp), self.dtypes, strict=True)
        return 1, positions, 1, sum(len(own) * dtype.itemsize for (own, _), dtype in kept)

    def common_bytes(self, rank: int, other_rank: int, other_tp: int) -> Int64s:
        """Return which byte of a canonical row each byte of common_rows() is."""
        found, first = list[torch.Tensor](), 0
        shared = self._shared(rank, other_rank, other_tp)
        for (_, numbers), nbytes, dtype in zip(shared, self._nbytes, self.dtypes, strict=True):
            size = dtype.itemsize
            found.append((first + numbers[:, None] * size + torch.arange(size)).reshape(-1))
            first += nbytes
        bytes_of_row: Int64s = torch.cat(found).numpy()
        return bytes_of_row

    def common_rows(
        self, rank: int, other_rank: int, other_tp: int, layer: int, block_ids: torch.Tensor, start: int, stop: int
    ) -> torch.Tensor:
        """Return the bytes of the elements that both ranks hold, in the order of the model's states."""
        self._check_fit(block_ids, start, stop)
        states, blocks = self._views[self.place_of(rank)][layer], block_ids[start:stop]
        shared = self._shared(rank, other_rank, other_tp)
        rows = [
            state[blocks].reshape(len(blocks), -1)[:, own.to(self.device)]
            for state, (own, _) in zip(states, shared, strict=True)
        ]
        return _bytes(rows).cpu()[None, :, None]

    def _shared(self, rank: int, other_rank: int, other_tp: int) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """For each state the elements that both ranks hold: their places on the rank here, and the model's numbers.

        In the order of those. It follows from what ranks hold (held_units), not from what moves.
        """
        key = rank, other_rank, other_tp
        if key not in self._common:
            found = list[tuple[torch.Tensor, torch.Tensor]]()
            for state in range(len(self.dtypes)):
                ours, theirs = self._elements(state, rank, self.tp_size), self._elements(state, other_rank, other_tp)
                both, own, _ = np.intersect1d(ours, theirs, assume_unique=True, return_indices=True)
                found.append((torch.from_numpy(own), torch.from_numpy(both)))
            self._common[key] = tuple(found)
        return self._common[key]

    def _elements(self, state: int, rank: int, tp_size: int) -> Int64s:
        """Return the model's number of each element of a rank's state, in the order in which the rank has them."""
        shape = self.spec.shapes[state]
        whole = np.arange(prod(shape), dtype=np.int64).reshape(shape[0], -1)
        if tp_size > 1:
            part = self.layout.parts[state].name
            units = held_units(self.spec, tp_size, self.sharding).get(part)
            if units is not None:
                whole = whole[units[rank]] if part == "ssm" else whole[:, units[rank]]
        found: Int64s = whole.reshape(-1)
        return found


def _bytes(states: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of states, each (blocks, ...), one after another: uint8, (blocks, bytes)."""
    rows = [state.reshape(len(state), prod(state.shape[1:])).contiguous().view(torch.uint8) for state in states]
    return torch.cat(rows, 1)
