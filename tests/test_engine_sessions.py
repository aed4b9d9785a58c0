"""A producer whose data connection or control channel ended: it says so, and gets another session by itself."""

import logging
import threading
import time
from functools import partial
from typing import Any

import msgspec
import pytest

from pdtx.engine import InboundRequest, KVConsumer, KVProducer, OutboundRequest
from pdtx.engine.handshake import make_hello
from pdtx.engine.inbound import Session
from pdtx.engine.inbound_messages import InboundMessages
from pdtx.engine.landing import Door
from pdtx.engine.outbound_leg import Leg
from pdtx.engine.outbound_session import OutboundSession
from pdtx.errors import (
    AuthenticationFailed,
    DeadlineExceeded,
    PdtxError,
    PeerLost,
    ProtocolError,
    TransferAborted,
    TransferRefused,
)
from pdtx.protocol import Bye, Complete, Hello, Message
from pdtx.testing.pair import Leaks
from pdtx.transports import Connection, TransferHandle, TransferKey, make_mover
from pdtx.transports.base import NOTICE_KEY
from tests.engine_pair import (
    LAYERS,
    OPEN,
    PATIENCE_S,
    Pair,
    WrappedMover,
    all_free,
    begin,
    describe,
    make_cache,
    serve,
    ship,
    wait_until,
)
from tests.faulty_mover import FaultyConnection, OnPut, Post, Timers

FOR_GOOD = r"lost decode-.*; a new session with decode-\w+ cannot be had: "
MOVERS = ("inproc", "tcp", "shm")


def cut(pair: Pair) -> str:
    """End the producer's data connection; return the session that it belonged to."""
    assert pair.producer.core.session.route is not None
    assert pair.producer.consumer is not None
    pair.producer.core.session.route.connection.close()
    return pair.producer.consumer.session_id


def session_of(pair: Pair) -> str:
    assert pair.producer.consumer is not None
    return pair.producer.consumer.session_id


@pytest.mark.parametrize("mover", MOVERS)
def test_a_broken_data_connection_is_replaced_with_its_session(mover: str, caplog: pytest.LogCaptureFixture) -> None:
    leaks = Leaks()
    with Pair(mover=mover) as pair:
        serve(pair, "before")
        for number in range(3):
            before = cut(pair)
            serve(pair, f"after-{number}")
            assert session_of(pair) != before
            with pytest.raises(AuthenticationFailed):
                pair.consumer.receiver.admit(before)
        assert len(pair.consumer.core.sessions) == 1
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("cannot go on with decode-" in text and "the connection was closed" in text for text in said) == 3
    assert sum("a new session with decode-" in text for text in said) == 3
    leaks.require_none("sessions that were replaced")


def test_what_has_arrived_goes_on_and_what_has_not_fails() -> None:
    with Pair(
        make_cache(num_blocks=20), make_cache("flashinfer_hnd", 32, num_blocks=20), mover="tcp"
    ) as pair:  # fmt: skip
        arrived, midway = begin(pair.producer, 20, "arrived"), begin(pair.producer, 20, "midway")
        ship(pair.producer, arrived)
        ready = pair.next_ready()
        received = pair.received("midway")
        ship(pair.producer, midway, complete=False)
        wait_until(lambda: midway.grant is not None and midway.unsent == 0, "all pieces")
        cut(pair)
        serve(pair)
        assert received.error is not None
        with pytest.raises((PeerLost, PdtxError), match="data connection"):
            pair.producer.wait(midway)
        pair.finish(ready)  # verified: the producer still answers for it
        assert pair.producer.wait(arrived).text == "done"
        serve(pair, "midway")


def test_what_has_arrived_outlasts_its_connection_before_its_completion_was_heard() -> None:
    """The word that all was sent comes over another channel, and may be read after the end of this one."""
    with Pair() as pair:
        request = begin(pair.producer, 20)
        received = pair.received("r")
        ship(pair.producer, request, complete=False)
        wait_until(lambda: request.grant is not None and request.unsent == 0, "all pieces")
        pair.consumer.receiver.closed(received.session.session_id, "it ended")
        assert received.error is None
        pair.producer.computed(request, 7)
        pair.finish(pair.next_ready())
        assert pair.producer.wait(request).text == "done"


