"""Slices of a layer that wait for the rest of what only moves together: groups of scales, whole blocks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pdtx.units import ceil_div

Fence = Callable[[], None]


@dataclass(frozen=True)
class _Slice:
    start: int
    stop: int
    fence: Fence

    def outside(self, positions: range) -> "Iterator[_Slice]":
        """What of it lies before and behind positions."""
        for start, stop in (
            (self.start, min(self.stop, positions.start)),
            (max(self.start, positions.stop), self.stop),
        ):
            if start < stop:
                yield _Slice(start, stop, self.fence)


class HoldingBack:
    """Slices of one layer of a request, in any order: each unit of tokens is let go once all of it is computed.

    A transfer brings the bytes of a whole unit, whichever of its tokens it is for. Sent before it is whole, it would
    bring bytes that are not computed yet, and could arrive after the transfer that brings them.
    unit: tokens, counted from 0. needed: those that are sent at all, so that nothing else is waited for.
    """

    def __init__(self, unit: int, needed: range) -> None:
        self._unit, self._needed = unit, needed
        self._held = list[_Slice]()

    def add(self, start: int, stop: int, fence: Fence) -> tuple[range, Fence]:
        """Take tokens start..stop; return which may be sent now, and what returns once all of them are written.

        Over all slices what is returned is disjoint, and makes up needed.
        """
        first, last = max(start, self._needed.start), min(stop, self._needed.stop)
        if first >= last:
            return range(0), fence
        self._held.append(_Slice(first, last, fence))
        begin, end = first // self._unit, ceil_div(last, self._unit)
        begin += not self._whole(begin)
        end -= end > begin and not self._whole(end - 1)
        if begin >= end:
            return range(0), fence
        positions = self._tokens(begin, end)
        parts = [one.fence for one in self._held if one.start < positions.stop and positions.start < one.stop]
        self._held = [rest for one in self._held for rest in one.outside(positions)]
        return positions, parts[0] if len(parts) == 1 else lambda: _all(parts)

    def _tokens(self, begin: int, end: int) -> range:
        """The needed tokens of units begin..end."""
        return range(max(begin * self._unit, self._needed.start), min(end * self._unit, self._needed.stop))

    def _whole(self, unit: int) -> bool:
        """Whether all needed tokens of a unit are computed."""
        tokens = self._tokens(unit, unit + 1)
        reached = tokens.start
        for one in sorted(self._held, key=lambda one: one.start):
            if one.start > reached:
                break
            reached = max(reached, one.stop)
        return reached >= tokens.stop


def _all(fences: Sequence[Fence]) -> None:
    for fence in fences:
        fence()
