"""A paged KV cache: one backing allocation, seen through a layout."""

from collections.abc import Callable

import torch

from pdtx.cache.codes import POISON
from pdtx.cache.memory import allocate
from pdtx.errors import CacheError, InputError
from pdtx.kvspec import FullAttentionSpec, dtype_size
from pdtx.layout import KVCacheLayout, make_layout

_POISON_64 = int.from_bytes(POISON.to_bytes(2, "little", signed=True) * 4, "little", signed=True)


def torch_dtype(dtype: str) -> torch.dtype:
    """Return torch's type of a spec's dtype name. Raises SpecError for an unknown one."""
    dtype_size(dtype)
    found = getattr(torch, dtype)
    if not isinstance(found, torch.dtype):
        raise InputError(f"torch has no dtype {dtype!r}")
    return found


def open_device(device: str | torch.device) -> torch.device:
    """Return the torch device. Raises InputError where it does not exist here."""
    try:
        found = torch.device(device)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"device {str(device)!r} cannot be used: {reason}; use 'cpu' or a CUDA device that is present"
        ) from None
    return found


def record_fence(device: torch.device) -> Callable[[], None]:
    """Return a function that returns once the device has done all that was asked of it so far."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.current_stream(device).record_event()
    return lambda: event.synchronize()


class PagedKVCache:
    """num_blocks blocks for each of num_layers equal layers, in one allocation that is poisoned at the start.

    layout: a preset's name, see pdtx.layout.LAYOUT_ORDERS.
    Raises LayoutError or SpecError for impossible numbers, InputError if the memory cannot be had.
    """

    def __init__(
        self,
        spec: FullAttentionSpec,
        *,
        layout: str,
        num_layers: int,
        num_blocks: int,
        device: str | torch.device = "cpu",
    ) -> None:
        self.spec = spec
        self.layout: KVCacheLayout = make_layout(layout, spec, num_layers=num_layers, num_blocks=num_blocks)
        self.num_layers, self.num_blocks = num_layers, num_blocks
        self.device = open_device(device)
        self.dtype = torch_dtype(spec.dtype)
        self.memory = allocate(self.layout.size_bytes, self.device)
        self._elements = self.memory.view(self.dtype)
        self._views = [self._view(layer) for layer in range(num_layers)]
        self.poison()

    def _view(self, layer: int) -> torch.Tensor:
        names = ("kv", "block", "token", "head", "channel")
        size = [self.layout.extent(name) for name in names]
        stride = [self.layout.stride(name) // self.layout.itemsize for name in names]
        # as_strided counts from the start of the storage, not from where the aligned region begins in it.
        offset = self._elements.storage_offset() + layer * self.layout.stride("layer") // self.layout.itemsize
        return self._elements.as_strided(size, stride, offset)

    def view(self, layer: int) -> torch.Tensor:
        """One layer in logical order, whatever lies in memory: shape (2, num_blocks, block_size, heads, channels)."""
        return self._views[layer]

    def _check_fit(self, block_ids: torch.Tensor, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= len(block_ids) * self.spec.block_size:
            raise CacheError(
                f"tokens {start}..{stop} do not fit into {len(block_ids)} blocks of {self.spec.block_size} tokens"
            )

    def _slots(self, block_ids: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Block and place in it of tokens start..stop."""
        self._check_fit(block_ids, start, stop)
        positions = torch.arange(start, stop, device=self.device)
        return block_ids[positions // self.spec.block_size], positions % self.spec.block_size

    def write(self, layer: int, block_ids: torch.Tensor, start: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key and value, each (T, heads, channels), as tokens start..start+T of a request.

        block_ids: the request's blocks in token order; int64, on the cache's device.
        Raises CacheError if the blocks are too few.
        """
        blocks, places = self._slots(block_ids, start, start + len(key))
        view = self._views[layer]
        view[0][blocks, places] = key
        view[1][blocks, places] = value

    def read(self, layer: int, block_ids: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return contiguous copies of key and value of tokens start..stop, each (T, heads, channels).

        Raises CacheError if the blocks are too few.
        """
        self._check_fit(block_ids, start, stop)
        # Whole blocks first, then the slice: several times as fast as an index for every token.
        size = self.spec.block_size
        first = start // size
        used = block_ids[first : -(-stop // size)]

        def gather(part: torch.Tensor) -> torch.Tensor:
            tokens = part.index_select(0, used).reshape(-1, *part.shape[2:])
            return tokens[start - first * size : stop - first * size].contiguous()

        key, value = self._views[layer]
        return gather(key), gather(value)

    def canonical(self, layer: int, block_ids: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return the bytes of tokens start..stop in the order every layout agrees on.

        Shape (2, T, heads, channels * itemsize), uint8, on the CPU.
        """
        return torch.stack(self.read(layer, block_ids, start, stop)).cpu().view(torch.uint8)

    def poison(self, block_ids: torch.Tensor | None = None) -> None:
        """Fill blocks (default: everything) with POISON, so that a byte that never arrived shows."""
        words = self.memory.view(torch.int16)
        if block_ids is None:
            words.fill_(POISON)
            return
        for view in self._raw_views():
            view[:, block_ids] = POISON

    def unpoisoned(self, block_ids: torch.Tensor, from_token: int = 0) -> int:
        """Count the 2-byte words that are not POISON in blocks, leaving out the first from_token tokens of each."""
        return sum(int((view[:, block_ids, from_token:] != POISON).sum()) for view in self._raw_views())

    def written_blocks(self) -> torch.Tensor:
        """Which blocks hold anything but POISON: bool, shape (num_blocks,). Reads the whole cache once."""
        written = torch.zeros(self.num_blocks, dtype=torch.bool, device=self.device)
        for view in self._raw_views():
            wide = view.shape[-1] % 4 == 0
            words = view.view(torch.int64) if wide else view
            written |= (words != (_POISON_64 if wide else POISON)).any(-1).any(-1).any(-1).any(0)
        return written

    def _raw_views(self) -> list[torch.Tensor]:
        """The layers as 2-byte words: (2, num_blocks, block_size, heads, words of a head)."""
        return [view.view(torch.int16) for view in self._views]
