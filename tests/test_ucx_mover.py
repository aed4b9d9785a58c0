"""The ucx mover is held to the contract of movers, over tcp and by whatever UCX finds on one host."""

import pytest

from pdtx.errors import InputError
from pdtx.testing.contract import CONTRACT, FAULTS, Check, Subject
from pdtx.testing.contract.faults import check_stopped_producer
from pdtx.transports import make_mover
from pdtx.transports.ucx.mover import UcxMover
from tests.contract_subjects import sampled
from tests.ucx_peer import usable_runtime

UCX = Subject.named("ucx")


def name_of(check: Check) -> str:
    return check.__name__.removeprefix("check_")


@pytest.mark.parametrize("check", CONTRACT, ids=name_of)
@pytest.mark.parametrize("tls", sampled(["tcp", "all"], ["tcp"]))
def test_contract(tls: str, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    usable_runtime()
    monkeypatch.setenv("UCX_TLS", tls)
    check(UCX)


@pytest.mark.parametrize("check", FAULTS, ids=name_of)
@pytest.mark.parametrize("tls", sampled(["tcp", "all"], ["all"]))
def test_faults(tls: str, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    usable_runtime()
    if tls == "all" and check is check_stopped_producer:
        pytest.skip(
            "a producer that writes by itself (cma) cannot be cut off: its transfers stay open until it goes on"
        )
    monkeypatch.setenv("UCX_TLS", tls)
    check(UCX)


def test_options_reach_the_engine() -> None:
    with pytest.raises(InputError, match="unknown UCX runtime 'java'"):
        make_mover("ucx", runtime="java")
    with pytest.raises(InputError, match="no UCX library /nowhere"):
        make_mover("ucx", library="/nowhere")


def test_knobs_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    usable_runtime()
    monkeypatch.setenv("UCX_TLS", "tcp")
    mover = UcxMover()
    try:
        assert mover.knobs["UCX_TLS"] == "tcp"
        assert "UCX_RNDV_THRESH" in mover.knobs
    finally:
        mover.close()
