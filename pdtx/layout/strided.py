"""What every layout is made of: axes with byte strides inside one region."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import ClassVar

from pdtx.errors import LayoutError


@dataclass(frozen=True)
class Axis:
    """One axis: its name, its extent in steps, and the bytes between two neighbouring steps."""

    name: str
    extent: int
    stride: int


@dataclass(frozen=True)
class StridedLayout:
    """Where each element of a cache lies inside one region of size_bytes.

    axes: outermost (largest stride) first. The element at coordinates x lies at sum(x[a] * stride[a]).
    blocks_per_manager_block: steps of the block axis in one block of the manager's, see block_steps.
    Raises LayoutError if axes are unknown, missing or doubled, if two elements would share a byte, or if
    the last element lies outside the region.
    """

    names: ClassVar[tuple[str, ...]] = ()
    """The axes that a layout of this kind has."""

    name: str
    axes: tuple[Axis, ...]
    itemsize: int
    size_bytes: int
    blocks_per_manager_block: int = 1

    def __post_init__(self) -> None:
        self._check_names()
        self._check_strides()
        blocks = self.extent("block")
        if self.blocks_per_manager_block < 1 or blocks % self.blocks_per_manager_block:
            raise LayoutError(
                f"layout {self.name!r} has {blocks} blocks, not a multiple of the "
                f"{self.blocks_per_manager_block} in a manager's block"
            )

    def _check_names(self) -> None:
        names = [axis.name for axis in self.axes]
        if sorted(names) != sorted(self.names):
            raise LayoutError(
                f"layout {self.name!r} has the axes {', '.join(names)}; needs each of {', '.join(self.names)}"
            )

    def _check_strides(self) -> None:
        if any(axis.extent < 1 or axis.stride < 1 for axis in self.axes):
            raise LayoutError(f"layout {self.name!r}: extents and strides must be 1 or more, not {self.axes}")
        # Extent 1 puts nothing beside itself, so its stride cannot overlap anything.
        stepped = [axis for axis in self.axes if axis.extent > 1]
        inner = [*stepped[1:], Axis("element", 1, self.itemsize)]
        for outer, next_inner in zip(stepped, inner, strict=True):
            if outer.stride < next_inner.stride * next_inner.extent:
                raise LayoutError(
                    f"layout {self.name!r}: axis {outer.name} steps {outer.stride} bytes, less than the "
                    f"{next_inner.stride * next_inner.extent} bytes of axis {next_inner.name} inside it"
                )
        end = sum((axis.extent - 1) * axis.stride for axis in self.axes) + self.itemsize
        if end > self.size_bytes:
            raise LayoutError(f"layout {self.name!r} ends at byte {end}, beyond its region of {self.size_bytes}")

    @cached_property
    def by_name(self) -> MappingProxyType[str, Axis]:
        """The axes by their names."""
        return MappingProxyType({axis.name: axis for axis in self.axes})

    def stride(self, name: str) -> int:
        """Bytes between two neighbours on an axis."""
        return self.by_name[name].stride

    def extent(self, name: str) -> int:
        """Number of steps of an axis."""
        return self.by_name[name].extent

    def block_steps(self, block_ids: Sequence[int]) -> list[int]:
        """Return the steps of the block axis that blocks of the manager's are, in token order.

        They differ where a kernel's blocks are smaller than the manager's (vLLM: 256 tokens managed, 64 a kernel
        block): manager's block b is then the steps b * n .. b * n + n - 1, and the token axis counts a step's tokens.
        """
        count = self.blocks_per_manager_block
        return [block * count + step for block in block_ids for step in range(count)]
