"""Requests that go on in another session: only what has not arrived is sent again, and every element is right."""

import contextlib
import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest

from pdtx.address import parse_address
from pdtx.cache import KVCaches, PagedLatentCache
from pdtx.engine import InboundRequest, KVConsumer, KVProducer, OutboundRequest, PrefillEngine, facts_of, match_caches
from pdtx.engine.arrivals import Arrivals, expected_buffers
from pdtx.engine.outbound_leg import Leg
from pdtx.errors import PdtxError, PeerLost
from pdtx.kvspec import MLAAttentionSpec
from pdtx.protocol import Part
from pdtx.transports import Connection, Mover, TransferKey, make_mover
from pdtx.units import round_up
from tests.engine_pair import (
    OPEN,
    PATIENCE_S,
    WrappedMover,
    all_free,
    caches_of,
    describe,
    finished,
    make_cache,
    produce,
    require_contents_of,
    wait_until,
)
from tests.rank_fleet import Fleet, Remote, all_of, sides, until
from tests.rank_process import Decode, Side
from tests.test_engine_scales import cache as quantized

ROUNDS = int(os.environ.get("PDTX_RESUME_ROUNDS", "20"))
LAYERS, CHANNELS, TOKENS, CHUNK = 6, 64, 480, 60
PAYLOAD = LAYERS * 2 * TOKENS * 2 * CHANNELS * 2
LEASE_S = 30.0
OVERHEAD = 4096
"""Bytes around a piece, and of a session, at most."""


def _reset(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RDWR)
    end.close()


@dataclass
class CuttingProxy:
    """Forwards connections, counts what goes to the consumer, and cuts all of them after so many bytes, once each."""

    target: str
    cuts: list[int]  # bytes after which a connection is cut, the next first
    forwarded: int = 0
    ends: list[socket.socket] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self.server.accept()[0]
                far = socket.create_connection(parse_address(self.target))
                self.ends += [near, far]
                for pair in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(16 << 10):
                if counts and self.cuts and self.forwarded + len(data) > self.cuts[0]:
                    data = data[: max(0, self.cuts[0] - self.forwarded)]
                    target.sendall(data)
                    self.forwarded += len(data)
                    self.cuts.pop(0)
                    for end in self.ends:
                        _reset(end)
                    return
                target.sendall(data)
                self.forwarded += len(data) if counts else 0
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.server.close()
        for end in self.ends:
            _reset(end)


class ThroughProxies(WrappedMover):
    """A mover whose connections go through one proxy."""

    name = "tcp"

    def __init__(self, inner: Mover, cuts: Sequence[int]) -> None:
        super().__init__(inner, lambda connection: connection)
        self.cuts, self.proxy = list(cuts), None

    proxy: CuttingProxy | None

    def connect(self, address: str, session_id: str, token: bytes, deadline: float) -> Connection:
        if self.proxy is None:
            self.proxy = CuttingProxy(address, self.cuts)
        return super().connect(self.proxy.address, session_id, token, deadline)


