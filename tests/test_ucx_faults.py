"""Links over UCX whose peers die, stop or are cut off: a typed error in time, and nothing written later."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from pdtx.errors import DeadlineExceeded, PdtxError, PeerLost, PeerUnreachable, TransferAborted, TransferError
from pdtx.plan import Runs
from pdtx.transports.base import Region
from pdtx.transports.onesided.fabric import Link, Progress
from pdtx.transports.ucx.libucp import Ucp
from pdtx.transports.ucx.link import Remote
from pdtx.transports.ucx.status import CANCELED, CONNECTION_RESET, ENDPOINT_FAILURES, NO_MEMORY, UcsError, error_of
from tests.ucx_peer import Moved, Peer, joined, pattern, scattered, ucx_fabric, usable_runtime

NBYTES = 32 << 20
BOTH = pytest.mark.parametrize("tls", ["tcp", "all"])
RUNTIMES = pytest.mark.parametrize("runtime", ["ucxx", "raw"])


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


@contextmanager
def connected(
    tls: str, monkeypatch: pytest.MonkeyPatch, runtime: str = "auto"
) -> Iterator[tuple[Peer, Link[Remote], Region, Remote, Runs]]:
    """A link over which one transfer has gone, and half of NBYTES in runs to put."""
    usable_runtime(runtime)
    monkeypatch.setenv("UCX_TLS", tls)
    with ucx_fabric(runtime=runtime) as fabric, joined(fabric, runtime=runtime) as (peer, link):
        runs, nbytes = scattered(NBYTES // 2 >> 15, 1 << 15)
        region = Region(pattern(nbytes, 1))
        remote = link.open(peer.share(nbytes, 2), nbytes)
        link.write(region, remote, runs, soon(), Moved().progress)
        yield peer, link, region, remote, runs


def require_at_its_end(link: Link[Remote], region: Region, remote: Remote, runs: Runs) -> None:
    for _ in range(2):
        with pytest.raises(PeerLost, match="has ended"):
            link.write(region, remote, runs, soon(), Moved().progress)
        with pytest.raises(PeerLost, match="has ended"):
            link.read(remote, region, runs, soon(), Moved().progress)


# -- peers that stop ---------------------------------------------------------------------------------------------------


@RUNTIMES
@pytest.mark.parametrize("native", ["1", "0"], ids=["native", "python"])
def test_stopped_peer_ends_a_put_at_its_deadline(native: str, runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDTX_NATIVE", native)
    with connected("tcp", monkeypatch, runtime) as (peer, link, region, remote, runs):
        peer.stop()
        begun = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="the put from"):
            link.write(region, remote, runs, begun + 1.0, Moved().progress)
        assert 0.9 < time.monotonic() - begun < 3.0
        require_at_its_end(link, region, remote, runs)
        begun = time.monotonic()
        link.close()
        assert time.monotonic() - begun < 3.0, "a stopped peer holds up the end of a link"


def test_stopped_peer_ends_a_get_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected("tcp", monkeypatch) as (peer, link, region, remote, runs):
        peer.stop()
        begun = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="the get from"):
            link.read(remote, region, runs, begun + 1.0, Moved().progress)
        assert 0.9 < time.monotonic() - begun < 3.0
        require_at_its_end(link, region, remote, runs)


def test_few_bytes_that_the_kernel_buffers_have_not_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """A put is done when the peer has the bytes, not when they have been sent."""
    with connected("tcp", monkeypatch) as (peer, link, region, remote, runs):
        peer.stop()
        few = Runs(runs.src[:1], runs.dst[:1], runs.nbytes[:1])
        with pytest.raises(DeadlineExceeded):
            link.write(region, remote, few, soon(0.5), Moved().progress)


def test_peer_that_stops_before_it_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    usable_runtime()
    monkeypatch.setenv("UCX_TLS", "tcp")
    with ucx_fabric() as fabric, joined(fabric, deadline_s=1.5) as (peer, link):
        peer.stop()
        begun = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="the UCX connection from"):
            _ = link.path
        assert time.monotonic() - begun < 4.0


def test_deadline_that_has_passed_already(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected("all", monkeypatch) as (_, link, region, remote, runs):
        moved = Moved()
        with pytest.raises(DeadlineExceeded):
            link.write(region, remote, runs, time.monotonic() - 1, moved.progress)
        assert moved.nbytes <= 8 << 20


# -- peers that die ----------------------------------------------------------------------------------------------------


def put_until_it_fails(link: Link[Remote], region: Region, remote: Remote, runs: Runs) -> PdtxError:
    limit = soon()
    while time.monotonic() < limit:
        try:
            link.write(region, remote, runs, soon(), Moved().progress)
        except PdtxError as error:
            return error
    raise AssertionError("a killed peer takes what is put")


@BOTH
@RUNTIMES
def test_killed_peer_is_noticed_in_the_middle(tls: str, runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(tls, monkeypatch, runtime) as (peer, link, region, remote, runs):
        killed = list[float]()

        def kill() -> None:
            killed.append(time.monotonic())
            peer.process.kill()

        timer = threading.Timer(0.2, kill)
        timer.start()
        error = put_until_it_fails(link, region, remote, runs)
        timer.join()
        took = time.monotonic() - killed[0]
        assert isinstance(error, PeerLost), repr(error)
        assert "UCX failed to finish the put" in str(error)
        assert took < 2.0
        require_at_its_end(link, region, remote, runs)


@BOTH
def test_killed_peer_is_noticed_by_the_next_transfer(tls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(tls, monkeypatch) as (peer, link, region, remote, runs):
        peer.kill()
        time.sleep(0.2)
        begun = time.monotonic()
        assert isinstance(put_until_it_fails(link, region, remote, runs), PeerLost)
        assert time.monotonic() - begun < 2.0


def test_peer_that_dies_before_it_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    usable_runtime()
    monkeypatch.setenv("UCX_TLS", "tcp")
    with ucx_fabric() as fabric, joined(fabric, deadline_s=5) as (peer, link):
        peer.kill()
        begun = time.monotonic()
        with pytest.raises((PeerUnreachable, DeadlineExceeded)):
            _ = link.path
        assert time.monotonic() - begun < 8.0


# -- transfers that are given up ---------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("native", ["1", "0"], ids=["native", "python"])
def test_transfer_that_is_given_up_writes_nothing_later(tls: str, native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDTX_NATIVE", native)
    with connected(tls, monkeypatch) as (peer, link, region, remote, runs):
        region.memory.fill_(0xEE)
        moved = Moved(stop_after=1)
        with pytest.raises(TransferAborted, match="was given up"):
            link.write(region, remote, runs, soon(), moved.progress)
        assert 0 < moved.nbytes < runs.total
        require_at_its_end(link, region, remote, runs)
        link.close()
        time.sleep(0.2)
        there = peer.memory()
        time.sleep(0.3)
        assert torch.equal(peer.memory(), there)


def calls_of(name: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The endpoints for which a function of Ucp is called from now on."""
    calls, original = list[int](), getattr(Ucp, name)

    def counted(ucp: Ucp, endpoint: int) -> int:
        calls.append(endpoint)
        return int(original(ucp, endpoint))

    monkeypatch.setattr(Ucp, name, counted)
    return calls