def test_what_has_arrived_in_an_earlier_session_ends_with_its_producer() -> None:
    """Though that session is no more, nobody waits for the answer."""
    with Pair(make_cache(num_blocks=20), make_cache("flashinfer_hnd", 32, num_blocks=20), mover="tcp") as pair:
        ship(pair.producer, begin(pair.producer, 20, "arrived"))
        ready = pair.next_ready()
        cut(pair)
        serve(pair)
        assert not ready.has_ended
        pair.producer.close()
        wait_until(lambda: isinstance(ready.error, PeerLost), "the loss of the producer")
        pair.consumer.let_go(ready)


def test_a_request_that_waits_for_blocks_fails_with_the_session() -> None:
    with Pair(destination=make_cache("flashinfer_hnd", 32, num_blocks=3)) as pair:
        going, queued = begin(pair.producer, 40, "going"), begin(pair.producer, 40, "queued")
        pair.received("queued")
        cut(pair)
        serve(pair)
        for request in (going, queued):
            with pytest.raises(PdtxError, match="data connection"):
                pair.producer.wait(request)


def test_the_old_session_cannot_write_what_was_granted_to_the_new_one() -> None:
    with Pair() as pair:
        old = cut(pair)
        request = begin(pair.producer, 20)
        received = pair.received("r")
        wait_until(lambda: request.grant is not None, "a grant")
        key = TransferKey("r", 0, 1, 0, 20)
        with pytest.raises(TransferRefused, match="was not granted"):
            pair.consumer.receiver.place(old, key)
        placement = pair.consumer.receiver.place(received.session.session_id, key)
        assert placement.deadline == received.deadline
        pair.consumer.receiver.closed(old, "it ended only now")
        assert received.error is None
        pair.consumer.receiver.placed(received.session.session_id, key, 0, TransferAborted("enough"))


def test_a_payload_is_not_placed_twice_while_the_first_is_written() -> None:
    """A request of the same name, begun after the first one has failed, waits its turn."""
    with Pair() as pair:
        request = begin(pair.producer, 20)
        received = pair.received("r")
        wait_until(lambda: request.grant is not None, "a grant")
        session_id, key = received.session.session_id, TransferKey("r", 0, 1, 0, 20)
        pair.consumer.receiver.place(session_id, key)
        pair.producer.fail(request, TransferAborted("enough"))
        wait_until(lambda: received.error is not None, "the consumer to learn of it")
        again = begin(pair.producer, 20)
        wait_until(lambda: again.grant is not None, "a grant")
        with pytest.raises(TransferRefused, match="is still being received"):
            pair.consumer.receiver.place(session_id, key)
        pair.consumer.receiver.placed(session_id, key, 0, TransferAborted("enough"))
        ship(pair.producer, again)
        pair.finish(pair.next_ready())


def door_of(request: InboundRequest) -> Door:
    (ask,) = request.asks.values()
    assert ask.door is not None
    return ask.door


def test_a_payloads_end_counts_once_also_when_it_is_told_twice_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pair() as pair:
        receiver, request = pair.consumer.receiver, begin(pair.producer, 20)
        received = pair.received("r")
        wait_until(lambda: request.grant is not None, "a grant")
        told, end = (received.session.session_id, TransferKey("r", 0, 1, 0, 20)), door_of(received).end
        receiver.place(*told)

        def tell_again(*call: Any) -> Any:  # noqa: ANN401 - as end
            monkeypatch.undo()
            receiver.placed(*told, 7, None)
            return end(*call)

        monkeypatch.setattr(door_of(received), "end", tell_again)
        receiver.placed(*told, 7, None)
        assert received.received_bytes == 7
        wait_until(lambda: pair.consumer.duplicate_notices == 1, "the second report")
        pair.producer.fail(request, TransferAborted("enough"))


@pytest.mark.parametrize("mover", ["inproc", "tcp"])
def test_a_lost_control_channel_is_dialled_again(mover: str) -> None:
    leaks = Leaks()
    with Pair(mover=mover) as pair:
        request = begin(pair.producer, 20)
        received, listener = pair.received("r"), pair.consumer._listener
        assert listener is not None
        listener.send(received.session.peer, Bye(reason="nothing heard for 5 s"))
        with pytest.raises(PeerLost, match=r"lost decode-.*: closed: nothing heard for 5 s"):
            pair.producer.wait(request)
        serve(pair)
    leaks.require_none("a control channel that was dialled again")


