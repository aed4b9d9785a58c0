"""NIXL's links: exact bytes whichever way runs are described, an end at every fault, and nothing left behind."""

import gc
import os
import socket
import sys
import threading
import time

import msgspec
import pytest
import torch

from pdtx.errors import (
    DeadlineExceeded,
    InputError,
    PeerLost,
    PeerUnreachable,
    ProtocolError,
    TransferAborted,
    TransferError,
)
from pdtx.testing.pair import Leaks
from pdtx.transports import Region, make_mover
from pdtx.transports.nixl import library
from pdtx.transports.nixl.messages import Place, pack, unpack_greeting, unpack_key
from pdtx.transports.onesided import Link, Shared
from tests.nixl_links import Counted, Pair, ended, joined, moved, needs_nixl, region_of, runs_of, scattered, soon

pytestmark = needs_nixl

RUNS = {
    "one": runs_of((3, 5, 1000)),
    "units": scattered(100, 4096, 256),
    "several units a run": runs_of((0, 8192, 8192), (16384, 0, 4096), (32768, 20480, 12288)),
    "small units": scattered(5000, 16, 1 << 16),
    "odd offsets": runs_of((1, 7, 4095), (8191, 5000, 4097), (20000, 30001, 1)),
    "of all sizes": runs_of((0, 50000, 1), (1, 40000, 2), (3, 30000, 3), (4096, 0, 4096), (8200, 9000, 20000)),
    "neighbours": runs_of(*((at, at + 4096, 512) for at in range(0, 65536, 512))),
    "none": runs_of(),
}
NBYTES = 1 << 20


@pytest.mark.parametrize("options", [{}, {"tls": "tcp"}, {"tls": "tcp", "num_threads": 2}], ids=str)
def test_exact_bytes(options: dict[str, object]) -> None:
    with joined(**options) as pair:
        for seed, (name, runs) in enumerate(RUNS.items(), 1):
            for op in ("write", "read"):
                source, destination = region_of(NBYTES, seed), region_of(NBYTES, seed + 100)
                expected, counted = moved(source, destination, runs), Counted()
                if op == "write":
                    pair.here.write(source, pair.remote(destination), runs, soon(), counted.progress)
                else:
                    pair.here.read(pair.remote(source), destination, runs, soon(), counted.progress)
                assert torch.equal(destination.memory, expected), f"{op} {name}"
                assert counted.nbytes == runs.total, f"{op} {name}"


