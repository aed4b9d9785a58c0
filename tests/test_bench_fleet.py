"""Fleets: cases measured with agents, what is counted and checked, and agents that are lost or stuck."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

from pdtx.bench.agent import Agent
from pdtx.bench.clock import Clock
from pdtx.bench.fleet import Fleet, Progress
from pdtx.bench.fleet_references import reference_names
from pdtx.bench.fleet_samples import make_sample
from pdtx.bench.work import LinkChecked, LinkMoved, Role
from pdtx.errors import DeadlineExceeded, InputError, PeerLost, PeerUnreachable, TransferError
from pdtx.results.model import Case, CaseResult, Transfer
from pdtx.sidechannel import Security
from pdtx.transports.base import Path
from tests import ports
from tests.fake_station import MAX_BYTES, NBYTES, FakeStation

_PATIENCE_S = 30.0
_SILENCE_S = 5.0


class _Local:
    """A fleet of agents in this process, with their stations, and themselves, by role and number."""

    def __init__(self, stack: ExitStack, prefill: int = 1, decode: int = 1) -> None:
        self.stations: dict[tuple[Role, int], FakeStation] = {}
        self.agents: dict[tuple[Role, int], Agent] = {}
        self.addresses: dict[Role, list[str]] = {"prefill": [], "decode": []}
        counts: dict[Role, int] = {"prefill": prefill, "decode": decode}
        for role, count in counts.items():
            for number in range(count):
                station = self.stations[role, number] = FakeStation()
                agent = Agent(station, role, "127.0.0.1:0", security=Security(), max_bytes=MAX_BYTES)
                self.agents[role, number] = stack.enter_context(agent)
                self.addresses[role].append(agent.address)
        self.fleet = stack.enter_context(_connect(self.addresses["prefill"], self.addresses["decode"]))

    def measure(self, case: Case | None = None, **options: object) -> CaseResult:
        return _measure(self.fleet, case, **options)


def _connect(prefill: Sequence[str], decode: Sequence[str]) -> Fleet:
    return Fleet.connect(prefill, decode, security=Security(), timeout_s=_PATIENCE_S, silence_s=_SILENCE_S)


def _measure(fleet: Fleet, case: Case | None = None, **options: object) -> CaseResult:
    settings: dict[str, object] = {
        "iterations": 3,
        "warmup": 1,
        "verify": True,
        "references": ["none"],
        "deadline": time.monotonic() + _PATIENCE_S,
    }
    return fleet.measure(case or Case(), **{**settings, **options})  # type: ignore[arg-type]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def local(stack: ExitStack) -> _Local:
    return _Local(stack)


def test_a_case_is_warmed_up_measured_counted_and_checked(local: _Local) -> None:
    told = list[Progress]()
    result = local.measure(told=told.append)
    assert result.error is None
    assert [(sample.iteration, sample.warmup) for sample in result.samples] == [
        (0, True), (1, False), (2, False), (3, False)
    ]  # fmt: skip
    assert all(sample.wrong == 0 for sample in result.samples)
    decode, prefill = local.stations["decode", 0], local.stations["prefill", 0]
    assert decode.did("check") == [((0,), True)] * 4
    assert prefill.did("ready") == decode.did("ready") == [0, 1, 2, 3]
    assert prefill.did("connect") == [(0, "127.0.0.1:1", b"t" * 32)]
    assert not decode.did("connect")
    assert not decode.did("move")
    assert len(result.load_average) == 2
    assert [(one.node, one.nbytes) for one in result.registrations] == [(0, NBYTES), (1, NBYTES)]
    (link,) = result.links
    assert (link.prefill, link.decode, link.wire_bytes, link.path["kind"]) == (0, 1, NBYTES, "tcp")
    assert told[0] == Progress("prepare", 0, 1)
    assert told[-1] == Progress("measure", 3, 3)
    assert {one.phase for one in told} == {"prepare", "warm-up", "measure"}
    assert local.fleet.current is None
    assert decode.log[-1][0] == prefill.log[-1][0] == "release"


def test_pull_is_posted_by_the_decode_side(local: _Local) -> None:
    assert local.measure(Case(op="pull")).error is None
    assert local.stations["decode", 0].did("move") == [(0,)] * 4
    assert not local.stations["prefill", 0].did("move")
    assert local.stations["decode", 0].did("check")


def test_without_verification_there_is_no_number_of_wrong_elements(local: _Local) -> None:
    result = local.measure(verify=False)
    assert not result.verified
    assert [sample.wrong for sample in result.samples] == [None] * 4
    assert local.stations["decode", 0].did("check") == [((0,), False)] * 4


def test_less_delivered_than_posted_fails(local: _Local) -> None:
    local.stations["prefill", 0].posts = 5
    result = local.measure()
    assert "delivered 1 of 5" in (result.error or "")
    assert "delivered 1 of 5" in (result.samples[0].error or "")
    assert len(result.samples) == 1
    local.stations["prefill", 0].posts = 1
    assert local.measure().error is None  # others go on


def test_bytes_that_the_receiver_has_not_counted_fail(local: _Local) -> None:
    local.stations["decode", 0].received = NBYTES - 1
    assert "1000 bytes and the receiver has counted 999" in (local.measure().error or "")


def test_a_wrong_element_fails_with_iteration_and_coordinate(local: _Local) -> None:
    local.stations["decode", 0].wrong_in = 2
    result = local.measure()
    assert "iteration 2: 1 wrong elements; first iteration 2: layer 3" in (result.error or "")
    assert [sample.wrong for sample in result.samples] == [0, 0, 1]
    assert local.measure(verify=False).error is None  # nobody has looked: unverified, and not right


def test_an_error_of_a_station_is_the_cases(local: _Local) -> None:
    local.stations["prefill", 0].fails["prepare"] = InputError("9 GiB are too much; fewer --tokens")
    assert "9 GiB are too much" in (local.measure().error or "")
    local.stations["prefill", 0].fails = {"move": TransferError("it broke")}
    assert "it broke" in (local.measure().error or "")
    local.stations["prefill", 0].fails = {}
    assert "8 KV heads cannot be divided" in (local.measure(Case(pattern="tp", tp=(3, 1))).error or "")
    assert local.measure().error is None


@pytest.mark.parametrize(("iterations", "warmup"), [(0, 0), (1, -1)])
def test_nothing_is_measured_by_no_iterations(local: _Local, iterations: int, warmup: int) -> None:
    with pytest.raises(InputError):
        local.measure(iterations=iterations, warmup=warmup)


def test_a_deadline_cuts_off_and_leaves_what_was_measured(local: _Local) -> None:
    local.stations["prefill", 0].move_s = 0.2
    started = time.monotonic()
    result = local.measure(iterations=1000, deadline=started + 3.0)
    assert time.monotonic() - started < 7.5  # what an agent is given beyond it, to say why, was not needed
    counted = sum(not sample.warmup for sample in result.samples)
    assert 1 <= counted < 1000
    assert f"cut off by the deadline after {counted} of 1000" in (result.error or "")
    assert local.measure().error is None


def test_an_agent_that_does_not_end_a_case_in_time_ends_the_fleet(
    local: _Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdtx.bench.fleet_case.GRACE_S", 0.1)
    monkeypatch.setattr("pdtx.bench.fleet.GRACE_S", 0.1)
    local.stations["prefill", 0].move_s = 60.0
    result = local.measure(deadline=time.monotonic() + 3.0)  # enough to come as far as the move
    assert "cut off by the deadline after 0 of 3" in (result.error or "")
    with pytest.raises(DeadlineExceeded, match="prefill agent 0"):
        local.measure()


def test_nobody_waits_for_one_agent_when_another_is_gone(local: _Local) -> None:
    local.stations["prefill", 0].move_s = 60.0
    threading.Timer(0.3, local.agents["decode", 0].close).start()
    started = time.monotonic()
    with pytest.raises(PeerLost, match="lost decode agent 0"):
        local.measure(deadline=time.monotonic() + 90.0)
    assert time.monotonic() - started < 30.0


def test_who_is_interrupted_finds_what_was_measured(local: _Local) -> None:
    def interrupt(progress: Progress) -> None:
        if (progress.phase, progress.done) == ("measure", 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        local.measure(told=interrupt)
    assert local.fleet.current is not None
    assert len(local.fleet.current.samples) == 3


def test_links_move_together_or_one_after_the_other(stack: ExitStack) -> None:
    local = _Local(stack, 2, 1)
    stations = [local.stations["prefill", number] for number in range(2)]
    for station in stations:
        station.move_s = 0.5  # far more than lies between two threads' starts
    together = local.measure(Case(pattern="fan-in"), iterations=1)
    assert stations[0].did("move") == [(0,)] * 2
    assert stations[1].did("move") == [(1,)] * 2
    first, second = together.samples[1].links
    assert first.begun < second.ended  # they overlap
    assert second.begun < first.ended
    for station in stations:
        station.move_s = 0.002
        station.moved.clear()
    alone = local.measure(Case(pattern="fan-in", isolated=True))
    turns = zip(stations[0].moved, stations[1].moved, strict=True)
    assert all(one[1] <= other[0] for one, other in turns)
    for sample in alone.samples:
        first, second = sample.links
        assert (first.begun, second.begun) == (0.0, first.ended)
        assert sample.wall_s == pytest.approx(second.ended)
    assert [(link.prefill, link.decode) for link in alone.links] == [(0, 2), (1, 2)]
    works = [local.stations["prefill", number].did("prepare")[0] for number in range(2)]
    assert works != local.stations["decode", 0].did("prepare")


def test_an_agent_without_work_is_left_alone(stack: ExitStack) -> None:
    local = _Local(stack, 4, 2)
    result = local.measure(Case(model="deepseek-v3", pattern="tp", tp=(4, 2)))
    assert result.error is None
    assert [(link.prefill, link.decode) for link in result.links] == [(0, 4), (2, 5)]
    assert not local.stations["prefill", 1].did("prepare")


def test_the_other_role_is_refused(stack: ExitStack) -> None:
    local = _Local(stack)
    local.fleet.close()
    deadline = time.monotonic() + _PATIENCE_S
    while True:  # until the agents have noticed
        with pytest.raises(InputError) as raised:
            _connect(local.addresses["decode"], local.addresses["prefill"])
        if "give it with --decode" in str(raised.value) or time.monotonic() > deadline:
            break
    assert "is a decode agent; give it with --decode" in str(raised.value)


def test_keys_are_one_or_one_each() -> None:
    with pytest.raises(InputError, match="3 --peer-key for 2 agents"):
        Fleet.connect(["127.0.0.1:1"], ["127.0.0.1:2"], security=Security(peer_public=[b"k"] * 3), timeout_s=1.0)
    with pytest.raises(InputError, match="at least"):
        Fleet.connect([], ["127.0.0.1:2"], security=Security(), timeout_s=1.0)


def test_nobody_at_an_address(free_port: int) -> None:
    with pytest.raises(PeerUnreachable):
        Fleet.connect([f"127.0.0.1:{free_port}"], ["127.0.0.1:2"], security=Security(), timeout_s=0.3)


def test_who_waits_for_an_agent_is_told_for_which(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdtx.bench.fleet._PATIENCE_S", 0.05)
    told = list[str]()
    with pytest.raises(PeerUnreachable):
        Fleet.connect(
            [f"127.0.0.1:{free_port}"], ["127.0.0.1:2"], security=Security(), timeout_s=1.0, waiting=told.append
        )
    assert len(told) > 1
    assert set(told) == {f"waiting for prefill agent 0 at 127.0.0.1:{free_port}"}
    before = len(told)
    time.sleep(0.2)
    assert len(told) == before


@pytest.fixture
def free_port() -> int:
    return ports.free_port()


# -- agents in processes ----------------------------------------------------------------------------------------------


def _child(
    stack: ExitStack, role: Role, move_s: float, before: Sequence[str] = ()
) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [*before, sys.executable, "-m", "tests.fake_station", role, str(move_s)], stdout=subprocess.PIPE, text=True
    )
    stack.enter_context(process)  # waits, and closes the pipe
    stack.callback(process.kill)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.mark.parametrize(
    ("victim", "how"),
    [
        ("prefill", signal.SIGSTOP),
        pytest.param("decode", signal.SIGKILL, marks=pytest.mark.thorough),
        pytest.param("prefill", signal.SIGKILL, marks=pytest.mark.thorough),
        pytest.param("decode", signal.SIGSTOP, marks=pytest.mark.thorough),
    ],
)
def test_a_lost_agent_ends_the_fleet_in_seconds(stack: ExitStack, victim: Role, how: signal.Signals) -> None:
    roles: tuple[Role, Role] = ("prefill", "decode")
    children = {role: _child(stack, role, 0.1) for role in roles}
    fleet = stack.enter_context(_connect([children["prefill"][1]], [children["decode"][1]]))

    def strike(progress: Progress) -> None:
        if (progress.phase, progress.done) == ("measure", 2):
            os.kill(children[victim][0].pid, how)

    started = time.monotonic()
    with pytest.raises(PeerLost, match=f"lost {victim} agent 0"):
        _measure(fleet, iterations=100, told=strike)
    assert time.monotonic() - started < 20.0
    assert fleet.current is not None
    assert len(fleet.current.samples) == 3
    fleet.close()
    survivor: Role = "decode" if victim == "prefill" else "prefill"
    if how == signal.SIGSTOP:
        os.kill(children[victim][0].pid, signal.SIGCONT)  # it goes on, and is free for the next driver
        with _connect_when_free(children) as again:
            assert _measure(again).error is None
    children[survivor][0].terminate()
    assert children[survivor][0].wait(10.0) == 0


def _connect_when_free(children: dict[Role, tuple[subprocess.Popen[str], str]]) -> Fleet:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return _connect([children["prefill"][1]], [children["decode"][1]])
        except InputError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


_BEHIND_S = 30
_ELSEWHEN = ("unshare", "--time", f"--monotonic=-{_BEHIND_S}", "--fork", "--kill-child")


def _can_be_elsewhen() -> bool:
    try:
        return subprocess.run([*_ELSEWHEN, "true"], capture_output=True, timeout=10.0, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not _can_be_elsewhen(), reason="no time namespaces for us here")
def test_an_agent_whose_clock_is_another_one(stack: ExitStack) -> None:
    # As on another host, and as in a container of this one: by boot and name it is this machine.
    _, first = _child(stack, "prefill", 0.05, _ELSEWHEN)
    _, second = _child(stack, "prefill", 0.05)
    decode = FakeStation()
    agent = stack.enter_context(Agent(decode, "decode", "127.0.0.1:0", security=Security(), max_bytes=MAX_BYTES))
    fleet = stack.enter_context(_connect([first, second], [agent.address]))
    errors = [node.clock_error_s for node in fleet.nodes]
    assert errors[0] > 0.0
    assert errors[1:] == [0.0, 0.0]
    result = _measure(fleet, Case(pattern="fan-in"))
    assert result.error is None
    for sample in result.samples:
        # And not some 30 seconds, by a clock taken for ours, or by a start that is as far away there.
        assert sample.wall_s < _BEHIND_S / 2
        assert len(sample.links) == 2


def _node(stack: ExitStack, role: Role) -> tuple[subprocess.Popen[str], str]:
    """A node as users start it, and where it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"{role}_node", "--bench", "--listen", "127.0.0.1:0", "--json", "--max-bytes", "64MiB"],
        stdout=subprocess.PIPE,
        text=True,
    )
    stack.enter_context(process)
    stack.callback(process.kill)
    assert process.stdout is not None
    event = json.loads(process.stdout.readline())
    assert event["event"] == "listening"
    assert event["max_bytes"] == 64 << 20
    return process, str(event["address"])


