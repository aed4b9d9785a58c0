"""Requests that are cancelled on either side, at any moment: what has not begun never crosses, and nothing leaks."""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import pytest

from pdtx.engine import OutboundRequest
from pdtx.engine.states import OutboundState
from pdtx.errors import PdtxError, TransferAborted, TransferError
from pdtx.testing import FaultyReceiver
from pdtx.testing.pair import Leaks
from pdtx.transports import Connection, Mover, TransferHandle, TransferKey
from tests.contract_subjects import sampled, usable_mover
from tests.engine_pair import (
    LAYERS,
    Pair,
    WrappedMover,
    all_free,
    begin,
    finished,
    make_cache,
    serve,
    settle,
    ship,
    wait_until,
)
from tests.faulty_mover import FaultyConnection, Post, faulty
from tests.slow_link import CANCELLED_AT, PIECES, slow_proxy

ROUNDS = 200
TOKENS = 100
LAYOUTS = ("flash_attn_nhd", "flash_attn_nhd")


def roomy(mover: str) -> Pair:
    source = make_cache(num_blocks=40, num_layers=8)
    return Pair(source, make_cache("flashinfer_hnd", 32, num_blocks=20, num_layers=8), mover=mover)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mover", sampled(("inproc", "tcp", "shm", "ucx"), ("inproc",)))
def test_random_cancels_leave_nothing_behind(mover: str) -> None:
    """Some requests finish, some are cancelled here or there; after all of them everything is as it was."""
    chance = random.Random(7)
    with roomy(usable_mover(mover)) as pair:
        serve(pair, "first", TOKENS)  # so that every thread there is has begun
        leaks, decoder = Leaks(), Decoder(pair, chance)
        with decoder:
            for number in range(ROUNDS):
                cancel_one(pair, f"r{number}", chance)
            wait_until(lambda: not pair.consumer.core.requests, "the consumer's end of all of them", 30.0)
        pair.require_all_free(30.0)
        assert not pair.producer.core.requests
        assert not pair.producer.core.draining
        assert not pair.consumer.core.draining
        assert pair.producer.control.errors == pair.consumer.control.errors == 0
        leaks.require_none("cancelled requests")
        serve(pair, "last", TOKENS)


def cancel_one(pair: Pair, name: str, chance: random.Random) -> None:
    """Begin a request and cancel it after a while, maybe."""
    request = begin(pair.producer, TOKENS, name)
    moment = chance.choice(("begun", "granted", "computing", "computed", "never"))
    if moment == "granted":
        wait_until(lambda: request.state is not OutboundState.ASKED, "a grant")
    if moment in ("computing", "computed", "never"):
        ship(pair.producer, request, [chance.randrange(1, TOKENS)], complete=moment != "computing")
    time.sleep(chance.choice((0.0, 0.0, 0.001, 0.005)))
    if moment == "never":
        with suppress(PdtxError):
            pair.producer.wait(request)
        return
    pair.producer.cancel(request, "chance")
    settle(pair.producer)
    assert request.has_outcome


class Decoder:
    """Takes what has arrived, and verifies it, or cancels it."""

    def __init__(self, pair: Pair, chance: random.Random) -> None:
        self.pair, self.stop, self.chance = pair, threading.Event(), random.Random(chance.random())
        self.thread = threading.Thread(target=self.run)
        self.problems = list[BaseException]()

    def run(self) -> None:
        consumer = self.pair.consumer
        while not self.stop.is_set():
            request = consumer.next_ready(0.02)
            if request is None:
                continue
            try:
                if self.chance.random() < 0.3:
                    consumer.cancel(request, "chance")
                else:
                    consumer.verify(request)
                    consumer.release(request)
                    consumer.finish(request, finished(request))
            except TransferError:  # cancelled by the producer meanwhile
                pass
            except BaseException as error:  # noqa: BLE001 - told to the test
                self.problems.append(error)
            consumer.let_go(request)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()
        assert not self.problems


class Stuck:
    """Puts that begin only when they are let go: the first one moves, the others wait at the transport."""

    def __init__(self) -> None:
        self.handles = list[TransferHandle]()

    def __call__(self, key: TransferKey, idle: TransferHandle, post: Post) -> TransferHandle:
        if key.request_id != "r":
            return post()
        handle = TransferHandle(key, 64, "the consumer", idle.deadline)
        if not self.handles:
            handle.post()
        self.handles.append(handle)
        return handle