def test_a_transfer_of_many_requests() -> None:
    """More bytes than a request has, more runs than one has, and runs that are longer than one."""
    nbytes = 100 << 20
    source, destination = region_of(nbytes, 1), region_of(nbytes)
    with joined() as pair:
        for runs in (runs_of((5, 3, nbytes - 5)), scattered(20_000, 512, nbytes // 512)):
            destination.memory.zero_()
            expected = moved(source, destination, runs)
            pair.here.write(source, pair.remote(destination), runs, soon(), Counted().progress)
            assert torch.equal(destination.memory, expected)


def test_regions_that_end_in_part_of_a_unit() -> None:
    source, destination, runs = region_of(10_000, 1), region_of(9_999), runs_of((0, 4096, 4096), (4096, 0, 4096))
    with joined() as pair:
        expected = moved(source, destination, runs)
        pair.here.write(source, pair.remote(destination), runs, soon(), Counted().progress)
        assert torch.equal(destination.memory, expected)


class TestPath:
    def test_on_one_host(self) -> None:
        with joined() as pair:
            path = pair.here.path
        assert path.kind == "shm"
        assert "shm" in path.possible
        assert "tcp" in path.possible
        assert path.library.startswith("NIXL 1")

    def test_tcp_is_found_and_not_what_was_configured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UCX_NET_DEVICES", "lo")
        with joined(tls="rc,tcp") as pair:
            path = pair.here.path
        assert (path.kind, path.possible) == ("tcp", ("tcp",))
        assert path.detail.startswith("tcp/lo")

    def test_emulation_is_flagged(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UCX_RNDV_THRESH", "8192")
        with joined(tls="tcp") as pair:
            assert pair.here.path.emulated

    def test_settings_are_left_as_they_were(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UCX_TLS", "all")
        with joined(tls="tcp"):
            assert os.environ["UCX_TLS"] == "all"
            assert "UCX_PROTO_INFO" not in os.environ


class TestConfirm:
    def test_a_put_is_confirmed_once(self) -> None:
        source, destination = region_of(NBYTES, 1), region_of(NBYTES)
        with joined() as pair:
            counted = Counted()
            pair.here.write(source, pair.remote(destination), RUNS["units"], soon(), counted.progress)
            pair.hold()
            pair.there.confirm(counted.progress.tag, soon())
            with pytest.raises(DeadlineExceeded, match="the notification of a put"):
                pair.there.confirm(counted.progress.tag, soon(0.05))

    def test_what_never_came_is_not_confirmed(self) -> None:
        with joined() as pair:
            pair.hold()
            with pytest.raises(DeadlineExceeded):
                pair.there.confirm(b"another", soon(0.05))


class TestEnds:
    """After each of them nothing is written any more, and every later call says so."""

    def test_deadline(self) -> None:
        nbytes = 64 << 20
        source, destination = region_of(nbytes, 1), region_of(nbytes)
        with joined(tls="tcp") as pair:
            remote = pair.remote(destination)
            pair.hold()  # over tcp the peer has to take part
            begun = time.monotonic()
            with pytest.raises(DeadlineExceeded, match="the end of a NIXL WRITE"):
                pair.here.write(source, remote, runs_of((0, 0, nbytes)), soon(0.3), Counted().progress)
            assert time.monotonic() - begun < 5
            self.require_ended(pair.here, source, remote)
            pair.held.clear()
            time.sleep(0.2)
            before = destination.memory.clone()
            time.sleep(0.3)
            assert torch.equal(destination.memory, before)

    def test_stopped(self) -> None:
        source, destination = region_of(100 << 20, 1), region_of(100 << 20)
        with joined() as pair:
            remote, counted = pair.remote(destination), Counted(stop_after=1)
            with pytest.raises(TransferAborted):
                pair.here.write(source, remote, runs_of((0, 0, 100 << 20)), soon(), counted.progress)
            assert counted.nbytes < 100 << 20
            self.require_ended(pair.here, source, remote)

    def test_the_peer_is_gone(self) -> None:
        source, destination = region_of(NBYTES, 1), region_of(NBYTES)
        with joined(tls="tcp") as pair:
            remote = pair.remote(destination)
            pair.here.write(source, remote, RUNS["units"], soon(), Counted().progress)
            pair.hold()
            pair.there.close()
            with pytest.raises((PeerLost, DeadlineExceeded)):
                self.write_for_ever(pair, source, remote)
            self.require_ended(pair.here, source, remote)

    def write_for_ever(self, pair: Pair, region: Region, remote: Place) -> None:
        """As long as it goes; at most 100 times, since the end of a peer is not heard of at once."""
        for _ in range(100):
            pair.here.write(region, remote, RUNS["units"], soon(5), Counted().progress)

    def require_ended(self, link: Link[Place], region: Region, remote: Place) -> None:
        assert ended(link)
        with pytest.raises(PeerLost, match="has ended"):
            link.write(region, remote, RUNS["one"], soon(), Counted().progress)
        with pytest.raises(PeerLost, match="has ended"):
            link.share(region)

    def test_a_peer_is_cut_off_where_it_needs_this_side(self) -> None:
        source, destination = region_of(NBYTES, 1), region_of(NBYTES)
        with joined(tls="tcp") as pair:
            remote = pair.remote(destination)
            pair.here.write(source, remote, RUNS["units"], soon(), Counted().progress)
            pair.hold()
            still = destination.memory.zero_().clone()
            assert pair.there.revoke()
            assert pair.there.revoke()
            pair.held.clear()
            with pytest.raises((PeerLost, DeadlineExceeded)):
                self.write_for_ever(pair, source, remote)
            assert torch.equal(destination.memory, still)

    def test_a_peer_that_reaches_the_memory_by_itself_cannot_be_cut_off(self) -> None:
        with joined() as pair:
            pair.hold()
            assert not pair.there.revoke()

    def test_closing_twice(self) -> None:
        with joined() as pair:
            pair.here.close()
            pair.here.close()
            with pytest.raises(PeerLost, match="it was closed"):
                pair.here.share(region_of(100))


class TestStrangers:
    """What a peer sends that is not what it should be."""

    def test_metadata_of_another(self) -> None:
        with joined() as pair, joined() as other:
            region = region_of(NBYTES)
            with pytest.raises(ProtocolError, match="not its own"):
                pair.here.open(other.there.share(region), NBYTES)
            key = unpack_key(other.there.share(region).key, NBYTES)
            whole = unpack_greeting(other.there.greeting()).metadata
            with pytest.raises(ProtocolError, match="not its own"):
                pair.here.open(Shared(pack(type(key)(key.place, whole))), NBYTES)

    def test_metadata_that_is_none(self) -> None:
        with joined() as pair:
            key = unpack_key(pair.there.share(region_of(NBYTES)).key, NBYTES)
            for metadata in (b"x" * 100, key.metadata[:-1], key.metadata[: len(key.metadata) // 2]):
                with pytest.raises((ProtocolError, PeerUnreachable)):
                    pair.here.open(Shared(pack(type(key)(key.place, metadata))), NBYTES)

    def test_memory_that_was_never_registered(self) -> None:
        """The peer's NIXL knows no such memory: the transfer fails, and nothing else."""
        with joined() as pair:
            key = unpack_key(pair.there.share(region_of(NBYTES)).key, NBYTES)
            elsewhere = Place(key.place.address + (1 << 40), NBYTES, "DRAM", 0)
            remote = pair.here.open(Shared(pack(type(key)(elsewhere, key.metadata))), NBYTES)
            with pytest.raises(TransferError, match="NIXL failed to prepare a WRITE"):
                pair.here.write(region_of(NBYTES), remote, RUNS["units"], soon(), Counted().progress)

    def test_its_own_greeting_and_another_backends(self) -> None:
        with joined() as pair:
            told = unpack_greeting(pair.here.greeting())
            with pytest.raises(ProtocolError, match="calls its NIXL agent"):
                pair.here.join(pack(told), soon())
            with pytest.raises(PeerUnreachable, match="uses NIXL's backend LIBFABRIC, this side UCX"):
                pair.here.join(pack(msgspec.structs.replace(told, backend="LIBFABRIC", agent="x")), soon())
            with pytest.raises(PeerUnreachable, match=r"it runs NIXL 0.1, this side NIXL 1"):
                pair.here.join(
                    pack(msgspec.structs.replace(told, library="NIXL 0.1", agent="x", metadata=b"nothing")), soon()
                )


class TestRegistration:
    def test_once(self) -> None:
        region = region_of(NBYTES)
        with joined() as pair:
            fabric = pair.fabrics[0]
            first = fabric.register(region)
            assert first is not None
            assert (first.nbytes, first.seconds >= 0) == (NBYTES, True)
            assert fabric.register(Region(region.memory)) is first
            assert fabric.register(region_of(NBYTES)) is not first
            assert fabric.register(Region(region.memory[8:])) is first, "it lies in a registered one"

    def test_of_nothing(self) -> None:
        with joined() as pair, pytest.raises(TransferError, match="empty region"):
            pair.fabrics[0].register(region_of(0))

    def test_a_peer_learns_of_no_region_that_is_not_shared(self) -> None:
        """A greeting grows with what is registered only if it tells of it."""
        with joined() as pair:
            fabric = pair.fabrics[0]
            regions = [region_of(4096) for _ in range(100)]
            one, other = socket.socketpair()
            with one, other:
                before = fabric.link(one.fileno())
                for region in regions:
                    fabric.register(region)
                after = fabric.link(one.fileno())
                try:
                    assert abs(len(after.greeting()) - len(before.greeting())) < 20
                finally:
                    before.close()
                    after.close()


def test_regions_are_shared_while_bytes_move() -> None:
    """Another thread shares one region after another meanwhile, as the thread that asks ahead does."""
    source, destination = region_of(32 << 20, 1), region_of(32 << 20)
    failures = list[BaseException]()
    with joined() as pair:
        remote = pair.remote(destination)
        regions = [region_of(8192) for _ in range(100)]

        def share_all() -> None:
            try:
                for region in regions:
                    pair.here.share(region)
            except BaseException as error:  # noqa: BLE001  # told to the test
                failures.append(error)

        thread = threading.Thread(target=share_all)
        thread.start()
        runs = scattered(1000, 32768, 1024)
        expected = moved(source, destination, runs)
        for _ in range(5):
            pair.here.write(source, remote, runs, soon(), Counted().progress)
        thread.join()
        assert failures == []
        assert torch.equal(destination.memory, expected)


@pytest.mark.parametrize("end", ["well", "late", "lost"])
def test_nothing_is_left_of_links_that_came_and_went(end: str) -> None:
    source, destination = region_of(NBYTES, 1), region_of(NBYTES)
    # The errors and their frames are still there when all has to be gone.
    kept = list[BaseException]()

    def one() -> None:
        with joined(tls="tcp") as pair:
            remote = pair.remote(destination)
            pair.here.write(source, remote, RUNS["units"], soon(), Counted().progress)
            pair.hold()
            if end == "lost":
                pair.there.close()
            try:
                for _ in range(0 if end == "well" else 100):
                    limit = soon(-1 if end == "late" else 5)
                    pair.here.write(source, remote, RUNS["units"], limit, Counted().progress)
            except (DeadlineExceeded, PeerLost) as error:
                kept.append(error)

    one()
    leaks = Leaks()
    for _ in range(4):
        one()
    gc.collect()
    leaks.require_none("four connections")
    assert [type(error) for error in kept] == {
        "well": [],
        "late": [DeadlineExceeded] * 5,
        "lost": [PeerLost] * 5,
    }[end]


def test_options_that_cannot_be() -> None:
    with pytest.raises(InputError, match="num_threads is -1"):
        make_mover("nixl", num_threads=-1)
    with pytest.raises(InputError, match=r"no backend 'PIGEON' here; one of .*UCX"):
        make_mover("nixl", backend="PIGEON")
    with pytest.raises(TransferError, match="does not start its backend UCX with UCX_TLS=rc"):
        make_mover("nixl", tls="rc")


def test_without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_load", library.Library)
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(InputError, match=r"NIXL does not load .* install the extra"):
        make_mover("nixl")
