"""Random sequences of events on the control of one side: their frame, and the table of states held against requests."""

import os
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import pytest

from pdtx.errors import IllegalTransition

SEQUENCES = int(os.environ.get("PDTX_SEQUENCES", "2000"))
_STEPS, _PART = 60, 500

in_parts = pytest.mark.parametrize("first", range(0, SEQUENCES, _PART))

Event = Callable[[], None]
S = TypeVar("S")


class RandomWorld(ABC):
    """One side's control with everything around it under the test's hand; all that happens follows from the seed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    @abstractmethod
    def run(self) -> None:
        """Run one sequence from its beginning to the end of all requests."""

    @abstractmethod
    def check(self) -> None:
        """Fail unless what must hold after every event does."""

    def step(self, progress: Sequence[Event], faults: Sequence[Event]) -> None:
        """Let events happen at random, and check after each. Some sequences have few faults, others many."""
        rate = self.chance.choice((0.02, 0.1, 0.3))
        for _ in range(_STEPS):
            self.chance.choice(faults if self.chance.random() < rate else progress)()
            self.check()


def run_all(world: Callable[[int], RandomWorld], count: int, first: int = 0) -> None:
    """Run so many sequences."""
    for seed in range(first, first + count):
        world(seed).run()


def run_part(world: Callable[[int], RandomWorld], first: int) -> None:
    """Run the sequences of one case of in_parts."""
    run_all(world, min(_PART, SEQUENCES - first), first)


def transitions_of(
    world: Callable[[int], RandomWorld],
    cls: Any,  # noqa: ANN401
    patch: pytest.MonkeyPatch,
    field: str = "state",
) -> set[tuple[Any, Any]]:
    """The transitions that records of a class make in 300 sequences. field: that holds their state."""
    seen, go = set[tuple[Any, Any]](), cls.go

    def note(request: Any, state: object) -> None:  # noqa: ANN401
        seen.add((getattr(request, field), state))
        go(request, state)

    patch.setattr(cls, "go", note)
    run_all(world, 300)
    return seen


def transitions_in(table: Mapping[S, frozenset[S]]) -> set[tuple[S, S]]:
    """The transitions that a table allows."""
    return {(before, after) for before, those in table.items() for after in those}


def require_only_these(allowed: frozenset[Any], make_request: Callable[[], Any], field: str = "state") -> None:
    """Fail unless a fresh request, whose id is r, can go to the allowed states and to no other one."""
    before = getattr(make_request(), field)
    for after in type(before):
        request = make_request()
        if after in allowed:
            request.go(after)
            assert getattr(request, field) is after
        else:
            with pytest.raises(IllegalTransition, match=rf"request r cannot go from {before.name} to {after.name}"):
                request.go(after)
