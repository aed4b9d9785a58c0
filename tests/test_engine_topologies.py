"""One producer with several consumers, several producers with one, ranks that pull, and a node that is both."""

import ctypes
import os
from pathlib import Path

import pytest

from pdtx.cache import CallerBlocks
from pdtx.engine import KVConsumer, KVProducer
from pdtx.errors import InputError, PdtxError
from pdtx.transports import make_mover
from tests.engine_pair import (
    OPEN,
    PATIENCE_S,
    all_free,
    begin,
    caches_of,
    describe,
    finished,
    make_cache,
    make_consumer,
    make_producer,
    produce,
    require_contents_of,
    wait_until,
)
from tests.rank_fleet import Fleet, all_of, sides
from tests.rank_process import Side

TOKENS = 40


def test_one_producer_serves_several_consumers() -> None:
    consumers = [make_consumer(make_cache("flashinfer_hnd", 32, num_blocks=9), "tcp", verify=True) for _ in range(3)]
    producer = make_producer(make_cache(num_blocks=30), "tcp")
    engines = [producer.connect(consumer.listen("127.0.0.1:0", security=OPEN), security=OPEN) for consumer in consumers]
    with pytest.raises(InputError, match=r"this producer has 3 consumers, .*; name one by begin\(to=\)"):
        producer.begin("r", num_tokens=TOKENS, timeout_s=PATIENCE_S)
    requests = {
        name: producer.begin(name, num_tokens=TOKENS, timeout_s=PATIENCE_S, to=engine)
        for name, engine in zip("abc", engines, strict=True)
    }
    contents = {name: produce(producer, request, [11]) for name, request in requests.items()}
    for name, consumer in zip("abc", consumers, strict=True):
        ready = consumer.next_ready(PATIENCE_S)
        assert ready is not None
        assert ready.request_id == name
        require_contents_of(consumer.cache, ready, contents[name])
        assert consumer.verify(ready).wrong == 0
        consumer.finish(ready, finished(ready))
        consumer.let_go(ready)
        assert producer.wait(requests[name]).text == "done"
    producer.close()
    producer.mover.close()
    for consumer in consumers:
        consumer.close()
        consumer.mover.close()


def test_connecting_twice_to_one_consumer_is_refused_and_changes_nothing() -> None:
    consumer = make_consumer(make_cache("flashinfer_hnd", 32), "tcp", verify=True)
    producer = make_producer(make_cache(num_blocks=30), "tcp")
    address = consumer.listen("127.0.0.1:0", security=OPEN)
    producer.connect(address, security=OPEN)
    for other in (address, address.replace("127.0.0.1", "localhost")):
        with pytest.raises(InputError, match=f"is connected to {consumer.engine_id} at {address} already"):
            producer.connect(other, security=OPEN)
    request = producer.begin("r", num_tokens=TOKENS, timeout_s=PATIENCE_S)
    contents = produce(producer, request)
    ready = consumer.next_ready(PATIENCE_S)
    assert ready is not None
    require_contents_of(consumer.cache, ready, contents)
    for engine in (producer, consumer):
        engine.close()
        engine.mover.close()


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("begins", [False, True])
def test_a_consumer_that_has_gone_and_listens_again_can_be_connected_to(resumes: bool, begins: bool) -> None:
    first, second = (make_consumer(make_cache("flashinfer_hnd", 32), "tcp", verify=True) for _ in range(2))
    cache = caches_of(make_cache(num_blocks=30))
    producer = KVProducer(cache, describe(cache), make_mover("tcp"), resumes=resumes)
    address = first.listen("127.0.0.1:0", security=OPEN)
    gone = producer.connect(address, security=OPEN)
    first.close()
    first.mover.close()
    wait_until(lambda: gone.sessions[0].lost is not None, "its goodbye")
    if begins:
        lost = producer.begin("lost", num_tokens=TOKENS, timeout_s=0.5)
        if resumes:
            with pytest.raises(InputError, match="which was lost; they go on by themselves"):
                producer.connect(address, security=OPEN)
        with pytest.raises(PdtxError):
            producer.wait(lost)
    second.listen(address, security=OPEN)
    producer.connect(address, security=OPEN)
    request = producer.begin("r", num_tokens=TOKENS, timeout_s=PATIENCE_S)
    contents = produce(producer, request)
    ready = second.next_ready(PATIENCE_S)
    assert ready is not None
    require_contents_of(second.cache, ready, contents)
    for engine in (producer, second):
        engine.close()
        engine.mover.close()


