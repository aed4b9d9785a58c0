"""Measure several ways to move the same bytes in turns, so that whatever changes meanwhile changes for all of them."""

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from benchmarks.peers import Peer
from benchmarks.rows import Row
from pdtx.errors import InputError, PdtxError
from pdtx.units import gb_per_s

logger = logging.getLogger(__name__)


@dataclass
class Measured:
    """What became of one way. seconds: of each round.

    missing: why there are none; failed: because something broke, and not because something is not installed.
    """

    name: str
    detail: str = ""
    nbytes: int = 0
    seconds: list[float] = field(default_factory=list)
    wrong: int = 0
    missing: str = ""
    failed: bool = False

    @property
    def rates(self) -> list[float]:
        """GB/s of each round."""
        return [gb_per_s(self.nbytes, seconds) for seconds in self.seconds]

    @property
    def typical(self) -> float:
        """The median of the seconds."""
        return median(self.seconds)

    def take(self, peer: Peer, seconds: float | None) -> None:
        """Keep the seconds of a round (None: it only warmed up), and what the peer says of itself."""
        self.detail, self.nbytes, self.wrong = peer.detail, peer.nbytes, peer.wrong
        if seconds is not None:
            self.seconds.append(seconds)

    def give_up(self, error: PdtxError) -> None:
        """Keep why it cannot be measured: half a measurement is none."""
        self.missing, self.failed, self.seconds = str(error), not isinstance(error, InputError), []
        logger.warning("%s: %s", self.name, error)


def measure_in_turns(ways: Mapping[str, Peer], rounds: int, needed: Collection[str] = ()) -> dict[str, Measured]:
    """Start all ways, measure rounds of each forwards and backwards in turns (a b, b a, ...), and stop them.

    One more round comes first and does not count. A way that cannot be started, or fails, is left out from then on.
    needed: those without all of which the others are of no use.
    """
    contest = _Contest(ways)
    with contest.stack:
        for key in sorted(ways, key=lambda key: key not in needed):
            if needed and key not in needed and not contest.running:
                contest.measured[key].missing = "there is nothing to compare it with"
                continue
            contest.start(key)
        for number in range(rounds + 1):
            # Whoever comes first finds other caches than who comes second: take turns.
            order = [key for key in ways if key in contest.running]
            for key in order if number % 2 else order[::-1]:
                contest.round(key, counts=number > 0)
    return contest.measured


class _Contest:
    """Ways under way. stack: stops them."""

    def __init__(self, ways: Mapping[str, Peer]) -> None:
        self._ways = ways
        self.measured = {key: Measured(peer.name) for key, peer in ways.items()}
        self.running = set[str]()
        self.stack = ExitStack()

    def start(self, key: str) -> None:
        try:
            self.stack.enter_context(self._ways[key])
        except PdtxError as error:
            self.measured[key].give_up(error)
        else:
            self.running.add(key)

    def round(self, key: str, *, counts: bool) -> None:
        peer = self._ways[key]
        try:
            seconds = peer.round()
        except PdtxError as error:
            # Its processes go at once: whatever they still do would be in the others' way.
            peer.stop()
            self.running.discard(key)
            self.measured[key].give_up(error)
        else:
            self.measured[key].take(peer, seconds if counts else None)


@dataclass(frozen=True)
class Figure:
    """What is compared of a measurement, round by round."""

    unit: str
    of: Callable[[Measured], list[float]]
    less_is_better: bool = False


RATE = Figure("GB/s", lambda measured: measured.rates)
TIME = Figure("ms", lambda measured: [seconds * 1e3 for seconds in measured.seconds], less_is_better=True)


def compare(
    name: str,
    ours: Measured,
    *references: Measured,
    at_least: float = 0.0,
    figure: Figure = RATE,
    limit: str = "",
) -> Row:
    """Return the row of ours against the fastest of the references: missing if ours is, or all of them are."""
    there = [one for one in references if not one.missing]
    row = partial(
        Row, name=name, unit=figure.unit, at_least=at_least, less_is_better=figure.less_is_better, limit=limit
    )
    if ours.missing or not there:
        absent = [ours] if ours.missing else list(references)
        reason = "; ".join(f"{one.name}: {one.missing}" for one in absent)
        return row(missing=reason, failed=any(one.failed for one in absent))
    best = min(there, key=lambda one: one.typical / one.nbytes)
    without = [f"without {one.name}: {one.missing}" for one in references if one.missing]
    others = [f"{one.name} {median(figure.of(one)):.3g} {figure.unit}" for one in there if one is not best]
    return row(
        ours=figure.of(ours),
        reference=figure.of(best),
        wrong=ours.wrong + sum(one.wrong for one in there),
        against=f"{best.name} ({best.detail})",
        detail="; ".join([ours.detail, *others, *without]),
    )