@contextmanager
def stuck_request() -> Iterator[tuple[Pair, OutboundRequest, list[TransferHandle]]]:
    """A request all of whose pieces are stuck at the transport; the one that moves ends with the block."""
    stuck = Stuck()
    wrap = partial(WrappedMover, wrap=lambda inner: FaultyConnection(inner, stuck, []))
    with Pair(make_cache(num_blocks=20), wrap=wrap) as pair:
        request = begin(pair.producer, 20)
        ship(pair.producer, request)
        wait_until(lambda: len(stuck.handles) == LAYERS, "all pieces at the transport")
        yield pair, request, stuck.handles
        stuck.handles[0].finish()


def test_what_waits_at_the_transport_is_withdrawn_and_what_moves_keeps_the_blocks() -> None:
    with stuck_request() as (pair, request, handles):
        received = pair.received("r")
        settle(pair.producer)
        pair.producer.cancel(request, "nobody waits for it any more")
        with pytest.raises(TransferAborted, match=r"^request r was cancelled: nobody waits for it any more$"):
            pair.producer.wait(request)
        assert [handle.state.value for handle in handles] == ["posted", "aborted", "aborted"]
        settle(pair.producer)
        assert not all_free(pair.producer.allocator), "a transfer still reads them"
        wait_until(lambda: received.error is not None, "the consumer to learn of it")
        assert "was cancelled: nobody waits for it any more" in str(received.error)
        serve(pair)  # at once, while the last piece of the cancelled one still moves


def test_a_consumer_that_cancels_stops_the_producer() -> None:
    with stuck_request() as (pair, request, handles):
        pair.consumer.cancel(pair.received("r"), "the client went away")
        with pytest.raises(TransferError, match=r"decode-.* failed in payload: .*was cancelled: the client went away"):
            pair.producer.wait(request)
        wait_until(lambda: [handle.state.final for handle in handles] == [False, True, True], "what waits withdrawn")


def test_a_cancelled_request_that_was_not_asked_for_costs_nothing() -> None:
    with Pair(mover="tcp") as pair:
        first = begin(pair.producer, 20)
        pair.producer.cancel(first, "at once")
        pair.producer.cancel(first, "again")
        with pytest.raises(TransferAborted, match="at once"):
            pair.producer.wait(first)
        serve(pair)


def test_begin_does_not_wait_after_a_cancel() -> None:
    """Not even where a piece of the cancelled request never ends by itself."""
    with stuck_request() as (pair, request, _):
        pair.producer.cancel(request, "enough")
        later = begin(pair.producer, 20, "later")
        wait_until(lambda: later.grant is not None, "a grant, while the piece still moves")
        pair.producer.cancel(later, "enough")


class ThroughProxy(WrappedMover):
    """A transport whose data connections go over a link of 900 kB/s."""

    name = "tcp"

    def __init__(self, inner: Mover, stack: ExitStack) -> None:
        super().__init__(inner, lambda connection: connection)
        self._stack = stack

    def connect(self, address: str, session_id: str, token: bytes, deadline: float) -> Connection:
        return super().connect(self._stack.enter_context(slow_proxy(address)), session_id, token, deadline)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_at_most_one_more_piece_crosses_a_slow_link_after_a_cancel(side: str) -> None:
    """A request of 4 MB in 31 pieces at 900 kB/s, cancelled at a fifth; the next one's first piece follows at once."""
    layers, tokens = PIECES, 32
    caches = [make_cache(name, 32, num_blocks=4, num_layers=layers, heads=8, channels=128) for name in LAYOUTS]
    placed = list[str]()
    receive = partial(FaultyReceiver, before_place=lambda key: placed.append(key.request_id))
    with ExitStack() as stack:
        pair = stack.enter_context(
            Pair(
                *caches,
                mover="tcp",
                wrap=partial(ThroughProxy, stack=stack),
                wrap_consumers=partial(faulty, receive=receive),
            )
        )
        request = begin(pair.producer, tokens)
        received = pair.received("r")
        ship(pair.producer, request)
        wait_until(lambda: len(request.moves) >= CANCELLED_AT, "a fifth of it", 30.0)
        if side == "producer":
            pair.producer.cancel(request, "enough")
        else:
            pair.consumer.cancel(received, "enough")
        wait_until(lambda: request.has_outcome, "the producer to learn of it")
        arrived = len(request.moves)
        later = begin(pair.producer, tokens, "next")
        wait_until(lambda: later.grant is not None, "a grant")
        pair.producer.layer_ready(later, 0, 0, 0, tokens)
        wait_until(lambda: "next" in placed, "its first piece", 30.0)
        # Behind what has arrived there is the piece that was moving, which may not have been placed yet, and one more.
        assert placed.count("r") <= arrived + 2, (arrived, placed)
        assert placed[-1] == "next"
        pair.producer.cancel(later, "enough")
