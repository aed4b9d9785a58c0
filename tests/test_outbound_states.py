"""The producer's control under random interleavings: no thread, no socket, every event in any order.

Invariants: blocks come back exactly once; each request has exactly one outcome; nothing is asked of a dead session; a
completion is sent only when all that was shipped has been delivered; what a consumer still has is not sent again; an
offer that was read well was read by all processes.
"""

from collections import Counter
from itertools import count

import pytest

from pdtx.cache import GroupAllocator, KVCaches
from pdtx.engine import facts_of, match_caches
from pdtx.engine.matching import Match
from pdtx.engine.outbound import OutboundRequest, ReadySlice
from pdtx.engine.outbound_control import OutboundControl
from pdtx.engine.outbound_leg import Leg, Piece
from pdtx.engine.outbound_messages import OutboundMessages
from pdtx.engine.outbound_session import DecodeEngine, OutboundSession
from pdtx.engine.picking import ModePicker
from pdtx.engine.route import Route
from pdtx.engine.shipping import Asked, Item, Posted, Probe
from pdtx.engine.states import LEG, OUTBOUND, LegState, OutboundLife, OutboundState
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
    Part,
    Pull,
    ReadReference,
    Refuse,
    Release,
    Renew,
    Welcome,
)
from pdtx.testing.wrapped import WrappedConnection
from pdtx.transports import TransferHandle, TransferKey
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


class FakeChannel:
    """A control channel of which the test knows what became."""

    address, lost = "x", None

    def send(self, message: Message | bytes) -> None: ...

    def give_up(self, reason: str) -> None: ...

    def close(self, linger_s: float = 1.0) -> None: ...