def test_a_consumer_that_is_gone_does_not_hold_up_the_others() -> None:
    first, second = (make_consumer(make_cache("flashinfer_hnd", 32), "tcp", verify=True) for _ in range(2))
    producer = make_producer(make_cache(num_blocks=30), "tcp")
    gone, there = (
        producer.connect(consumer.listen("127.0.0.1:0", security=OPEN), security=OPEN) for consumer in (first, second)
    )
    lost = producer.begin("lost", num_tokens=TOKENS, timeout_s=PATIENCE_S, to=gone)
    wait_until(lambda: lost.grant is not None, "a grant")
    first.close()
    first.mover.close()
    with pytest.raises(PdtxError):
        producer.wait(lost)
    request = producer.begin("r", num_tokens=TOKENS, timeout_s=PATIENCE_S, to=there)
    produce(producer, request)
    ready = second.next_ready(PATIENCE_S)
    assert ready is not None
    assert second.verify(ready).wrong == 0
    second.finish(ready, finished(ready))
    second.let_go(ready)
    assert producer.wait(request).text == "done"
    wait_until(lambda: all_free(producer.allocator), "its blocks")
    producer.close()
    producer.mover.close()
    second.close()
    second.mover.close()


def test_one_consumer_serves_several_producers_of_several_ranks() -> None:
    """Two prefill engines, of one and of two processes, with one decode engine of two."""
    decode = sides(2, Side("4", layout="flashinfer_hnd", block_size=32))
    with Fleet(sides(2, Side("4")), decode) as fleet:
        other = fleet.add_prefill(Side("4", engine_id="other"))
        for number in range(2):
            all_of(fleet.prefill, "begin", "same", TOKENS, number)
            other.do("begin", "same", TOKENS, 10 + number)
            all_of([*fleet.prefill, other], "compute", "same")
            found = [all_of(fleet.decode, "take_any", (number, 10 + number)) for _ in range(2)]
            for each in found:
                fleet.require_right(each, "same")
            for remote in (*fleet.prefill, other):
                assert remote.do("wait", "same")[:2] == ("done", True)


def test_a_node_can_be_both() -> None:
    """It gets a request, and passes it on out of the same blocks."""
    first = make_producer(make_cache(num_blocks=9), "tcp")
    middle = caches_of(make_cache("flashinfer_hnd", 32, num_blocks=9))
    blocks = CallerBlocks(middle.groups)
    consumer = KVConsumer(middle, describe(middle), make_mover("tcp"), verify=True, blocks=blocks)
    producer = KVProducer(middle, describe(middle), make_mover("tcp"), blocks=blocks)
    last = make_consumer(make_cache("flash_attn_hnd", 16, num_blocks=9), "tcp", verify=True)
    first.connect(consumer.listen("127.0.0.1:0", security=OPEN), security=OPEN)
    producer.connect(last.listen("127.0.0.1:0", security=OPEN), security=OPEN)
    consumer.expect("r", TOKENS, [[3, 5]], deadline_s=PATIENCE_S)
    request = begin(first, TOKENS)
    contents = produce(first, request, [11])
    arrived = list[object]()

    def look() -> bool:
        arrived.extend(consumer.poll())
        return bool(arrived)

    wait_until(look, "the request in the middle")
    assert arrived[0].error is None  # type: ignore[attr-defined]
    onward = producer.begin("r", num_tokens=TOKENS, tables=[[3, 5]], timeout_s=PATIENCE_S)
    producer.prefix_ready(onward, TOKENS)
    producer.computed(onward, 7)
    ready = last.next_ready(PATIENCE_S)
    assert ready is not None
    require_contents_of(last.cache, ready, contents)
    assert last.verify(ready).wrong == 0
    last.finish(ready, finished(ready))
    last.let_go(ready)
    assert producer.wait(onward).text == "done"
    for engine in (first, consumer, producer, last):
        engine.close()
        engine.mover.close()


