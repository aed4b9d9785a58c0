"""What goes wrong in the middle of a call leaves nothing behind: no block, no thread, no request without an end."""

from collections.abc import Callable
from threading import Event, Thread
from typing import Any

import pytest

from pdtx.engine import InboundRequest, KVProducer
from pdtx.engine.control_channel import ControlChannel
from pdtx.engine.shipping import Item
from pdtx.engine.states import LegState
from pdtx.errors import InputError, PdtxError, PeerLost
from pdtx.protocol import Failure, Finished, LayerDone, ReadReference, Reference, Refuse
from pdtx.sidechannel import Dialer
from pdtx.transports import make_mover
from tests.engine_pair import OPEN, PATIENCE_S, caches_of, describe, wait_until
from tests.test_engine_callers_blocks import TOKENS, Callers, poll


def test_a_request_that_no_message_can_carry_leaves_its_blocks_to_the_caller() -> None:
    with Callers() as both:
        with pytest.raises(InputError, match="request id 'no id has a space' cannot be sent"):
            both.begin("no id has a space")
        assert not getattr(both.producer.pool, "num_leases")  # noqa: B009 - of CallerBlocks


@pytest.mark.parametrize("reason", ["\ud800 is in no encoding", "a\x1b[31mred\nline"], ids=["surrogate", "escapes"])
@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_a_reason_of_any_characters_ends_both_sides_and_arrives_printable(side: str, reason: str) -> None:
    with Callers() as both:
        request = both.begin()
        both.consumer.expect("r", TOKENS, [[2, 5]], deadline_s=20.0)
        wait_until(lambda: bool(request.grant), "the grant")
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
        wait_until(lambda: bool(both.consumer.core.requests), "the request")
        session = next(iter(both.consumer.core.sessions.values()))
        words = "\x1b[2J" + "x" * 100_000
        both.consumer.core.effects.send(session.peer, Failure(request_id="r", phase="\x1b[31m", reason=words))
        assert poll(both.producer.poll) == [request]
        assert str(request.error).isprintable()
        assert len(str(request.error)) < 3000


def test_a_device_that_fails_while_it_verifies_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(request: InboundRequest) -> None:
        raise RuntimeError("device-side assert\nwith many lines")

    with Callers() as both:
        monkeypatch.setattr(both.consumer, "verify", broken)
        both.consumer.expect("r", TOKENS, [[2, 5]], deadline_s=20.0)
        request = both.begin()
        both.compute(request)
        both.producer.computed(request)
        reason = "verification failed: RuntimeError: device-side assert with many lines"
        assert str(both.arrived().error) == reason
        assert reason in str(both.ended().error)