class World(RandomWorld):
    """A producer's control with everything around it under the test's hand: consumers of one and of two processes.

    Some producers resume; some requests are offered, and pulled.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.allocator = GroupAllocator({group.name: group.num_blocks for group in SOURCE.groups})
        cache = KVCaches(SOURCE.groups, [(0, SOURCE.buffers[0])])
        self.core = OutboundControl(cache, self.allocator, self, resumes=self.chance.random() < 0.5)
        self.messages = OutboundMessages(self.core)
        self.items, self.posted = list[Item](), list[Posted]()
        self.requests = list[OutboundRequest]()
        self.outcomes = Counter[int]()
        self.alive = dict[OutboundSession, bool]()
        self.opening = list[OutboundSession]()
        self.attempts, self.held = count(1), dict[Leg, set[TransferKey]]()
        self.all_sessions = list[OutboundSession]()
        for processes in (1, 2):
            sessions = [OutboundSession(FakeChannel()) for _ in range(processes)]
            self.all_sessions += sessions
            self.core.add_engine(DecodeEngine(f"decode-{processes}", processes, sessions))
            for session in sessions:
                self._open(session)

    # -- effects ------------------------------------------------------------------------------------------------------

    def send(self, session: OutboundSession, message: Message) -> None:
        match message:
            case Complete():
                assert self.alive[session]
                leg = self.leg_of(session, message.request_id)
                assert not leg.pending
                assert leg.request.is_computed
                assert leg.grant is not None
                assert message.nbytes == 8 * len(self.noticed(leg))
            case LayerDone():
                leg = self.leg_of(session, message.request_id)
                key = TransferKey(
                    message.request_id, message.layer_start, message.layer_stop, message.token_start,
                    message.token_stop, message.buffer, message.src_rank, message.dst_rank,
                )  # fmt: skip
                assert key not in self.noticed(leg), "a piece was delivered twice"
                self.noticed(leg).add(key)

    def leg_of(self, session: OutboundSession, request_id: str) -> Leg:
        (leg,) = (leg for leg in self.core.requests[request_id].legs if leg.session is session)
        return leg

    def noticed(self, leg: Leg) -> set[TransferKey]:
        """What the consumer holds of a leg, and has heard of."""
        return self.held.setdefault(leg, set())

    def ask(self, leg: Leg) -> None:
        assert self.alive[leg.session], "a request was asked for in a dead session"
        if self.chance.random() < 0.2:  # the consumer has come back empty
            self.noticed(leg).clear()

    def next_attempt(self) -> int:
        return next(self.attempts)

    def ship(self, item: Item) -> None:
        self.items.append(item)

    def open_session(self, session: OutboundSession, timeout_s: float) -> None:
        assert session not in self.opening
        self.opening.append(session)
        self.alive[session] = False
        for posted in list(self.posted):  # the old connection is closed
            if posted.piece.route is session.route:
                self._end(posted, PeerLost("the connection was closed"))

    def ring(self) -> None:
        pass

    # -- events -------------------------------------------------------------------------------------------------------

    def _open(self, session: OutboundSession) -> None:
        self.alive[session] = True
        modes = ModePicker(Mode.DIRECT, stages=False, mover="inproc", device="cpu", table=CostTable({}))
        self.core.on_opened(session, Route(WELCOME, MATCH, FakeConnection(), modes), None)

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
        request = OutboundRequest(f"r{len(self.requests)}", tokens, deadline=1e12, attempt=self.next_attempt())
        if self.chance.random() < 0.3:
            request.lease_s, request.generation = 1e6, 7
        places = [group.table_blocks(tokens) for group in SOURCE.groups]
        try:
            self.core.begin(request, places, self.chance.choice(self.core.engines))
        except (OutOfBlocks, PeerLost):
            return
        self.requests.append(request)

    def live(self, *states: OutboundState) -> OutboundRequest | None:
        found = [each for each in self.requests if not states or each.state in states]
        return self.chance.choice(found) if found else None

    def leg(self, *states: LegState) -> Leg | None:
        found = [leg for each in self.requests if not each.has_outcome for leg in each.legs if leg.state in states]
        return self.chance.choice(found) if found else None

    def pull(self) -> None:
        request, session = self.live(), self.chance.choice(self.all_sessions)
        if request is not None and self.alive[session]:
            generation = self.chance.choice((7, 7, None, 8))
            self._say(session, Pull(request_id=request.request_id, generation=generation))
            self._say(session, Renew(request_ids=[request.request_id]))

    def grant(self) -> None:
        leg = self.leg(LegState.ASKED)
        if leg is not None and self.alive[leg.session]:
            blocks = GrantedBlocks(block_ids=[1, 2], generations=[0, 0])
            groups = [blocks] * self.chance.choice((1, 1, 1, 1, 1, 2))
            cached = self.chance.choice((0, 0, 0, 0, 1000)) if not self.noticed(leg) else 0
            attempt = self.chance.choice((leg.attempt, leg.attempt, leg.attempt + 1000))
            arrived = [
                Part(
                    buffer=key.buffer, src_rank=key.src_rank, dst_rank=key.dst_rank, layer_start=key.layer_start,
                    layer_stop=key.layer_stop, token_start=key.token_start, token_stop=key.token_stop,
                )
                for key in self.noticed(leg)
            ]  # fmt: skip
            name = leg.request.request_id
            grant = Grant(
                request_id=name, groups=groups, deadline_s=1.0, cached_tokens=cached, attempt=attempt, arrived=arrived
            )
            self._say(leg.session, grant)
            assert attempt == leg.attempt or leg.state is LegState.ASKED, "a late grant was taken"

    def _say(self, session: OutboundSession, message: Message) -> None:
        self.messages.on_message(session, message)

    def ready(self) -> None:
        request = self.live()
        if request is not None:
            layer = self.chance.choice(
                [at for at in range(LAYERS) if at not in {r.layer for r in request.ready}] or [0]
            )
            if layer not in {ready.layer for ready in request.ready}:
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
        if not piece.is_current:
            self.core.on_dropped(piece, None)
        elif self.chance.random() < 0.05:
            self.core.on_dropped(piece, TransferError("no room"))
        else:
            assert piece.key not in self.noticed(piece.leg), "what has arrived is sent again"
            handle = TransferHandle(piece.key, 8, "peer", piece.request.deadline)
            posted = Posted(piece, handle, CHOICE, 1, 8, 0.0)
            self.posted.append(posted)
            self.core.on_posted(posted)

    def deliver(self) -> None:
        if self.posted:
            posted = self.chance.choice(self.posted)
            errors = (None, None, None, None, None, TransferError("broke"), DeadlineExceeded("room", "peer", 1.0))
            broken = posted.piece.route.ended
            self._end(posted, broken if isinstance(broken, PeerLost) else self.chance.choice(errors))

    def release(self) -> None:
        if (leg := self.leg(LegState.COMPLETED)) is not None and self.alive[leg.session]:
            self._say(leg.session, Release(request_id=leg.request.request_id))

    def finish(self) -> None:
        if (leg := self.leg(LegState.RELEASED, LegState.RELEASED, LegState.COMPLETED)) is not None and self.alive[
            leg.session
        ]:
            self._say(leg.session, finished(leg.request.request_id))

    def consumer_says(self) -> None:
        request, session = self.live(), self.chance.choice(self.all_sessions)
        if request is None or not self.alive[session]:
            return
        name = request.request_id
        ask = ReadReference(request_id=name, buffer=0, layer=0, token_start=0, token_stop=1)
        kinds: tuple[Message, ...] = (
            Failure(request_id=name, phase="p", reason="x"), Refuse(request_id=name, reason="x"),
            Release(request_id=name), Release(request_id=name), finished(name), ask, ask,
        )  # fmt: skip
        self._say(session, self.chance.choice(kinds))

    def cancel(self) -> None:
        if (request := self.live()) is not None:
            self.core.cancel(request, "chance")

    def expire(self) -> None:
        if (request := self.live()) is not None:
            if self.chance.random() < 0.5:
                request.deadline = 0.0
            elif request.lease_s:
                request.lease_end = 0.0
        self.core.tick(1.0)

    def lose(self) -> None:
        session = self.chance.choice(self.all_sessions)
        if self.chance.random() < 0.5 and session.route is not None:
            connection = session.route.connection
            assert isinstance(connection, FakeConnection)
            connection.broken = PeerLost("the connection broke")
        else:
            self.alive[session] = False
            self.core.on_lost(session, PeerLost("the channel broke"))

    def opened(self) -> None:
        for session in self.all_sessions:
            session.retry_at = 0.0
        if self.opening:
            session = self.opening.pop()
            if self.chance.random() < 0.7:
                self._open(session)
            else:
                final = self.chance.random() < 0.1
                self.core.on_not_opened(session, PeerUnreachable("nobody") if final else PeerLost("silent"))
                session.retry_at = 0.0

    def run(self) -> None:
        progress = (
            self.begin, self.grant, self.grant, self.grant, self.ready, self.ready, self.computed, self.work, self.work,
            self.work, self.deliver, self.deliver, self.opened, self.release, self.release, self.finish, self.finish,
            self.pull,
        )  # fmt: skip
        faults = self.consumer_says, self.cancel, self.expire, self.lose
        self.step(progress, faults)
        self.core.close(PeerLost("closed"))
        while self.items or self.posted or self.opening:
            self.work()
            self.deliver()
            self.opened()
        self.check()
        for request in self.requests:
            assert request.has_outcome, request
            assert request.state is OutboundState.ENDED, request
            assert not request.unsent
        assert not self.core.requests
        assert not self.core.draining
        assert not any(session.new or session.live for session in self.all_sessions)
        assert all_free(self.allocator)

    def check(self) -> None:
        for number, request in enumerate(self.requests):
            assert all(leg.unsent >= leg.pending >= 0 for leg in request.legs)
            assert (request.error is None) or (request.finished is None)
            outcome = id(request.error) if request.error is not None else id(request.finished)
            if request.has_outcome:
                assert self.outcomes.setdefault(number, outcome) == outcome, "a second outcome"
            held = sum(len(pool) for pool in request.blocks.groups) if request.blocks is not None else 0
            assert not (request.returned and (request.unsent or request.reading)), f"{held} blocks are being read"
            if request.finished is not None and request.lease_s:
                assert len(request.legs) == request.legs[0].session.engine.processes  # type: ignore[union-attr]


def finished(name: str) -> Finished:
    return Finished(
        request_id=name, token_ids=[1], text="", verified=True, wrong=0, received_bytes=1, received_runs=1, times={}
    )


@in_parts
@pytest.mark.timeout(1200)
def test_any_interleaving_keeps_the_invariants(first: int) -> None:
    run_part(World, first)


def test_the_interleavings_use_every_transition_of_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert transitions_of(World, Leg, monkeypatch) == transitions_in(LEG)
    assert transitions_of(World, OutboundRequest, monkeypatch, "life") == transitions_in(OUTBOUND)


@pytest.mark.parametrize("state", LegState)
def test_only_transitions_of_the_legs_table_are_allowed(state: LegState) -> None:
    require_only_these(LEG[state], lambda: Leg(OutboundRequest("r", 1, 0.0), OutboundSession(), state))


@pytest.mark.parametrize("life", OutboundLife)
def test_only_transitions_of_the_requests_table_are_allowed(life: OutboundLife) -> None:
    require_only_these(OUTBOUND[life], lambda: OutboundRequest("r", 1, 0.0, life=life), "life")


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
