"""Lost, failed, doubled, mis-addressed and early notices: one fault for each request, through the real engine.

Two senders are the two ranks of one prefill node, P TP2 -> D TP1, with 8 blocks on either side. The times are shorter
than those of the case. The word that a payload has arrived, its notice, travels twice: the mover tells the consumer's
receiver and acknowledges the put, and then the producer says so on the control channel; each row says which it means.

A row is a function of a mover's name. It runs for every mover, and once more for a mover or an engine that is wrong in
just that way, under which it has to fail.
"""

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import msgspec
import pytest
import torch

from pdtx.cache import KVCaches, PagedKVCache
from pdtx.engine import InboundRequest, KVProducer, OutboundRequest
from pdtx.engine.arrivals import Arrivals, Notice
from pdtx.engine.inbound import Session
from pdtx.engine.inbound_control import InboundControl
from pdtx.engine.inbound_messages import InboundMessages
from pdtx.engine.outbound_control import OutboundControl
from pdtx.engine.outbound_session import OutboundSession
from pdtx.engine.receiving import PayloadReceiver
from pdtx.engine.registering import regions_of
from pdtx.errors import DeadlineExceeded, PdtxError, PeerLost, TransferError, VerificationError
from pdtx.kvspec import FullAttentionSpec
from pdtx.protocol import Complete, Failure, LayerDone, Message
from pdtx.sidechannel import Dialer, Listener
from pdtx.transports import Placement, Receiver, Region, TransferHandle, TransferKey
from tests import stopping_producer
from tests.broken_engines import give_back_at_once, hold_nothing
from tests.contract_subjects import sampled, usable_mover
from tests.engine_pair import Pair, attention, begin, change, produce, require_contents, wait_until
from tests.faulty_mover import FaultyConnection, FaultyReceiver, OnPut, Post, Timers, faulty
from tests.stopping_producer import StoppingProducer

BLOCKS, BLOCK = 8, 16
TOKENS = BLOCKS * BLOCK - 2  # and two to come
LAYERS = 2

DEADLINE_S = 2.0
TOLERANCE_S = 0.5
BUSY_S = 1.0
"""What a machine that does much else besides may add; the teeth are later by more than both."""
QUIET_S = 0.4
"""How long nothing is to happen that a fault would bring about at once."""
SILENCE_S = 1.0
SETTLED_S = 4.5
"""Less than any deadline or silence that would settle things by itself."""

MOVERS = ("tcp", "ucx", "shm", "nixl")


@pytest.fixture(params=sampled(MOVERS, ("shm", "nixl")))
def mover(request: pytest.FixtureRequest) -> str:
    return usable_mover(request.param)


def model(tp_size: int, num_blocks: int = BLOCKS) -> PagedKVCache:
    layers = [f"layers.{number}" for number in range(LAYERS)]
    return attention(
        FullAttentionSpec, "full", block_size=BLOCK, layers=layers, num_blocks=num_blocks + 1, heads=4, channels=16,
        tp_size=tp_size,
    )  # fmt: skip


def as_it_is(key: TransferKey, idle: TransferHandle, post: Post) -> TransferHandle:
    return post()


@dataclass
class Faults:
    """What goes wrong at the moment; nothing by default."""

    on_put: OnPut = as_it_is
    say: Callable[[Message], list[Message]] = lambda message: [message]
    handles: list[TransferHandle] = field(default_factory=list)
    said: list[Message] = field(default_factory=list)

    def clear(self) -> None:
        self.on_put, self.say = as_it_is, lambda message: [message]


