"""A paged cache of one vector a token or for several: latent vectors, an indexer's keys, compressed entries."""

from typing import ClassVar

import torch

from pdtx.cache.buffer import PagedBuffer
from pdtx.cache.device import torch_dtype
from pdtx.cache.tokens import put_tokens, take_tokens
from pdtx.cache.verify import Kind
from pdtx.errors import CacheError, LayoutError
from pdtx.kvspec import MLAAttentionSpec, SlidingWindowMLASpec
from pdtx.layout import RecordLayout
from pdtx.units import ceil_div


class PagedLatentCache(PagedBuffer):
    """A buffer of layers that keep one vector for every ratio tokens; with tensor parallelism every rank keeps all.

    layout: a preset of RECORD_ORDERS. dtype: of the vectors' elements; uint8 where the spec says that they are records
    of another making (fp8_ds_mla). channels: elements of a vector. ratio: the spec's compress_ratio; in canonical form
    each of its tokens has an equal share of the vector's bytes.
    Raises LayoutError, SpecError or ParallelError for impossible numbers, InputError if the memory cannot be had.
    """

    spec: MLAAttentionSpec | SlidingWindowMLASpec

    usual_name, usual_layout = "latent", "mla"
    kind: ClassVar[Kind] = "record"

    def _open(self) -> None:
        spec = self.spec
        self.dtype = torch.uint8 if spec.cache_dtype_str == "fp8_ds_mla" else torch_dtype(spec.dtype)
        self.ratio = spec.compress_ratio
        (part,) = self.layout.parts
        order = ("block", "token", "byte")
        self._views = [
            [rank.view(part, order, self.dtype, {"layer": layer}) for layer in range(self.num_layers)]
            for rank in self.ranks
        ]
        self.channels = self._views[0][0].shape[-1]
        self._share, rest = divmod(self.channels * self.dtype.itemsize, self.ratio)
        if rest:
            raise LayoutError(
                f"buffer {self.name}: vectors of {self.channels * self.dtype.itemsize} bytes have no equal share for "
                f"each of {self.ratio} tokens"
            )
        self.itemsize = self.dtype.itemsize if self._share % self.dtype.itemsize == 0 else 1

    def _check_layout(self) -> None:
        layout = self.layout
        if not isinstance(layout, RecordLayout) or "kv" in layout.by_name or layout.extent("head") != 1:
            raise LayoutError(f"{layout.name} does not hold one vector a token, as buffer {self.name} needs")

    def write(self, layer: int, block_ids: torch.Tensor, start: int, rows: torch.Tensor) -> None:
        """Store rows (T, channels), the vectors of tokens start..start+T*ratio. block_ids: see PagedKVCache.write.

        Raises CacheError if the blocks are too few, or start is no vector's first token.
        """
        self._check_fit(block_ids, start, start + len(rows) * self.ratio)
        self._check_whole(start)
        for views in self._views:
            put_tokens(views[layer], self._steps(block_ids), start // self.ratio, rows)

    def read(self, layer: int, block_ids: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return a copy of tokens start..stop's vectors, (T / ratio, channels). Raises CacheError as write does."""
        self._check_fit(block_ids, start, stop)
        self._check_whole(start, stop)
        return take_tokens(self._views[0][layer], self._steps(block_ids), start // self.ratio, stop // self.ratio)

    def block_tensors(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Return shape and dtype of a block's vectors, see PagedBuffer."""
        return (((self.block_size // self.ratio, self.channels), self.dtype),)

    def read_block(self, layer: int, block_id: int) -> tuple[torch.Tensor, ...]:
        """Return the vectors of a block, see PagedBuffer."""
        return (self.read(layer, torch.tensor([block_id], device=self.device), 0, self.block_size),)

    def _check_whole(self, *positions: int) -> None:
        wrong = next((position for position in positions if position % self.ratio), None)
        if wrong is not None:
            raise CacheError(f"buffer {self.name}: token {wrong} lies inside a vector for {self.ratio} tokens")

    def rows_shape(self, positions: int) -> tuple[int, int, int, int]:
        """Return (1, positions, 1, bytes of a vector / ratio)."""
        return 1, positions, 1, self._share

    def common_units(self, rank: int, other_rank: int, other_tp: int) -> range:
        """Return unit 0: every rank holds all of a vector."""
        return range(1)

    def common_rows(
        self, rank: int, other_rank: int, other_tp: int, layer: int, block_ids: torch.Tensor, start: int, stop: int
    ) -> torch.Tensor:
        """Return a rank's copy of tokens start..stop, see PagedBuffer."""
        self._check_fit(block_ids, start, stop)
        return self._rows(self.place_of(rank), layer, block_ids, start, stop).cpu()[None, :, None]

    def canonical(self, layer: int, block_ids: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return the bytes of tokens start..stop, see PagedBuffer."""
        self._check_fit(block_ids, start, stop)
        return self._rows(0, layer, block_ids, start, stop).cpu()[None, :, None]

    def _rows(self, place: int, layer: int, block_ids: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return what each of tokens start..stop has of its vector on a rank: uint8, (T, bytes)."""
        first, last = start // self.ratio, ceil_div(stop, self.ratio)
        vectors = take_tokens(self._views[place][layer], self._steps(block_ids), first, last)
        shares = vectors.view(torch.uint8).reshape(-1, self._share)
        return shares[start - first * self.ratio :][: stop - start]

    def write_canonical(self, layer: int, block_ids: torch.Tensor, start: int, rows: torch.Tensor) -> None:
        """Store the bytes of tokens start.., see PagedBuffer."""
        vectors = rows[0, :, 0].to(self.device).reshape(-1, self._share * self.ratio)
        self.write(layer, block_ids, start, vectors.view(self.dtype))

    def replicas_differ(self, layer: int, block_ids: torch.Tensor, start: int, stop: int) -> int:
        """Count elements in which a rank's copy is not the first rank's."""
        self._check_fit(block_ids, start, stop)
        first, *others = (
            self._rows(place, layer, block_ids, start, stop).reshape(-1, self.itemsize)
            for place in range(len(self.ranks))
        )
        return sum(int((other != first).any(-1).sum()) for other in others)
