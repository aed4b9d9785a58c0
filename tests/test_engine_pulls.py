"""Pulls whose connection is lost: an offer is held on for its lease, and what has not arrived goes on."""

import signal
import threading

import pytest

from pdtx.engine import KVProducer
from pdtx.errors import PdtxError, PeerLost
from pdtx.transports import make_mover
from tests.engine_pair import (
    OPEN,
    PATIENCE_S,
    caches_of,
    describe,
    make_cache,
    produce,
    require_contents_of,
    wait_until,
)
from tests.rank_fleet import Fleet, Remote, all_of, sides, until
from tests.rank_process import Decode, Side
from tests.test_engine_resume import CHUNKS, HALF, PAYLOAD, TOKENS, Resuming, resuming


def lose_channel(pair: Resuming) -> None:
    """Break the control channel, which the consumer has dialled."""
    (dialled,) = pair.consumer._dialled.values()
    dialer = dialled.channel._dialer
    assert dialer is not None
    dialer._socket.disconnect(dialer._target)  # what follows is as after a reset
    dialled.channel._lose(PeerLost("it was cut"), "it was cut")


def refusal(pair: Resuming) -> str:
    found = list[str]()

    def look() -> bool:
        found.extend(str(one.error) for one in pair.consumer.poll())
        return bool(found)

    wait_until(look, "the end of the pull")
    return found[0]


def redialling() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pdtx-redial"]