class Case:
    """A pair over a real mover whose faults can be changed. At the end everything must be as at the start."""

    def __init__(
        self, mover: str, receive: Callable[[Receiver], Receiver] = lambda it: it, *, producer_blocks: int = BLOCKS
    ) -> None:
        self.faults, self.timers, self.sent = Faults(), Timers(), dict[str, dict[tuple[str, str], torch.Tensor]]()
        wrap = lambda inner: FaultyConnection(inner, lambda *put: self.faults.on_put(*put), self.faults.handles)  # noqa: E731
        self.pair = Pair(
            model(2, producer_blocks),
            model(1),
            mover=mover,
            wrap=partial(faulty, wrap=wrap),
            wrap_consumers=partial(faulty, receive=receive),
        )
        self.producer, self.consumer = self.pair.producer, self.pair.consumer
        send = self.producer.core.effects.send

        def say(session: OutboundSession, message: Message) -> None:
            for each in self.faults.say(message):
                self.faults.said.append(each)
                send(session, each)

        self.producer.core.effects.send = say  # type: ignore[method-assign]

    def __enter__(self) -> "Case":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.require_as_before()
        finally:
            self.timers.__exit__()
            self.pair.close()

    def begin(self, name: str, deadline_s: float = DEADLINE_S) -> OutboundRequest:
        return self.producer.begin(name, list(range(TOKENS)), max_tokens=2, timeout_s=deadline_s)

    def compute(self, request: OutboundRequest, fill: int | None = None) -> None:
        """Write both senders' heads, layer by layer, as random bytes or all the same, and ship them."""
        contents = self.sent[request.request_id] = {}
        (buffer,) = self.producer.cache.buffers
        for layer, name in enumerate(buffer.layer_names):
            rows = torch.randint(256, buffer.rows_shape(TOKENS), dtype=torch.uint8)
            if fill is not None:
                rows.fill_(fill)
            buffer.write_canonical(layer, request.tables[0], 0, rows)
            contents[buffer.name, name] = rows
            self.producer.layer_ready(request, 0, layer, 0, TOKENS)
        self.producer.computed(request, 7)

    def ship(self, name: str, deadline_s: float = DEADLINE_S, fill: int | None = None) -> OutboundRequest:
        request = self.begin(name, deadline_s)
        self.compute(request, fill)
        return request

    def verify(self, request: OutboundRequest) -> None:
        """The consumer takes a request, compares every element twice, and ends it well."""
        ready = self.pair.next_ready()
        assert ready.request_id == request.request_id
        require_contents(self.pair, ready, self.sent[request.request_id])
        self.pair.finish(ready)
        assert self.producer.wait(request).text == "done"

    def require_failed(self, request: OutboundRequest, received: InboundRequest) -> PdtxError:
        """Return the producer's error of a request that has failed on both sides, of which nothing was accepted."""
        with pytest.raises(PdtxError) as caught:
            self.producer.wait(request)
        wait_until(lambda: received.error is not None, "the consumer to learn of it", SETTLED_S)
        assert self.consumer.next_ready(0.0) is None
        assert received.complete is None
        return caught.value

    def require_as_before(self) -> None:
        """Both sides are alive, a clean request verifies, and everything that was taken is back."""
        self.faults.clear()
        limit = time.monotonic() + SETTLED_S
        self.pair.require_all_free(SETTLED_S)
        wait_until(self._idle, "every transfer ended", max(0.1, limit - time.monotonic()))
        self.verify(self.ship("clean", 20.0))
        self.pair.require_all_free(SETTLED_S)
        wait_until(self._idle, "every transfer ended", SETTLED_S)

    def _idle(self) -> bool:
        open_handles = [handle for handle in self.faults.handles if not handle.state.final]
        left = (
            open_handles,
            self.producer.core.requests,
            self.consumer.core.requests,
            self.consumer.receiver.num_placing,
        )
        return not any(left)


def names_sender_1(error: PdtxError | None) -> bool:
    return error is not None and ("from rank 1 to rank 0" in str(error) or "rank 1 to 0" in str(error))


# -- none ----------------------------------------------------------------------------------------------------------


def row_none(mover: str, on_put: OnPut = as_it_is) -> None:
    with Case(mover) as case:
        case.faults.on_put = on_put
        case.verify(case.ship("r"))
        assert (case.consumer.duplicate_notices, case.consumer.unknown_notices) == (0, 0)


