"""The consumer's control under random interleavings: no thread, no socket, every event in any order.

Invariants: blocks come back exactly once, and never while a payload is written into them; each request ends exactly
once; nothing is granted to a dead session; a session's requests have left the queue before its blocks are granted; a
request is ready only when all processes have said so; in another session only what was noticed counts as arrived, and
nothing is granted while the session before still writes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np
import pytest

from pdtx.cache import GroupAllocator, GroupBlocks, PagedKVCache
from pdtx.engine import facts_of
from pdtx.engine.inbound import InboundRequest, PrefillEngine
from pdtx.engine.inbound_control import InboundControl
from pdtx.engine.inbound_messages import InboundMessages
from pdtx.engine.landing import Door, Landing
from pdtx.engine.receiving import PayloadReceiver
from pdtx.engine.states import INBOUND, InboundState
from pdtx.errors import PdtxError, PeerLost, TransferError, TransferRefused
from pdtx.kvspec import FullAttentionSpec
from pdtx.plan.runs import Int64s
from pdtx.protocol import (
    PROTOCOL_VERSION,
    CacheDescription,
    Complete,
    Failure,
    Finished,
    Grant,
    Hello,
    LayerDone,
    Message,
    Reference,
    Refuse,
    TransferRequest,
)
from pdtx.tiers.prefix import Fetched
from pdtx.transports import TransferKey
from tests.broken_engines import hold_nothing
from tests.engine_pair import all_free, caches_of, describe, make_cache
from tests.interleavings import (
    RandomWorld,
    in_parts,
    require_only_these,
    run_all,
    run_part,
    transitions_in,
    transitions_of,
)

LAYERS, BLOCKS = 2, 5
DESTINATION = caches_of(make_cache("flashinfer_hnd", 16, num_blocks=BLOCKS, num_layers=LAYERS))
FACTS = facts_of(describe(DESTINATION))


def source(tp_size: int, rank: int) -> CacheDescription:
    """A producer's process with one rank."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype="bfloat16")
    ranks = range(rank, rank + 1)
    cache = PagedKVCache(spec, num_layers=LAYERS, num_blocks=9, tp_size=tp_size, tp_ranks=ranks)
    return describe(cache)


@dataclass(frozen=True)
class Peer:
    """A process of a producer: its side-channel addresses, of which it uses one at a time."""

    addresses: tuple[bytes, ...]
    engine_id: str
    process: int
    processes: int
    cache: CacheDescription


PEERS = (
    Peer((b"a", b"a2"), "one", 0, 1, source(1, 0)),
    Peer((b"b", b"b2"), "two", 0, 2, source(2, 0)),
    Peer((b"c", b"c2"), "two", 1, 2, source(2, 1)),
)


