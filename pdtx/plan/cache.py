"""Plans of a shape that has been seen before, without the work that depends on the shape alone."""

import threading
from collections import OrderedDict
from collections.abc import Sequence

from pdtx.errors import PlanError
from pdtx.layout import Layout
from pdtx.parallel import Box
from pdtx.plan.build import WHOLE, build_plan
from pdtx.plan.endpoint import Endpoint
from pdtx.plan.shape import PlanShape, make_shape
from pdtx.plan.transfer import TransferPlan

_Key = tuple[Layout, Layout, Layout, tuple[Box, ...], int, int, int]

MOST_SHAPES = 1024


class PlanCache:
    """Shapes of plans, the least recently used forgotten first. Safe to use from several threads.

    A shape costs a few kilobytes, whatever the number of blocks. hits, misses: how often one was known, and was not.
    """

    def __init__(self, most: int = MOST_SHAPES) -> None:
        """Keep at most so many shapes. Raises PlanError for less than one."""
        if most < 1:
            raise PlanError(f"a plan cache keeps 1 shape or more, not {most}")
        self._most = most
        self._shapes = OrderedDict[_Key, PlanShape]()
        self._lock = threading.Lock()
        self.hits, self.misses = 0, 0

    def __len__(self) -> int:
        return len(self._shapes)

    def plan(
        self,
        src: Endpoint,
        dst: Endpoint,
        tokens: range,
        layers: range | None = None,
        *,
        dst_layer: int | None = None,
        merge: bool = True,
        boxes: Sequence[Box] = WHOLE,
    ) -> TransferPlan:
        """Return what build_plan returns for the same arguments. Raises the same errors."""
        return build_plan(
            src, dst, tokens, layers, dst_layer=dst_layer, merge=merge, boxes=boxes, shapes=self._shape
        )  # fmt: skip

    def _shape(
        self, src: Layout, dst: Layout, order: Layout, boxes: tuple[Box, ...], num_layers: int, tokens: range
    ) -> PlanShape:
        key = (src, dst, order, boxes, num_layers, tokens.start, tokens.stop)
        with self._lock:
            shape = self._shapes.get(key)
            if shape is not None:
                self._shapes.move_to_end(key)
                self.hits += 1
                return shape
            self.misses += 1
        shape = make_shape(src, dst, order, boxes, num_layers, tokens)
        with self._lock:
            self._shapes[key] = shape
            while len(self._shapes) > self._most:
                self._shapes.popitem(last=False)
        return shape
