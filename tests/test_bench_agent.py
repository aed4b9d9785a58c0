"""Agents: calls and their answers, one driver at a time, and what is left when a driver goes."""

import queue
import threading
import time
from collections.abc import Iterator

import msgpack
import pytest

import pdtx
from pdtx.bench import calls
from pdtx.bench.agent import Agent
from pdtx.bench.clock import Clock, read_clock
from pdtx.bench.fleet_remote import RemoteAgent, gather
from pdtx.bench.work import LinkWork, Prepared, StationWork
from pdtx.errors import DeadlineExceeded, InputError, PdtxError, PeerLost, ProtocolError, TransferError
from pdtx.protocol import (
    PROTOCOL_VERSION,
    Answer,
    BufferDescription,
    CacheDescription,
    Call,
    GroupDescription,
    Message,
    Reject,
    TierHello,
)
from pdtx.results.model import Case
from pdtx.sidechannel import Dialer, Security
from tests.fake_station import MAX_BYTES, FakeStation

_PATIENCE_S = 20.0
_WORK = StationWork(Case(), "decode", range(1), 1, (LinkWork(0, range(1), range(1), range(1)),))


def _soon() -> float:
    return time.monotonic() + _PATIENCE_S


@pytest.fixture
def station() -> FakeStation:
    return FakeStation()


@pytest.fixture
def agent(station: FakeStation) -> Iterator[Agent]:
    with Agent(station, "decode", "127.0.0.1:0", security=Security(), max_bytes=MAX_BYTES) as agent:
        yield agent


@pytest.fixture
def remote(agent: Agent) -> Iterator[RemoteAgent]:
    remote = RemoteAgent(agent.address, "decode", 0, Security())
    remote.connect(_soon())
    yield remote
    remote.close()


def test_hello_tells_who_the_agent_is(remote: RemoteAgent) -> None:
    assert remote.facts.role == "decode"
    assert remote.facts.max_bytes == MAX_BYTES
    assert remote.facts.facts["pdtx"] == pdtx.__version__
    assert remote.clock == Clock(0.0, 0.0)  # of the same machine


def test_a_call_reaches_the_station(remote: RemoteAgent, station: FakeStation) -> None:
    prepared: Prepared = remote.start(calls.PREPARE, _WORK).result(_soon())
    assert station.did("prepare") == [_WORK]
    assert (prepared.address, prepared.token) == ("127.0.0.1:1", b"t" * 32)
    assert prepared.links[0]["run_sizes"] == {"500": 2}


def test_unknown_methods_and_malformed_bodies_are_answered_and_the_agent_lives_on(remote: RemoteAgent) -> None:
    with pytest.raises(ProtocolError, match="no method 'shutdown'"):
        remote.start(calls.Method("shutdown", None, None)).result(_soon())
    with pytest.raises(ProtocolError, match="malformed body"):
        remote.start(calls.READY, calls.Nothing()).result(_soon())
    with pytest.raises(ProtocolError, match="waits 3600 s at most"):
        remote.start(calls.MOVE, calls.MoveCall((0,), time.monotonic(), float("inf"))).result(_soon())
    remote.start(calls.READY, calls.ReadyCall(1)).result(_soon())


@pytest.mark.parametrize(
    "fields", [{"iteration": "1"}, {"iteration": 1.5}, [1], None, {"iteration": None}, {"iteration": {"a": 1}}]
)
def test_bodies_are_checked_field_by_field(fields: object) -> None:
    with pytest.raises(ProtocolError):
        calls.unpack(msgpack.packb(fields), calls.ReadyCall)


def test_no_room_is_made_for_what_a_list_only_claims() -> None:
    with pytest.raises(ProtocolError):
        calls.unpack(b"\x82\xa5links\xdd\xff\xff\xff\xff", calls.CheckCall)


