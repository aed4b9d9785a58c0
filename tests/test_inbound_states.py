"""The consumer's control under random interleavings: no thread, no socket, every event in any order.

Invariants: blocks come back exactly once, and never while a payload is written into them; each request ends exactly
once; nothing is granted to a dead session; a session's requests have left the queue before its blocks are granted.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import numpy as np
import pytest

from pdtx.cache import GroupAllocator, GroupBlocks
from pdtx.engine import facts_of
from pdtx.engine.inbound import InboundRequest, Session
from pdtx.engine.inbound_control import InboundControl
from pdtx.engine.landing import Landing
from pdtx.engine.receiving import PayloadReceiver
from pdtx.engine.states import INBOUND, InboundState
from pdtx.errors import PdtxError, PeerLost, TransferError, TransferRefused
from pdtx.plan.runs import Int64s
from pdtx.protocol import (
    PROTOCOL_VERSION,
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
SOURCE = describe(make_cache(num_blocks=9, num_layers=LAYERS))
DESTINATION = caches_of(make_cache("flashinfer_hnd", 16, num_blocks=BLOCKS, num_layers=LAYERS))
FACTS = facts_of(describe(DESTINATION))
PEERS = (b"a", b"b")


class World(RandomWorld):
    """A consumer's control with everything around it under the test's hand."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.numbers = count()
        self.allocator = GroupAllocator({group.name: group.num_blocks for group in DESTINATION.groups})
        self.receiver = PayloadReceiver(DESTINATION, self, None)
        scrubs, self.tiers = self.chance.random() < 0.5, self.chance.random() < 0.3
        self.core = InboundControl(
            DESTINATION, FACTS, self.allocator, self.receiver, self, align=1, max_deadline_s=1e6, scrubs=scrubs
        )
        self.posted, self.scrubbing = list[Callable[[], object]](), list[Callable[[bool], object]]()
        self.loading, self.loads_held = list[InboundRequest](), dict[InboundRequest, GroupBlocks]()
        self.granted = list[InboundRequest]()
        self.writing = dict[tuple[str, TransferKey], tuple[InboundRequest, bool]]()
        self.taken = list[InboundRequest]()
        self.waiting = list[InboundRequest]()
        self.all = list[InboundRequest]()
        self.ends = dict[InboundRequest, int]()

    # -- effects ------------------------------------------------------------------------------------------------------

    def send(self, peer: bytes, message: Message) -> None:
        if isinstance(message, Grant):
            request = self.core.requests[peer, message.request_id]
            session = request.session
            assert self.core.sessions.get(peer) is session, "granted to a dead session"
            assert request.error is None
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
        if isinstance(message, Failure | Refuse):
            assert (peer, message.request_id) not in self.core.requests or isinstance(message, Refuse)

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

    def on_payload_failed(self, session_id: str, request_id: str, landing: Landing, error: PdtxError) -> None:
        self.post(lambda: self.core.on_payload_failed(session_id, request_id, landing, error))

    def on_payload_twice(self, key: TransferKey) -> None:
        self.post(lambda: self.core.on_payload_twice(key))

    def on_connection_closed(self, session_id: str, reason: str) -> None:
        self.post(lambda: self.core.on_connection_closed(session_id, reason))

    # -- events -------------------------------------------------------------------------------------------------------

    def hello(self) -> None:
        peer = PEERS[self.chance.random() < 0.3]
        hello = Hello(
            protocol=PROTOCOL_VERSION, pdtx_version="1", engine_id="p", incarnation="1", cache=SOURCE, movers=[]
        )
        self.core.on_hello(peer, hello, lambda session: Refuse(request_id="welcome", reason=session.session_id))

    def ask(self) -> None:
        name = f"r{next(self.numbers)}" if self.chance.random() < 0.8 else "again"
        tokens = self.chance.choice((0, 5, 16, 40, 1000))
        ask = TransferRequest(request_id=name, num_tokens=tokens, token_ids=[], max_tokens=0, deadline_s=1e6)
        self._hear(ask)

    def _hear(self, message: Message) -> None:
        before = set(self.core.requests.values())
        self.core.on_message(PEERS[self.chance.random() < 0.2], message)
        self.all += [request for request in self.core.requests.values() if request not in before]

    def pick(self, *states: InboundState) -> InboundRequest | None:
        found = [request for request in self.core.requests.values() if not states or request.state in states]
        return self.chance.choice(found) if found else None

    def place(self) -> None:
        request = self.pick(InboundState.RECEIVING) or self.pick()
        if request is None:
            return
        layer = self.chance.randrange(LAYERS)
        key = TransferKey(request.request_id, layer, layer + 1, 0, request.num_tokens)
        session_id = request.session.session_id
        try:
            self.receiver.place(session_id, key)
        except TransferRefused:
            return
        assert request in self.granted
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
        for layer in range(LAYERS):
            done = LayerDone(
                request_id=request.request_id, buffer=0, src_rank=0, dst_rank=0, layer_start=layer,
                layer_stop=layer + 1, token_start=0, token_stop=request.num_tokens, nbytes=64,
            )  # fmt: skip
            self.core.on_message(request.session.peer, done)
        if request.missing() is None or self.chance.random() < 0.1:
            complete = Complete(
                request_id=request.request_id, first_token=None, num_tokens=request.num_tokens, nbytes=64 * LAYERS
            )
            missing = request.missing()
            self.core.on_message(request.session.peer, complete)
            assert missing is None or request.error is not None

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
            self.core.on_message(request.session.peer, self.chance.choice(kinds))

    def cancel(self) -> None:
        if (request := self.pick()) is not None:
            self.core.cancel(request, "chance")

    def expire(self) -> None:
        if (request := self.pick()) is not None:
            request.deadline = 0.0
        self.core.tick(1.0)

    def lose(self) -> None:
        if self.chance.random() < 0.5:
            self.core.on_lost(self.chance.choice(PEERS), "gone")
        elif (request := self.pick()) is not None:
            self.receiver.closed(request.session.session_id, "broke")

    def work(self) -> None:
        """The control thread and the scrubber go on."""
        if self.posted:
            self.posted.pop(0)()
        if self.scrubbing:
            self.scrubbing.pop(0)(True)

    def run(self) -> None:
        self.hello()
        progress = (
            self.ask, self.place, self.place, self.place, self.placed, self.placed, self.notice, self.next_ready,
            self.decode, self.load_some, self.load_some, self.work, self.work,
        )  # fmt: skip
        faults = self.hello, self.peer_says, self.cancel, self.expire, self.lose
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
    session = Session.__new__(Session)
    return InboundRequest(session, ask, (), Landing.__new__(Landing), 0.0, state=state)


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
