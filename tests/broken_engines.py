"""Engines with one mistake each, for the tests that must find it."""

from collections.abc import Callable

import pytest

from pdtx.engine.landing import Landing
from pdtx.engine.outbound import OutboundRequest
from pdtx.engine.outbound_control import OutboundControl
from pdtx.engine.states import OutboundLife


def hold_nothing(patch: pytest.MonkeyPatch) -> None:
    """The consumer takes its blocks back while payloads are written into them."""
    close = Landing.close

    def idle(self: Landing, on_idle: Callable[[], None]) -> bool:
        close(self, lambda: None)
        return True

    patch.setattr(Landing, "close", idle)


def give_back_at_once(patch: pytest.MonkeyPatch) -> None:
    """The producer takes its blocks back while transfers read them."""
    give_back = OutboundControl._return_blocks

    def early(self: OutboundControl, request: OutboundRequest) -> None:
        unsent = [leg.unsent for leg in request.legs]
        for leg in request.legs:
            leg.unsent = 0
        if request.life is not OutboundLife.ENDED:
            give_back(self, request)
        for leg, count in zip(request.legs, unsent, strict=True):
            leg.unsent = count

    patch.setattr(OutboundControl, "_return_blocks", early)
