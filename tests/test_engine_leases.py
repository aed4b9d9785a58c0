"""Offered requests: pulled by a consumer when it has room, held under leases until all has been read."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pdtx.engine import KVConsumer, KVProducer, OutboundRequest
from pdtx.engine.offers import GRACE_S, Offers
from pdtx.errors import InputError, LeaseExpired, PdtxError, TransferError
from pdtx.transports import make_mover
from tests.engine_pair import (
    OPEN,
    PATIENCE_S,
    all_free,
    caches_of,
    describe,
    finished,
    make_cache,
    produce,
    wait_until,
)

TOKENS = 40


class Both:
    """A producer that listens, and a consumer that has dialled it."""

    def __init__(self, mover: str = "tcp", *, consumer_blocks: int = 20, producer_blocks: int = 20) -> None:
        source = caches_of(make_cache(num_blocks=producer_blocks))
        destination = caches_of(make_cache("flashinfer_hnd", 32, num_blocks=consumer_blocks))
        self.producer = KVProducer(source, describe(source), make_mover(mover))
        self.consumer = KVConsumer(destination, describe(destination), make_mover(mover), verify=True)
        self.consumer.listen("127.0.0.1:0", security=OPEN)
        self.address = self.producer.listen("127.0.0.1:0", security=OPEN)
        self.source = self.consumer.connect(self.address, security=OPEN)

    def offer(self, name: str = "r", lease_s: float = 30.0, *, compute: bool = True) -> OutboundRequest:
        request = self.producer.offer(name, num_tokens=TOKENS, lease_s=lease_s)
        if compute:
            produce(self.producer, request, [11])
        return request

    def pull(self, name: str = "r", generation: int | None = None, deadline_s: float = PATIENCE_S) -> None:
        self.consumer.pull(name, self.source, generation=generation, deadline_s=deadline_s)

    def take(self) -> str:
        """Verify the next request that is ready, and end it well."""
        ready = self.consumer.next_ready(PATIENCE_S)
        assert ready is not None, [str(one.error) for one in self.consumer.poll()]
        assert self.consumer.verify(ready).wrong == 0
        self.consumer.release(ready)
        self.consumer.finish(ready, finished(ready))
        self.consumer.let_go(ready)
        return ready.request_id

    def refusal(self) -> str:
        """What a pull that was not to be had says."""
        found = list[str]()

        def look() -> bool:
            found.extend(str(one.error) for one in self.consumer.poll())
            return bool(found)

        wait_until(look, "the end of a pull")
        (text,) = found
        return text

    @property
    def counters(self) -> tuple[int, int, int]:
        return self.producer.expired, self.producer.late_reads, self.producer.unknown_reads

    def close(self) -> None:
        for engine in (self.producer, self.consumer):
            engine.close()
            engine.mover.close()


@contextmanager
def both(mover: str = "tcp", **options: int) -> Iterator[Both]:
    """At the end every block must be free again."""
    pair = Both(mover, **options)
    try:
        yield pair
        wait_until(lambda: all_free(pair.producer.allocator), "the producer's blocks")
        wait_until(lambda: all_free(pair.consumer.allocator), "the consumer's blocks")
    finally:
        pair.close()


def ended(request: OutboundRequest) -> float:
    """When a request ended, in time.monotonic()."""
    wait_until(lambda: request.has_outcome, "its end", 20.0)
    return time.monotonic()


@pytest.mark.parametrize("mover", ["tcp", "shm", "inproc"])
def test_an_offer_is_pulled_and_verified(mover: str) -> None:
    with both(mover) as pair:
        request = pair.offer()
        assert request.state.name == "OFFERED"
        pair.pull(generation=request.generation)
        assert pair.take() == "r"
        assert pair.producer.wait(request).text == "done"
        assert pair.counters == (0, 0, 0)


def test_a_pull_may_come_before_all_is_computed() -> None:
    with both() as pair:
        request = pair.offer(compute=False)
        pair.pull()
        wait_until(lambda: request.grant is not None, "the grant")
        produce(pair.producer, request, [11])
        assert pair.take() == "r"
        assert pair.producer.wait(request).text == "done"


def test_a_consumer_pulls_when_it_has_room_and_its_leases_are_renewed_meanwhile() -> None:
    with both(consumer_blocks=3) as pair:  # room for one request
        requests = [pair.offer(f"r{number}", lease_s=0.6) for number in range(3)]
        for number in range(3):
            pair.pull(f"r{number}")
        for number in range(3):
            time.sleep(1.0)  # longer than a lease, and each request waits for the one before
            assert pair.take() == f"r{number}"
        assert [pair.producer.wait(request).text for request in requests] == ["done"] * 3
        assert pair.counters == (0, 0, 0)


def test_a_lease_that_nobody_reads_ends_and_a_late_pull_gets_nothing() -> None:
    with both() as pair:
        request = pair.offer(lease_s=3.0)
        assert request.lease_end - request.computed == pytest.approx(3.0 + GRACE_S, abs=0.05)
        assert ended(request) >= request.lease_end
        with pytest.raises(LeaseExpired, match="lease of request r ended after 3 s: nobody has pulled it"):
            pair.producer.wait(request)
        pair.pull()
        assert "it is not held any more: its lease has ended" in pair.refusal()
        assert pair.counters == (1, 1, 0)
        assert pair.consumer.next_ready(0.0) is None


def test_each_lease_ends_by_its_own_time() -> None:
    """A long one that was entered before, and an older one that is renewed, hold up nobody."""
    with both(consumer_blocks=3) as pair:
        long, renewed = pair.offer("long", lease_s=60.0), pair.offer("renewed", lease_s=1.0)
        blocker = pair.offer("blocker", lease_s=60.0)
        pair.pull("blocker")
        pair.pull("renewed")  # waits for blocks
        short = pair.offer("short", lease_s=1.0)
        assert ended(short) >= short.lease_end
        time.sleep(0.5)
        assert not renewed.has_outcome
        assert not long.has_outcome
        assert [pair.take(), pair.take()] == ["blocker", "renewed"]
        assert pair.producer.wait(renewed).text == pair.producer.wait(blocker).text == "done"
        assert pair.counters == (1, 0, 0)
        pair.producer.cancel(long, "enough")


def test_a_consumer_that_stops_renewing_loses_its_lease_and_accepts_nothing_more() -> None:
    with both(consumer_blocks=3) as pair:
        blocker, request = pair.offer("blocker", lease_s=60.0), pair.offer(lease_s=0.5)
        pair.pull("blocker")
        pair.pull()
        wait_until(lambda: bool(request.legs), "the pull")
        pair.consumer.control.call(setattr, pair.consumer.core.pulls, "_renew_at", float("inf"))
        with pytest.raises(LeaseExpired, match=r"decode-.* did not read all of it, nor renew the lease"):
            pair.producer.wait(request)
        assert pair.take() == "blocker"
        assert "lease of request r ended" in pair.refusal()
        assert pair.producer.wait(blocker).text == "done"
        assert pair.counters == (1, 0, 0)
        assert pair.consumer.next_ready(0.0) is None


def test_a_pull_of_what_was_pulled_before_is_refused() -> None:
    with both() as pair:
        request = pair.offer()
        pair.pull()
        with pytest.raises(InputError, match="request id 'r' is in use"):
            pair.pull()
        ready = pair.consumer.next_ready(PATIENCE_S)
        assert ready is not None
        other = caches_of(make_cache("flashinfer_hnd", 32, num_blocks=9))
        second = KVConsumer(other, describe(other), make_mover("tcp"), verify=True)
        second.listen("127.0.0.1:0", security=OPEN)
        source = second.connect(pair.address, security=OPEN)
        second.pull("r", source, deadline_s=PATIENCE_S)
        found = list[object]()

        def look() -> bool:
            found.extend(second.poll())
            return bool(found)

        wait_until(look, "the refusal")
        assert "it was pulled before" in str(found[0])
        assert pair.counters == (0, 1, 0)
        pair.consumer.verify(ready)
        pair.consumer.release(ready)
        pair.consumer.finish(ready, finished(ready))
        pair.consumer.let_go(ready)
        assert pair.producer.wait(request).text == "done"
        pair.pull()
        assert "it is not held any more" in pair.refusal()
        assert pair.counters == (0, 2, 0)
        second.close()
        second.mover.close()


def test_unknown_requests_and_other_generations_are_refused() -> None:
    with both() as pair:
        pair.pull("nothing")
        assert "no such request is offered here" in pair.refusal()
        request = pair.offer()
        pair.pull(generation=request.generation ^ 1)
        assert f"generation {request.generation ^ 1} of it is not offered" in pair.refusal()
        assert pair.counters == (0, 0, 2)
        assert not request.legs
        pair.pull(generation=request.generation)
        assert pair.take() == "r"
        assert pair.producer.wait(request).text == "done"


def test_a_cancelled_offer_is_not_to_be_had() -> None:
    with both() as pair:
        request = pair.offer()
        pair.producer.cancel(request, "no need")
        pair.pull()
        assert "or it was read or cancelled" in pair.refusal()
        assert pair.counters == (0, 1, 0)


def test_a_request_that_is_pushed_cannot_be_pulled() -> None:
    with both() as pair:
        push = pair.producer.begin("r", num_tokens=TOKENS, timeout_s=PATIENCE_S)  # to whoever has dialled
        pair.pull("other")
        assert "no such request" in pair.refusal()
        produce(pair.producer, push, [11])
        assert pair.take() == "r"
        assert pair.producer.wait(push).text == "done"


def test_a_pull_that_nobody_answers_ends_by_its_deadline() -> None:
    with both() as pair:
        pair.producer._sessions._messages.on_message = lambda *_: None  # type: ignore[method-assign]
        pair.pull(deadline_s=0.3)
        assert re.match(r"deadline of 0\.\d+ s exceeded while waiting for an answer to the pull", pair.refusal())


def test_a_producer_that_goes_away_ends_what_was_pulled() -> None:
    with both() as pair:
        request = pair.offer(compute=False)
        pair.pull()
        wait_until(lambda: request.grant is not None, "the grant")
        pair.producer.close()
        text = pair.refusal()
        assert "lost prefill-" in text or "the data connection of prefill-" in text
        with pytest.raises(PdtxError, match=r"prefill-.*: nothing is heard of its processes 0"):
            pair.pull("again")


def test_a_consumer_that_goes_away_ends_the_offer_that_it_was_reading() -> None:
    with both(consumer_blocks=3) as pair:
        request, other = pair.offer(compute=False), pair.offer("other")
        pair.pull()
        wait_until(lambda: request.grant is not None, "the grant")
        pair.consumer.close()
        with pytest.raises(PdtxError, match="decode-"):
            pair.producer.wait(request)
        assert not other.has_outcome  # whoever comes next may pull it
        pair.producer.cancel(other, "enough")


def test_a_lease_is_given_and_sides_that_cannot_pull_say_so() -> None:
    with both() as pair:
        with pytest.raises(InputError, match="lease_s is 0; give the seconds"):
            pair.producer.offer("r", num_tokens=TOKENS, lease_s=0.0)
        cache = caches_of(make_cache())
        deaf = KVConsumer(cache, describe(cache), make_mover("tcp"), verify=True)
        with pytest.raises(InputError, match="this consumer does not listen"):
            deaf.connect(pair.address, security=OPEN)
        deaf.close()
        deaf.mover.close()


def test_caches_that_do_not_match_are_refused_by_field() -> None:
    with both() as pair:
        other = caches_of(make_cache(dtype="float16"))
        consumer = KVConsumer(other, describe(other), make_mover("tcp"), verify=True)
        consumer.listen("127.0.0.1:0", security=OPEN)
        with pytest.raises(PdtxError, match="dtype of buffer full is bfloat16 on the prefill side and float16"):
            consumer.connect(pair.address, security=OPEN)
        consumer.close()
        consumer.mover.close()


# -- teeth -------------------------------------------------------------------------------------------------------------


def test_leases_that_end_in_the_order_of_their_beginning_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where only the first of a list is looked at."""

    def first_only(offers: Offers, now: float) -> None:
        for request in list(offers._core.requests.values())[:1]:
            if request.lease_end < now:
                offers.expired += 1
                offers._core.end(request, TransferError("late"))

    monkeypatch.setattr(Offers, "tick", first_only)
    with both() as pair:
        long, short = pair.offer("long", lease_s=60.0), pair.offer("short", lease_s=0.3)
        with pytest.raises(AssertionError):
            wait_until(lambda: short.has_outcome, "its end", 2.0)
        for request in (long, short):
            pair.producer.cancel(request, "enough")
