"""What carries the payload, what must carry it, and how it is moved: seen through the engine."""

import logging
from collections.abc import Callable

import pytest

from pdtx.engine import KVProducer, register_cache
from pdtx.engine.picking import ModePicker, Picks
from pdtx.errors import InputError, TransferError, TransferRefused, WrongTransport
from pdtx.plan import Costs, CostTable, Mode, Runs
from pdtx.testing.pair import Leaks
from pdtx.testing.wrapped import WrappedConnection
from pdtx.transports import Connection, Mover, Path, Receiver, Region, Registration, TransferHandle, TransferKey
from pdtx.transports.base import PathKind
from pdtx.transports.registry import make_mover
from tests.engine_pair import OPEN, Pair, WrappedMover, begin, caches_of, describe, make_cache, ship

RDMA = Path("rdma", "rc_mlx5/mlx5_0:1", library="some 1.0", possible=("rdma", "tcp"))
EMULATED = Path("rdma", "rc_verbs/rxe0:1", emulated=True, possible=("rdma",))


class OnPath(WrappedConnection):
    """Says that something else carries the payload; notes how each put was to be moved."""

    def __init__(self, inner: Connection, path: Path, *, stages: bool = True) -> None:
        super().__init__(inner)
        self._path, self._stages, self.staged = path, stages, list[bool]()

    @property
    def path(self) -> Path:
        return self._path

    @property
    def stages(self) -> bool:
        return self._stages

    def put(
        self, key: TransferKey, region: Region, runs: Runs, deadline: float, *, staged: bool = False
    ) -> TransferHandle:
        self.staged.append(staged)
        return self.inner.put(key, region, runs, deadline)


class RegisteringMover(WrappedMover):
    """Counts the regions it is told of before anything else."""

    def __init__(self, inner: Mover, *, broken: bool = False) -> None:
        super().__init__(inner, lambda connection: connection)
        self.regions, self.broken, self.began = list[Region](), broken, False

    def register(self, region: Region) -> Registration | None:
        if self.broken:
            raise TransferError("no memory can be locked")
        assert not self.began
        self.regions.append(region)
        return Registration(region.nbytes, 0.25)

    def listen(self, address: str, receiver: Receiver) -> str:
        self.began = True
        return super().listen(address, receiver)

    def connect(self, address: str, session_id: str, token: bytes, deadline: float) -> Connection:
        self.began = True
        return super().connect(address, session_id, token, deadline)


class Connected:
    """A pair whose second producer goes over a path that the test makes up."""

    def __init__(self, path: Path, *, stages: bool = True) -> None:
        self.pair, self.cache = Pair(), make_cache()
        self.connections = list[OnPath]()

        def wrap(connection: Connection) -> Connection:
            self.connections.append(OnPath(connection, path, stages=stages))
            return self.connections[-1]

        self._wrap = wrap

    def producer(self, mode: Mode = Mode.AUTO, costs: CostTable | None = None) -> KVProducer:
        caches = caches_of(self.cache)
        mover = WrappedMover(make_mover("inproc"), self._wrap)
        producer = KVProducer(caches, describe(caches), mover, mode=mode, costs=costs)
        self.pair.producers.append(producer)
        return producer

    def __enter__(self) -> "Connected":
        self.pair.__enter__()
        return self

    def __exit__(self, *reason: object) -> None:
        self.pair.close()


def send(connected: Connected, producer: KVProducer, tokens: int) -> Picks:
    """Ship a prompt, check every element of it, and return what was picked."""
    producer.connect(connected.pair.address, security=OPEN)
    request = begin(producer, tokens)
    ship(producer, request)
    ready = connected.pair.next_ready()
    connected.pair.finish(ready)
    producer.wait(request)
    return request.picks


