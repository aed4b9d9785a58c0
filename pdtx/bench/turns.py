"""Ways to move the same bytes, measured in turns, so that whatever changes meanwhile changes for all of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

MOVES_A_ROUND = 3
"""The median of which is the round's time: one that is interrupted does not count, nor the first one, which finds
memory and caches as the others have left them."""


class Way(ABC):
    """One way to move bytes. name, detail: for tables. nbytes: of a move. wrong: elements found wrong in all rounds."""

    wrong = 0

    def __init__(self, name: str, detail: str, nbytes: int) -> None:
        self.name, self.detail, self.nbytes = name, detail, nbytes

    def round(self) -> float:
        """Move a few times and compare what came of it; return the seconds of a move alone, the median."""
        self.prepare()
        seconds = median(self.move() for _ in range(MOVES_A_ROUND))
        self.wrong += self.count_wrong()
        return seconds

    @abstractmethod
    def prepare(self) -> None:
        """Make sure that nothing of an earlier round can pass for what this one moves."""

    @abstractmethod
    def move(self) -> float:
        """Move once; return the seconds."""

    @abstractmethod
    def count_wrong(self) -> int:
        """Compare what the last move left, and what it should not have touched; return how many elements are wrong."""


@dataclass(frozen=True)
class Timed:
    """What rounds of a way took."""

    way: Way
    seconds: list[float] = field(default_factory=list)

    @property
    def typical(self) -> float:
        """The median of the seconds."""
        return median(self.seconds)

    @property
    def rate(self) -> float:
        """Bytes a second, by the median."""
        return self.way.nbytes / self.typical


def in_turns(ways: Mapping[str, Way], rounds: int, told: Callable[[int], None] = lambda _: None) -> dict[str, Timed]:
    """Measure rounds of each way forwards and backwards (a b, b a, ...); one more comes first and does not count.

    told: called with the number of each round when it is over.
    """
    timed = {key: Timed(way) for key, way in ways.items()}
    order = list(ways)
    for number in range(rounds + 1):
        # Whoever comes first finds other caches than who comes second: take turns.
        for key in order if number % 2 else order[::-1]:
            seconds = ways[key].round()
            if number:
                timed[key].seconds.append(seconds)
        told(number)
    return timed
