"""What every layout is made of: axes with byte strides inside one region."""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import ClassVar

from pdtx.errors import LayoutError
from pdtx.layout.base import OUTSIDE_PAGE, Layout, Part


@dataclass(frozen=True)
class Axis:
    """One axis: its name, its extent in steps, and the bytes between two neighbouring steps."""

    name: str
    extent: int
    stride: int


@dataclass(frozen=True)
class StridedLayout(Layout):
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
        if self.end > self.size_bytes:
            raise LayoutError(f"layout {self.name!r} ends at byte {self.end}, beyond its region of {self.size_bytes}")

    @property
    def end(self) -> int:
        """The byte behind the last element; what is left of size_bytes is padding."""
        return sum((axis.extent - 1) * axis.stride for axis in self.axes) + self.itemsize

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

    @property
    def parts(self) -> tuple[Part, ...]:
        """The layout itself."""
        return (Part("", 0, self),)

    @property
    def sliceable(self) -> frozenset[str]:
        """The axes of which a part may be moved without the rest: all, where a class does not say otherwise."""
        return frozenset(self.by_name)

    @property
    def block_size(self) -> int:
        """Positions in a step of the block axis: 1 where it has no token axis."""
        return self.token_steps * self.tokens_per_step

    @property
    def token_steps(self) -> int:
        """Steps of the token axis: 1 where there is none."""
        return self.extent("token") if "token" in self.by_name else 1

    @property
    def tokens_per_step(self) -> int:
        """Tokens for which one step of the token axis stands: 1, where a class does not say otherwise."""
        return 1

    @property
    def tokens_together(self) -> int:
        """Tokens that move together, counted from the start of a block: 1, where a class does not say otherwise."""
        return 1

    @property
    def bytes_per_block(self) -> int:
        """Payload bytes of one step of the block axis in one layer."""
        return self.itemsize * prod(axis.extent for axis in self.axes if axis.name not in OUTSIDE_PAGE)