# -- sender 1 cannot post ------------------------------------------------------------------------------------------


def raises_at_once(key: TransferKey, idle: TransferHandle, post: Post) -> TransferHandle:
    if key.src_rank == 1:
        raise TransferError("no room in the send queue")
    return post()


def fails_at_once(key: TransferKey, idle: TransferHandle, post: Post) -> TransferHandle:
    if key.src_rank == 1:
        idle.finish(TransferError("no room in the send queue"))
        return idle
    return post()


def row_cannot_post(mover: str, on_put: OnPut = raises_at_once) -> None:
    with Case(mover) as case:
        case.faults.on_put = on_put
        begun, request = time.monotonic(), case.begin("r")
        received = case.pair.received("r")
        case.compute(request)
        error = case.require_failed(request, received)
        assert time.monotonic() - begun < 2.0
        for text in (str(error), str(received.error)):
            assert "rank 1 to 0, 8 blocks of rank 1 (" in text
            blocks = ", ".join(map(str, request.sources[0].tolist()))
            assert f"({blocks}) could not be sent: no room in the send queue" in text
            assert "deadline" not in text
            assert "timeout" not in text
        assert case.consumer.num_failed == 1


# -- the notice of sender 1 is dropped -----------------------------------------------------------------------------


def never_acknowledged(key: TransferKey, idle: TransferHandle, post: Post) -> TransferHandle:
    if key.src_rank == 1:
        post()
        return idle
    return post()


def row_acknowledgement_dropped(mover: str) -> None:
    """The mover's word that sender 1's payload has arrived is lost, so that nobody says so."""
    with Case(mover) as case:
        kept = list[TransferHandle]()

        def never(key: TransferKey, idle: TransferHandle, post: Post) -> TransferHandle:
            if key.src_rank == 1:
                kept.append(idle)
            return never_acknowledged(key, idle, post)

        case.faults.on_put = never
        begun, request = time.monotonic(), case.begin("r")
        received = case.pair.received("r")
        case.compute(request)
        error = case.require_failed(request, received)
        took = time.monotonic() - begun
        assert DEADLINE_S - TOLERANCE_S < took < DEADLINE_S + TOLERANCE_S + BUSY_S, took
        assert names_sender_1(error), error
        assert names_sender_1(received.error), received.error
        assert "deadline of" in str(error)
        # What only the test could have ended.
        for handle in kept:
            handle.finish(TransferError("enough"))


def row_word_dropped(mover: str) -> None:
    """The producer's word is lost on its way. What comes behind it on the same channel proves so, long before 5 s."""
    with Case(mover) as case:
        case.faults.say = lambda message: [] if isinstance(message, LayerDone) and message.src_rank == 1 else [message]
        begun, request = time.monotonic(), case.begin("r")
        received = case.pair.received("r")
        case.compute(request)
        error = case.require_failed(request, received)
        assert time.monotonic() - begun < DEADLINE_S + TOLERANCE_S + BUSY_S
        assert names_sender_1(error), error
        assert names_sender_1(received.error), received.error


def row_all_words_dropped(mover: str) -> None:
    """So is all that comes behind it: the deadline ends the request, with all its bytes here and none accepted."""
    with Case(mover) as case:

        def say(message: Message) -> list[Message]:
            lost = isinstance(message, Complete) or (isinstance(message, LayerDone) and message.src_rank == 1)
            return [] if lost else [message]

        case.faults.say = say
        begun, request = time.monotonic(), case.begin("r", 20.0)
        received = case.pair.received("r")
        change(case.consumer, received, deadline=received.begun + DEADLINE_S)
        case.compute(request)
        error = case.require_failed(request, received)
        took = time.monotonic() - begun
        assert DEADLINE_S - TOLERANCE_S < took < DEADLINE_S + TOLERANCE_S + BUSY_S, took
        assert isinstance(received.error, DeadlineExceeded)
        nbytes = LAYERS * 2 * TOKENS * 4 * 16 * 2
        assert f"{nbytes} bytes received; group full, buffer full: no notice of {LAYERS * TOKENS} " in str(error)
        assert names_sender_1(error), error