class Resuming:
    """A producer that resumes, and a consumer, over a proxy that cuts their data connection."""

    def __init__(
        self,
        cuts: Sequence[int] = (),
        *,
        resumes: bool = True,
        caches: tuple[KVCaches, KVCaches] | None = None,
        pulls: bool = False,
    ) -> None:
        self.sources, self.destinations = caches or (
            caches_of(make_cache(num_blocks=100, num_layers=LAYERS, channels=CHANNELS)),
            caches_of(make_cache("flashinfer_hnd", 32, num_blocks=50, num_layers=LAYERS, channels=CHANNELS)),
        )
        self.mover = ThroughProxies(make_mover("tcp"), cuts)
        self.producer = KVProducer(self.sources, describe(self.sources), self.mover, resumes=resumes)
        self.consumer = self.make_consumer()
        self.address = self.consumer.listen("127.0.0.1:0", security=OPEN)
        self.source: PrefillEngine | None = None
        if pulls:
            self.listening = self.producer.listen("127.0.0.1:0", security=OPEN)
            self.source = self.consumer.connect(self.listening, security=OPEN)
        else:
            self.producer.connect(self.address, security=OPEN)
        self.under_way = 0

    def make_consumer(self) -> KVConsumer:
        return KVConsumer(self.destinations, describe(self.destinations), make_mover("tcp"), verify=True)

    def begin(self, name: str = "r", timeout_s: float = PATIENCE_S, num_tokens: int = TOKENS) -> OutboundRequest:
        if self.source is None:
            return self.producer.begin(name, num_tokens=num_tokens, timeout_s=timeout_s)
        request = self.producer.offer(name, num_tokens=num_tokens, lease_s=LEASE_S)
        self.consumer.pull(name, self.source, generation=request.generation, deadline_s=timeout_s)
        return request

    @property
    def noticed_bytes(self) -> int:
        """Bytes of which both sides know that they have arrived, of the only request."""
        (request,) = self.consumer.core.requests.values()
        return request.noticed_bytes

    def ready(self) -> InboundRequest:
        ready = self.consumer.next_ready(PATIENCE_S)
        assert ready is not None, [str(one.error) for one in self.consumer.poll()]
        return ready

    def finish(self, ready: InboundRequest, compared: int = PAYLOAD // 2) -> None:
        found = self.consumer.verify(ready)
        assert (found.wrong, found.compared) == (0, compared)
        self.consumer.release(ready)
        self.consumer.finish(ready, finished(ready))
        self.consumer.let_go(ready)

    @property
    def wire(self) -> int:
        """Bytes that have gone to the consumer."""
        assert self.mover.proxy is not None
        return self.mover.proxy.forwarded

    def close(self) -> None:
        for engine in (self.producer, self.consumer):
            engine.close()
            engine.mover.close()
        if self.mover.proxy is not None:
            self.mover.proxy.close()


@contextlib.contextmanager
def resuming(
    cuts: Sequence[int] = (),
    *,
    resumes: bool = True,
    caches: tuple[KVCaches, KVCaches] | None = None,
    pulls: bool = False,
) -> Iterator[Resuming]:
    pair = Resuming(cuts, resumes=resumes, caches=caches, pulls=pulls)
    try:
        yield pair
        wait_until(lambda: all_free(pair.producer.allocator), "the producer's blocks")
        wait_until(lambda: all_free(pair.consumer.allocator), "the consumer's blocks")
    finally:
        pair.close()


CHUNKS = [CHUNK] * (TOKENS // CHUNK - 1)
HALF = TOKENS // 2


@pytest.fixture
def under_way(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each time that a leg began anew: bytes of pieces that the transport had and had not delivered then."""
    found, lost, restart = list[int](), dict[OutboundRequest, int](), Leg.restart

    def note(leg: Leg) -> None:
        request = leg.request
        found.append(request.nbytes - sum(leg.delivered.values()) - lost.get(request, 0))
        lost[request] = lost.get(request, 0) + found[-1]
        restart(leg)

    monkeypatch.setattr(Leg, "restart", note)
    return found


@pytest.mark.parametrize("pulls", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_a_cut_at_a_random_point_costs_what_was_under_way(seed: int, pulls: bool, under_way: list[int]) -> None:
    chance = random.Random(seed)
    cuts = sorted(chance.sample(range(200, PAYLOAD), chance.choice((1, 1, 2))))
    with resuming(cuts, pulls=pulls) as pair:
        request = pair.begin()
        contents = produce(pair.producer, request, CHUNKS)
        ready = pair.ready()
        require_contents_of(pair.destinations, ready, contents)
        pair.finish(ready)
        assert pair.producer.wait(request).text == "done"
        assert ready.received_bytes == PAYLOAD
        assert under_way, "nothing was cut"
        pieces = LAYERS * (len(CHUNKS) + 1)
        assert pair.wire <= PAYLOAD + sum(under_way) + (len(cuts) + 1) * (pieces + 1) * 256 + OVERHEAD
        assert request.nbytes <= PAYLOAD + sum(under_way)


def _scales() -> tuple[KVCaches, KVCaches]:
    return quantized("nvfp4", "flashinfer_nvfp4_nhd", 16), quantized("nvfp4", "flashinfer_nvfp4_hnd", 32)


def _whole_blocks() -> tuple[KVCaches, KVCaches]:
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=132, dtype="uint8")
    source, destination = (
        PagedLatentCache(spec, layout="deepseek_indexer", num_layers=LAYERS, num_blocks=40) for _ in range(2)
    )
    return caches_of(source), caches_of(destination)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("caches", [_scales, _whole_blocks])
def test_what_moves_together_goes_on_too(
    caches: Callable[[], tuple[KVCaches, KVCaches]], seed: int, under_way: list[int]
) -> None:
    """Bytes of a piece are not those of its tokens, and chunks end in the middle of what moves together."""
    pairs, chance, tokens = caches(), random.Random(seed), 299
    (buffer,) = pairs[0].buffers
    rows = buffer.rows_shape(tokens)
    payload = buffer.num_layers * rows[0] * rows[1] * rows[2] * rows[3]
    with resuming([chance.randrange(200, payload)], caches=pairs) as pair:
        request = pair.begin(num_tokens=tokens)
        contents = produce(pair.producer, request, [37, 61, 50, 43, 59])
        ready = pair.ready()
        require_contents_of(pair.destinations, ready, contents)
        pair.finish(ready, payload // buffer.itemsize)
        assert pair.producer.wait(request).text == "done"
        assert under_way, "nothing was cut"
        # Every byte once, but for what was under way; a group or block at the end is brought whole.
        together = next(iter(pair.producer.core.session.route.match.buffers)).together  # type: ignore[union-attr]
        assert ready.received_bytes <= payload // tokens * round_up(tokens, together)


def test_several_requests_go_on_and_what_has_arrived_is_not_sent_again(under_way: list[int]) -> None:
    with resuming([PAYLOAD + PAYLOAD // 2]) as pair:
        requests = [pair.begin(f"r{number}") for number in range(3)]
        contents = {request.request_id: produce(pair.producer, request, CHUNKS) for request in requests}
        for _ in requests:
            ready = pair.ready()
            require_contents_of(pair.destinations, ready, contents[ready.request_id])
            pair.finish(ready)
        assert [pair.producer.wait(request).text for request in requests] == ["done"] * 3
        assert sum(request.nbytes for request in requests) <= 3 * PAYLOAD + sum(under_way)


def test_a_producer_that_does_not_resume_fails_what_was_cut() -> None:
    with resuming([PAYLOAD // 2], resumes=False) as pair:
        request = pair.begin()
        produce(pair.producer, request, CHUNKS)
        with pytest.raises(PdtxError, match="connection"):
            pair.producer.wait(request)


def test_a_lost_control_channel_is_dialled_anew_and_the_request_goes_on() -> None:
    with resuming() as pair:
        request = pair.begin()
        wait_until(lambda: request.grant is not None, "a grant")
        first = request.grant
        channel = pair.producer.core.session.channel
        assert channel is not None
        half = produce(pair.producer, request, CHUNKS[:3], stop_at=HALF)
        wait_until(lambda: pair.noticed_bytes == PAYLOAD // 2, "the notices of all pieces")
        channel._lose(PeerLost("it was cut"), "it was cut")  # type: ignore[attr-defined]
        wait_until(lambda: request.grant is not None and request.grant is not first, "another grant")
        assert request.grant is not None
        assert request.grant.arrived
        rest = produce(pair.producer, request, CHUNKS[4:], start_at=HALF, contents=half)
        ready = pair.ready()
        require_contents_of(pair.destinations, ready, rest)
        pair.finish(ready)
        assert pair.producer.wait(request).text == "done"
        assert request.nbytes == PAYLOAD


def test_a_consumer_that_was_killed_and_came_back_empty_gets_everything() -> None:
    decode = Side("4", layout="flashinfer_hnd", block_size=32)
    with Fleet([Side("4", options={"resumes": True})], [decode]) as fleet:
        (prefill,) = fleet.prefill
        prefill.do("begin", "r", 75, 1)
        until(lambda: prefill.do("state", "r") == "COMPUTING", "a grant")
        fleet.decode[0].process.kill()
        fleet.decode[0].process.wait()
        prefill.do("compute", "r", 20)
        fleet.decode.append(Remote(Decode, decode))
        fleet.decode[1].do("listen", fleet.addresses[0])
        fleet.require_right([fleet.decode[1].do("take", 1)], "r")
        assert prefill.do("wait", "r")[0] == "done"


def test_a_producer_that_says_goodbye_fails_its_requests_at_once() -> None:
    with resuming() as pair:
        request = pair.begin()
        wait_until(lambda: request.grant is not None, "a grant")
        produce(pair.producer, request, stop_at=CHUNK)
        pair.producer.close()
        wait_until(lambda: pair.consumer.num_failed == 1, "the end at the consumer")


def test_a_payload_that_is_refused_since_the_consumer_left_first_is_sent_in_another_session() -> None:
    """The consumer has lost the control channel, and the producer does not know it yet."""
    with resuming() as pair:
        request = pair.begin()
        wait_until(lambda: request.grant is not None, "a grant")
        (session,) = pair.consumer.core.sessions.values()
        pair.consumer.control.call(pair.consumer.core.suspend, session)
        contents = produce(pair.producer, request, CHUNKS)
        ready = pair.ready()
        require_contents_of(pair.destinations, ready, contents)
        pair.finish(ready)
        assert pair.producer.wait(request).text == "done"


def test_the_end_of_a_data_connection_that_is_heard_of_before_the_completion_changes_nothing() -> None:
    with resuming() as pair:
        request = pair.begin()
        contents = produce(pair.producer, request, CHUNKS, complete=False)
        wait_until(lambda: pair.noticed_bytes == PAYLOAD, "all notices")
        (session,) = pair.consumer.core.sessions.values()
        pair.consumer.control.call(pair.consumer._messages.on_connection_closed, session.session_id, "it was cut")
        pair.producer.computed(request, 7)
        ready = pair.ready()
        require_contents_of(pair.destinations, ready, contents)
        pair.finish(ready)
        assert pair.producer.wait(request).text == "done"


def test_a_request_whose_completion_was_heard_ends_with_its_channel() -> None:
    """Of two processes: the one that has completed its part does not ask for it again."""
    prefill = sides(2, Side("4", options={"resumes": True}))
    with Fleet(prefill, [Side("4", layout="flashinfer_hnd", block_size=32)]) as fleet:
        all_of(fleet.prefill, "begin", "r", 75, 1)
        fleet.prefill[0].do("compute", "r")
        until(lambda: fleet.prefill[0].do("state", "r") == "COMPLETED", "the completion")
        until(lambda: fleet.decode[0].do("completed", "r") == 1, "its message")
        fleet.prefill[0].do("lose_channels")
        until(lambda: fleet.decode[0].do("failed") == 1, "the end at decode")
        for each in fleet.prefill:
            with pytest.raises(PdtxError, match="lost"):
                each.do("wait", "r")


def test_what_a_consumer_says_of_a_cancelled_request_does_not_end_the_session(under_way: list[int]) -> None:
    with resuming() as pair:
        for number in range(20):
            cancelled, other = pair.begin(f"a{number}"), pair.begin(f"b{number}")
            for each in (cancelled, other):
                wait_until(partial(lambda one: one.grant is not None, each), "a grant")
            produce(pair.producer, cancelled, CHUNKS[:3], stop_at=HALF)
            pair.producer.cancel(cancelled, "it is not wanted")
            contents = produce(pair.producer, other, CHUNKS)
            ready = pair.ready()
            require_contents_of(pair.destinations, ready, contents)
            pair.finish(ready)
            assert pair.producer.wait(other).text == "done"
        assert not under_way, "something was sent again"


def test_a_request_that_is_not_asked_for_again_ends_by_its_deadline() -> None:
    with resuming() as pair:
        pair.begin(timeout_s=1.0)
        wait_until(lambda: bool(pair.consumer.core.requests), "the request")
        (session,) = pair.consumer.core.sessions.values()
        pair.consumer.control.call(pair.consumer._messages.on_lost, session.peer, "gone")
        assert pair.consumer.core.requests
        wait_until(lambda: pair.consumer.num_expired == 1, "its deadline")


# -- teeth -------------------------------------------------------------------------------------------------------------


def test_what_was_received_but_not_noticed_does_not_count() -> None:
    """Parts are whole runs of positions, layers one after another together."""
    pair = caches_of(make_cache(num_layers=4))
    parts = _parts_after(pair, noticed=[(0, 0, 10), (1, 0, 10), (2, 0, 10), (2, 12, 14)], received=[(3, 0, 10)])
    assert [(p.layer_start, p.layer_stop, p.token_start, p.token_stop) for p in parts] == [
        (0, 2, 0, 10), (2, 3, 0, 10), (2, 3, 12, 14),
    ]  # fmt: skip


def _parts_after(
    caches: KVCaches, noticed: Sequence[tuple[int, int, int]], received: Sequence[tuple[int, int, int]]
) -> list[Part]:
    facts = facts_of(describe(caches))
    match = match_caches(facts, facts)
    arrivals = Arrivals(expected_buffers(facts, 1, frozenset()), [range(20)])
    for layer, start, stop in (*noticed, *received):
        key = TransferKey("r", layer, layer + 1, start, stop)
        arrivals.expect(key, match.buffers[0])
        arrivals.arrive(key, 8 * (stop - start))
        if (layer, start, stop) in noticed:
            arrivals.notice(key, 8 * (stop - start))
    parts = arrivals.keep_noticed(match.of_consumer)
    assert arrivals.received_bytes == arrivals.noticed_bytes == sum(8 * (stop - start) for _, start, stop in noticed)
    return parts


def test_a_consumer_that_takes_what_it_has_not_for_arrived_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = Arrivals.keep_noticed

    def generous(self: Arrivals, matches: object) -> list[Part]:
        kept = keep(self, matches)  # type: ignore[arg-type]
        return [*kept, Part(buffer=0, src_rank=0, dst_rank=0, layer_start=0, layer_stop=LAYERS, token_start=0,
                            token_stop=TOKENS)]  # fmt: skip

    monkeypatch.setattr(Arrivals, "keep_noticed", generous)
    with resuming([PAYLOAD // 2]) as pair:
        request = pair.begin()
        produce(pair.producer, request, CHUNKS)
        with pytest.raises(PdtxError, match="has arrived, which was never delivered"):
            pair.producer.wait(request)
