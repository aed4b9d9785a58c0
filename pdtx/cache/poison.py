"""The fill that a cache has before anything is written to it, and how much of it is left."""

from collections.abc import Sequence
from math import prod

import torch

from pdtx.cache.codes import POISON, POISON_BYTES
from pdtx.layout import Part

_POISON_64 = int.from_bytes(POISON_BYTES * 4, "little", signed=True)
_PAGE_AXES = ("layer", "block", "token")


def fill_with_poison(memory: torch.Tensor) -> None:
    """Poison a whole region, uint8."""
    whole = memory.numel() // 2 * 2
    memory[:whole].view(torch.int16).fill_(POISON)
    memory[whole:] = POISON_BYTES[0]


class PoisonedPart:
    """One part of a layout in one region, seen as 2-byte words, or as bytes where it is not made of whole words.

    memory: the region, uint8. Shape of the view: (layers, block steps, token steps, ..., words).
    """

    def __init__(self, memory: torch.Tensor, part: Part) -> None:
        axes = part.layout.by_name
        size = [axes[name].extent if name in axes else 1 for name in _PAGE_AXES]
        stride = [axes[name].stride if name in axes else 0 for name in _PAGE_AXES]
        inside = [axis for axis in part.layout.axes if axis.name not in _PAGE_AXES and axis.extent > 1]
        width = part.layout.itemsize
        if inside and inside[-1].stride == width:
            width *= inside.pop().extent
        size += [*(axis.extent for axis in inside), width]
        stride += [*(axis.stride for axis in inside), 1]
        whole = all(number % 2 == 0 for number in (part.offset, width, *stride[:-1], memory.storage_offset()))
        unit = 2 if whole else 1
        elements = memory[: memory.numel() // unit * unit].view(torch.int16) if whole else memory
        steps = [*(step // unit for step in stride[:-1]), 1]
        size[-1] //= unit
        # as_strided counts from the start of the storage, not from where the aligned region begins in it.
        self.view = elements.as_strided(size, steps, elements.storage_offset() + part.offset // unit)
        self._fill = (
            torch.tensor(POISON, dtype=torch.int16, device=memory.device)
            if whole
            else _fill_of_bytes(size, steps, part.offset, memory.device)
        )

    def fill(self, steps: torch.Tensor) -> None:
        """Poison steps of the block axis, (n,), in all layers."""
        self.view[:, steps] = self._of_blocks(self._fill.expand_as(self.view), steps)

    def _of_blocks(self, fill: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        return self._fill if self._fill.dim() == 0 else fill[:, steps]

    def count(self, steps: torch.Tensor, inside: slice) -> int:
        """Count the words that differ in steps of the block axis, in some token steps of each."""
        fill = self._of_blocks(self._fill.expand_as(self.view), steps)
        found = self.view[:, steps, inside]
        return int((found != (fill if fill.dim() == 0 else fill[:, :, inside])).sum())

    def written(self) -> torch.Tensor:
        """Which steps of the block axis hold anything else: bool, (steps,). Reads the part once."""
        written = torch.zeros(self.view.shape[1], dtype=torch.bool, device=self.view.device)
        for layer, view in enumerate(self.view):
            if self._fill.dim():
                differs = view != self._fill.expand_as(self.view)[layer]
            elif _can_widen(view):
                differs = view.view(torch.int64) != _POISON_64
            else:
                differs = view != POISON
            written |= differs.reshape(len(view), prod(differs.shape[1:])).any(-1)
        return written


def _can_widen(view: torch.Tensor) -> bool:
    """Whether 2-byte words can be looked at four at a time."""
    return all(number % 4 == 0 for number in (view.shape[-1], view.storage_offset(), *view.stride()[:-1]))


def _fill_of_bytes(size: Sequence[int], strides: Sequence[int], offset: int, device: torch.device) -> torch.Tensor:
    """Return the byte that poison has at each place of a view: which of the two depends on the address alone."""
    odd = torch.full((1,) * len(size), offset % 2, dtype=torch.uint8, device=device)
    for axis, (extent, stride) in enumerate(zip(size, strides, strict=True)):
        shape = [1] * len(size)
        shape[axis] = extent
        odd = odd ^ (torch.arange(extent, device=device) * stride % 2).to(torch.uint8).reshape(shape)
    table = torch.tensor(list(POISON_BYTES), dtype=torch.uint8, device=device)
    return table[odd.long()]