# -- the notice of sender 0 comes twice, sender 1 is slow ------------------------------------------------------------


class PlacedTwice(FaultyReceiver):
    """Tells the end of sender 0's payloads twice. twice: those of which it has done so."""

    def __init__(self, inner: Receiver, twice: list[TransferKey]) -> None:
        super().__init__(inner)
        self._twice = twice

    def placed(self, session_id: str, key: TransferKey, nbytes: int, error: PdtxError | None) -> None:
        self.inner.placed(session_id, key, nbytes, error)
        if key.src_rank == 0 and key.request_id == "r":
            self.inner.placed(session_id, key, nbytes, error)
            self._twice.append(key)


def row_twice(mover: str, *, by_mover: bool = False) -> None:
    placed, held = list[TransferKey](), list[Callable[[], None]]()
    receive = partial(PlacedTwice, twice=placed) if by_mover else lambda receiver: receiver
    with Case(mover, receive) as case:

        def slow(key: TransferKey, idle: TransferHandle, post: Post) -> TransferHandle:
            if key.src_rank == 0:
                return post()

            def go() -> None:
                post().on_end(end_with)

            def end_with(real: TransferHandle) -> None:
                idle.finish(real.error)

            held.append(go)
            return idle

        def twice(message: Message) -> list[Message]:
            first = isinstance(message, LayerDone) and message.src_rank == 0 and message.layer_start == 0
            return [message, message] if first else [message]

        case.faults.on_put = slow
        if not by_mover:
            case.faults.say = twice
        request = case.begin("r", 20.0)
        received = case.pair.received("r")
        case.compute(request)
        duplicates = LAYERS if by_mover else 1
        half = LAYERS * TOKENS * 2 * 2 * 16 * 2
        # The first word and its copy come before the last one.
        wait_until(lambda: received.noticed_bytes >= half, "all of sender 0")
        wait_until(lambda: len(placed) == (LAYERS if by_mover else 0), "the mover's second word of each")
        assert case.consumer.duplicate_notices == duplicates
        assert received.noticed_bytes == half
        missing = received.missing()
        assert missing is not None
        assert "from rank 1 to rank 0" in missing
        assert case.consumer.next_ready(QUIET_S) is None
        wait_until(lambda: len(held) == LAYERS, "all of sender 1")
        for go in held:
            go()
        case.verify(request)
        assert case.consumer.duplicate_notices == duplicates


# -- a notice with another request's id ------------------------------------------------------------------------------


def row_other_id(mover: str, other: str = "other") -> None:
    """other: a request that waits for its payload, or none of ours."""
    with Case(mover) as case:

        def also_of_other(message: Message) -> list[Message]:
            if not isinstance(message, LayerDone) or (message.request_id, message.src_rank) != ("r", 1):
                return [message]
            wrong = msgspec.structs.replace(message, request_id=other)
            return [wrong, message] if message.layer_start == 0 else [message]

        case.faults.say = also_of_other
        request = case.ship("r")
        case.verify(request)
        assert case.consumer.unknown_notices == 1
        assert case.consumer.num_failed == 0


def row_other_waits(mover: str) -> None:
    """The other request has its grant and waits: a notice that is not its own brings it no nearer to its end."""
    with Case(mover, producer_blocks=2 * BLOCKS) as case:
        other = case.producer.begin("other", [1, 2, 3], max_tokens=2, timeout_s=20.0)
        received = case.pair.received("other")
        wait_until(lambda: other.grant is not None, "its grant")
        notice = LayerDone(
            request_id="other", buffer=0, src_rank=1, dst_rank=0, layer_start=0, layer_stop=1, token_start=0,
            token_stop=3, nbytes=1,
        )  # fmt: skip
        case.producer.core.effects.send(case.producer.core.session, notice)
        wait_until(lambda: case.consumer.unknown_notices == 1, "the notice", 2.0)
        assert received.noticed_bytes == 0
        assert case.consumer.next_ready(0.1) is None
        assert received.error is None
        case.producer.fail(other, TransferError("enough"))