@pytest.mark.parametrize("asked", [False, True])
def test_an_interrupted_expect_leaves_no_blocks_where_payloads_may_go(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Callers() as both:
        request = both.begin() if asked else None
        wait_until(lambda: not asked or bool(both.consumer.core.requests), "the request")
        call = both.consumer.control.call

        def interrupted(event: Callable[..., Any], *args: object) -> None:
            call(event, *args)
            if request is not None:
                wait_until(lambda: request.grant is not None, "the grant")
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


FINISHED = Finished(
    request_id="r", token_ids=[], text="", verified=True, wrong=0, received_bytes=0, received_runs=0, times={}
)


@pytest.mark.parametrize("granted", [False, True])
def test_a_request_is_not_finished_before_it_was_delivered(granted: bool) -> None:
    with Callers() as both:
        request = both.begin()
        wait_until(lambda: bool(both.consumer.core.requests), "the request")
        (session,) = both.consumer.core.sessions.values()
        if granted:
            both.consumer.expect("r", TOKENS, [[2, 5]], deadline_s=20.0)
            wait_until(lambda: bool(request.grant), "the grant")
        both.consumer.core.effects.send(session.peer, FINISHED)
        assert poll(both.producer.poll) == [request]
        assert "finished request r before all of it was delivered" in str(request.error)
        wait_until(lambda: not both.consumer.core.requests, "the end at the consumer")


def test_a_consumer_cannot_pile_up_reads_of_a_producers_cache() -> None:
    with Callers() as both:
        entered, go = Event(), Event()

        do = both.producer._shipper._do

        def wait(item: Item) -> None:
            entered.set()
            go.wait(PATIENCE_S)
            do(item)

        request = both.begin()
        both.consumer.expect("r", TOKENS, [[2, 5]], deadline_s=20.0)
        wait_until(lambda: bool(both.consumer.core.requests), "the request")
        # Complete as far as this side knows: a consumer that has not heard so verifies nothing by itself.
        wait_until(lambda: request.grant is not None, "the grant")
        both.producer.control.call(request.legs[0].go, LegState.COMPLETED)
        both.producer._shipper._do = wait  # type: ignore[method-assign]
        (session,) = both.consumer.core.sessions.values()
        ask = ReadReference(request_id="r", buffer=0, layer=0, token_start=0, token_stop=1)
        for _ in range(100):
            both.consumer.core.effects.send(session.peer, ask)
        wait_until(lambda: bool(request.error), "the end of the request")
        assert "at most 8 of a request" in str(request.error)
        assert entered.wait(PATIENCE_S)
        assert not both.freed, "blocks went back while they could be read"
        go.set()
        assert poll(both.producer.poll) == [request]
        assert both.freed


def test_reference_data_that_nobody_asked_for_is_not_kept() -> None:
    with Callers() as both:
        both.begin()
        wait_until(lambda: bool(both.consumer.core.requests), "the request")
        (there,) = both.consumer.core.requests.values()
        early = Reference(request_id="r", buffer=0, layer=0, token_start=0, token_stop=1, data=b"of an earlier request")
        channel = channel_of(both.producer)
        channel.send(early)
        channel.send(LayerDone(  # comes behind it
            request_id="r", buffer=0, src_rank=0, dst_rank=0, layer_start=0, layer_stop=1, token_start=0, token_stop=1,
            nbytes=1,
        ))  # fmt: skip
        wait_until(lambda: bool(both.consumer.unknown_notices), "the notice")
        assert there.references.empty()


def channel_of(producer: KVProducer) -> ControlChannel:
    channel = producer.core.session.channel
    assert isinstance(channel, ControlChannel)
    return channel


def _dialers(monkeypatch: pytest.MonkeyPatch, before: Callable[[], object] = lambda: None) -> list[Dialer]:
    """Every dialer that connects from now on."""
    found, connect = list[Dialer](), Dialer.connect

    def note(dialer: Dialer, timeout_s: float) -> None:
        found.append(dialer)
        before()
        connect(dialer, timeout_s)

    monkeypatch.setattr(Dialer, "connect", note)
    return found


def test_a_producer_that_is_closed_while_it_dials_leaves_no_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    with Callers() as both:
        go = Event()
        dialled = _dialers(monkeypatch, lambda: go.wait(PATIENCE_S))
        channel = channel_of(both.producer)
        channel._lose(PeerLost("lost"), "lost")
        both.begin()
        wait_until(lambda: bool(dialled), "the second channel")
        closer = Thread(target=both.producer.close)
        closer.start()
        wait_until(lambda: both.producer._opener._closed, "close() to wait for the opener")
        go.set()
        closer.join(PATIENCE_S)
        assert [dialer._thread.is_alive() for dialer in dialled] == [False]


def test_a_connect_that_fails_leaves_no_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    with Callers() as both:
        dialled = _dialers(monkeypatch)
        cache = caches_of(both.source)
        other = KVProducer(cache, describe(cache), make_mover("inproc"))
        with pytest.raises(PdtxError, match="mover"):
            other.connect(channel_of(both.producer).address, security=OPEN)
        assert [dialer._thread.is_alive() for dialer in dialled] == [False]
        other.close()


def test_a_lost_channel_ends_its_requests_also_where_another_is_being_dialled() -> None:
    with Callers() as both:
        request, channel, go = both.begin(), channel_of(both.producer), Event()
        wait_until(lambda: bool(both.consumer.core.requests), "the request")
        both.producer.control.post(go.wait, PATIENCE_S)
        channel._lose(PeerLost("it was killed"), "it was killed")
        channel._lost = None  # as dialling anew begins, before the control thread has heard of the loss
        go.set()
        assert poll(both.producer.poll) == [request]
        assert "it was killed" in str(request.error)


@pytest.mark.parametrize("kind", ["failure", "refuse"])
def test_a_failure_of_an_earlier_request_of_that_name_ends_both_sides(kind: str) -> None:
    with Callers() as both:
        request = both.begin()
        wait_until(lambda: bool(both.consumer.core.requests), "the request")
        (session,) = both.consumer.core.sessions.values()
        stale = (
            Failure(request_id="r", phase="payload", reason="")
            if kind == "failure"
            else Refuse(request_id="r", reason="in use")
        )
        both.consumer.core.effects.send(session.peer, stale)
        assert poll(both.producer.poll) == [request]
        wait_until(lambda: not both.consumer.core.requests, "the end at the consumer")
