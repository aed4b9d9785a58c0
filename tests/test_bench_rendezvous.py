"""Processes that find each other: their places by the launchers' variables, the store, and what is left of one dead."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest
import zmq

from pdtx.bench.fleet import Fleet
from pdtx.bench.fleet_remote import RemoteAgent
from pdtx.bench.rendezvous import Place, Rendezvous
from pdtx.bench.rendezvous_store import RunStore
from pdtx.errors import (
    AddressInUse,
    AuthenticationFailed,
    DeadlineExceeded,
    InputError,
    PdtxError,
    PeerLost,
    PeerUnreachable,
)
from pdtx.sidechannel import Dialer, KeyPair, Security
from tests.engine_pair import wait_until
from tests.fake_station import FakeStation
from tests.ports import free_port

_TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
_SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "20017", "SLURM_JOB_NODELIST": "node[03-05,7],x"}
_LWS = {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "bench-0.bench.default"}


def test_torchrun() -> None:
    place = Place.from_environment(_TORCHRUN, 1, 3)
    assert (place.rank, place.world, place.role, place.index) == (2, 4, "decode", 1)
    assert (place.master, place.port, place.hosts_store, place.drives) == ("10.0.0.1", 1234, False, False)
    assert Place.from_environment(_TORCHRUN, 3, 1).role == "prefill"
    first = {**_TORCHRUN, "RANK": "0"}
    assert Place.from_environment(first, 2, 2).hosts_store
    # torchrun serves a store of its own at that port, which all use.
    assert not Place.from_environment({**first, "TORCHELASTIC_USE_AGENT_STORE": "True"}, 2, 2).hosts_store
    assert Place.from_environment({**first, "TORCHELASTIC_RESTART_COUNT": "3"}, 2, 2).attempt == "3"


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("node[03-05,7],x", "node03"), ("a,b", "a"), ("one", "one"), ("gpu-7", "gpu-7"), ("r[1-2]n,z", "r1n")],
)
def test_slurm(nodes: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")  # no scontrol
    place = Place.from_environment({**_SLURM, "SLURM_JOB_NODELIST": nodes}, 1, 1)
    assert (place.master, place.port, place.launcher) == (host, 20017, "Slurm")
    assert place.drives
    named = {**_SLURM, "MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "7"}
    assert (Place.from_environment(named, 1, 1).master, Place.from_environment(named, 1, 1).port) == ("10.1.1.1", 7)


def test_leader_worker_set() -> None:
    place = Place.from_environment(_LWS, 1, 1)
    assert (place.rank, place.role, place.index, place.master) == (1, "decode", 0, "bench-0.bench.default")
    assert place.port == 29500


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({}, "torchrun, srun or a LeaderWorkerSet"),
        ({**_TORCHRUN, "WORLD_SIZE": "5"}, "5 processes, and 2 prefill and 2 decode agents are 4"),
        ({**_TORCHRUN, "WORLD_SIZE": "four"}, "WORLD_SIZE is 'four'"),
        ({**_TORCHRUN, "WORLD_SIZE": ""}, "WORLD_SIZE is not set"),
        ({**_TORCHRUN, "RANK": "4"}, "rank 4 of 4"),
        ({**_TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT 70000"),
        ({**_TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    ],
)
def test_places_that_cannot_be(env: dict[str, str], text: str) -> None:
    with pytest.raises(InputError, match=text):
        Place.from_environment(env, 2, 2)


def test_a_list_of_hosts_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(InputError, match="set MASTER_ADDR"):
        Place.from_environment({**_SLURM, "SLURM_JOB_NODELIST": "[1-2]"}, 1, 1)


@pytest.fixture
def port() -> int:
    return free_port()


def _place(rank: int, port: int) -> Place:
    env = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return Place.from_environment(env, 1, 1)


def test_nobody_makes_the_store(port: int) -> None:
    with pytest.raises(PeerUnreachable, match=f"the run's store at 127.0.0.1:{port} does not answer"):
        RunStore(_place(1, port), 1.0)


def test_the_port_of_the_store_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(AddressInUse, match="set MASTER_PORT"):
            RunStore(_place(0, taken.getsockname()[1]), 1.0)


def test_who_does_not_come_is_named(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdtx.bench.rendezvous._LEAVE_S", 0.1)
    station = FakeStation()
    with (
        pytest.raises(DeadlineExceeded, match="the address of its agent from rank 1"),
        Rendezvous(_place(0, port), station, max_bytes=1, timeout_s=1.0) as rendezvous,
    ):
        rendezvous.fleet()
    assert station.log[-1][0] == "close"


def test_the_channels_of_a_run_have_keys_of_their_own(port: int) -> None:
    served = list[str]()

    def serve() -> None:
        with Rendezvous(_place(1, port), FakeStation(), max_bytes=1, timeout_s=20.0) as member:
            member.serve(served.append)

    other = threading.Thread(target=serve)
    other.start()
    with Rendezvous(_place(0, port), FakeStation(), max_bytes=1, timeout_s=20.0) as first:
        fleet = first.fleet()
        assert [(node.role, node.rank) for node in fleet.nodes] == [("prefill", 0), ("decode", 0)]
        for node in fleet.nodes:
            stranger = Dialer(node.facts["address"], lambda _: None, lambda _: None, security=Security())
            with pytest.raises(AuthenticationFailed):
                stranger.connect(10.0)
        with pytest.raises(InputError, match="rank 0 drives"):
            first.serve()
    other.join(20.0)
    assert not other.is_alive()
    assert "decode agent 0 (rank 1)" in served[0]


def test_a_driver_that_goes_without_a_word_is_noticed_though_the_store_lives(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As under torchrun, whose store is not rank 0's.
    monkeypatch.setattr("pdtx.bench.rendezvous._WORD_S", 0.3)
    looks, look = list[None](), Rendezvous._stopped

    def counted(member: Rendezvous) -> str | None:
        looks.append(None)
        return look(member)

    monkeypatch.setattr(Rendezvous, "_stopped", counted)
    public, secret = zmq.curve_keypair()
    store = RunStore(_place(0, port), 20.0)
    store.put("driver", public)

    def drive_and_go() -> None:
        member = msgspec.msgpack.decode(store.wait("agent/1", "its address", "rank 1", time.monotonic() + 20.0))
        security = Security(KeyPair(public, secret), [member["public"]])
        remote = RemoteAgent(member["address"], "decode", 0, security)
        remote.connect(time.monotonic() + 20.0)
        seen = len(looks) + 2  # by the end of the first look that begins now, so when the next one begins
        wait_until(lambda: len(looks) >= seen, "to be seen")
        remote.close()

    driver = threading.Thread(target=drive_and_go)
    driver.start()
    with (
        pytest.raises(PeerLost, match="has not said that it has done"),
        Rendezvous(_place(1, port), FakeStation(), max_bytes=1, timeout_s=20.0) as member,
    ):
        member.serve()
    driver.join()
    store.close()


def test_rank_0_says_that_it_has_done_before_it_leaves_the_agents(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes: who has been left, and hears nothing, takes rank 0 for gone."""
    close, served = Fleet.close, threading.Event()

    def serve() -> None:
        with Rendezvous(_place(1, port), FakeStation(), max_bytes=1, timeout_s=20.0) as member:
            member.serve()
        served.set()

    heard = list[bool]()

    def close_when_heard(fleet: Fleet) -> None:
        heard.append(served.wait(15.0))
        close(fleet)

    monkeypatch.setattr(Fleet, "close", close_when_heard)
    other = threading.Thread(target=serve)
    other.start()
    with Rendezvous(_place(0, port), FakeStation(), max_bytes=1, timeout_s=20.0) as first:
        first.fleet()
    other.join(20.0)
    assert heard == [True]