# -- sender 0 errors at once, sender 1 goes on writing ---------------------------------------------------------------


class WritesOn(FaultyReceiver):
    """Sender 1's payloads are being written until an event: whoever else gets their memory before finds it changing."""

    def __init__(self, inner: Receiver, until: threading.Event) -> None:
        super().__init__(inner)
        self._until, self._placements = until, dict[TransferKey, Placement]()

    def place(self, session_id: str, key: TransferKey) -> Placement:
        placement = self.inner.place(session_id, key)
        self._placements[key] = placement
        return placement

    def placed(self, session_id: str, key: TransferKey, nbytes: int, error: PdtxError | None) -> None:
        placement = self._placements.pop(key)
        while key.src_rank == 1 and not self._until.wait(0.02):
            fill(placement, 0x77)
        self.inner.placed(session_id, key, nbytes, error)


@contextlib.contextmanager
def finally_set(event: threading.Event) -> Iterator[None]:
    """Whoever waits for it goes on, whatever happens."""
    try:
        yield
    finally:
        event.set()


def fill(placement: Placement, value: int) -> None:
    for offset, nbytes in zip(placement.slices.offsets.tolist(), placement.slices.nbytes.tolist(), strict=True):
        placement.region.memory[offset : offset + nbytes] = value


def row_writes_on(mover: str) -> None:
    until = threading.Event()
    with Case(mover, partial(WritesOn, until=until), producer_blocks=2 * BLOCKS) as case, finally_set(until):

        def sender_0_errs(key: TransferKey, idle: TransferHandle, post: Post) -> TransferHandle:
            if key.src_rank == 1:
                return post()
            case.timers.after(0.1, lambda: idle.finish(TransferError("sender 0 is out of order")))
            return idle

        case.faults.on_put = sender_0_errs
        request = case.begin("r", 20.0)
        received = case.pair.received("r")
        case.compute(request)
        error = case.require_failed(request, received)  # told while sender 1 still writes
        assert "sender 0 is out of order" in str(error)
        assert "8 blocks of rank 0" in str(error)
        case.faults.clear()
        later = case.begin("later", 20.0)
        case.pair.received("later")
        limit = time.monotonic() + QUIET_S
        while time.monotonic() < limit:
            assert later.grant is None, "blocks that are being written were granted"
            assert case.producer.allocator.num_free == (0,), "blocks that are being read were given back"
            time.sleep(0.02)
        until.set()
        wait_until(lambda: later.grant is not None, "the blocks, once nobody writes them", SETTLED_S)
        case.compute(later)
        case.verify(later)
        assert case.consumer.num_failed == 1
        assert sum(isinstance(message, Failure) for message in case.faults.said) == 1


# -- the notice comes before the payload -----------------------------------------------------------------------------


def leave_stale_bytes(case: Case) -> None:
    """Fill the consumer's pool with the very bytes that are to come. Twice: the last block is not filled to its end."""
    for name in ("stale", "as-stale"):
        case.verify(case.ship(name, fill=0x5A))