# -- pulls of ranks in processes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("src", "dst"), [(1, 2), (2, 1), (2, 2), (4, 2)])
def test_ranks_in_processes_pull(src: int, dst: int) -> None:
    decode = sides(dst, Side("4", layout="flashinfer_hnd", block_size=32))
    with Fleet(sides(src, Side("4")), decode, pull=True) as fleet:
        all_of(fleet.prefill, "offer", "r", TOKENS, 1, 5.0)
        all_of(fleet.prefill, "compute", "r")
        all_of(fleet.decode, "pull", "r")
        fleet.require_right(all_of(fleet.decode, "take", 1), "r")
        for text, verified, _, _ in all_of(fleet.prefill, "wait", "r"):
            assert (text, verified) == ("done", True)
        assert all_of(fleet.prefill, "counters") == [(0, 0, 0)] * src


def test_an_offer_that_one_rank_does_not_pull_ends_with_its_lease_everywhere() -> None:
    decode = sides(2, Side("4", layout="flashinfer_hnd", block_size=32))
    with Fleet(sides(2, Side("4")), decode, pull=True) as fleet:
        all_of(fleet.prefill, "offer", "r", TOKENS, 1, 0.8)
        all_of(fleet.prefill, "compute", "r")
        fleet.decode[0].do("pull", "r")
        fleet.decode[0].do("stop_renewing")
        for remote in fleet.prefill:
            with pytest.raises(PdtxError, match="lease of request r ended"):
                remote.do("wait", "r")


# -- clocks ------------------------------------------------------------------------------------------------------------


def _has_time_namespaces() -> bool:
    return Path("/proc/self/ns/time").exists() and os.geteuid() == 0 and hasattr(ctypes.CDLL(None), "unshare")


@pytest.mark.skipif(not _has_time_namespaces(), reason="needs root and time namespaces (Linux 5.6)")
@pytest.mark.parametrize("mover", ["tcp", "shm"])
@pytest.mark.parametrize("ahead_s", [90.0, -90.0])
def test_clocks_of_both_sides_may_differ(mover: str, ahead_s: float) -> None:
    """No absolute time crosses: pushes, pulls, renewed leases and those that end are as ever."""
    decode = Side("4", layout="flashinfer_hnd", block_size=32, mover=mover, clock_s=ahead_s)
    with Fleet([Side("4", mover=mover)], [decode], pull=True) as fleet:
        (prefill,), (one,) = fleet.prefill, fleet.decode
        ahead = one.do("clock") - prefill.do("clock")
        assert abs(ahead - ahead_s) < 30.0
        prefill.do("offer", "late", TOKENS, 2, 0.5)
        prefill.do("compute", "late")
        prefill.do("offer", "r", TOKENS, 1, 0.5)
        one.do("pull", "r")
        prefill.do("sleep", 1.5)  # renewed meanwhile
        prefill.do("compute", "r")
        fleet.require_right([one.do("take", 1)], "r")
        assert prefill.do("wait", "r")[:2] == ("done", True)
        with pytest.raises(PdtxError, match=r"lease of request late ended after 0\.5 s"):
            prefill.do("wait", "late")
        one.do("pull", "late")
        assert "not held any more" in one.do("poll", "late")
        prefill.do("begin_to_dialled", "push", TOKENS, 3)
        prefill.do("compute", "push")
        fleet.require_right([one.do("take", 3)], "push")
        assert prefill.do("wait", "push")[0] == "done"
        assert prefill.do("counters") == (1, 1, 0)
