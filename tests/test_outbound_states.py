"""The producer's control under random interleavings: no thread, no socket, every event in any order.

Invariants: blocks come back exactly once; each request has exactly one outcome; nothing is asked of a dead session; a
completion is sent only when all that was shipped has been delivered.
"""

from collections import Counter

import pytest

from pdtx.cache import GroupAllocator, KVCaches
from pdtx.engine import facts_of, match_caches
from pdtx.engine.matching import Match
from pdtx.engine.outbound import OutboundRequest, Piece, ReadySlice
from pdtx.engine.outbound_control import OutboundControl
from pdtx.engine.picking import ModePicker
from pdtx.engine.route import Route
from pdtx.engine.shipping import Asked, Item, Posted, Probe
from pdtx.engine.states import OUTBOUND, OutboundState
from pdtx.errors import DeadlineExceeded, OutOfBlocks, PeerLost, PeerUnreachable, TransferError
from pdtx.plan import Choice, CostTable, Mode
from pdtx.protocol import (
    Complete,
    DataEndpoint,
    Failure,
    Finished,
    Grant,
    GrantedBlocks,
    LayerDone,
    Message,
    ReadReference,
    Refuse,
    Release,
    Welcome,
)
from pdtx.testing.wrapped import WrappedConnection
from pdtx.transports import TransferHandle
from pdtx.transports.inproc import InprocConnection
from tests.broken_engines import give_back_at_once
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
SOURCE = caches_of(make_cache(num_blocks=BLOCKS, num_layers=LAYERS))
DESTINATION = caches_of(make_cache("flashinfer_hnd", 32, num_blocks=BLOCKS, num_layers=LAYERS))
MATCH: Match = match_caches(facts_of(describe(SOURCE)), facts_of(describe(DESTINATION)))
WELCOME = Welcome(
    protocol=1, pdtx_version="1", engine_id="decode", incarnation="1", session_id="s", token=bytes(32),
    cache=describe(DESTINATION), data_endpoints=[DataEndpoint(mover="inproc", address="x")], lease_s=1.0, verify="off",
)  # fmt: skip
CHOICE = Choice(Mode.DIRECT, 0.0, 0.0, "")


class FakeConnection(WrappedConnection):
    def __init__(self) -> None:
        super().__init__(InprocConnection.__new__(InprocConnection))
        self.broken: PeerLost | None = None

    @property
    def ended(self) -> PeerLost | None:
        return self.broken