def row_early_word(mover: str) -> None:
    """The producer says that sender 1's payloads are there, and sends them when the request has failed for it."""
    with Case(mover) as case:
        leave_stale_bytes(case)
        held = list[Post]()

        def says_first(key: TransferKey, idle: TransferHandle, post: Post) -> TransferHandle:
            if key.src_rank == 0:
                return post()
            held.append(post)
            idle.finish()
            return idle

        case.faults.on_put = says_first
        request = case.begin("r")
        received = case.pair.received("r")
        case.compute(request, fill=0x5A)
        error = case.require_failed(request, received)
        assert names_sender_1(error), error
        wait_until(lambda: case.consumer.unknown_notices == LAYERS, "both words")
        assert len(held) == LAYERS
        late = [post() for post in held]
        wait_until(lambda: all(handle.state.final for handle in late), "the late payloads")
        assert all(handle.error is not None for handle in late), "nobody may have taken what came too late"


class ShadowReceiver(FaultyReceiver):
    """A mover that says placed() of sender 1's payloads before their bytes lie there: land() lets them arrive."""

    def __init__(self, inner: Receiver) -> None:
        super().__init__(inner)
        self._real = dict[TransferKey, tuple[Placement, Region]]()
        self._landing = list[tuple[Placement, Region]]()

    def place(self, session_id: str, key: TransferKey) -> Placement:
        real = self.inner.place(session_id, key)
        if key.src_rank != 1 or key.request_id != "r":
            return real
        shadow = Region(torch.zeros_like(real.region.memory))
        self._real[key] = real, shadow
        return Placement(shadow, real.slices, real.deadline)

    def placed(self, session_id: str, key: TransferKey, nbytes: int, error: PdtxError | None) -> None:
        self.inner.placed(session_id, key, nbytes, error)
        if key in self._real:
            self._landing.append(self._real.pop(key))

    def land(self) -> None:
        for real, shadow in self._landing:
            for offset, nbytes in zip(real.slices.offsets.tolist(), real.slices.nbytes.tolist(), strict=True):
                real.region.memory[offset : offset + nbytes] = shadow.memory[offset : offset + nbytes]
        self._landing.clear()


def row_early_mover(mover: str) -> None:
    """The mover itself says so too early: the verification must not take what lay there before for the payload."""
    shadows = list[ShadowReceiver]()

    def receive(inner: Receiver) -> Receiver:
        shadows.append(ShadowReceiver(inner))
        return shadows[-1]

    with Case(mover, receive) as case:
        leave_stale_bytes(case)
        request = case.ship("r", 20.0, fill=0x5A)
        ready = case.pair.next_ready()
        with pytest.raises(VerificationError, match="was never written: it holds poison") as caught:
            case.consumer.verify(ready)
        shadows[0].land()
        case.consumer.fail(ready, caught.value)
        case.consumer.let_go(ready)
        with pytest.raises(VerificationError, match="poison"):
            case.producer.wait(request)
        assert case.consumer.num_failed == 1


# -- the sender's process is stopped ---------------------------------------------------------------------------------


class TakesNothingBefore(FaultyReceiver):
    """Lets sender 1's payload in only after an event: over TCP it is in the middle of its way until then."""

    def __init__(self, inner: Receiver, event: threading.Event) -> None:
        super().__init__(inner)
        self._event = event

    def place(self, session_id: str, key: TransferKey) -> Placement:
        if key.request_id == "stopped" and key.src_rank == 1:
            self._event.wait(10.0)
        return self.inner.place(session_id, key)


