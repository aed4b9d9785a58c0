"""Every yardstick moves the bytes it says, notices those that are wrong, and leaves no process behind."""

import multiprocessing
import os
import time
from collections.abc import Callable

import pytest

from benchmarks.peers import (
    BulkSocket,
    Memcpy,
    MooncakePeer,
    NixlPeer,
    Peer,
    SocketPingPong,
    UcxPerftest,
    Workload,
)
from benchmarks.peers.base import CacheMemory
from benchmarks.peers.child import Child, awake
from benchmarks.peers.ucx_perftest import _overall_rate
from pdtx.errors import InputError, PdtxError

TINY = Workload.random(unit=4096, regions=3, blocks=5, pool=9)
WORDS = TINY.nbytes // 8

PEERS: dict[str, Callable[[], Peer]] = {
    "socket": lambda: BulkSocket(1 << 20),
    "ping-pong": lambda: SocketPingPong(80_008),
    "memcpy-c": lambda: Memcpy("c", TINY),
    "memcpy-torch": lambda: Memcpy("torch", TINY),
    "memcpy-numpy": lambda: Memcpy("numpy", TINY),
    "nixl-read": lambda: NixlPeer("READ", workload=TINY),
    "nixl-write-tcp": lambda: NixlPeer("WRITE", threads=4, tls="tcp", workload=TINY),
    "nixl-alone": lambda: NixlPeer("WRITE", tls="tcp", progress_thread=False, workload=TINY),
    "mooncake": lambda: MooncakePeer(TINY),
    "perftest": lambda: UcxPerftest(size=4096, tls="tcp", total_bytes=1 << 20),
}


@pytest.mark.parametrize("make", PEERS.values(), ids=PEERS.keys())
def test_moves_and_verifies(make: Callable[[], Peer]) -> None:
    peer = make()
    try:
        peer.start()
        seconds = [peer.round() for _ in range(2)]
    except InputError as error:
        pytest.skip(str(error))
    finally:
        peer.stop()
        peer.stop()
    assert all(0 < each < 60 for each in seconds)
    assert peer.wrong == 0
    assert peer.nbytes > 0
    assert not multiprocessing.active_children()


class TestWorkload:
    def test_default_is_256_mib_of_llama(self) -> None:
        workload = Workload.random()
        assert workload.nbytes == 256 << 20
        assert len(workload.src_units) == 8192
        assert workload.memory_bytes == 64 * 257 << 15

    def test_runs_are_joined_where_they_touch(self) -> None:
        assert len(Workload.bulk(1 << 20).runs) == 1
        assert TINY.runs.total == TINY.nbytes

    def test_refuses_units_of_no_whole_words(self) -> None:
        with pytest.raises(InputError, match="no multiple of 8"):
            Workload.bulk(1001)


class TestVerification:
    def test_a_cache_that_nobody_wrote_is_wrong(self) -> None:
        assert CacheMemory(TINY).wrong() == WORDS

    def test_right_words_are_right(self) -> None:
        assert copied(TINY).wrong() == 0

    @pytest.mark.parametrize("where", ["moved", "beside"])
    def test_one_wrong_byte_counts(self, where: str) -> None:
        memory = copied(TINY)
        moved = set(TINY.dst_units.tolist())
        unit = next(unit for unit in range(27) if (unit in moved) == (where == "moved"))
        memory.tensor[unit * TINY.unit + 77] ^= 1
        assert memory.wrong() == 1

    def test_two_swapped_units_count(self) -> None:
        memory = copied(TINY)
        one, other = TINY.dst_units[:2]
        memory.words[[one, other]] = memory.words[[other, one]]
        assert memory.wrong() == 2 * TINY.unit // 8

    def test_poison_clears_what_an_earlier_round_left(self) -> None:
        memory = copied(TINY)
        memory.poison()
        assert memory.wrong() == WORDS


def copied(workload: Workload) -> CacheMemory:
    source, destination = CacheMemory(workload), CacheMemory(workload)
    source.fill()
    destination.words[workload.dst_units] = source.words[workload.src_units]
    return destination


class Actor:
    """Lives in a child."""

    def __init__(self, fail: bool = False) -> None:
        if fail:
            raise InputError("not\ntoday")

    def setting(self, name: str) -> str | None:
        return os.environ.get(name)

    def fail(self) -> None:
        raise ZeroDivisionError("by nothing")

    def die(self) -> None:
        os._exit(3)

    def clock(self) -> float:
        return time.thread_time()


class TestChild:
    def test_gets_its_own_settings_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UCX_RNDV_THRESH", "8192")
        monkeypatch.setenv("PDTX_SOMETHING", "kept")
        child = Child({"UCX_TLS": "tcp"}, Actor)
        try:
            child.ready()
            names = ("UCX_RNDV_THRESH", "UCX_TLS", "PDTX_SOMETHING")
            assert [child.call(Actor.setting, name) for name in names] == [None, "tcp", "kept"]
        finally:
            child.end()
        assert (os.environ["UCX_RNDV_THRESH"], "UCX_TLS" in os.environ) == ("8192", False)

    def test_failures_are_one_line(self) -> None:
        child = Child({}, Actor)
        try:
            child.ready()
            with pytest.raises(PdtxError, match=r"^Actor: ZeroDivisionError: by nothing$"):
                child.call(Actor.fail)
            with pytest.raises(PdtxError, match="ended with status 3"):
                child.call(Actor.die)
        finally:
            child.end()

    def test_a_failure_to_begin_ends_it(self) -> None:
        child = Child({}, Actor, fail=True)
        with pytest.raises(InputError, match=r"^Actor: not today$"):
            child.ready()
        child.end()
        assert not multiprocessing.active_children()

    def test_stands_still_between_calls_and_ends_all_the_same(self) -> None:
        child = Child({}, Actor)
        child.ready()
        child.pause()
        with awake(child):
            child.call(Actor.clock)
        child.end()
        assert not multiprocessing.active_children()


def test_the_rate_is_read_from_the_named_column() -> None:
    printed = "noise\niterations,avg_bw,overall_bw,avg_mr\n  16,1.0,2.5,3.0\n"
    assert _overall_rate(printed) == 2.5 * 2**20
    with pytest.raises(PdtxError, match="printed no rate"):
        _overall_rate("nothing of the kind")


def test_a_program_that_is_none_is_an_input_error() -> None:
    with pytest.raises(InputError, match="is no program"), UcxPerftest(program="/nonexistent"):
        pass