def test_nodes_measure_and_one_that_is_killed_while_it_receives_is_noticed(stack: ExitStack) -> None:
    prefill, prefill_at = _node(stack, "prefill")
    decode, decode_at = _node(stack, "decode")
    fleet = stack.enter_context(_connect([prefill_at], [decode_at]))
    assert [(node.role, node.rank, node.clock_error_s) for node in fleet.nodes] == [("prefill", 0, 0), ("decode", 0, 0)]
    assert fleet.max_bytes == 64 << 20

    case = Case(layers=2, tokens=64, tp=(1, 2), layout=("flash_attn_nhd", "flashinfer_hnd"))
    result = _measure(fleet, case, references=["auto"])
    assert result.error is None
    assert [sample.wrong for sample in result.samples] == [0] * 4
    (link,) = result.links
    assert {one.links[0].received_bytes for one in result.samples} == {link.wire_bytes}
    (reference,) = result.references
    assert (reference.name, reference.limits, reference.missing) == ("socket", True, "")
    assert len(reference.seconds) == 3  # one for each counted iteration

    too_large = _measure(fleet, Case(tokens=4096))
    assert "agent 0 at" in (too_large.error or "")  # refused before anything is allocated, and the fleet goes on

    def strike(progress: Progress) -> None:
        if progress == Progress("prepare", 1, 1):
            threading.Timer(1.0, decode.kill).start()  # in the middle of the move, which takes 20 s

    started = time.monotonic()
    with pytest.raises(PeerLost, match="lost decode agent 0"):
        _measure(fleet, Case(layers=2, tokens=64, layer_compute_s=10.0), told=strike)
    assert time.monotonic() - started < 20.0
    fleet.close()
    prefill.terminate()
    assert prefill.wait(10.0) == 0  # though a move was under way