def row_stopped(mover: str, *, renews: bool = True, silence_s: float | None = None) -> None:
    """silence_s: after which the consumer takes the producer for lost, where that is before the deadline."""
    destination = stopping_producer.model(1)
    stopped = threading.Event()
    if mover != "tcp":
        stopped.set()
    receive = partial(faulty, receive=partial(TakesNothingBefore, event=stopped))
    with Pair(stopping_producer.model(2), destination, mover=mover, wrap_consumers=receive) as pair:
        beat_s = (silence_s or 5.0) / 5
        with StoppingProducer(pair.address, mover, DEADLINE_S, renews=renews, beat_s=beat_s) as sender:
            sender.go_on()
            received = pair.received("stopped")
            wait_until(lambda: sender.is_stopped, "the stop")
            stopped.set()
            wait_until(lambda: received.error is not None, "the consumer to give up")
            took, error = time.monotonic() - received.begun, received.error
            assert pair.consumer.next_ready(0.0) is None
            if silence_s is None:
                assert DEADLINE_S - 0.1 < took < DEADLINE_S + TOLERANCE_S + BUSY_S, took
                assert isinstance(error, DeadlineExceeded)
                if mover == "tcp":  # in the middle of a payload, so that the mover's own deadline may be the first
                    assert error.phase in ("payload", f"the payload of {stopping_producer.STOPPED}")
                else:
                    assert error.phase == "payload"
                if error.phase == "payload":
                    assert error.peer == sender.engine_id
                    assert f"{received.received_bytes} bytes received; group full, buffer full: " in str(error)
                    assert re.search("first layer 0 position 0 from rank [01] to rank 0", str(error))
                else:
                    assert re.search(r"from 127\.0\.0\.1:\d+ \(\d+ of \d+ bytes\)$", str(error))
                # All of it may be here: on its way when the process stopped, or read from it by shm all the same.
                whole = 2 * stopping_producer.TOKENS * 2 * 4 * 128 * 2
                assert names_sender_1(error) or received.received_bytes == whole
            else:
                assert isinstance(error, PeerLost)
                assert sender.engine_id in str(error)
            sender.resume()
            first = sender.hear()
            assert re.match("DeadlineExceeded: |PeerLost: |Transfer(Error|Aborted|Refused): ", first), first
            pair.require_all_free(SETTLED_S)
            sender.go_on()
            ready = pair.next_ready()
            assert ready.request_id == "after"
            pair.finish(ready)
            assert sender.hear() == "done"
            assert pair.consumer.num_failed == 1
            pair.require_all_free(SETTLED_S)
        request = begin(pair.producer, stopping_producer.TOKENS, "clean")
        produce(pair.producer, request)
        pair.finish(pair.next_ready())


def test_stopped_sender(mover: str) -> None:
    row_stopped(mover)


def test_sender_that_was_stopped_until_it_was_taken_for_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    beat_s = SILENCE_S / 5
    monkeypatch.setattr("pdtx.engine.consumer.Listener", partial(Listener, silence_s=SILENCE_S, heartbeat_s=beat_s))
    monkeypatch.setattr("pdtx.engine.control_channel.Dialer", partial(Dialer, heartbeat_s=beat_s))
    row_stopped("tcp", silence_s=SILENCE_S)


def test_a_sender_that_makes_no_new_session_is_found_out() -> None:
    """The tooth: after the stop its data connection is broken, and stays so."""
    with pytest.raises((AssertionError, PdtxError)):
        row_stopped("tcp", renews=False)


# -- every row for every mover ---------------------------------------------------------------------------------------

ROWS: dict[str, Callable[[str], None]] = {
    "none": row_none,
    "sender 1 cannot post": row_cannot_post,
    "sender 1 fails to post": partial(row_cannot_post, on_put=fails_at_once),
    "acknowledgement of sender 1 dropped": row_acknowledgement_dropped,
    "word of sender 1 dropped": row_word_dropped,
    "word of sender 1 and all behind it dropped": row_all_words_dropped,
    "word of sender 0 twice, sender 1 slow": row_twice,
    "mover tells of sender 0 twice, sender 1 slow": partial(row_twice, by_mover=True),
    "notice with the id of no request": partial(row_other_id, other="nobody"),
    "notice with the id of a request that waits": row_other_waits,
    "sender 0 errors, sender 1 writes on": row_writes_on,
    "word before payload": row_early_word,
    "mover tells before payload": row_early_mover,
}


@pytest.mark.parametrize("row", ROWS)
def test_row(row: str, mover: str) -> None:
    ROWS[row](mover)


# -- teeth -----------------------------------------------------------------------------------------------------------


