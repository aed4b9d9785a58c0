"""A paged cache of states: one block holds all states of a request in a layer."""

from collections.abc import Sequence
from math import prod
from typing import ClassVar

import torch

from pdtx.cache.buffer import PagedBuffer
from pdtx.cache.device import torch_dtype
from pdtx.cache.verify import Kind
from pdtx.errors import CacheError, LayoutError
from pdtx.kvspec import MambaSpec
from pdtx.layout import StateLayout


class PagedStateCache(PagedBuffer):
    """A buffer of layers that keep states of fixed shapes; position 0 of a table of one block is a request's.

    layout: a preset of STATE_ORDERS. In canonical form all states of a layer are bytes one after another, each in the
    order of its spec's shape (a convolution's inputs before its channels), whatever lies in memory.
    Raises LayoutError, SpecError or ParallelError for impossible numbers, InputError if the memory cannot be had.
    """

    spec: MambaSpec
    itemsize = 1

    usual_name, usual_layout = "state", "mamba_sd"
    kind: ClassVar[Kind] = "state"

    def _open(self) -> None:
        spec = self.spec
        self.dtypes = tuple(torch_dtype(dtype) for dtype in spec.dtypes)
        self._nbytes = [prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, self.dtypes, strict=True)]
        self._views = [self._states(layer) for layer in range(self.num_layers)]

    def _check_layout(self) -> None:
        if not isinstance(self.layout, StateLayout):
            raise LayoutError(f"{self.layout.name} does not hold states, as buffer {self.name} needs")

    def _states(self, layer: int) -> list[torch.Tensor]:
        """The states of a layer, each (blocks, first dimension of its shape, the rest)."""
        (rank,) = self.ranks
        return [
            rank.view(part, ("block", *part.layout.names[2:]), dtype, {"layer": layer})
            for part, dtype in zip(self.layout.parts, self.dtypes, strict=True)
        ]

    def write(self, layer: int, block_id: int, states: Sequence[torch.Tensor]) -> None:
        """Store a layer's states, each in the shape and dtype that the spec gives it. Raises CacheError for others."""
        shapes, dtypes = tuple(tuple(state.shape) for state in states), tuple(state.dtype for state in states)
        if shapes != self.spec.shapes or dtypes != self.dtypes:
            raise CacheError(
                f"states of shapes {shapes} and types {dtypes} are not those of buffer {self.name}, "
                f"{self.spec.shapes} and {self.dtypes}"
            )
        for view, state in zip(self._views[layer], states, strict=True):
            view[block_id] = state.reshape(view.shape[1:])

    def read(self, layer: int, block_id: int) -> tuple[torch.Tensor, ...]:
        """Return contiguous copies of a layer's states, each in the shape that the spec gives it."""
        return tuple(
            view[block_id].clone(memory_format=torch.contiguous_format).reshape(shape)
            for view, shape in zip(self._views[layer], self.spec.shapes, strict=True)
        )

    def block_tensors(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Return shape and dtype of each state, see PagedBuffer."""
        return tuple(zip(self.spec.shapes, self.dtypes, strict=True))

    def read_block(self, layer: int, block_id: int) -> tuple[torch.Tensor, ...]:
        """Return the states of a block, see PagedBuffer."""
        return self.read(layer, block_id)

    def rows_shape(self, positions: int) -> tuple[int, int, int, int]:
        """Return (1, positions, 1, bytes of all states)."""
        return 1, positions, 1, sum(self._nbytes)

    def common_units(self, rank: int, other_rank: int, other_tp: int) -> range:
        """Return unit 0: one rank keeps all."""
        return range(1)

    def common_rows(
        self, rank: int, other_rank: int, other_tp: int, layer: int, block_ids: torch.Tensor, start: int, stop: int
    ) -> torch.Tensor:
        """Return the bytes of the states, see PagedBuffer."""
        self.place_of(rank)
        return self.canonical(layer, block_ids, start, stop)

    def canonical(self, layer: int, block_ids: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return the bytes of the states, see PagedBuffer."""
        self._check_fit(block_ids, start, stop)
        rows = [
            torch.cat([state.cpu().reshape(-1).view(torch.uint8) for state in self.read(layer, block)])
            for block in block_ids[start:stop].tolist()
        ]
        return torch.stack(rows)[None, :, None] if rows else torch.empty(self.rows_shape(0), dtype=torch.uint8)

    def write_canonical(self, layer: int, block_ids: torch.Tensor, start: int, rows: torch.Tensor) -> None:
        """Store the bytes of the states, see PagedBuffer."""
        count = rows.shape[1]
        self._check_fit(block_ids, start, start + count)
        for block, row in zip(block_ids[start : start + count].tolist(), rows[0, :, 0], strict=True):
            pieces = row.to(self.device).split(self._nbytes)
            kinds = zip(pieces, self.dtypes, self.spec.shapes, strict=True)
            # A slice may begin where no element of its type may lie; a copy does not.
            self.write(layer, block, [piece.clone().view(dtype).reshape(shape) for piece, dtype, shape in kinds])

    def replicas_differ(self, layer: int, block_ids: torch.Tensor, start: int, stop: int) -> int:
        """Return 0: one rank keeps all."""
        return 0
