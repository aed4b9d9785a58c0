"""The mover within one host over caches in shared memory; test_contract.py holds it to the rest, over private ones."""

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pdtx.cache import memory
from pdtx.errors import InputError, PeerUnreachable
from pdtx.plan import Runs
from pdtx.testing import CONTRACT, Gate, GrantingReceiver, MoverPair, Scene, Subject
from pdtx.testing.contract import require_works, start
from pdtx.transports import Placement, Region, TransferKey, TransferState, make_mover
from pdtx.transports.shm.mover import ShmMover
from tests.tcp_clients import wait_until

MOVING = {
    "check_every_layout_pair",
    "check_partial_ranges",
    "check_many_at_once",
    "check_get_every_layout_pair",
    "check_gets_and_puts_mixed",
    "check_large_get",
}
CHECKS = [check for check in CONTRACT if check.__name__ in MOVING]


def test_checks_are_there() -> None:
    assert len(CHECKS) == len(MOVING)


@pytest.fixture
def shared_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """All caches are allocated in shared memory."""

    def allocate(nbytes: int, device: torch.device, *, shared: bool = False) -> torch.Tensor:
        return memory.allocate(nbytes, device, shared=True)

    monkeypatch.setattr("pdtx.cache.buffer.allocate", allocate)


@pytest.mark.usefixtures("shared_caches")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("copy_by", ["auto", "kernel", "torch"])
def test_contract_over_shared_caches(copy_by: str, check: Callable[[Subject], None]) -> None:
    check(Subject.named("shm", copy_by=copy_by))


@pytest.mark.parametrize(("shared", "detail"), [(True, "mapped memfd"), (False, "cma")])
def test_path_says_how_registered_memory_is_reached(shared: bool, detail: str, request: pytest.FixtureRequest) -> None:
    if shared:
        request.getfixturevalue("shared_caches")
    with MoverPair(ShmMover) as pair:
        scene = Scene()
        pair.producer.register(scene.src.region)
        connection = pair.connect()
        assert (connection.path.kind, connection.path.detail) == ("shm", detail)
        start(pair, connection, scene, scene.plan()).wait()
        scene.require_exact()
        assert (connection.path.kind, connection.path.detail) == ("shm", detail)


def test_another_host_is_out_of_reach() -> None:
    mover = ShmMover()
    try:
        with pytest.raises(PeerUnreachable, match=r"192\.0\.2\.1:5600 on this host.*one host only"):
            mover.connect("192.0.2.1:5600", "session", bytes(32), time.monotonic() + 5)
    finally:
        mover.close()


def test_unknown_way_to_copy_is_refused() -> None:
    with pytest.raises(InputError, match="copy_by is 'magic'; one of auto, native, kernel, torch"):
        make_mover("shm", copy_by="magic")


def test_little_is_begun_before_the_consumer_has_copied_what_was_before() -> None:
    """A consumer that is busy with the first of ten puts: all of them but one more can still be cancelled."""
    gate, nbytes, count, asked = Gate(), 256 << 10, 10, list[TransferKey]()
    region, there = (Region(torch.zeros(nbytes, dtype=torch.uint8)) for _ in range(2))
    runs = Runs(*(np.array([number]) for number in (0, 0, nbytes)))
    grants = GrantingReceiver()
    subject = Subject(ShmMover)
    with subject.faulty_pair(grants, before_place=asked.append, before_placed=lambda _: gate.hold()) as pair:
        connection = pair.connect()
        keys = [TransferKey(f"request-{number}", 0, 1, 0, 16) for number in range(count)]
        for key in keys:
            grants.grant("session", key, Placement(there, runs.destination()))
        handles = [connection.put(key, region, runs, time.monotonic() + 60) for key in keys]
        gate.wait_reached()
        wait_until("all puts are asked for", lambda: asked == keys)
        begun = -1
        while begun != (begun := sum(handle.state is not TransferState.PENDING for handle in handles)):
            time.sleep(0.2)
        assert [handle.cancel() for handle in handles] == [False, False, *[True] * (count - 2)]
        gate.open()
        require_works(pair, connection)
        # The thread that copies tells of what has arrived, the one that reads of what was cancelled.
        ends = [placed for placed in grants.heard if placed.key in keys]
        assert [placed.key for placed in ends if placed.error is None] == keys[:2]
        assert [placed.key for placed in ends if placed.error is not None] == keys[2:]