def swap_senders(patch: pytest.MonkeyPatch) -> None:
    """Both senders are read from the memory of sender 0."""

    def first_only(cache: KVCaches) -> tuple[dict[int, Region], ...]:
        return tuple(dict.fromkeys(ranks, ranks[0]) for ranks in regions_of(cache))

    patch.setattr("pdtx.engine.shipping.regions_of", first_only)


def swallow_errors(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OutboundControl, "on_dropped", lambda *_: None)


def wait_too_long(patch: pytest.MonkeyPatch) -> None:
    tick = OutboundControl.tick
    patch.setattr(OutboundControl, "tick", lambda self, now: tick(self, now - 4 * TOLERANCE_S))
    patch.setattr(InboundControl, "tick", lambda *_: False)


def never_reap(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InboundControl, "tick", lambda *_: False)
    wait = KVProducer.wait

    def soon(self: KVProducer, request: OutboundRequest) -> object:
        change(self, request, deadline=time.monotonic() + DEADLINE_S + 4 * TOLERANCE_S)
        return wait(self, request)

    patch.setattr(KVProducer, "wait", soon)


def need_no_notices(patch: pytest.MonkeyPatch) -> None:
    """What the producer says at the end is believed."""
    complete = InboundMessages._on_complete

    def believe(self: InboundMessages, request: InboundRequest, session: Session, message: Complete) -> None:
        arrivals = request.landing._arrivals
        arrivals.noticed_bytes = arrivals.received_bytes = message.nbytes
        complete(self, request, session, message)

    patch.setattr(InboundMessages, "_on_complete", believe)
    patch.setattr(Arrivals, "unnoticed", lambda _: None)
    patch.setattr(Arrivals, "missing", lambda _: None)


def count_every_notice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Arrivals, "notice", lambda *_: Notice.NEW)


def believe_movers(patch: pytest.MonkeyPatch) -> None:
    """Every placed() counts, as if each were the first."""
    placed = PayloadReceiver.placed

    def again(self: PayloadReceiver, session_id: str, key: TransferKey, nbytes: int, error: PdtxError | None) -> None:
        arrivals = next(iter(self._doors.values())).landing._arrivals
        if (session_id, key) in self._placing:
            placed(self, session_id, key, nbytes, error)
        else:
            arrivals.received_bytes += nbytes

    patch.setattr(PayloadReceiver, "placed", again)


def no_poison(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCaches, "poison", lambda *_: None)
    patch.setattr("pdtx.engine.verifier.Verifier._require_no_strays", lambda *_: None)


TEETH: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "both senders read one memory": ("none", swap_senders),
    "an error of posting is swallowed": ("sender 1 cannot post", swallow_errors),
    "an error of a transfer is swallowed": ("sender 1 fails to post", swallow_errors),
    "deadlines are not kept": ("acknowledgement of sender 1 dropped", wait_too_long),
    "the last word is believed": ("word of sender 1 dropped", need_no_notices),
    "the consumer has no deadline": ("word of sender 1 and all behind it dropped", never_reap),
    "every notice counts": ("word of sender 0 twice, sender 1 slow", count_every_notice),
    "every placed() counts": ("mover tells of sender 0 twice, sender 1 slow", believe_movers),
    "a notice counts without its payload": ("notice with the id of a request that waits", count_every_notice),
    "blocks are free while they are written": ("sender 0 errors, sender 1 writes on", hold_nothing),
    "blocks are free while they are read": ("sender 0 errors, sender 1 writes on", give_back_at_once),
    "the last word is believed early": ("word before payload", need_no_notices),
    "blocks are not poisoned": ("mover tells before payload", no_poison),
}


@pytest.mark.parametrize("tooth", TEETH)
def test_teeth(tooth: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    row, break_it = TEETH[tooth]
    caplog.set_level(logging.CRITICAL)
    with monkeypatch.context() as patch:
        break_it(patch)
        with pytest.raises((AssertionError, PdtxError, pytest.fail.Exception)):
            ROWS[row]("inproc")
