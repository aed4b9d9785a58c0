"""Match the parts and axes of two layouts: what is one thing on both sides, and what must not be cut."""

from dataclasses import dataclass
from math import lcm

from pdtx.errors import PlanError
from pdtx.layout import KVCacheLayout, Layout, Part, PartedLayout, QuantizedLayout, RecordLayout, StridedLayout
from pdtx.parallel import Box, Cut
from pdtx.plan.grids import GridAxis

_WORDS = {"kv": "K/V part", "head": "KV head"}
"""What axes are called in messages, where that is not their name."""


@dataclass(frozen=True)
class BoxAxis:
    """An axis of the box that is copied: steps, and the bytes from one to the next on either side.

    order: bytes from one step to the next in the layout that the stream follows.
    """

    name: str
    extent: int
    src: int
    dst: int
    order: int

    @property
    def loop(self) -> GridAxis:
        """The axis as a loop of a grid."""
        return GridAxis(self.extent, self.src, self.dst)


def match_parts(src: Layout, dst: Layout) -> tuple[tuple[Part, Part], ...]:
    """Pair the parts of two layouts by name; a layout of plain K/V elements is read as its keys and values if need be.

    Raises PlanError for layouts that hold different things.
    """
    if isinstance(src, KVCacheLayout) and isinstance(dst, PartedLayout):
        src = PartedLayout.of(src)
    elif isinstance(src, PartedLayout) and isinstance(dst, KVCacheLayout):
        dst = PartedLayout.of(dst)
    elif isinstance(src, QuantizedLayout) and isinstance(dst, RecordLayout):
        src = src.whole
    elif isinstance(src, RecordLayout) and isinstance(dst, QuantizedLayout):
        dst = dst.whole
    names = [[part.name for part in side.parts] for side in (src, dst)]
    if names[0] != names[1]:
        raise PlanError(
            f"parts differ: source {src.name} has {', '.join(names[0]) or 'one'}, "
            f"destination {dst.name} has {', '.join(names[1]) or 'one'}"
        )
    return tuple(zip(src.parts, dst.parts, strict=True))


def check_parts(src: StridedLayout, dst: StridedLayout) -> None:
    """Raise PlanError, naming the field and both values, unless two parts hold the same kind of thing.

    Raises LayoutError for one whose blocks cannot be moved one by one.
    """
    for axis in dict.fromkeys((*src.by_name, *dst.by_name)):
        if _extent(src, axis) != 1 or _extent(dst, axis) != 1:
            for one, other in ((src, dst), (dst, src)):
                if axis not in one.by_name:
                    raise PlanError(
                        f"{one.name} has no axis {axis}, which {other.name} has; they hold different things"
                    )
    _same("bytes of an element", src, src.itemsize, dst, dst.itemsize)
    _same("tokens in a step", src, src.tokens_per_step, dst, dst.tokens_per_step)
    small, large = sorted((src.block_size, dst.block_size))
    if large % small:
        raise PlanError(
            f"block sizes {src.block_size} (source) and {dst.block_size} (destination): neither divides the other"
        )
    for side in (src, dst):
        side.require_movable()


def whole_blocks(src: StridedLayout, dst: StridedLayout) -> bool:
    """Whether tokens of a block must stay together. Raises PlanError if then the block sizes differ."""
    together = any("token" in side.by_name and "token" not in side.sliceable for side in (src, dst))
    if together:
        _same("block size, which must be equal where blocks move whole", src, src.block_size, dst, dst.block_size)
    return together


def tokens_together(src: StridedLayout, dst: StridedLayout) -> int:
    """Tokens, counted from the start of a block, that a plan moves together. Raises as whole_blocks()."""
    return src.block_size if whole_blocks(src, dst) else max(src.tokens_per_step, src.tokens_together)


def positions_together(src: Layout, dst: Layout) -> int:
    """Positions, counted from the start of a block, that a plan moves together, whatever part of them it is given.

    Of these a plan for some brings the bytes of all. Raises PlanError for layouts that cannot be matched.
    """
    return lcm(*(tokens_together(ours.layout, theirs.layout) for ours, theirs in match_parts(src, dst)))


def box_axes(
    src: StridedLayout,
    dst: StridedLayout,
    box: Box,
    num_layers: int,
    num_steps: int,
    order: StridedLayout | None = None,
) -> list[BoxAxis]:
    """Return the axes of a box, in the source's order, without those of one step; block is not among them.

    num_steps: of the token axis. order: default dst.
    Raises PlanError if the sides have another extent and the box does not cut it, if a cut leaves a side, or goes
    through what must stay together.
    """
    cuts = {cut.axis: cut for cut in box.cuts}
    unknown = set(cuts) - set(src.by_name)
    if unknown:
        raise PlanError(f"{src.name} has no axis {min(unknown)} to cut")
    order = order or dst
    axes = list[BoxAxis]()
    for name in (axis.name for axis in src.axes if axis.name != "block"):
        if name in ("layer", "token"):
            extent = num_layers if name == "layer" else num_steps
        elif name in cuts:
            extent = _check_cut(src, dst, cuts[name])
        else:
            extent = _extent(src, name)
            _same(f"number of {_WORDS.get(name, name)}s", src, extent, dst, _extent(dst, name))
        if extent > 1:
            axes.append(BoxAxis(name, extent, src.stride(name), dst.stride(name), order.stride(name)))
    for axis in axes:
        if axis.src != axis.dst and not (axis.name in src.sliceable and axis.name in dst.sliceable):
            raise PlanError(
                f"{axis.name} steps {axis.src} bytes in {src.name} and {axis.dst} in {dst.name}, "
                "inside bytes that must stay together: only equal layouts can exchange them"
            )
    return axes


def _check_cut(src: StridedLayout, dst: StridedLayout, cut: Cut) -> int:
    for side, start in ((src, cut.src), (dst, cut.dst)):
        extent = side.extent(cut.axis)
        if cut.count < 1 or start < 0 or start + cut.count > extent:
            raise PlanError(
                f"{_WORDS.get(cut.axis, cut.axis)}s {start}..{start + cut.count} lie outside "
                f"the {extent} that {side.name} has"
            )
        if cut.count != extent and cut.axis not in side.sliceable:
            raise PlanError(f"{side.name} cannot be cut along {cut.axis}: it lies inside bytes that must stay together")
    return cut.count


def _extent(layout: StridedLayout, axis: str) -> int:
    return layout.extent(axis) if axis in layout.by_name else 1


def _same(what: str, src: StridedLayout, ours: int, dst: StridedLayout, theirs: int) -> None:
    if ours != theirs:
        raise PlanError(f"{what} differs: source {src.name} has {ours}, destination {dst.name} has {theirs}")