@pytest.mark.parametrize("require", [None, "rdma"])
def test_the_path_is_known_after_connecting(require: PathKind | None, caplog: pytest.LogCaptureFixture) -> None:
    with Connected(RDMA) as connected, caplog.at_level(logging.INFO, "pdtx"):
        producer = connected.producer()
        before = producer.path
        producer.connect(connected.pair.address, security=OPEN, require=require)
        assert (before, producer.path) == (None, RDMA)
        lines = [record for record in caplog.records if "goes over rdma (rc_mlx5/mlx5_0:1, some 1.0)" in record.message]
        assert len(lines) == 1
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_emulated_path_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with Connected(EMULATED) as connected, caplog.at_level(logging.INFO, "pdtx"):
        connected.producer().connect(connected.pair.address, security=OPEN)
        (line,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert "emulated in software" in line
        assert "rc_verbs/rxe0:1" in line


@pytest.mark.parametrize("require", ["tcp", "shm"])
def test_another_path_than_required_fails_before_any_payload(require: PathKind) -> None:
    leaks = Leaks()
    with Connected(RDMA) as connected:
        producer = connected.producer()
        with pytest.raises(WrongTransport) as caught:
            producer.connect(connected.pair.address, security=OPEN, require=require)
        error = caught.value
        assert (error.required, error.found, error.possible) == (require, "rdma", ("rdma", "tcp"))
        assert str(error) == (
            f"{require} is required, but the payload would go over rdma (rc_mlx5/mlx5_0:1, some 1.0); "
            "possible with this mover here: rdma, tcp; choose another mover, or its options"
        )
        assert connected.connections[0].staged == []
    leaks.require_none("a path that is not the required one")


@pytest.mark.parametrize("mover", ["inproc", "tcp"])
def test_nothing_here_is_rdma(mover: str) -> None:
    with Pair(mover=mover) as pair:
        producer = KVProducer(pair.sources, describe(pair.sources), make_mover(mover))
        pair.producers.append(producer)
        with pytest.raises(WrongTransport, match=f"rdma is required, but the payload would go over {mover} "):
            producer.connect(pair.address, security=OPEN, require="rdma")


DEAR_RUNS = CostTable({("inproc", "cpu"): Costs(run_s=1.0, pack_run_s=1e-9)}, "this test")
CHEAP_RUNS = CostTable({("inproc", "cpu"): Costs(run_s=1e-9, pack_run_s=1.0)}, "this test")


@pytest.mark.parametrize(
    ("mode", "costs", "staged", "words"),
    [
        (Mode.AUTO, DEAR_RUNS, True, "the costs in this test"),
        (Mode.AUTO, CHEAP_RUNS, False, "the costs in this test"),
        (Mode.DIRECT, DEAR_RUNS, False, "as asked for"),
        (Mode.STAGED, CHEAP_RUNS, True, "as asked for"),
        (Mode.AUTO, None, None, "default costs of inproc"),
    ],
)
def test_pieces_are_moved_as_picked(mode: Mode, costs: CostTable | None, staged: bool | None, words: str) -> None:
    with Connected(RDMA) as connected:
        picks = send(connected, connected.producer(mode, costs), 75)
        used = connected.connections[0].staged
        assert used
        if staged is not None:
            assert set(used) == {staged}
            assert picks.text == f"{'staged' if staged else 'direct'} {len(used)}"
        assert sum(picks.counts.values()) == len(used)
        assert words in picks.reason


def test_a_connection_that_cannot_stage_is_not_asked_to() -> None:
    with Connected(RDMA, stages=False) as connected:
        picks = send(connected, connected.producer(costs=DEAR_RUNS), 40)
        assert set(connected.connections[0].staged) == {False}
        assert picks.reason == "direct: inproc moves directly"
    with Connected(RDMA, stages=False) as connected:
        producer = connected.producer(Mode.STAGED)
        with pytest.raises(InputError, match="mover inproc cannot stage here; choose mode direct or auto"):
            producer.connect(connected.pair.address, security=OPEN)


def test_both_ways_are_counted_with_the_first_reason_of_each() -> None:
    picks = Picks()
    assert (picks.text, picks.reason) == ("", "")
    picker = ModePicker(Mode.AUTO, stages=False, mover="m", device="cpu", table=CostTable({}))
    with Pair() as pair:
        assert pair.producer.core.session.route is not None
        match = pair.producer.core.session.route.match
        plan = match.buffers[0].plan(
            match.buffers[0].moves[0],
            match.buffers[0].source(pair.sources.buffers[0].layout.block_steps([1])),
            match.buffers[0].destination(pair.destinations.buffers[0].layout.block_steps([1])),
            range(1),
            range(4),
        )
    direct = picker.pick(plan)
    picker = ModePicker(Mode.STAGED, stages=True, mover="m", device="cpu", table=CostTable({}))
    for choice in (direct, picker.pick(plan), picker.pick(plan)):
        picks.add(choice)
    assert picks.text == "staged 2, direct 1"
    assert picks.reason.startswith("direct: m moves directly; staged: ")


@pytest.mark.parametrize("broken", [False, True])
def test_both_nodes_register_their_caches_first(broken: bool) -> None:
    movers = list[RegisteringMover]()

    def wrap(mover: Mover) -> Mover:
        movers.append(RegisteringMover(mover, broken=broken))
        return movers[-1]

    with Pair() as pair:
        if broken:
            with pytest.raises(TransferError, match="no memory can be locked"):
                pair.connect(wrap=wrap)
            return
        producer = pair.connect(wrap=wrap)
        regions = [rank.memory for buffer in producer.cache.buffers for rank in buffer.ranks]
        assert [region.address for region in movers[0].regions] == [memory.data_ptr() for memory in regions]
        assert producer.registration.nbytes == sum(memory.numel() for memory in regions)
        assert producer.registration.seconds == 0.25 * len(regions)
        assert pair.consumer.registration.nbytes == 0, "there is nothing to register in this process"
        mine = register_cache(RegisteringMover(make_mover("inproc")), pair.consumer.cache)
        assert mine.nbytes == sum(buffer.nbytes for buffer in pair.consumer.cache.buffers)


def test_a_decode_node_gives_nothing_away(caplog: pytest.LogCaptureFixture) -> None:
    with Pair() as pair, caplog.at_level(logging.INFO, "pdtx"):
        key = TransferKey("r", 0, 1, 0, 4)
        with pytest.raises(TransferRefused, match="this node gives nothing away"):
            pair.consumer.receiver.offer("session", key)
        pair.consumer.receiver.offered("session", key, 0, None)
        pair.consumer.receiver.notified("session", b"hello")
        assert "ignored a notice of 5 bytes" in caplog.text
        check: Callable[[Receiver], Receiver] = lambda receiver: receiver  # noqa: E731 - mypy compares the protocol
        check(pair.consumer.receiver)
