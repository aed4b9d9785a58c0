"""Lay axes out in memory: strides from an order, extents, and perhaps a padded page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdtx.errors import LayoutError
from pdtx.kvspec import AttentionSpec
from pdtx.layout.base import OUTSIDE_PAGE
from pdtx.layout.presets import is_cross_layer, is_packed
from pdtx.layout.strided import Axis, StridedLayout


@dataclass(frozen=True, kw_only=True)
class Frame:
    """How many pages there are, and what a page is.

    num_blocks, block_size: the manager's. kernel_block_size: tokens in a step of the block axis.
    page_size_padded: bytes from page to page where that is more than a page's elements.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    kernel_block_size: int | None = None
    page_size_padded: int | None = None

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.num_blocks < 1:
            raise LayoutError(f"a cache needs 1 or more layers and blocks, not {self.num_layers} and {self.num_blocks}")
        kernel = self.kernel_block_size
        if kernel is not None and (kernel < 1 or self.block_size % kernel):
            raise LayoutError(f"kernel blocks of {kernel} tokens do not divide a block of {self.block_size}")
        if self.kernel_blocks > 1 and self.page_size_padded is not None:
            raise LayoutError(
                f"pages padded to {self.page_size_padded} bytes cannot be split into {self.kernel_blocks} kernel blocks"
            )

    @classmethod
    def of(
        cls, name: str, spec: AttentionSpec, *, num_layers: int, num_blocks: int, kernel_block_size: int | None
    ) -> "Frame":
        """Return the frame of a preset for a spec. Raises LayoutError if it is impossible."""
        if is_cross_layer(name) and spec.page_size_padded is not None:
            raise LayoutError(f"{name} has no padded form; page_size_padded is {spec.page_size_padded}")
        return cls(
            num_layers=num_layers,
            num_blocks=num_blocks,
            block_size=spec.block_size,
            kernel_block_size=kernel_block_size,
            page_size_padded=spec.page_size_padded,
        )

    @property
    def kernel_blocks(self) -> int:
        """Kernel blocks in one of the manager's blocks."""
        return self.block_size // (self.kernel_block_size or self.block_size)

    def extents(self, tokens_per_step: int = 1) -> dict[str, int]:
        """Extents of layer, block and token, where one step of token holds tokens_per_step tokens."""
        tokens = self.block_size // self.kernel_blocks
        if tokens % tokens_per_step:
            raise LayoutError(f"blocks of {tokens} tokens hold no whole number of vectors for {tokens_per_step} tokens")
        return {
            "layer": self.num_layers,
            "block": self.num_blocks * self.kernel_blocks,
            "token": tokens // tokens_per_step,
        }


def pack(
    name: str, order: Sequence[str], extents: Mapping[str, int], itemsize: int, page_size_padded: int | None = None
) -> tuple[tuple[Axis, ...], int]:
    """Lay the axes out, the last of order innermost, without gaps but for the padding; return axes and total bytes.

    Raises LayoutError where a padded page would have to lie in pieces, or would hold no whole number of elements.
    """
    if page_size_padded is not None and page_size_padded % itemsize:
        raise LayoutError(f"{name}: page_size_padded is {page_size_padded}, not whole elements of {itemsize} bytes")
    stride, padded, axes = itemsize, page_size_padded, list[Axis]()
    for place, axis in reversed(list(enumerate(order))):
        if axis in OUTSIDE_PAGE and padded is not None:
            stride, padded = _padded(name, padded, stride, order[:place], extents), None
        axes.append(Axis(axis, extents[axis], stride))
        stride *= extents[axis]
    return tuple(reversed(axes)), stride


def _padded(name: str, padded: int, page: int, outer: Sequence[str], extents: Mapping[str, int]) -> int:
    """Return the padded page, once all that steps inside a page lies within it."""
    torn = [axis for axis in outer if axis not in OUTSIDE_PAGE and extents[axis] > 1]
    if torn:
        raise LayoutError(
            f"{name} has no padded form; page_size_padded is {padded}, but a page lies in pieces, one for each step "
            f"of {', '.join(torn)}"
        )
    if padded < page:
        raise LayoutError(f"{name}: page_size_padded is {padded}, less than the {page} bytes of a page")
    return padded


def check_split(layout: StridedLayout) -> None:
    """Raise LayoutError where vLLM 0.32 would not split a block for a kernel: unless it lies in one dense page."""
    if not is_packed(layout.name):
        return
    page = layout.bytes_per_block
    if layout.blocks_per_manager_block > 1 and layout.stride("block") != page:
        raise LayoutError(
            f"{layout.name} has {layout.stride('block')} bytes from block to block, not a page's {page}: "
            f"its blocks cannot be split into {layout.blocks_per_manager_block} kernel blocks"
        )
