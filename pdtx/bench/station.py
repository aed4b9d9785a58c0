"""One end of the links that are measured: caches of a case, and a mover that posts transfers or answers them."""

import time
from collections import Counter
from collections.abc import Mapping
from typing import Self

from pdtx.address import join_address
from pdtx.bench.contents import Found
from pdtx.bench.station_bounds import check_size, check_work
from pdtx.bench.station_caches import CaseShape, case_shape
from pdtx.bench.station_contents import CaseCaches, region_sizes
from pdtx.bench.station_links import PostingLink, move_all
from pdtx.bench.station_memory import StationMemory
from pdtx.bench.station_pieces import Piece, Planner, link_facts, pieces_of
from pdtx.bench.station_receiver import LinkCount, StationReceiver, session_of
from pdtx.bench.work import LinkChecked, LinkMoved, Prepared, StationWork
from pdtx.engine.picking import ModePicker
from pdtx.errors import InputError
from pdtx.plan import Mode, load_costs
from pdtx.results.model import Case, Registration
from pdtx.transports import Mover, Path, Placement, Region, make_mover
from pdtx.transports.options import typed_options
from pdtx.transports.registry import mover_class

_ANSWER_DIRECT = ("inproc", "shm")
"""Movers over which packing on the way makes no difference, as their connections say once there is one."""