class World(RandomWorld):
    """A producer's control with everything around it under the test's hand."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.allocator = GroupAllocator({group.name: group.num_blocks for group in SOURCE.groups})
        self.core = OutboundControl(KVCaches(SOURCE.groups, [(0, SOURCE.buffers[0])]), self.allocator, self)
        self.sent, self.items = list[Message](), list[Item]()
        self.posted = list[Posted]()
        self.requests = list[OutboundRequest]()
        self.outcomes = Counter[int]()
        self.session_alive, self.asked_in, self.epoch = False, dict[str, int](), 0
        self.opening = False
        self._open()

    # -- effects ------------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        self.sent.append(message)
        match message:
            case Complete():
                assert self.asked_in[message.request_id] == self.epoch or self.session_alive
                request = self.core.requests[message.request_id]
                assert not request.unsent
                assert request.is_computed
                assert request.grant is not None
            case LayerDone():
                assert message.request_id in self.core.requests

    def ask(self, request: OutboundRequest) -> None:
        assert self.session_alive, "a request was asked for in a dead session"
        self.asked_in[request.request_id] = self.epoch

    def ship(self, item: Item) -> None:
        self.items.append(item)

    def open_session(self, old: Route | None, timeout_s: float) -> None:
        assert not self.opening
        self.opening = True
        self.session_alive = False
        for posted in list(self.posted):  # the old connection is closed
            if posted.piece.route is old:
                self._end(posted, PeerLost("the connection was closed"))

    def ring(self) -> None:
        pass

    # -- events -------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self.opening, self.session_alive = False, True
        self.epoch += 1
        modes = ModePicker(Mode.DIRECT, stages=False, mover="inproc", device="cpu", table=CostTable({}))
        self.core.on_opened(Route(WELCOME, MATCH, FakeConnection(), modes), None)

    def _end(self, posted: Posted, error: TransferError | PeerLost | None) -> None:
        self.posted.remove(posted)
        handle = posted.handle
        if not handle.state.final:
            if error is None or self.chance.random() < 0.5:
                handle.post()
            handle.finish(error)
        self.core.on_piece_end(posted.piece, handle)

    def begin(self) -> None:
        tokens = self.chance.choice((0, 3, 16, 20))
        request = OutboundRequest(f"r{len(self.requests)}", tokens, deadline=1e12)
        places = [group.table_blocks(tokens) for group in SOURCE.groups]
        try:
            self.core.begin(request, places)
        except (OutOfBlocks, PeerLost):
            return
        self.requests.append(request)

    def live(self, *states: OutboundState) -> OutboundRequest | None:
        found = [each for each in self.requests if not states or each.state in states]
        return self.chance.choice(found) if found else None

    def grant(self) -> None:
        request = self.live(OutboundState.ASKED)
        if request is not None:
            blocks = GrantedBlocks(block_ids=[1, 2], generations=[0, 0])
            groups = [blocks] * self.chance.choice((1, 1, 1, 2))
            cached = self.chance.choice((0, 0, 16, 1000))
            self._say(Grant(request_id=request.request_id, groups=groups, deadline_s=1.0, cached_tokens=cached))

    def _say(self, message: Message) -> None:
        self.core.on_message(message)

    def ready(self) -> None:
        request = self.live()
        if request is not None:
            layer = self.chance.randrange(LAYERS)
            self.core.on_ready(request, ReadySlice(0, layer, 0, request.num_tokens, lambda: None))

    def computed(self) -> None:
        if (request := self.live()) is not None:
            self.core.computed(request, 1)

    def work(self) -> None:
        """The shipper does its next item."""
        if not self.items:
            return
        item = self.items.pop(0)
        match item:
            case Asked():
                self.core.on_read(item, TransferError("no") if self.chance.random() < 0.2 else None)
            case Probe():
                error = TransferError("dead") if self.chance.random() < 0.3 else None
                self.core.on_probed(item.route, error)
            case Piece():
                self._post(item)

    def _post(self, piece: Piece) -> None:
        if piece.request.has_outcome:
            self.core.on_dropped(piece, None)
        elif self.chance.random() < 0.1:
            self.core.on_dropped(piece, TransferError("no room"))
        else:
            handle = TransferHandle(piece.key, 8, "peer", piece.request.deadline)
            posted = Posted(piece, handle, CHOICE, 1, 8, 0.0)
            self.posted.append(posted)
            self.core.on_posted(posted)

    def deliver(self) -> None:
        if self.posted:
            posted = self.chance.choice(self.posted)
            errors = (None, None, None, TransferError("broke"), DeadlineExceeded("room", "peer", 1.0))
            self._end(posted, self.chance.choice(errors))

    def release(self) -> None:
        if (request := self.live(OutboundState.COMPLETED)) is not None and self.session_alive:
            self._say(Release(request_id=request.request_id))

    def consumer_says(self) -> None:
        request = self.live()
        if request is None:
            return
        name = request.request_id
        finished = Finished(
            request_id=name, token_ids=[1], text="", verified=True, wrong=0, received_bytes=1, received_runs=1, times={}
        )
        ask = ReadReference(request_id=name, buffer=0, layer=0, token_start=0, token_stop=1)
        kinds: tuple[Message, ...] = (
            Failure(request_id=name, phase="p", reason="x"), Refuse(request_id=name, reason="x"),
            Release(request_id=name), Release(request_id=name), finished, ask, ask,
        )  # fmt: skip
        if self.session_alive:
            self._say(self.chance.choice(kinds))

    def cancel(self) -> None:
        if (request := self.live()) is not None:
            self.core.cancel(request, "chance")

    def expire(self) -> None:
        if (request := self.live()) is not None:
            request.deadline = 0.0
        self.core.tick(1.0)

    def lose(self) -> None:
        if self.chance.random() < 0.5 and self.core.session.route is not None:
            connection = self.core.session.route.connection
            assert isinstance(connection, FakeConnection)
            connection.broken = PeerLost("the connection broke")
        else:
            self.session_alive = False
            self.core.on_lost(PeerLost("the channel broke"))

    def opened(self) -> None:
        if self.opening:
            if self.chance.random() < 0.7:
                self._open()
            else:
                self.opening = False
                final = self.chance.random() < 0.1
                self.core.session.retry_at = 0.0
                self.core.on_not_opened(PeerUnreachable("nobody") if final else PeerLost("silent"))
        self.core.session.retry_at = 0.0

    def run(self) -> None:
        progress = (
            self.begin, self.grant, self.grant, self.ready, self.ready, self.computed, self.work, self.work, self.work,
            self.deliver, self.deliver, self.opened, self.release,
        )  # fmt: skip
        faults = self.consumer_says, self.cancel, self.expire, self.lose
        self.step(progress, faults)
        while self.items or self.posted or self.opening:
            self.work()
            self.deliver()
            self.opened()
        self.core.close(PeerLost("closed"))
        while self.items or self.posted:
            self.work()
            self.deliver()
        self.check()
        for request in self.requests:
            assert request.has_outcome, request
            assert request.state is OutboundState.ENDED, request
            assert not request.unsent
        assert not self.core.requests
        assert not self.core.draining
        assert all_free(self.allocator)

    def check(self) -> None:
        for number, request in enumerate(self.requests):
            assert request.unsent >= 0
            assert (request.error is None) or (request.finished is None)
            outcome = id(request.error) if request.error is not None else id(request.finished)
            if request.has_outcome:
                assert self.outcomes.setdefault(number, outcome) == outcome, "a second outcome"
            held = sum(len(pool) for pool in request.blocks.groups) if request.blocks is not None else 0
            assert not (request.returned and (request.unsent or request.reading)), f"{held} blocks are being read"


@in_parts
@pytest.mark.timeout(1200)
def test_any_interleaving_keeps_the_invariants(first: int) -> None:
    run_part(World, first)


def test_the_interleavings_use_every_transition_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert transitions_of(World, OutboundRequest, monkeypatch) == transitions_in(OUTBOUND)


@pytest.mark.parametrize("state", OutboundState)
def test_only_transitions_of_the_table_are_allowed(state: OutboundState) -> None:
    require_only_these(OUTBOUND[state], lambda: OutboundRequest("r", 1, 0.0, state=state))


def test_an_ended_request_that_gives_its_blocks_back_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tooth: without the count of pieces and readers, blocks come back while they are read."""
    give_back_at_once(monkeypatch)
    with pytest.raises(AssertionError):
        run_all(World, 500)


def test_a_second_outcome_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cancel = OutboundControl.cancel

    def again(core: OutboundControl, request: OutboundRequest, reason: str) -> None:
        cancel(core, request, reason)
        request.error = TransferError("again")

    monkeypatch.setattr(OutboundControl, "cancel", again)
    with pytest.raises(AssertionError):
        run_all(World, 500)