def test_a_control_channel_lost_while_a_new_session_is_made_is_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the old channel says last is not about the new one."""
    with Pair() as pair:
        producer, listener = pair.producer, pair.consumer._listener
        (session,) = pair.consumer.core.sessions.values()

        def make(*facts: Any, **options: Any) -> Hello:  # noqa: ANN401 - as make_hello
            if producer.core.session.lost is None:
                assert listener is not None
                listener.send(session.peer, Bye(reason="nothing heard for 5 s"))
                wait_until(lambda: producer.core.session.lost is not None, "the loss")
            return make_hello(*facts, **options)

        monkeypatch.setattr("pdtx.engine.opening.make_hello", make)
        cut(pair)
        serve(pair)
        made = session_of(pair)
        serve(pair, "another")
        assert session_of(pair) == made


def test_a_hello_that_was_held_up_does_not_take_the_place_of_a_later_session() -> None:
    """As happens where the consumer was stopped, and two channels of one producer wait for it."""
    with Pair() as pair:
        serve(pair)
        (session,) = pair.consumer.core.sessions.values()
        late = msgspec.structs.replace(pair.producer._opener.hello(), number=session.number - 1)
        with pytest.raises(ProtocolError, match=r"hello 0 of prefill-.* was held up: 1 came before it"):
            pair.consumer.control.call(pair.consumer._messages.on_hello, b"another", late, None, ("s", bytes(32)))
        assert list(pair.consumer.core.sessions.values()) == [session]
        serve(pair, "another")


def test_another_consumer_at_the_address_is_greeted_as_such() -> None:
    with Pair(mover="tcp") as pair:
        serve(pair)
        pair.consumer.close()
        wait_until(lambda: pair.producer.core.session.lost is not None, "the loss")
        pair.consumer = KVConsumer(pair.destinations, describe(pair.destinations), make_mover("tcp"), verify=True)
        pair.consumer.listen(pair.address, security=OPEN)
        serve(pair)
        assert pair.producer.peer == pair.consumer.engine_id


def test_another_consumer_that_does_not_fit_ends_it_for_good() -> None:
    with Pair(mover="tcp") as pair:
        pair.consumer.close()
        wait_until(lambda: pair.producer.core.session.lost is not None, "the loss")
        description = describe(pair.destinations, "other weights")
        pair.consumer = KVConsumer(pair.destinations, description, make_mover("tcp"), verify=True)
        pair.consumer.listen(pair.address, security=OPEN)
        for _ in range(2):
            with pytest.raises(PeerLost, match=f"{FOR_GOOD}.*fingerprint is same"):
                pair.producer.wait(begin(pair.producer, 20))


def test_a_consumer_that_is_gone_ends_it_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdtx.engine.opening.ATTEMPT_S", 0.3)
    with Pair(mover="tcp") as pair:
        pair.consumer.close()
        wait_until(lambda: pair.producer.core.session.lost is not None, "the loss")
        with pytest.raises(PeerLost, match=f"{FOR_GOOD}nobody answers at"):
            pair.producer.wait(begin(pair.producer, 20))
        begun = time.monotonic()
        for number in range(100):
            with pytest.raises(PeerLost, match="nobody answers"):
                begin(pair.producer, 20, f"r{number}")
        assert time.monotonic() - begun < 10.0  # one attempt each would take 30 s


class Deaf:
    """A consumer that does not hear the first hellos. An attempt whose hello is heard may take as long as it wants."""

    def __init__(self, patch: pytest.MonkeyPatch, count: int) -> None:
        self.hellos, self._count, self._real, self._patch = 0, count, KVConsumer._on_hello, patch
        patch.setattr(KVConsumer, "_on_hello", lambda *call: self.hear(*call))
        patch.setattr("pdtx.engine.opening.ATTEMPT_S", 0.3)

    def hear(self, consumer: KVConsumer, peer: bytes, hello: Hello) -> None:
        self.hellos += 1
        if self.hellos > self._count:
            self._real(consumer, peer, hello)
        elif self.hellos == self._count:
            self.recover()

    def recover(self) -> None:
        """Hear every hello from the next one on."""
        self._count = min(self._count, self.hellos)
        self._patch.setattr("pdtx.engine.opening.ATTEMPT_S", PATIENCE_S)


def test_a_consumer_that_is_silent_for_a_while_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pair(mover="tcp") as pair:
        deaf = Deaf(monkeypatch, 2)
        cut(pair)
        serve(pair)
        assert deaf.hellos >= 3  # more where an attempt took longer than it may


def test_no_new_session_by_the_deadline_fails_the_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pair(mover="tcp") as pair:
        deaf = Deaf(monkeypatch, 10**6)
        cut(pair)
        begun = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"waiting for a new session from decode-.*the handshake's answer"):
            pair.producer.wait(begin(pair.producer, 20, timeout_s=0.8))
        assert 0.7 < time.monotonic() - begun < 5.0
        deaf.recover()
        serve(pair)


def test_closing_does_not_wait_for_a_new_session(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pair(mover="tcp") as pair:
        deaf = Deaf(monkeypatch, 10**6)
        cut(pair)
        errors = list[PdtxError]()

        def try_to_begin() -> None:
            try:
                pair.producer.wait(begin(pair.producer, 20))
            except PdtxError as error:
                errors.append(error)

        thread = threading.Thread(target=try_to_begin)
        thread.start()
        wait_until(lambda: deaf.hellos > 0, "a hello")
        begun = time.monotonic()
        pair.producer.close()
        thread.join()
        assert time.monotonic() - begun < 3.0
        assert [type(error) for error in errors] == [PeerLost]
        assert "the producer was closed" in str(errors[0])


def test_the_path_is_required_of_every_new_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pair(mover="tcp") as pair:
        pair.producer._opener.require = "rdma"
        cut(pair)
        with pytest.raises(PeerLost, match=r"a new session with decode-\w+ cannot be had: rdma is required"):
            pair.producer.wait(begin(pair.producer, 20))


class ProbedConnection(FaultyConnection):
    """A probe over it, which comes behind what was cut off, fails as the connection breaks."""

    def __init__(self, inner: Connection, on_put: OnPut) -> None:
        super().__init__(inner, on_put, [])
        self.probes = list[TransferHandle]()

    def notify(self, data: bytes, deadline: float) -> TransferHandle:
        self.probes.append(TransferHandle(NOTICE_KEY, 0, "the consumer", deadline))
        return self.probes[-1]

    def close(self) -> None:
        self.inner.close()
        for probe in self.probes:
            probe.abort("the connection was closed")


def test_the_next_request_waits_until_it_is_known_whether_a_connection_outlives_a_cut_transfer() -> None:
    """It must not be the one that finds out."""
    connections = list[ProbedConnection]()

    def breaks_late(key: TransferKey, idle: TransferHandle, post: Post) -> TransferHandle:
        if key.request_id != "cut":
            return post()
        idle.finish(DeadlineExceeded("room to send", "the consumer", 1.0))
        if key.layer_start == 0:
            threading.Timer(0.2, connections[0].close).start()
        return idle

    def wrap(inner: Connection) -> Connection:
        connections.append(ProbedConnection(inner, breaks_late))
        return connections[-1]

    with Pair(wrap=partial(WrappedMover, wrap=wrap)) as pair:
        request = begin(pair.producer, 20, "cut")
        ship(pair.producer, request)
        with pytest.raises(DeadlineExceeded, match="room to send"):
            pair.producer.wait(request)
        serve(pair)
        assert len(connections) == 2


def test_a_request_whose_deadline_is_noticed_before_its_transfers_is_one_cut_off_too() -> None:
    connections, stuck = list[FaultyConnection](), list[TransferHandle]()

    def sticks(key: TransferKey, idle: TransferHandle, post: Post) -> TransferHandle:
        if key.request_id != "cut":
            return post()
        stuck.append(idle)
        return idle

    def wrap(inner: Connection) -> Connection:
        connections.append(FaultyConnection(inner, sticks, []))
        return connections[-1]

    def cut_off() -> None:
        connections[0].close()
        for handle in stuck:
            handle.finish(DeadlineExceeded("room to send", "the consumer", 1.0))

    with Pair(wrap=partial(WrappedMover, wrap=wrap)) as pair, Timers() as timers:
        request = begin(pair.producer, 20, "cut", timeout_s=2.0)
        ship(pair.producer, request)
        wait_until(lambda: len(stuck) == LAYERS, "all pieces at the mover")
        with pytest.raises(PdtxError, match=r"pieces of them not acknowledged|waiting for payload"):
            pair.producer.wait(request)
        timers.after(0.2, cut_off)
        serve(pair)
        assert len(connections) == 2


def test_an_interrupt_while_a_request_is_begun_costs_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a signal raises, the node's main thread may be anywhere in begin()."""

    with Pair() as pair:

        def interrupted(leg: Leg) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(pair.producer.core.effects, "ask", interrupted)
            with pytest.raises(KeyboardInterrupt):
                begin(pair.producer, 20)
        wait_until(lambda: all_free(pair.producer.allocator), "its blocks")
        serve(pair, "r")
        pair.producer.close()


