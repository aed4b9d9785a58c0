"""What a station does for its mover where peers connect to it: it admits links, places or offers pieces, and counts."""

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pdtx.bench.station_pieces import Piece, PieceName
from pdtx.errors import AuthenticationFailed, PdtxError, TransferRefused
from pdtx.transports import Placement, TransferKey

logger = logging.getLogger(__name__)

_PAYLOAD_S = 600.0
"""Seconds after which no payload is taken any more, however steadily it trickles in: the driver gives up before."""

Place = Callable[[Piece], Placement]


def session_of(link: int) -> str:
    """Return the session id of a link."""
    return f"link-{link}"


@dataclass
class LinkCount:
    """What one link has received, or given, of the present iteration. times: how often each piece."""

    nbytes: int = 0
    times: Counter[PieceName] = field(default_factory=Counter)

    def deliveries(self, pieces: Mapping[PieceName, Piece], expected_bytes: int) -> int:
        """Return how often the whole has come: not at all while a piece is missing, whatever came twice."""
        if any(name not in self.times for name in pieces):
            return 0
        return self.nbytes // expected_bytes if expected_bytes else 1


class StationReceiver:
    """The Receiver of a station: pieces of the present iteration, as often as they come, and nothing else.

    place, offer: where a piece goes or comes from, by this side's own plan; None where that is not what links do.
    """

    def __init__(
        self, links: Mapping[int, Mapping[PieceName, Piece]], *, place: Place | None = None, offer: Place | None = None
    ) -> None:
        self.token = secrets.token_bytes(32)
        self._links = {session_of(number): dict(pieces) for number, pieces in links.items()}
        self._place, self._offer = place, offer
        self._lock = threading.Lock()
        self._iteration: int | None = None
        self._counts = dict[str, LinkCount]()

    def begin(self, iteration: int) -> None:
        """Take an iteration's pieces from now on, and count from nothing."""
        with self._lock:
            self._iteration = iteration
            self._counts = {session: LinkCount() for session in self._links}

    def count(self, link: int) -> LinkCount:
        """Return what has come, or was given, over a link since begin()."""
        with self._lock:
            found = self._counts.get(session_of(link), LinkCount())
            return LinkCount(found.nbytes, Counter(found.times))

    def close(self) -> None:
        """Let nothing happen any more, and forget whose memory it was."""
        self._links, self._place, self._offer = {}, None, None

    # -- for the mover, from its threads -------------------------------------------------------------------------------

    def admit(self, session_id: str) -> bytes:
        """Return the token; see Receiver."""
        if session_id not in self._links:
            raise AuthenticationFailed("no such link")
        return self.token

    def place(self, session_id: str, key: TransferKey) -> Placement:
        """Say where a piece of the present iteration goes; see Receiver."""
        if self._place is None:
            raise TransferRefused(f"{key}: links of this case read from this side, and nothing is written to it")
        return self._bounded(self._place(self._piece(session_id, key)))

    def offer(self, session_id: str, key: TransferKey) -> Placement:
        """Say where a piece of the present iteration comes from; see Receiver."""
        if self._offer is None:
            raise TransferRefused(f"{key}: links of this case write to this side, and nothing is read from it")
        return self._bounded(self._offer(self._piece(session_id, key)))

    def placed(self, session_id: str, key: TransferKey, nbytes: int, error: PdtxError | None) -> None:
        """Count a piece that has arrived; see Receiver."""
        if error is not None:
            logger.info("%s has not arrived: %s", key, error)
            return
        with self._lock:
            count = self._counts.get(session_id)
            if count is not None and self._iteration is not None and key.request_id.startswith(f"i{self._iteration}."):
                count.nbytes += nbytes
                count.times[_name(key)] += 1

    offered = placed

    def notified(self, session_id: str, data: bytes) -> None:
        """Log a notice: stations have nothing to say to each other; see Receiver."""
        logger.info("ignored a notice of %d bytes over %s", len(data), session_id)

    def closed(self, session_id: str, reason: str) -> None:
        """Log the end of a link; see Receiver."""
        logger.info("%s has ended: %s", session_id, reason)

    def _piece(self, session_id: str, key: TransferKey) -> Piece:
        with self._lock:
            iteration, pieces = self._iteration, self._links.get(session_id, {})
        try:
            piece = pieces.get(_name(key))
        except ValueError:
            piece = None
        if piece is None or iteration is None or piece.key(iteration) != key:
            raise TransferRefused(f"{key} is no part of iteration {iteration} of {session_id}")
        return piece

    @staticmethod
    def _bounded(placement: Placement) -> Placement:
        return Placement(placement.region, placement.slices, time.monotonic() + _PAYLOAD_S)


def _name(key: TransferKey) -> PieceName:
    """Read a piece's name out of a key. Raises ValueError for one that no station makes."""
    request = int(key.request_id.rpartition(".r")[2])
    return request, key.buffer, key.layer_start, key.layer_stop, key.src_rank, key.dst_rank