def test_a_rank_that_fails_before_it_is_an_agent_is_named(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdtx.bench.rendezvous._LEAVE_S", 0.1)

    def fail() -> None:
        with (
            pytest.raises(AddressInUse),
            Rendezvous(_place(1, port), FakeStation(), max_bytes=1, timeout_s=20.0, advertise="203.0.113.9"),
        ):
            pass

    other = threading.Thread(target=fail)
    other.start()
    with (
        pytest.raises(PdtxError, match=r"rank 1 has failed: cannot listen on 203\.0\.113\.9"),
        Rendezvous(_place(0, port), FakeStation(), max_bytes=1, timeout_s=20.0) as first,
    ):
        first.fleet()
    other.join(20.0)


# -- processes --------------------------------------------------------------------------------------------------------


class _Run:
    """Processes of a run, by rank."""

    def __init__(self, stack: ExitStack, port: int, prefill: int, decode: int, move_s: float = 0.002) -> None:
        self.ranks = [
            stack.enter_context(_process(rank, port, prefill, decode, move_s)) for rank in range(prefill + decode)
        ]
        for process in self.ranks:
            stack.callback(process.kill)

    def ends(self) -> list[tuple[int, str]]:
        """Exit code and stderr of each."""
        return [(process.wait(60.0), process.stderr.read() if process.stderr else "") for process in self.ranks]


def _process(rank: int, port: int, prefill: int, decode: int, move_s: float) -> subprocess.Popen[str]:
    env = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(prefill + decode),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tests.rendezvous_process", str(prefill), str(decode), str(move_s)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_two_and_two_processes_measure(stack: ExitStack, port: int) -> None:
    run = _Run(stack, port, 2, 2)
    assert _line(run.ranks[0]) == "connected"
    answer = json.loads(_line(run.ranks[0]))
    assert answer == {
        "error": None,
        "nodes": [["prefill", 0], ["prefill", 1], ["decode", 0], ["decode", 1]],
        "links": [[0, 2], [1, 3]],
        "samples": 3,
    }
    assert [code for code, _ in run.ends()] == [0] * 4


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_one_that_dies_is_noticed_by_the_others(stack: ExitStack, port: int, victim: int) -> None:
    run = _Run(stack, port, 1, 1, move_s=5.0)
    assert _line(run.ranks[0]) == "connected"
    run.ranks[victim].send_signal(signal.SIGKILL)
    code, text = run.ends()[1 - victim]
    assert code == 1
    assert "lost decode agent 0" in text if victim == 1 else "rank 0 is gone" in text