def test_the_next_hello_does_not_overtake_a_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer would take the request for one that lacks something, and tell nobody."""
    completing, retired = threading.Event(), threading.Event()
    retire = InboundMessages._retire

    def tell(messages: InboundMessages, before: Session, after: Session) -> None:
        retire(messages, before, after)
        retired.set()

    with Pair(make_cache(num_blocks=20), make_cache("flashinfer_hnd", 32, num_blocks=20)) as pair:
        send, begun = pair.producer.core.effects.send, list[OutboundRequest]()

        def slow(session: OutboundSession, message: Message) -> None:
            if isinstance(message, Complete) and not completing.is_set():
                completing.set()
                retired.wait(0.3)  # as long as the hello has to wait for this
            send(session, message)

        request = begin(pair.producer, 20)
        ship(pair.producer, request, complete=False)
        wait_until(lambda: request.grant is not None and request.unsent == 0, "all pieces")
        monkeypatch.setattr(pair.producer.core.effects, "send", slow)
        monkeypatch.setattr(InboundMessages, "_retire", tell)
        completer = threading.Thread(target=pair.producer.computed, args=(request, 7))
        beginner = threading.Thread(target=lambda: begun.append(begin(pair.producer, 20, "next")))
        completer.start()
        assert completing.wait(PATIENCE_S)
        cut(pair)
        beginner.start()
        completer.join()
        beginner.join()
        pair.finish(pair.next_ready())
        assert pair.producer.wait(request).text == "done"
        ship(pair.producer, begun[0])
        pair.finish(pair.next_ready())


def test_a_reference_asked_for_while_the_session_changes_is_read() -> None:
    """What has arrived needs the control channel alone."""
    connections, opening, verified = list[Connection](), threading.Event(), threading.Event()

    def wrap(inner: Connection) -> Connection:
        connections.append(inner)
        if len(connections) == 2:
            opening.set()
            assert verified.wait(PATIENCE_S)
        return inner

    with Pair(
        make_cache(num_blocks=20),
        make_cache("flashinfer_hnd", 32, num_blocks=20),
        wrap=partial(WrappedMover, wrap=wrap),
    ) as pair:
        arrived, begun = begin(pair.producer, 20, "arrived"), list[OutboundRequest]()
        ship(pair.producer, arrived)
        ready = pair.next_ready()
        cut(pair)
        beginner = threading.Thread(target=lambda: begun.append(begin(pair.producer, 20, "next")))
        beginner.start()
        assert opening.wait(PATIENCE_S)
        pair.finish(ready)
        verified.set()
        beginner.join()
        assert pair.producer.wait(arrived).text == "done"
        ship(pair.producer, begun[0])
        pair.finish(pair.next_ready())


def test_pieces_that_come_after_the_end_of_the_connection_cost_no_blocks() -> None:
    with Pair() as pair:
        request = begin(pair.producer, 20)
        wait_until(lambda: request.grant is not None, "a grant")
        cut(pair)
        ship(pair.producer, request)
        with pytest.raises(PdtxError, match="connection"):
            pair.producer.wait(request)
        serve(pair)


def test_a_completion_is_for_the_peers_request_whatever_its_session() -> None:
    """A peer's word counts for its own requests only."""
    with Pair(destination=make_cache("flashinfer_hnd", 32, num_blocks=20)) as pair:
        second: KVProducer = pair.connect()
        mine = begin(pair.producer, 20, "mine")
        received = pair.received("mine")
        claim = Complete(request_id="mine", first_token=1, num_tokens=20, nbytes=0)
        second.core.effects.send(second.core.session, claim)
        serve(pair)
        assert received.error is None
        ship(pair.producer, mine)
        pair.finish(pair.next_ready())
