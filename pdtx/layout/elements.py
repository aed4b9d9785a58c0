"""Layouts of plain elements: one stride an axis, and every axis may be cut."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from pdtx.errors import LayoutError
from pdtx.layout.packing import pack
from pdtx.layout.strided import StridedLayout

AXIS_NAMES = ("layer", "block", "kv", "head", "token", "channel")
"""layer of the model | block of the pool | 0 = K, 1 = V | KV head | token in its block | channel in its head."""


@dataclass(frozen=True)
class KVCacheLayout(StridedLayout):
    """A layout whose elements each have one place by layer, block, kv, head, token and channel."""

    names: ClassVar[tuple[str, ...]] = AXIS_NAMES

    @property
    def bytes_per_token(self) -> int:
        """Payload bytes of one token in one layer, K and V together."""
        return self.bytes_per_block // self.block_size

    def with_swapped(self, first: str, second: str) -> "KVCacheLayout":
        """Return a copy in which two axes trade places in memory: the classic wrong reading, for fault injection.

        Raises LayoutError for a layout with padding.
        """
        if prod(axis.extent for axis in self.axes) * self.itemsize != self.size_bytes:
            raise LayoutError(f"{self.name} has padding between its pages; only packed layouts can be swapped")
        order = [{first: second, second: first}.get(axis.name, axis.name) for axis in self.axes]
        extents = {axis.name: axis.extent for axis in self.axes}
        name = f"{self.name}[{first}<->{second}]"
        return packed(name, order, extents, self.itemsize, kernel_blocks=self.blocks_per_manager_block)


def packed(
    name: str,
    order: Sequence[str],
    extents: Mapping[str, int],
    itemsize: int,
    *,
    kernel_blocks: int = 1,
    page_size_padded: int | None = None,
) -> KVCacheLayout:
    """Lay the axes out without gaps but for a padded page, the last of order innermost."""
    axes, size = pack(name, order, extents, itemsize, page_size_padded)
    return KVCacheLayout(name, axes, itemsize, size, kernel_blocks)