def test_error_closes_the_endpoint_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only when the link is closed: until then UCX might go on."""
    with connected("tcp", monkeypatch, "raw") as (_, link, region, remote, runs):
        closed = calls_of("close_endpoint", monkeypatch)
        with pytest.raises(TransferAborted):
            link.write(region, remote, runs, soon(), Moved(stop_after=1).progress)
        assert len(closed) == 1


def test_put_ends_with_one_flush_and_a_get_with_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What says that a network card has sent is not that it has arrived."""
    with connected("tcp", monkeypatch, "raw") as (_, link, region, remote, runs):
        flushed = calls_of("flush", monkeypatch)
        link.write(region, remote, runs, soon(), Moved().progress)
        assert len(flushed) == 1
        link.read(remote, region, runs, soon(), Moved().progress)
        assert len(flushed) == 1


def test_interrupt_makes_a_transfer_look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected("tcp", monkeypatch) as (peer, link, region, remote, runs):
        peer.stop()
        stopped = threading.Event()

        def give_up() -> None:
            stopped.set()
            link.interrupt()

        timer = threading.Timer(0.3, give_up)
        timer.start()
        begun = time.monotonic()
        with pytest.raises(TransferAborted):
            link.write(region, remote, runs, soon(), Progress(lambda _: None, stopped.is_set, b""))
        assert 0.2 < time.monotonic() - begun < 2.0
        timer.join()


# -- peers that are cut off --------------------------------------------------------------------------------------------


@RUNTIMES
def test_revoked_peer_cannot_write_over_tcp(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with connected("tcp", monkeypatch, runtime) as (peer, link, region, remote, runs):
        there = peer.memory()
        assert peer.ask("revoke") is True
        assert peer.ask("revoke") is True
        region.memory.fill_(0xEE)
        # Nobody answers any more; in a connection its control stream ends, which is noticed sooner.
        with pytest.raises((PeerLost, DeadlineExceeded)):
            link.write(region, remote, runs, soon(1.5), Moved().progress)
        assert torch.equal(peer.memory(), there)


def test_peer_on_one_host_cannot_be_cut_off_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes by itself, without any help from the owner of the memory."""
    with connected("all", monkeypatch) as (peer, link, region, remote, runs):
        assert link.path.kind == "shm"
        assert peer.ask("revoke") is False
        region.memory.fill_(0xEE)
        link.write(region, remote, runs, soon(), Moved().progress)
        assert int((peer.memory() == 0xEE).sum()) >= runs.total


# -- what UCX says -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (CONNECTION_RESET, PeerLost),
        (-80, PeerLost),
        (-3, PeerLost),
        (ENDPOINT_FAILURES[0], PeerLost),
        (-40, PeerLost),
        (CANCELED, PeerLost),
        (NO_MEMORY, TransferError),
        (-22, TransferError),
    ],
)
def test_statuses_are_typed(status: int, expected: type[PdtxError]) -> None:
    error = error_of(UcsError("finish the put", status, "its words"), "10.0.0.1:99")
    assert type(error) is expected
    assert "10.0.0.1:99" in str(error)
    assert "UCX failed to finish the put: its words" in str(error)