class Station:
    """What a process keeps for measuring, case after case. Not safe to use from several threads at once.

    The side that posts (push: prefill, pull: decode) calls connect() and move(); the other one listens.
    The side that is written to (decode) calls check().
    """

    def __init__(self, *, device: str = "cpu", max_bytes: int) -> None:
        """max_bytes: of all caches of a case; nothing is allocated above it. Raises InputError for no device."""
        if max_bytes < 1:
            raise InputError(f"max_bytes is {max_bytes}; a station needs 1 or more for its caches")
        self._memory = StationMemory(device, max_bytes)
        self._prepared: _PreparedCase | None = None

    def prepare(self, work: StationWork, host: str) -> Prepared:
        """Make the caches, the mover and the plans of a case; listen at host:0 if the peers connect to this side.

        Ends what was prepared before. Raises InputError for a case that cannot be or needs more than max_bytes,
        AddressInUse, TransferError for memory that cannot be registered.
        """
        self.release()
        check_work(work)
        shape = case_shape(work.case, work.pool_requests)
        self._memory.require(region_sizes(work, shape))
        check_size(work, shape, self._memory.max_bytes)
        pieces = {link.number: pieces_of(shape, link) for link in work.links}
        caches = CaseCaches(work, shape, pieces, self._memory)
        mover = _make_mover(work.case)
        try:
            self._prepared = _PreparedCase(work, shape, pieces, caches, mover)
            return self._prepared.open(host)
        except BaseException:
            self._prepared = None
            mover.close()
            raise

    def connect(self, link: int, address: str, token: bytes, timeout_s: float) -> Path:
        """Open a link's connection to the station that listens; return what carries its payload.

        Raises what Mover.connect raises, InputError for a link that is not of the case, or where the peers connect.
        """
        return self._case.connect(link, address, token, time.monotonic() + timeout_s)

    def facts(self, link: int) -> dict[str, object]:
        """Return what Prepared.links has of a link; once it is connected, modes are those of the connection."""
        return dict(self._case.facts[self._case.known(link)])

    def ready(self, iteration: int) -> None:
        """Write what iteration moves, or poison what it is to be written to; forget the counts of the one before.

        Without verification memory is written to once, for all iterations. Raises InputError before prepare().
        """
        self._case.ready(iteration)

    def move(self, links: tuple[int, ...], start_at: float, timeout_s: float) -> tuple[LinkMoved, ...]:
        """Wait until time.monotonic() is start_at, then move all of the links at once.

        timeout_s: from start_at on. Raises what ended the first transfer that failed, as a PdtxError; nothing of the
        iteration is under way then. Links that failed cannot be used any more.
        """
        return self._case.move(links, start_at, timeout_s)

    def stop(self, reason: str) -> None:
        """Make a move that is under way end soon, as aborted; its links cannot be used again. Safe from any thread."""
        prepared = self._prepared
        if prepared is not None:
            prepared.stop(reason)

    def check(self, links: tuple[int, ...], full: bool) -> tuple[LinkChecked, ...]:
        """Return what has arrived of the present iteration.

        full: look at every element, and for writes where none belonged, which are told with the first of links. What
        was looked for can be looked at once; ready() comes before the next look.
        """
        return self._case.check(links, full)

    def release(self) -> None:
        """End connections and the mover of the case; memory is kept for the next one. Idempotent."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared.close()

    def close(self) -> None:
        """Give back everything. Idempotent."""
        self.release()
        self._memory.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _case(self) -> "_PreparedCase":
        if self._prepared is None:
            raise InputError("the station has no case prepared; prepare() comes first")
        return self._prepared


# -- set-up ------------------------------------------------------------------------------------------------------------


def _make_mover(case: Case) -> Mover:
    cls = mover_class(case.mover)
    options = typed_options(case.mover, cls, [f"{key}={value}" for key, value in case.mover_options.items()])
    if case.streams is not None:
        if "streams" in options:
            raise InputError("streams are given twice, as an option of the mover and as an axis of their own")
        try:
            options |= typed_options(case.mover, cls, [f"streams={case.streams}"])
        except InputError:
            raise InputError(f"mover {case.mover} has no streams to choose; leave streams out, or take tcp") from None
    return make_mover(case.mover, **options)


# -- a case ------------------------------------------------------------------------------------------------------------


class _PreparedCase:
    """What a station has of the present case."""

    def __init__(
        self,
        work: StationWork,
        shape: CaseShape,
        pieces: Mapping[int, tuple[Piece, ...]],
        caches: CaseCaches,
        mover: Mover,
    ) -> None:
        self.mover = mover
        self._work, self._shape, self._pieces, self._caches = work, shape, pieces, caches
        self._posts = work.role == ("prefill" if work.case.op == "push" else "decode")
        self._planner, self._costs, self._mode = Planner(shape), load_costs(), _mode(work.case)
        self._receiver = StationReceiver(
            {number: {piece.name: piece for piece in found} for number, found in pieces.items()},
            place=self._place if work.role == "decode" else None,
            offer=self._offer if work.role == "prefill" else None,
        )
        self._links = dict[int, PostingLink]()
        self._moved = dict[int, LinkMoved]()
        self._iteration: int | None = None
        picker = self._picker(stages=work.case.op == "push" and work.case.mover not in _ANSWER_DIRECT)
        self.facts = {number: link_facts(shape, found, self._planner, picker) for number, found in pieces.items()}

    def open(self, host: str) -> Prepared:
        """Register the memory, and listen if the peers connect to this side."""
        answers = [self.mover.register(region) for region in self._caches.regions.values()]
        found = [answer for answer in answers if answer is not None]
        total = Registration(
            node=0,  # the driver knows which
            nbytes=sum(one.nbytes for one in found),
            seconds=sum(one.seconds for one in found),
            regions=len(found),
        )
        registrations = (total,) if found else ()
        if self._posts:
            return Prepared(self.facts, registrations)
        address = self.mover.listen(join_address(host, 0), self._receiver)
        return Prepared(self.facts, registrations, address, self._receiver.token)

    def close(self) -> None:
        """End connections and the mover; the memory is not held any more."""
        self.mover.close()
        # Links and the receiver know this case, and it knows them: Python would keep the memory until it looks.
        self._links.clear()
        self._receiver.close()

    def known(self, link: int) -> int:
        """Return the number of a link. Raises InputError for one that is not of the case."""
        if link not in self._pieces:
            raise InputError(f"link {link} is not one of this station's, {sorted(self._pieces)}")
        return link

    def connect(self, link: int, address: str, token: bytes, deadline: float) -> Path:
        """See Station."""
        if not self._posts:
            raise InputError(f"with {self._work.case.op} the {self._work.role} side listens, and does not connect")
        pieces = self._pieces[self.known(link)]
        connection = self.mover.connect(address, session_of(link), token, deadline)
        earlier = self._links.pop(link, None)
        if earlier is not None:
            earlier.connection.close()
        picker = self._picker(stages=self._work.case.op == "push" and connection.stages)
        self._links[link] = PostingLink(
            link, self._work.case, pieces, self._planner, self._region, connection, picker
        )  # fmt: skip
        self.facts[link] = link_facts(self._shape, pieces, self._planner, picker)
        return connection.path

    def ready(self, iteration: int) -> None:
        """See Station."""
        self._iteration, self._moved = iteration, {}
        self._receiver.begin(iteration)
        self._caches.ready(iteration)

    def move(self, links: tuple[int, ...], start_at: float, timeout_s: float) -> tuple[LinkMoved, ...]:
        """See Station."""
        iteration = self._begun
        lacking = next((link for link in links if self.known(link) not in self._links), None)
        if lacking is not None:
            raise InputError(f"link {lacking} is not connected; connect() comes first")
        if not links:
            return ()
        found = move_all([self._links[link] for link in links], iteration, start_at, start_at + timeout_s)
        self._moved |= {moved.link: moved for moved in found}
        return tuple(found)

    def stop(self, reason: str) -> None:
        """See Station."""
        for link in list(self._links.values()):
            link.stop(reason)

    def check(self, links: tuple[int, ...], full: bool) -> tuple[LinkChecked, ...]:
        """See Station."""
        if self._work.role != "decode":
            raise InputError("nothing is written to the prefill side; check() is asked of the decode side")
        iteration, answers = self._begun, list[LinkChecked]()
        strays = self._caches.strays() if full else Found()
        for link in links:
            count = self._count(self.known(link))
            pieces = {piece.name: piece for piece in self._pieces[link]}
            expected = self.facts[link]["wire_bytes"]
            deliveries = count.deliveries(pieces, int(str(expected)))
            found = self._caches.compare(link, iteration) + strays if full else Found()
            first = f"iteration {iteration}: {found.first}" if found.first else ""
            answers.append(LinkChecked(link, count.nbytes, deliveries, found.wrong if full else None, first))
            strays = Found()
        return tuple(answers)

    def _count(self, link: int) -> LinkCount:
        """Return what has come over a link: as its receiver was told, or, of gets, as they have ended here."""
        moved = self._moved.get(link)
        if not self._posts or moved is None:
            return self._receiver.count(link)
        names = Counter(
            (one.request, one.buffer, one.layer_start, one.layer_stop, one.src_rank, one.dst_rank)
            for one in moved.transfers
        )
        return LinkCount(moved.claimed_bytes, names)

    @property
    def _begun(self) -> int:
        if self._iteration is None:
            raise InputError("no iteration has begun; ready() comes first")
        return self._iteration

    # -- for links and the receiver -----------------------------------------------------------------------------------

    def _picker(self, *, stages: bool) -> ModePicker:
        device = self._caches.device.type
        return ModePicker(self._mode, stages=stages, mover=self._work.case.mover, device=device, table=self._costs)

    def _region(self, piece: Piece) -> Region:
        rank = piece.move.src_rank if self._work.role == "prefill" else piece.move.dst_rank
        return self._caches.regions[piece.match.index, rank]

    def _place(self, piece: Piece) -> Placement:
        return Placement(self._region(piece), self._planner.arriving(piece).destination())

    def _offer(self, piece: Piece) -> Placement:
        return Placement(self._region(piece), self._planner.offered(piece).source())


def _mode(case: Case) -> Mode:
    if case.mode == "staged" and case.op == "pull":
        raise InputError("what is pulled is not packed on the way; leave mode staged out, or push")
    return Mode(case.mode)
