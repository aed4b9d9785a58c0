"""Movers over verbs: the contract of movers, and that it is RDMA. For a host with a verbs device, or deploy/rdma-lab.

scripts/test-rdma runs them there. UCX may use nothing but rc and ud here, so that whatever passes has gone over verbs.
PDTX_RDMA_UCX chooses the ucx mover's library (default: nixl, whose UCX has verbs).
"""

import os
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from pdtx.errors import DeadlineExceeded, InputError, TransferError
from pdtx.testing import Scene
from pdtx.testing.contract import CONTRACT, FAULTS, Check, Subject, cancels, ends, gets, leaks, notices, payloads, start
from pdtx.testing.contract.faults import check_stopped_producer
from pdtx.transports import make_mover
from tests.rdma_node import counters, device, grown, mtu

SUBJECTS = {
    "nixl": Subject.named("nixl", tls="rc,ud"),
    "ucx": Subject.named("ucx", library=os.environ.get("PDTX_RDMA_UCX", "nixl")),
}

TIMED = (
    ends.check_deadline,
    gets.check_get_deadline,
    notices.check_notice_deadline,
    ends.check_cancel,
    ends.check_close_with_work_pending,
    ends.check_consumer_closes,
    cancels.check_cancels_in_a_queue,
    cancels.check_get_cancels_in_a_queue,
    gets.check_get_cancel,
    gets.check_close_with_gets_pending,
    gets.check_consumer_closes_under_gets,
)
"""Hold a mover to fractions of a second, or move 24 MiB while something is held: too much for an emulated processor."""

LONG = (
    payloads.check_every_layout_pair,
    payloads.check_many_ranges_in_one_call,
    payloads.check_many_at_once,
    payloads.check_many_at_once_over_several_peers,
    payloads.check_several_producers,
    payloads.check_several_consumers,
    payloads.check_staged_in_pieces,
    payloads.check_two_connections_of_one_session,
    ends.check_done_means_arrived,
    gets.check_get_every_layout_pair,
    gets.check_large_get,
    gets.check_gets_and_puts_mixed,
    notices.check_many_notices,
    leaks.check_hundreds_of_connections,
    leaks.check_nothing_left,
)
"""Half a minute each on an emulated processor, or more than 10 s for one move: megabytes in runs, many connections."""


def name_of(check: Check) -> str:
    return check.__name__.removeprefix("check_")


@pytest.fixture
def over_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "rc,ud")
    if "UCX_NET_DEVICES" not in os.environ:
        monkeypatch.setenv("UCX_NET_DEVICES", f"{device()}:1")


def usable(name: str) -> Subject:
    subject = replace(SUBJECTS[name], connections=10)
    try:
        subject.make().close()
    except InputError as error:
        pytest.skip(str(error))
    return subject


@pytest.mark.rdma
@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.usefixtures("over_verbs")
def test_the_path_is_rdma(name: str) -> None:
    before = counters()
    with usable(name).pair() as pair:
        path = pair.connect().path
    assert path.kind == "rdma", str(path)
    assert path.possible == ("rdma",)
    assert device() in path.detail, str(path)
    assert not path.emulated, str(path)
    assert grown(before).get("sent_pkts", 0) > 0, "no packet has left the card"


@pytest.mark.rdma
@pytest.mark.parametrize("check", CONTRACT, ids=name_of)
@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.usefixtures("over_verbs")
def test_contract(name: str, check: Check) -> None:
    if os.environ.get("PDTX_RDMA_SLOW"):
        for kind, why in ((TIMED, "holds a mover to real time"), (LONG, "takes minutes")):
            if check in kind:
                pytest.skip(f"{why}: not on an emulated processor")
        # A busy one misses the 10 s of a connection now and then. What the contract itself finds counts at once.
        with suppress(DeadlineExceeded):
            check(usable(name))
            return
    check(usable(name))


@pytest.mark.rdma
@pytest.mark.parametrize("check", FAULTS, ids=name_of)
@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.usefixtures("over_verbs")
def test_faults(name: str, check: Check) -> None:
    if os.environ.get("PDTX_RDMA_SLOW"):
        pytest.skip("64 MiB within seconds: not on an emulated processor, see tests/rdma_faults.py")
    if check is check_stopped_producer:
        pytest.skip(
            "a card that writes by itself cannot be cut off: its transfers stay open until the producer goes on"
        )
    check(usable(name))


WAYS = {
    "rdma": ("rc,ud", Subject.named("ucx", library="nixl")),
    "tcp": ("tcp", Subject.named("ucx", library="nixl")),
    "shm": ("rc,ud", Subject.named("shm")),
}


@pytest.mark.rdma
@pytest.mark.parametrize("kind", WAYS)
def test_three_transports_are_told_apart_by_the_card_itself(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The card has sent all of a payload, or not a packet; and the connection says which."""
    tls, subject = WAYS[kind]
    monkeypatch.setenv("UCX_TLS", tls)
    if kind == "tcp":
        monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    subject.make().close()
    before = counters()
    with subject.pair() as pair:
        connection, scene = pair.connect(), Scene(tokens=600, num_layers=4)
        plan = scene.plan()
        start(pair, connection, scene, plan).wait()
        scene.require_exact()
        assert connection.path.kind == kind, str(connection.path)
    sent = grown(before).get("sent_pkts", 0)
    assert sent >= plan.flat.total // mtu() if kind == "rdma" else sent == 0, f"the card has sent {sent} packets"


def test_what_is_left_out_is_of_the_contract() -> None:
    assert set(TIMED) | set(LONG) < set(CONTRACT)
    assert not set(TIMED) & set(LONG)


def test_a_ucx_without_verbs_is_no_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX_TLS=rc,tcp on the index's UCX starts on tcp: it must be told as tcp, and --require rdma must fail."""
    from tests.ucx_peer import usable_runtime

    usable_runtime("raw", "wheel")
    monkeypatch.setenv("UCX_TLS", "rc,tcp")
    with Subject.named("ucx", library="wheel", runtime="raw").pair() as pair:
        path = pair.connect().path
    assert (path.kind, path.possible) == ("tcp", ("tcp",)), str(path)


def test_verbs_alone_are_refused_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.ucx_peer import usable_runtime

    usable_runtime("raw", "wheel")
    monkeypatch.setenv("UCX_TLS", "rc")
    begun = time.monotonic()
    with pytest.raises(TransferError, match="UCX_TLS"):
        make_mover("ucx", library="wheel", runtime="raw")
    assert time.monotonic() - begun < 5