@pytest.mark.parametrize("ends", [[0], [1, 0], [-1, 2], [0, 2**40], ["0", 1], 5, [0, True]])
def test_ranges_are_checked(ends: object) -> None:
    fields = {"number": 0, "requests": ends, "prefill_ranks": [0, 1], "decode_ranks": [0, 1]}
    with pytest.raises(ProtocolError, match="range"):
        calls.unpack(msgpack.packb(fields), LinkWork)


def test_an_error_keeps_its_class_and_a_bug_does_not_end_the_agent(remote: RemoteAgent, station: FakeStation) -> None:
    station.fails["ready"] = InputError("too much")
    with pytest.raises(InputError, match=r"decode agent 0 at .*: too much") as raised:
        remote.start(calls.READY, calls.ReadyCall(0)).result(_soon())
    assert raised.value.exit_code == 2
    station.fails["ready"] = DeadlineExceeded("payload", "somebody", 1.0)
    with pytest.raises(DeadlineExceeded, match="payload"):
        remote.start(calls.READY, calls.ReadyCall(0)).result(_soon())
    station.fails["ready"] = RuntimeError("a bug")
    with pytest.raises(PdtxError, match="RuntimeError: a bug"):
        remote.start(calls.READY, calls.ReadyCall(0)).result(_soon())
    # Of another agent: this one is still there.
    station.fails["ready"] = PeerLost("the other end is gone")
    with pytest.raises(PdtxError, match="the other end is gone") as other:
        remote.start(calls.READY, calls.ReadyCall(0)).result(_soon())
    assert not isinstance(other.value, PeerLost)


def test_the_work_of_the_other_role_is_refused(remote: RemoteAgent) -> None:
    work = StationWork(Case(), "prefill", range(1), 1, ())
    with pytest.raises(InputError, match="this agent is a decode agent"):
        remote.start(calls.PREPARE, work).result(_soon())


def test_a_mover_within_one_process_is_refused(remote: RemoteAgent, station: FakeStation) -> None:
    work = StationWork(Case(mover="inproc"), "decode", range(1), 1, _WORK.links)
    with pytest.raises(InputError, match="inproc works within one process"):
        remote.start(calls.PREPARE, work).result(_soon())
    assert not station.did("prepare")