def test_a_lost_control_channel_is_dialled_anew_and_only_the_rest_is_sent() -> None:
    with resuming(pulls=True) as pair:
        request = pair.begin()
        wait_until(lambda: request.grant is not None, "a grant")
        first = request.grant
        half = produce(pair.producer, request, CHUNKS[:3], stop_at=HALF)
        wait_until(lambda: pair.noticed_bytes == PAYLOAD // 2, "the notices of all pieces")
        lose_channel(pair)
        wait_until(lambda: request.grant is not None and request.grant is not first, "another grant")
        assert request.grant is not None
        assert request.grant.arrived
        contents = produce(pair.producer, request, CHUNKS[4:], start_at=HALF, contents=half)
        ready = pair.ready()
        require_contents_of(pair.destinations, ready, contents)
        pair.finish(ready)
        assert pair.producer.wait(request).text == "done"
        assert request.nbytes == PAYLOAD
        assert (pair.producer.expired, pair.producer.late_reads, pair.producer.unknown_reads) == (0, 0, 0)
    assert not redialling()


def test_a_pull_that_was_not_answered_is_said_again() -> None:
    with resuming(pulls=True) as pair:
        on_pull, pulls = pair.producer.core.offers.on_pull, list[object]()
        pair.producer.core.offers.on_pull = lambda session, pull: pulls.append(pull)  # type: ignore[method-assign]
        request = pair.begin()
        wait_until(lambda: bool(pulls), "the pull")
        pair.producer.core.offers.on_pull = on_pull  # type: ignore[method-assign]
        lose_channel(pair)
        contents = produce(pair.producer, request, CHUNKS)
        ready = pair.ready()
        require_contents_of(pair.destinations, ready, contents)
        pair.finish(ready)
        assert pair.producer.wait(request).text == "done"


def test_what_is_pushed_over_a_channel_that_the_consumer_dialled_fails_with_it() -> None:
    """The producer cannot dial, so that it would wait for its deadline."""
    with resuming(pulls=True) as pair:
        pushed = pair.producer.begin("pushed", num_tokens=TOKENS, timeout_s=3 * PATIENCE_S)
        wait_until(lambda: pushed.grant is not None, "a grant")
        lose_channel(pair)
        wait_until(lambda: pair.consumer.num_failed == 1, "the end at the consumer")
        with pytest.raises(PeerLost):
            pair.producer.wait(pushed)


def test_without_resuming_a_pull_fails_at_once_and_the_offer_can_be_pulled_again() -> None:
    with resuming([PAYLOAD // 2], resumes=False, pulls=True) as pair:
        request = pair.begin()
        contents = produce(pair.producer, request, CHUNKS)
        assert "connection" in refusal(pair) or "lost" in refusal(pair)
        wait_until(lambda: not request.legs, "the producer's notice")
        assert not request.has_outcome
        wait_until(lambda: not pair.consumer.core.sessions, "the end of the session")
        source = pair.consumer.connect(pair.listening, security=OPEN)
        pair.consumer.pull("r", source, generation=request.generation, deadline_s=PATIENCE_S)
        ready = pair.ready()
        require_contents_of(pair.destinations, ready, contents)
        pair.finish(ready)
        assert pair.producer.wait(request).text == "done"
        assert (pair.producer.expired, pair.producer.late_reads, pair.producer.unknown_reads) == (0, 0, 0)


def test_an_offer_that_is_lost_and_not_pulled_again_ends_with_its_lease() -> None:
    with resuming(resumes=False, pulls=True) as pair:
        request = pair.producer.offer("short", num_tokens=TOKENS, lease_s=1.0)
        assert pair.source is not None
        pair.consumer.pull("short", pair.source, deadline_s=PATIENCE_S)
        wait_until(lambda: request.grant is not None, "a grant")
        produce(pair.producer, request, stop_at=HALF)
        lose_channel(pair)
        assert "lost prefill-" in refusal(pair)
        wait_until(lambda: not request.legs, "the producer's notice")
        produce(pair.producer, request, start_at=HALF)
        wait_until(lambda: request.has_outcome, "the end of the lease")
        assert "lease" in str(request.error)
        assert pair.producer.expired == 1


def test_a_producer_that_was_started_anew_ends_what_was_pulled_from_the_one_before() -> None:
    with resuming(pulls=True) as pair:
        request = pair.begin()
        wait_until(lambda: request.grant is not None, "a grant")
        listener = pair.producer._sessions._listener
        assert listener is not None
        listener.close(0.0, "it was killed")
        other = caches_of(make_cache(num_blocks=100, num_layers=6, channels=64))
        second = KVProducer(other, describe(other), make_mover("tcp"), resumes=True)
        second.listen(pair.listening, security=OPEN)
        assert "was started anew" in refusal(pair)
        pair.producer.cancel(request, "enough")
        second.close()
        second.mover.close()


def test_a_consumer_that_is_closed_while_it_dials_leaves_nothing_running() -> None:
    pair = Resuming(pulls=True)
    request = pair.begin()
    wait_until(lambda: request.grant is not None, "a grant")
    listener = pair.producer._sessions._listener
    assert listener is not None
    listener.close(0.0, "it was killed")
    wait_until(lambda: bool(redialling()), "another attempt")
    pair.close()
    assert not redialling()


@pytest.mark.parametrize("resumes", [True, False])
def test_another_consumer_may_pull_what_a_killed_one_was_reading(resumes: bool) -> None:
    decode = Side("4", layout="flashinfer_hnd", block_size=32)
    with Fleet([Side("4", options={"resumes": resumes})], [decode], pull=True) as fleet:
        (prefill,) = fleet.prefill
        prefill.do("offer", "r", 75, 1, 30.0)
        fleet.decode[0].do("pull", "r")
        until(lambda: prefill.do("granted", "r"), "a grant")
        fleet.decode[0].process.kill()
        fleet.decode[0].process.wait()
        until(lambda: not prefill.do("granted", "r"), "its loss")
        prefill.do("compute", "r", 20)
        fleet.decode.append(Remote(Decode, decode))
        fleet.decode[1].do("listen")
        fleet.decode[1].do("connect", fleet.sources[0])
        fleet.decode[1].do("pull", "r")
        fleet.require_right([fleet.decode[1].do("take", 1)], "r")
        assert prefill.do("wait", "r")[0] == "done"
        assert prefill.do("counters") == (0, 0, 0)


def test_nothing_is_pulled_again_before_all_processes_have_answered() -> None:
    """One of them could answer with what it offered at first, another one with what it offered then."""
    decode = [Side("4", layout="flashinfer_hnd", block_size=32)]
    with Fleet(sides(2, Side("4")), decode, pull=True) as fleet:
        stopped = fleet.prefill[1]
        all_of(fleet.prefill, "offer", "r", 75, 1, 30.0)
        all_of(fleet.prefill, "compute", "r")
        stopped.process.send_signal(signal.SIGSTOP)
        fleet.decode[0].do("pull", "r", None, 0.5)
        assert "deadline" in fleet.decode[0].do("poll", "r")
        with pytest.raises(PdtxError, match="processes 1 of prefill have not answered an earlier pull of it"):
            fleet.decode[0].do("pull", "r")
        stopped.process.send_signal(signal.SIGCONT)
        for each in fleet.prefill:
            with pytest.raises(PdtxError, match=r"failed in|refused"):
                each.do("wait", "r")
        all_of(fleet.prefill, "offer", "r", 75, 2, 30.0)
        all_of(fleet.prefill, "compute", "r")
        fleet.decode[0].do("pull", "r")
        fleet.require_right([fleet.decode[0].do("take", 2)], "r")
        assert [text for text, *_ in all_of(fleet.prefill, "wait", "r")] == ["done", "done"]


def test_the_processes_of_a_producer_share_a_generation() -> None:
    decode = [Side("4", layout="flashinfer_hnd", block_size=32)]
    with Fleet(sides(2, Side("4")), decode, pull=True) as fleet:
        assert all_of(fleet.prefill, "offer", "r", 75, 1, 30.0, 5) == [5, 5]
        all_of(fleet.prefill, "compute", "r")
        fleet.decode[0].do("pull", "r", 6)
        assert "generation 6 of it is not offered" in fleet.decode[0].do("poll", "r")
        until(lambda: fleet.decode[0].do("silent", "r") == 0, "the answer of the other process")
        fleet.decode[0].do("pull", "r", 5)
        fleet.require_right([fleet.decode[0].do("take", 1)], "r")
        assert [text for text, *_ in all_of(fleet.prefill, "wait", "r")] == ["done", "done"]


def test_ranks_in_processes_go_on_where_one_connection_was_cut() -> None:
    prefill = sides(2, Side("4", options={"resumes": True}))
    decode = sides(2, Side("4", layout="flashinfer_hnd", block_size=32))
    with Fleet(prefill, decode, pull=True) as fleet:
        all_of(fleet.prefill, "offer", "r", 75, 1, 30.0)
        all_of(fleet.decode, "pull", "r")
        until(lambda: all(all_of(fleet.prefill, "granted", "r")), "grants")
        fleet.prefill[0].do("compute_some", "r", 40)
        fleet.prefill[0].do("cut")
        all_of(fleet.prefill, "compute", "r", 20)
        fleet.require_right(all_of(fleet.decode, "take", 1), "r")
        assert [text for text, *_ in all_of(fleet.prefill, "wait", "r")] == ["done", "done"]
