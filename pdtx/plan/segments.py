"""Token positions cut into segments: what lies in one block on both sides."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pdtx.layout import StridedLayout
from pdtx.plan.runs import Int64s
from pdtx.units import ceil_div


@dataclass(frozen=True)
class Segments:
    """Neighbouring segments of equal length, all of it steps of the token axis.

    A unit is the smaller of both sides' blocks; a segment is what is moved of one. first, stop: units; skip: steps left
    out at the start of the only one; steps: of each. parts: units in a group, which is a block of the destination.
    """

    unit: int
    first: int
    stop: int
    skip: int
    steps: int
    parts: int = 1

    def __len__(self) -> int:
        return self.stop - self.first

    def last_offset(self, layout: StridedLayout) -> int:
        """Return the most that a segment can begin after its block."""
        last_unit = layout.token_steps // self.unit - 1
        return (last_unit * self.unit + self.skip) * (layout.stride("token") if "token" in layout.by_name else 0)

    def place(self, layout: StridedLayout, block_ids: Int64s, shift: int, out: Int64s) -> None:
        """Write to out, shape (len(self),), where each segment begins: its block, and in it its first token.

        block_ids: the steps of the block axis that units 0, 1, ... lie in. shift: bytes added to all.
        """
        stride = layout.stride("block")
        token = layout.stride("token") if "token" in layout.by_name else 0
        shift += self.skip * token
        ratio = layout.token_steps // self.unit
        if ratio == 1:
            np.multiply(block_ids[self.first : self.stop], stride, out=out)
            np.add(out, shift, out=out)
            return
        low, high = self.first // ratio, ceil_div(self.stop, ratio)
        inside = np.arange(ratio, dtype=np.int64) * (self.unit * token) + shift
        found = np.add.outer(block_ids[low:high] * stride, inside).reshape(-1)
        out[:] = found[self.first - low * ratio : self.stop - low * ratio]


def cut(steps: range, unit: int, group: int) -> Iterator[Segments]:
    """Cut steps at every multiple of unit; yield the pieces in order, equal ones together.

    group: units in a block of the destination; only whole ones come in groups.
    """
    if not steps:
        return
    first, last = steps.start // unit, ceil_div(steps.stop, unit)
    skip, rest = steps.start % unit, steps.stop % unit
    if last - first == 1:
        yield Segments(unit, first, last, skip, len(steps))
        return
    if skip:
        yield Segments(unit, first, first + 1, skip, unit - skip)
        first += 1
    whole = last - (rest > 0)
    # Where the whole blocks of the destination begin and end.
    edges = [first, ceil_div(first, group) * group, whole // group * group, whole]
    if group == 1 or edges[1] >= edges[2]:
        edges = [first, whole]
    for low, high in pairwise(edges):
        if high > low:
            parts = group if low % group == 0 and high % group == 0 else 1
            yield Segments(unit, low, high, 0, unit, parts)
    if rest:
        yield Segments(unit, whole, last, 0, rest)
