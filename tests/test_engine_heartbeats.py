"""Whatever one peer does, the others hear heartbeats in time: nothing that takes long runs where those are sent."""

import contextlib
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from pdtx.cache import KVCaches
from pdtx.engine.handshake import ProcessIdentity, make_hello
from pdtx.plan.runs import Int64s
from pdtx.protocol import Bye, Heartbeat, Hello, Message, TransferRequest, Welcome, decode, encode
from pdtx.sidechannel import Dialer
from tests.engine_pair import OPEN, PATIENCE_S, Pair, begin, describe, make_cache, settle, ship, wait_until

HELLOS, REQUESTS, POOL_BYTES = 12_000, 3_000, 4 << 30
MOST_S = 2.0


class Listening(Dialer):
    """A peer that notes when it has heard something."""

    def __init__(self, address: str) -> None:
        self.heard, self.messages = list[float](), list[Message]()
        super().__init__(address, self.messages.append, lambda _: None, security=OPEN)
        self.connect(PATIENCE_S)

    def _heard(self, peer: bytes) -> None:
        super()._heard(peer)
        self.heard.append(time.monotonic())

    def hello(self) -> None:
        self.send(make_hello(ProcessIdentity("p"), describe(make_cache()), "inproc"))
        wait_until(lambda: any(isinstance(m, Welcome) for m in self.messages), "a welcome")

    def longest_gap_since(self, begun: float) -> float:
        times = [begun, *(at for at in self.heard if at >= begun), time.monotonic()]
        return float(np.diff(times).max())


def ask(name: str) -> TransferRequest:
    return TransferRequest(request_id=name, num_tokens=20, token_ids=list(range(20)), max_tokens=2, deadline_s=60.0)


@contextlib.contextmanager
def busy_control(pair: Pair) -> Iterator[None]:
    """The control thread of the consumer does something that takes as long as the with block."""
    going, until = threading.Event(), threading.Event()

    def event() -> None:
        going.set()
        until.wait(60.0)

    pair.consumer.control.post(event)
    assert going.wait(PATIENCE_S)
    try:
        yield
    finally:
        until.set()


def test_heartbeats_are_sent_whatever_the_control_thread_does() -> None:
    with Pair() as pair:
        peer = Listening(pair.address)
        peer.hello()
        with busy_control(pair):
            before = len(peer.heard)
            wait_until(lambda: len(peer.heard) >= before + 3, "three heartbeats")
        peer.close()


def test_a_peer_that_floods_a_busy_node_is_given_up_and_the_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What waits for the control thread is bounded for each peer."""
    monkeypatch.setattr("pdtx.engine.control_thread.MAX_WAITING", 200)
    with Pair() as pair:
        rogue = Listening(pair.address)
        rogue.hello()
        with busy_control(pair):
            for number in range(1000):
                rogue.send(ask(f"r{number}"))
            wait_until(lambda: any(isinstance(m, Bye) for m in rogue.messages) or rogue._lost, "the end of the flood")
        settle(pair.consumer)
        wait_until(lambda: not pair.consumer.core.requests, "the end of its requests")
        ship(pair.producer, begin(pair.producer, 20, "next"))
        pair.finish(pair.next_ready())
        rogue.close(0.0)


def test_poisoning_a_pool_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    until, poisoning, poison = threading.Event(), threading.Event(), KVCaches.poison

    def slow(cache: KVCaches, group: int, block_ids: Int64s) -> None:
        poisoning.set()
        assert until.wait(60.0)
        poison(cache, group, block_ids)

    monkeypatch.setattr(KVCaches, "poison", slow)
    with Pair(make_cache(num_blocks=20), make_cache("flashinfer_hnd", 32, num_blocks=4)) as pair:
        first = begin(pair.producer, 20, "first")
        ship(pair.producer, first)
        pair.finish(pair.next_ready(), verify=False)
        assert poisoning.wait(PATIENCE_S)
        settle(pair.consumer)
        second = begin(pair.producer, 20, "second")
        wait_until(lambda: second.grant is not None, "a grant of the blocks that are free")
        third = begin(pair.producer, 90, "third")
        pair.received("third")
        settle(pair.consumer)
        assert third.grant is None, "blocks were granted before they were poisoned"
        ship(pair.producer, second)
        until.set()
        pair.finish(pair.next_ready())
        wait_until(lambda: third.grant is not None, "a grant of all blocks")
        ship(pair.producer, third)
        pair.finish(pair.next_ready())


def test_blocks_that_cannot_be_poisoned_stay_out_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(cache: KVCaches, group: int, block_ids: Int64s) -> None:
        raise RuntimeError("the device failed")

    with contextlib.closing(Pair(make_cache(num_blocks=20))) as pair:
        with monkeypatch.context() as patch:
            patch.setattr(KVCaches, "poison", broken)
            request = begin(pair.producer, 20, "first")
            ship(pair.producer, request)
            pair.finish(pair.next_ready(), verify=False)
            pair.producer.wait(request)
        ship(pair.producer, begin(pair.producer, 20, "next"))
        pair.finish(pair.next_ready())
        wait_until(lambda: not pair.consumer.core.draining, "the end of both")
        pool = pair.consumer.allocator.pools[0]
        wait_until(lambda: pool.num_free == pool.num_blocks - 2, "all but the block that was lost")


# -- the real thing, by the clock --------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("deed", ["hellos after a Bye", "requests and death", "a pool to poison"])
def test_heartbeats_keep_their_time(deed: str) -> None:
    large = deed == "a pool to poison"
    blocks = POOL_BYTES // make_cache("flashinfer_hnd", 32, num_blocks=2).nbytes * 2 if large else 9
    with Pair(destination=make_cache("flashinfer_hnd", 32, num_blocks=blocks)) as pair:
        peer, rogue = Listening(pair.address), Listening(pair.address)
        peer.hello()
        rogue.hello()
        begun = time.monotonic()
        match deed:
            case "hellos after a Bye":
                hello = encode(make_hello(ProcessIdentity("p"), describe(make_cache()), "inproc"))
                assert isinstance(decode(hello), Hello)
                rogue.send(Bye(reason="enough"))
                for _ in range(HELLOS):
                    rogue._outbox.append((b"", hello))
                rogue._wake()
            case "requests and death":
                for number in range(REQUESTS):
                    rogue.send(ask(f"r{number}"))
                wait_until(lambda: len(pair.consumer.core.requests) >= REQUESTS, "all requests", 60.0)
                rogue.close(0.0)
                wait_until(lambda: not pair.consumer.core.requests, "the end of all requests", 60.0)
            case _:
                pool = pair.consumer.allocator
                taken = pool.allocate(pool.num_free)
                pair.consumer.control.call(pair.consumer.core._put_back, pool.retire(taken))
                wait_until(lambda: pool.num_free == (blocks - 1,), "the poison", 60.0)
        wait_until(lambda: len([at for at in peer.heard if at > begun]) >= 5, "heartbeats", 60.0)
        assert peer.longest_gap_since(begun) < MOST_S
        assert encode(Heartbeat())
        peer.close()
        rogue.close(0.0)
