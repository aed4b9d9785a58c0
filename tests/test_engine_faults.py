"""What goes wrong in the middle of a call leaves nothing behind: no block, no thread, no request without an end."""

import pytest

from pdtx.errors import ProtocolError
from tests.test_engine_callers_blocks import Callers


def test_a_request_that_no_message_can_carry_leaves_its_blocks_to_the_caller() -> None:
    with Callers() as both:
        with pytest.raises(ProtocolError):
            both.begin("no id has a space")
        assert not getattr(both.producer.pool, "num_leases")  # noqa: B009 - of CallerBlocks
