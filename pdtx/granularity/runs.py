"""The contiguous pieces that a block is moved in, read off a layout's axes."""

from collections.abc import Collection
from dataclasses import dataclass
from math import prod

from pdtx.layout import Axis, StridedLayout


@dataclass(frozen=True, kw_only=True)
class BlockRuns:
    """One block of all layers of a layout, as equal contiguous runs.

    nbytes: of a run. count: runs in the block. spans: the axes that lie inside a run, whole or as the slice asked for.
    stride: bytes from a run to the same run of the next block.
    regions: memory regions in which such runs lie at one stride: axes around the blocks, and layers told apart.
    """

    nbytes: int
    count: int
    spans: frozenset[str]
    stride: int
    regions: int

    @property
    def adjacent_blocks_join(self) -> bool:
        """Whether a run of one block ends where the next block's begins."""
        return self.stride == self.nbytes


def block_runs(layout: StridedLayout, *, cut: Collection[str] = (), heads: int | None = None) -> BlockRuns:
    """Return the runs of one block.

    cut: axes along which the mover cuts although the bytes may go on (a virtual half of a page: kv).
    heads: move so many heads only, where that is less than the layout has.
    """
    run, count, joined, spans = layout.itemsize, 1, True, set[str]()
    for axis in reversed(layout.axes):
        if axis.name == "block":
            joined = False
            continue
        extent = min(axis.extent, heads) if axis.name == "head" and heads else axis.extent
        joined = joined and axis.name not in cut and (extent == 1 or axis.stride == run)
        if joined:
            run *= extent
            spans.add(axis.name)
        else:
            count *= extent
    return BlockRuns(
        nbytes=run, count=count, spans=frozenset(spans), stride=layout.stride("block"), regions=_regions(layout, cut)
    )


def _regions(layout: StridedLayout, cut: Collection[str]) -> int:
    names = [axis.name for axis in layout.axes]
    around: tuple[Axis, ...] = layout.axes[: names.index("block")]
    apart = layout.extent("layer") if "layer" in cut and "layer" not in {axis.name for axis in around} else 1
    return prod(axis.extent for axis in around) * apart
