"""Layouts of recurrent layers' states: one of each lies in every page, one after another."""

from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import ClassVar

from pdtx.errors import LayoutError
from pdtx.kvspec import KVCacheSpec, MambaSpec, dtype_size
from pdtx.layout.base import Layout, Part
from pdtx.layout.packing import Frame, pack
from pdtx.layout.presets import STATE_ORDERS, preset_name
from pdtx.layout.strided import StridedLayout

_CONV_AXES = 2  # of a convolution's state: the last inputs, and their channels


@dataclass(frozen=True)
class ConvStateLayout(StridedLayout):
    """Where a convolution's last inputs lie: step counts them, the oldest first."""

    names: ClassVar[tuple[str, ...]] = ("layer", "block", "step", "channel")


@dataclass(frozen=True)
class HeadStateLayout(StridedLayout):
    """Where a recurrence's state lies: head is its first dimension (heads, or Mamba 1's channels), element the rest."""

    names: ClassVar[tuple[str, ...]] = ("layer", "block", "head", "element")


@dataclass(frozen=True)
class StateLayout(Layout):
    """A region of pages that hold one of each state; the step of the block axis is the page, padding included.

    states: "conv" (or "conv0", "conv1", ... where there are several), then "ssm", as far as a layer has them; in the
    order of the spec's shapes.
    Raises LayoutError without states, if one lies outside the region, or if they disagree on layers, blocks or pages.
    """

    name: str
    states: tuple[Part, ...]
    size_bytes: int

    def __post_init__(self) -> None:
        if not self.states:
            raise LayoutError(f"layout {self.name!r} has no states")
        for part in self.parts:
            if part.offset < 0 or part.offset + part.layout.size_bytes > self.size_bytes:
                raise LayoutError(f"layout {self.name!r}: {part.name} lies outside the region of {self.size_bytes}")
        for one, other in pairwise(self.parts):
            if any(one.layout.by_name[axis] != other.layout.by_name[axis] for axis in ("layer", "block")):
                raise LayoutError(f"layout {self.name!r}: {one.name} and {other.name} do not lie in the same pages")

    @property
    def parts(self) -> tuple[Part, ...]:
        """The states."""
        return self.states


def make_state_layout(
    name: str, spec: KVCacheSpec, *, num_layers: int, num_blocks: int, kernel_block_size: int | None = None
) -> StateLayout:
    """Return the layout of one of STATE_ORDERS for num_layers equal layers of num_blocks blocks in one region.

    spec: its shapes have a convolution's inputs before its channels (SD), whatever the preset; in memory the preset
    decides. Of several shapes all but the last are convolutions; a single one is, if it has two dimensions.
    kernel_block_size: None, for states are not split.

    Raises LayoutError for an unknown name, or for a spec that the preset cannot hold.
    """
    name = preset_name(name)
    if name not in STATE_ORDERS:
        raise LayoutError(f"{name} does not hold states; one of {', '.join(STATE_ORDERS)} does")
    if not isinstance(spec, MambaSpec):
        raise LayoutError(f"{name} holds the states of recurrent layers, not {type(spec).__name__}")
    if kernel_block_size is not None:
        raise LayoutError(f"{name}: states are not split into kernel blocks of {kernel_block_size} tokens")
    frame = Frame(num_layers=num_layers, num_blocks=num_blocks, block_size=1)
    states, offset = list[Part](), 0
    for part, shape, dtype in zip(_state_names(name, spec), spec.shapes, spec.dtypes, strict=True):
        states.append(_state(name, part, shape, dtype_size(dtype), offset, frame, spec.page_size_bytes))
        offset += prod(shape) * dtype_size(dtype)
    return StateLayout(name, tuple(states), num_layers * num_blocks * spec.page_size_bytes)


def _state_names(name: str, spec: MambaSpec) -> list[str]:
    """Tell convolutions from recurrences by their shapes; mamba_type mostly keeps its default, whatever the layer."""
    *before, last = spec.shapes
    convs = spec.shapes if not before and len(last) == _CONV_AXES else before
    for shape in convs:
        if len(shape) != _CONV_AXES:
            raise LayoutError(f"{name}: every state but the last is a convolution's (inputs, channels), not {shape}")
    if not last:
        raise LayoutError(f"{name} holds states of one dimension or more, not a single number")
    names = ["conv"] if len(convs) == 1 else [f"conv{place}" for place in range(len(convs))]
    return names if len(convs) == len(spec.shapes) else [*names, "ssm"]


def _state(
    name: str, part: str, shape: tuple[int, ...], itemsize: int, offset: int, frame: Frame, page_bytes: int
) -> Part:
    """Place a state offset bytes into every page. Raises LayoutError where its elements would not be aligned."""
    if offset % itemsize or page_bytes % itemsize:
        raise LayoutError(
            f"{name}: {part} begins at byte {offset} of pages of {page_bytes} bytes, not at whole elements of "
            f"{itemsize} bytes; pad the page or choose one dtype for the states"
        )
    extents = {"layer": frame.num_layers, "block": frame.num_blocks}
    make: type[ConvStateLayout | HeadStateLayout]
    if part == "ssm":
        make, order = HeadStateLayout, HeadStateLayout.names
        extents |= {"head": shape[0], "element": prod(shape[1:])}
    else:
        make, order = ConvStateLayout, STATE_ORDERS[name]
        extents |= {"step": shape[0], "channel": shape[1]}
    axes, size = pack(f"{name}.{part}", order, extents, itemsize, page_bytes)
    return Part(part, offset, make(f"{name}.{part}", axes, itemsize, size - offset))
