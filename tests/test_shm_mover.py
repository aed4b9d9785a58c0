"""The mover within one host over caches in shared memory; test_contract.py holds it to the rest, over private ones."""

import time
from collections.abc import Callable

import pytest
import torch

from pdtx.cache import memory
from pdtx.errors import InputError, PeerUnreachable
from pdtx.testing import CONTRACT, MoverPair, Scene, Subject
from pdtx.testing.contract import start
from pdtx.transports import make_mover
from pdtx.transports.shm.mover import ShmMover

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