class World(RandomWorld):
    """A consumer's control with everything around it under the test's hand: producers of one and of two processes.

    Some of them resume what a lost session has not delivered.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.numbers, self.attempts = count(), count(1)
        self.allocator = GroupAllocator({group.name: group.num_blocks for group in DESTINATION.groups})
        self.receiver = PayloadReceiver(DESTINATION, self, None)
        scrubs, self.tiers = self.chance.random() < 0.5, self.chance.random() < 0.3
        self.resumes = self.chance.random() < 0.5
        self.core = InboundControl(
            DESTINATION, FACTS, self.allocator, self.receiver, self, align=1, max_deadline_s=1e6, scrubs=scrubs
        )
        self.messages = InboundMessages(self.core)
        self.posted, self.scrubbing = list[Callable[[], object]](), list[Callable[[bool], object]]()
        self.loading, self.loads_held = list[InboundRequest](), dict[InboundRequest, GroupBlocks]()
        self.granted = list[InboundRequest]()
        self.writing = dict[tuple[str, TransferKey], tuple[InboundRequest, bool]]()
        self.noticed = set[tuple[InboundRequest, TransferKey]]()
        self.taken = list[InboundRequest]()
        self.waiting = list[InboundRequest]()
        self.all = list[InboundRequest]()

    # -- effects ------------------------------------------------------------------------------------------------------

    def send(self, peer: bytes, message: Message) -> None:
        if isinstance(message, Grant):
            session = self.core.sessions.get(peer)
            assert session is not None, "granted to a dead session"
            request = self.core.requests[self.core.engines.engine_of(session), message.request_id]
            ask = request.ask_of(session)
            assert ask is not None
            assert message.attempt == ask.attempt
            assert request.error is None
            assert not any(
                key.request_id == message.request_id and key.src_rank == session.process
                for (name, key), (other, _) in self.writing.items()
                if other is request and name != session.session_id
            ), "granted while the old session writes"
            for part in message.arrived:
                key = TransferKey(message.request_id, part.layer_start, part.layer_start + 1, part.token_start,
                                  part.token_stop, 0, part.src_rank, part.dst_rank)  # fmt: skip
                assert (request, key) in self.noticed, "what was not noticed counts as arrived"
            mine = {block for group in message.groups for block in group.block_ids}
            written = {
                int(block)
                for other, _ in self.writing.values()
                if other is not request and other.blocks is not None
                for block in other.blocks.groups[0].ids
            }
            assert not mine & written, "blocks were granted that are being written"
            for other in self.core.requests.values():
                if other is not request and other.blocks is not None:
                    assert not mine & set(other.blocks.groups[0].ids.tolist()), "a block was granted twice"
            self.granted.append(request)
        if isinstance(message, Failure):
            assert not any(
                one.request_id == message.request_id and one.session.peer == peer for one in self.core.requests.values()
            ), "a failure of a request that goes on"

    def post(self, event: Callable[[], object]) -> None:
        self.posted.append(event)

    def load(self, request: InboundRequest) -> bool:
        if self.tiers:
            self.loading.append(request)
        return self.tiers

    def scrub(self, ids: Sequence[Int64s], then: Callable[[bool], object]) -> None:
        self.scrubbing.append(then)

    def ready(self, request: InboundRequest) -> None:
        self.waiting.append(request)

    # -- what the receiver reports, which is posted -----------------------------------------------------------------

    def on_payload_failed(self, session_id: str, request_id: str, door: Door, error: PdtxError) -> None:
        self.post(lambda: self.messages.on_payload_failed(session_id, request_id, door, error))

    def on_payload_twice(self, key: TransferKey) -> None:
        self.post(lambda: self.messages.on_payload_twice(key))

    def on_connection_closed(self, session_id: str, reason: str) -> None:
        self.post(lambda: self.messages.on_connection_closed(session_id, reason))

    # -- events -------------------------------------------------------------------------------------------------------

    def hello(self) -> None:
        peer = self.chance.choice(PEERS)
        address = self.chance.choice(peer.addresses)
        hello = Hello(
            protocol=PROTOCOL_VERSION, pdtx_version="1", engine_id=peer.engine_id, incarnation=peer.engine_id,
            cache=peer.cache, movers=[], process=peer.process, processes=peer.processes, resumes=self.resumes,
        )  # fmt: skip
        self.messages.on_hello(address, hello, lambda session: Refuse(request_id="welcome", reason=session.session_id))
        if self.chance.random() < 0.7:  # as a producer does that goes on
            for request in list(self.core.requests.values()):
                ask = request.asks.get(peer.process)
                if ask is not None and ask.suspended and request.engine.engine_id == peer.engine_id:
                    again = self.asking(request.request_id, request.num_tokens)
                    self.messages.on_message(address, again)

    def asking(self, name: str, tokens: int) -> TransferRequest:
        return TransferRequest(
            request_id=name, num_tokens=tokens, token_ids=[], max_tokens=0, deadline_s=1e6, attempt=next(self.attempts)
        )

    def ask(self) -> None:
        name = f"r{next(self.numbers)}" if self.chance.random() < 0.8 else "again"
        tokens = self.chance.choice((0, 5, 16, 40, 1000))
        for session in list(self.core.sessions.values()):
            if self.chance.random() < 0.8:
                self._hear(session.peer, self.asking(name, tokens))

    def _hear(self, peer: bytes, message: Message) -> None:
        before = set(self.core.requests.values())
        self.messages.on_message(peer, message)
        self.all += [request for request in self.core.requests.values() if request not in before]

    def pick(self, *states: InboundState) -> InboundRequest | None:
        found = [request for request in self.core.requests.values() if not states or request.state in states]
        return self.chance.choice(found) if found else None

    def place(self) -> None:
        request = self.pick(InboundState.RECEIVING) or self.pick()
        if request is None:
            return
        ask = self.chance.choice(list(request.asks.values()))
        layer = self.chance.randrange(LAYERS)
        key = TransferKey(request.request_id, layer, layer + 1, 0, request.num_tokens, 0, ask.session.process, 0)
        session_id = ask.session.session_id
        try:
            self.receiver.place(session_id, key)
        except TransferRefused:
            return
        assert request in self.granted
        assert (request, key) not in self.noticed, "what has arrived is written again"
        mine = [other for (_, other), (one, _) in self.writing.items() if one is request]
        assert key not in mine, "one piece is written twice at once"
        self.writing[session_id, key] = request, True

    def placed(self) -> None:
        if not self.writing:
            return
        (session_id, key), (request, _) = self.chance.choice(list(self.writing.items()))
        assert request.blocks is not None
        if not request.has_ended:
            self.allocator.check(request.blocks)
        del self.writing[session_id, key]
        error = TransferError("broke") if self.chance.random() < 0.05 else None
        self.receiver.placed(session_id, key, 64, error)
        if self.chance.random() < 0.1:
            self.receiver.placed(session_id, key, 64, error)

    def notice(self) -> None:
        request = self.pick(InboundState.RECEIVING)
        if request is None:
            return
        for ask in list(request.heard()):
            for layer in range(LAYERS):
                key = TransferKey(request.request_id, layer, layer + 1, 0, request.num_tokens, 0, ask.session.process)
                before = request.noticed_bytes
                done = LayerDone(
                    request_id=request.request_id, buffer=0, src_rank=ask.session.process, dst_rank=0,
                    layer_start=layer, layer_stop=layer + 1, token_start=0, token_stop=request.num_tokens, nbytes=64,
                )  # fmt: skip
                self.messages.on_message(ask.session.peer, done)
                if request.noticed_bytes > before:
                    assert (request, key) not in self.noticed
                    self.noticed.add((request, key))
        for ask in list(request.heard()):
            if request.missing() is None or self.chance.random() < 0.05:
                complete = Complete(
                    request_id=request.request_id, first_token=None, num_tokens=request.num_tokens, nbytes=64 * LAYERS
                )
                missing, was_ready = request.missing(), request.state is InboundState.READY
                self.messages.on_message(ask.session.peer, complete)
                if self._is_ready(request) and not was_ready:
                    assert missing is None
                    assert len(request.asks) == request.engine.processes
                    assert all(one.complete is not None for one in request.asks.values())

    def _is_ready(self, request: InboundRequest) -> bool:
        return request.state is InboundState.READY

    def next_ready(self) -> None:
        if self.waiting:
            request = self.waiting.pop(0)
            if self.core.take(request):
                self.taken.append(request)

    def decode(self) -> None:
        """The decoder ends a request, well or not, and lets its blocks go."""
        if not self.taken:
            return
        request = self.taken.pop(self.chance.randrange(len(self.taken)))
        finished = Finished(
            request_id=request.request_id, token_ids=[], text="", verified=False, wrong=0, received_bytes=0,
            received_runs=0, times={},
        )  # fmt: skip
        if self.chance.random() < 0.5:
            self.core.finish(request, finished)
        else:
            self.core.fail(request, TransferError("wrong"))
        assert request.blocks is not None
        self.core.unhold(request.blocks)

    def load_some(self) -> None:
        if not self.loading:
            return
        request = self.loading.pop(0)
        error = TransferError("tier") if self.chance.random() < 0.2 else None
        self.core.on_loaded(request, error or Fetched())

    def peer_says(self) -> None:
        request = self.pick()
        if request is not None:
            name = request.request_id
            kinds: tuple[Message, ...] = (
                Failure(request_id=name, phase="prefill", reason="x"),
                Reference(request_id=name, buffer=0, layer=0, token_start=0, token_stop=1, data=b"x"),
            )
            ask = self.chance.choice(list(request.asks.values()))
            if ask.session.peer in self.core.sessions:
                self.messages.on_message(ask.session.peer, self.chance.choice(kinds))

    def cancel(self) -> None:
        if (request := self.pick()) is not None:
            self.core.cancel(request, "chance")

    def expire(self) -> None:
        if (request := self.pick()) is not None:
            request.deadline = 0.0
        self.core.tick(1.0)

    def lose(self) -> None:
        if self.chance.random() < 0.5:
            peer = self.chance.choice(PEERS)
            self.messages.on_lost(self.chance.choice(peer.addresses), "gone", departed=self.chance.random() < 0.2)
        elif (request := self.pick()) is not None:
            ask = self.chance.choice(list(request.asks.values()))
            self.receiver.closed(ask.session.session_id, "broke")

    def work(self) -> None:
        """The control thread and the scrubber go on."""
        if self.posted:
            self.posted.pop(0)()
        if self.scrubbing:
            self.scrubbing.pop(0)(True)

    def run(self) -> None:
        for _ in range(4):
            self.hello()
        progress = (
            self.ask, self.place, self.place, self.place, self.place, self.placed, self.placed, self.placed,
            self.notice, self.notice, self.next_ready, self.decode, self.load_some, self.load_some, self.work,
            self.work, self.hello,
        )  # fmt: skip
        faults = self.hello, self.hello, self.peer_says, self.cancel, self.expire, self.lose
        self.step(progress, faults)
        self.core.close(PeerLost("closing"))
        while self.writing or self.posted or self.scrubbing or self.taken or self.waiting:
            for event in (self.placed, self.work, self.next_ready, self.decode):
                event()
        self.check()
        for request in self.all:
            assert request.state is InboundState.ENDED, request
        assert not self.core.requests
        assert not self.core.draining
        assert self.core.queue is not None
        assert not len(self.core.queue)
        assert not self.receiver.num_placing
        assert self.core.num_ended == len(self.all)
        assert all_free(self.allocator)

    def check(self) -> None:
        for request, _ in self.writing.values():
            assert request.blocks is not None
            if request.state is not InboundState.ENDED:
                self.allocator.check(request.blocks)
            else:
                pytest.fail("blocks that are being written were returned")


@in_parts
@pytest.mark.timeout(1200)
def test_any_interleaving_keeps_the_invariants(first: int) -> None:
    run_part(World, first)


def test_the_interleavings_use_every_transition_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert transitions_of(World, InboundRequest, monkeypatch) == transitions_in(INBOUND)


def make_request(state: InboundState) -> InboundRequest:
    ask = TransferRequest(request_id="r", num_tokens=1, token_ids=[], max_tokens=0, deadline_s=1.0)
    engine = PrefillEngine("p", 1, ())
    return InboundRequest(engine, ask, (), Landing.__new__(Landing), 0.0, state=state)


@pytest.mark.parametrize("state", InboundState)
def test_only_transitions_of_the_table_are_allowed(state: InboundState) -> None:
    require_only_these(INBOUND[state], partial(make_request, state))


def require_found() -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception, PdtxError)):
        run_all(World, 1000)


def test_blocks_that_return_while_they_are_written_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    hold_nothing(monkeypatch)
    require_found()


def test_requests_that_stay_in_the_queue_of_a_dead_session_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdtx.engine.granting.GrantQueue.remove", lambda *_: None)
    require_found()


def test_blocks_that_return_twice_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    put_back = InboundControl._put_back

    def twice(core: InboundControl, ids: Sequence[Int64s]) -> None:
        put_back(core, ids)
        put_back(core, [np.array(group, np.int64) for group in ids])

    monkeypatch.setattr(InboundControl, "_put_back", twice)
    require_found()