def test_references_share_what_an_agent_may_take(remote: RemoteAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = list[int | None]()

    def refuse(*_: object, max_bytes: int | None = None, **__: object) -> None:
        taken.append(max_bytes)
        raise InputError("seen")

    monkeypatch.setattr("pdtx.bench.agent_methods.ReferenceServer.open", refuse)
    monkeypatch.setattr("pdtx.bench.agent_methods.ReferenceClient", refuse)
    for method, body in (
        (calls.OPEN_REFERENCE, calls.OpenReference("socket", 5)),
        (calls.CONNECT_REFERENCE, calls.ConnectReference("memcpy", "", b"", 5, 1.0)),
    ):
        with pytest.raises(InputError, match="seen"):
            remote.start(method, body).result(_soon())
    assert taken == [MAX_BYTES // 3] * 2


def test_clocks_are_read_while_the_station_is_at_work(remote: RemoteAgent, station: FakeStation) -> None:
    station.move_s = 1.0
    moving = remote.start(calls.MOVE, calls.MoveCall((0,), time.monotonic(), 5.0))
    answered: calls.ClockRead = remote.start(calls.PING).result(_soon())
    (moved,) = moving.result(_soon())
    assert answered.at < moved.ended


def test_a_second_driver_is_told_who_the_first_is(agent: Agent, remote: RemoteAgent, station: FakeStation) -> None:
    second = RemoteAgent(agent.address, "decode", 0, Security())
    with pytest.raises(InputError, match=r"at work for .*process \d+\); one driver at a time"):
        second.connect(_soon())
    second.close()
    remote.start(calls.READY, calls.ReadyCall(0)).result(_soon())  # the first one is not disturbed
    remote.close()
    third = _connected_when_free(agent)
    assert station.released.is_set()
    third.close()


def test_a_drivers_name_does_nothing_to_a_terminal(station: FakeStation) -> None:
    names = list[str]()
    with Agent(
        station, "decode", "127.0.0.1:0", security=Security(), max_bytes=MAX_BYTES, on_driver=names.append
    ) as agent:
        dialer, heard = _raw(agent)
        hello = calls.HelloCall(PROTOCOL_VERSION, pdtx.__version__, "me\n\x1b[31magent: error\u2028" + "x" * 500)
        dialer.send(Call(call_id=1, method="hello", body=calls.pack(hello)))
        assert isinstance(heard.get(timeout=_PATIENCE_S), Answer)
        dialer.close(0.5)
    assert names[0] == ("me  [31magent: error " + "x" * 500)[:200]


def test_an_agents_error_does_nothing_to_a_terminal() -> None:
    error = calls.error_of(Answer(call_id=1, error="a\n\x1b[31mb", kind="InputError"), "agent 0")
    assert str(error) == "agent 0: a  [31mb"


def test_a_silence_says_what_may_be_behind_it() -> None:
    assert calls.cause_of("nothing heard for 20 s") == "nothing heard for 20 s; it was stopped, or a host is overloaded"
    assert calls.cause_of("it closed\nthe connection") == "it closed the connection"


def test_ten_seconds_of_silence_are_no_loss(agent: Agent, remote: RemoteAgent) -> None:
    assert min(remote._dialer.silence_s, agent._listener.silence_s) == calls.SILENCE_S > 10.0


def _connected_when_free(agent: Agent) -> RemoteAgent:
    """Connect once the agent has noticed that its driver has gone."""
    deadline = _soon()
    while True:
        remote = RemoteAgent(agent.address, "decode", 0, Security())
        try:
            remote.connect(deadline)
        except InputError:
            remote.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return remote


def test_what_a_lost_driver_began_is_released_before_the_next_one_is_welcome(
    agent: Agent, remote: RemoteAgent, station: FakeStation
) -> None:
    station.move_s = 60.0
    remote.start(calls.PREPARE, _WORK).result(_soon())
    remote.start(calls.MOVE, calls.MoveCall((0,), time.monotonic(), 90.0))
    remote.start(calls.CHECK, calls.CheckCall((0,), False))
    deadline = _soon()
    while not station.did("move") and time.monotonic() < deadline:
        time.sleep(0.01)
    remote.close()
    following = _connected_when_free(agent)  # long before the move would have ended by itself
    assert station.log[-1][0] == "release"
    assert not station.did("check")  # nothing is done any more for one that has gone
    following.close()


def _raw(agent: Agent) -> tuple[Dialer, "queue.Queue[Message]"]:
    heard: queue.Queue[Message] = queue.Queue()
    dialer = Dialer(agent.address, heard.put, lambda _: None, security=Security())
    dialer.connect(_PATIENCE_S)
    return dialer, heard


def test_strangers_get_nothing_done(agent: Agent, station: FakeStation) -> None:
    dialer, heard = _raw(agent)
    try:
        dialer.send(Call(call_id=7, method="ready", body=calls.pack(calls.ReadyCall(0))))
        answer = heard.get(timeout=_PATIENCE_S)
        assert isinstance(answer, Answer)
        assert (answer.call_id, answer.kind) == (7, "InputError")
        hello = calls.HelloCall(PROTOCOL_VERSION, "0.0.0", "me")
        dialer.send(Call(call_id=8, method="hello", body=calls.pack(hello)))
        answer = heard.get(timeout=_PATIENCE_S)
        assert isinstance(answer, Answer)
        assert "run the same pdtx on all hosts" in answer.error
        dialer.send(_a_nodes_hello())
        assert isinstance(heard.get(timeout=_PATIENCE_S), Reject)
    finally:
        dialer.close()
    assert not agent.driver
    assert not station.did("ready")


def _a_nodes_hello() -> TierHello:
    group = GroupDescription(name="full", kind="full", block_size=16, num_blocks=4)
    buffer = BufferDescription(name="full", group="full", spec={}, layer_names=["0"], layout="x", size_bytes=1)
    cache = CacheDescription(model="m", fingerprint="f", device="cpu", groups=[group], buffers=[buffer])
    return TierHello(protocol=PROTOCOL_VERSION, pdtx_version="1", engine_id="e", cache=cache, block_tokens=16)


def test_every_address_of_a_machine_is_no_place_for_data() -> None:
    with pytest.raises(InputError, match="--advertise"):
        Agent(FakeStation(), "decode", "0.0.0.0:0", security=Security(insecure=True), max_bytes=1)


def test_an_agent_that_ends_says_so_to_who_waits(agent: Agent, remote: RemoteAgent, station: FakeStation) -> None:
    station.move_s = 60.0
    moving = remote.start(calls.MOVE, calls.MoveCall((0,), time.monotonic(), 5.0))
    threading.Thread(target=agent.close).start()
    with pytest.raises(PeerLost, match="lost decode agent 0"):
        moving.result(_soon())
    with pytest.raises(PeerLost):
        remote.start(calls.LOAD)
    agent.close()


def test_gather_waits_for_all_and_raises_the_first_failure(remote: RemoteAgent, station: FakeStation) -> None:
    station.fails["ready"], station.move_s = TransferError("no"), 0.3
    moving = calls.MoveCall((0,), time.monotonic(), 5.0)
    started = [remote.start(calls.READY, calls.ReadyCall(0)), remote.start(calls.MOVE, moving)]
    with pytest.raises(TransferError, match="no"):
        gather(started, _soon())
    assert len(station.moved) == 1  # it has ended


def test_a_call_whose_answer_is_late_leaves_the_agent_stuck_until_it_comes(
    remote: RemoteAgent, station: FakeStation
) -> None:
    station.move_s, station.ends_when_stopped = 60.0, False
    moving = remote.start(calls.MOVE, calls.MoveCall((0,), time.monotonic(), 5.0))
    with pytest.raises(DeadlineExceeded, match="the answer to move"):
        moving.result(time.monotonic() + 0.05)
    assert remote.stuck
    station.stopped.set()  # it ends, and well
    remote.start(calls.LOAD).result(_soon())
    assert not remote.stuck


class _Skewed:
    """Two clocks, one of them ahead; every reading takes a way there and a way back."""

    def __init__(self, ahead: float, ways: list[tuple[float, float]]) -> None:
        self.now, self.ahead, self.ways = 100.0, ahead, iter(ways)

    def ask(self) -> float:
        there, back = next(self.ways)
        self.now += there
        at = self.now + self.ahead
        self.now += back
        return at


def test_a_clock_is_told_by_the_shortest_way() -> None:
    skewed = _Skewed(50.0, [(0.5, 0.1), (0.010, 0.012), (0.3, 0.3)])
    clock = read_clock(skewed.ask, reads=3, now=lambda: skewed.now)
    assert clock.offset_s == pytest.approx(50.0 - 0.001)
    assert clock.error_s == pytest.approx(0.011)
    assert abs(clock.offset_s - 50.0) <= clock.error_s
    assert clock.here(clock.there(3.0)) == pytest.approx(3.0)


def test_one_machine_has_one_clock_unless_its_readings_say_otherwise() -> None:
    same = _Skewed(0.0, [(0.1, 0.3)] * 4)
    assert read_clock(same.ask, reads=4, same_host=True, now=lambda: same.now) == Clock(0.0, 0.0)
    other = _Skewed(-9.0, [(0.1, 0.1)] * 4)  # a container with a time namespace of its own
    assert read_clock(other.ask, reads=4, same_host=True, now=lambda: other.now).offset_s == pytest.approx(-9.0)
