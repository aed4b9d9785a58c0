"""What goes wrong in the middle of a call leaves nothing behind: no block, no thread, no request without an end."""

from collections.abc import Callable
from typing import Any

import pytest

from pdtx.errors import ProtocolError
from pdtx.protocol import Failure
from tests.engine_pair import wait_until
from tests.test_engine_callers_blocks import TOKENS, Callers, poll


def test_a_request_that_no_message_can_carry_leaves_its_blocks_to_the_caller() -> None:
    with Callers() as both:
        with pytest.raises(ProtocolError):
            both.begin("no id has a space")
        assert not getattr(both.producer.pool, "num_leases")  # noqa: B009 - of CallerBlocks


@pytest.mark.parametrize("reason", ["\ud800 is in no encoding", "a\x1b[31mred\nline"])
@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_a_reason_of_any_characters_ends_both_sides_and_arrives_printable(side: str, reason: str) -> None:
    with Callers() as both:
        request = both.begin()
        both.consumer.expect("r", TOKENS, [[2, 5]], deadline_s=20.0)
        wait_until(lambda: request.grant, "the grant")
        if side == "producer":
            both.producer.cancel(request, reason)
        else:
            both.consumer.cancel("r", reason)
        (sent,), (arrived,) = poll(both.producer.poll), poll(both.consumer.poll)
        assert both.freed
        assert both.back
        told = arrived.error if side == "producer" else sent.error
        assert "was cancelled" in str(told)
        assert str(told).isprintable()


def test_a_peers_words_are_printed_as_one_short_line() -> None:
    with Callers() as both:
        request = both.begin()
        wait_until(lambda: both.consumer.core.requests, "the request")
        session = next(iter(both.consumer.core.sessions.values()))
        words = "\x1b[2J" + "x" * 100_000
        both.consumer._send(session, Failure(request_id="r", phase="\x1b[31m", reason=words))
        assert poll(both.producer.poll) == [request]
        assert str(request.error).isprintable()
        assert len(str(request.error)) < 3000


@pytest.mark.parametrize("asked", [False, True])
def test_an_interrupted_expect_leaves_no_blocks_where_payloads_may_go(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Callers() as both:
        request = both.begin() if asked else None
        wait_until(lambda: not asked or both.consumer.core.requests, "the request")
        call = both.consumer.control.call

        def interrupted(event: Callable[..., Any], *args: object) -> None:
            call(event, *args)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(both.consumer.control, "call", interrupted)
            with pytest.raises(KeyboardInterrupt):
                both.consumer.expect("r", TOKENS, [[2, 5]], deadline_s=20.0)
        (arrived,) = poll(both.consumer.poll)
        assert "interrupted" in str(arrived.error)
        assert len(both.back) == 1
        assert not both.consumer.core.expectations.expected
        if request is not None:
            assert poll(both.producer.poll) == [request]