# -- samples ----------------------------------------------------------------------------------------------------------


def _moved(link: int, begun: float, ended: float) -> LinkMoved:
    transfer = Transfer(link, 0, 0, 0, 1, 0, 0, 8, 0.0, 0.001, 0.002, ended - begun)
    return LinkMoved(link, begun, ended, 0.1, 0.2, 0.3, 8, 1, (transfer,))


def _checked(*links: int, wrong: int | None = 0) -> dict[int, LinkChecked]:
    return {link: LinkChecked(link, 8, 1, wrong) for link in links}


def test_times_of_skewed_clocks_are_the_drivers() -> None:
    # Four ranks, 10 ms each, staggered to 12 ms; each clock is somewhere else.
    offsets = [0.0, 1000.0, -500.0, 3.5]
    staggered = [0.0, 0.001, 0.002, 0.0005]
    moved = [
        _moved(link, 50.0 + at + offset, 50.010 + at + offset)
        for link, (at, offset) in enumerate(zip(staggered, offsets, strict=True))
    ]
    clocks = {link: Clock(offset, 1e-5) for link, offset in enumerate(offsets)}
    sample = make_sample(7, False, moved, _checked(0, 1, 2, 3), clocks)
    assert sample.wall_s == pytest.approx(0.012)
    assert [link.begun for link in sample.links] == pytest.approx(staggered)
    assert [link.ended - link.begun for link in sample.links] == pytest.approx([0.010] * 4)
    assert [transfer.posted for transfer in sample.transfers] == pytest.approx([at + 0.001 for at in staggered])


def test_one_link_that_nobody_looked_at_makes_a_sample_unverified() -> None:
    moved = [_moved(0, 1.0, 2.0), _moved(1, 1.0, 2.0)]
    clocks = {0: Clock(), 1: Clock()}
    assert make_sample(0, False, moved, {**_checked(0), **_checked(1, wrong=None)}, clocks).wrong is None
    assert make_sample(0, False, moved, _checked(0, 1, wrong=2), clocks).wrong == 4


def test_references_that_fit() -> None:
    tcp, memory = Path("tcp", "a socket"), Path("shm", "memory")
    assert reference_names(["auto"], "tcp", tcp) == ("socket",)
    assert reference_names(["auto"], "nixl", memory) == ("memcpy",)
    assert reference_names(["auto"], "ucx", tcp) == ("ucx_perftest", "socket")
    assert reference_names(["memcpy", "auto"], "shm", memory) == ("memcpy",)
    assert reference_names(["none"], "tcp", tcp) == ()
