"""Requests of a producer that failed before all of its processes had asked for their part."""

import time
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

_MAX_REMEMBERED = 20_000
"""Of one producer; the oldest is forgotten first."""


@dataclass(eq=False)
class FailedBefore:
    """What is refused to a producer's processes, as it is over already. Used by the consumer's control thread alone.

    The processes of a producer do not know of one another, and neither does this side know which try of a request a
    process means that asks late. So a request id is of no use to any of them until the deadline of the request that has
    failed: else one process could take part in an earlier try than another one. Of what was pulled only the processes
    that have not answered as yet are refused, once each, and it is not pulled again from several processes before that.
    """

    _pushed: dict[str, tuple[float, str]] = field(default_factory=dict)
    _pulled: dict[str, tuple[set[int], str]] = field(default_factory=dict)

    def add(self, request_id: str, deadline: float, reason: str) -> None:
        """Remember a request that a producer has begun. deadline: of it, in time.monotonic()."""
        _make_room(self._pushed)
        self._pushed[request_id] = deadline, reason

    def add_pulled(self, request_id: str, silent: set[int], reason: str) -> None:
        """Remember a request that this side has asked for, and which processes have not answered."""
        _make_room(self._pulled)
        self._pulled[request_id] = silent, reason

    def pulls_again(self, request_id: str) -> None:
        """This side asks for a request, whatever has become of it before."""
        self._pulled.pop(request_id, None)
        self._pushed.pop(request_id, None)

    def silent(self, request_id: str) -> set[int]:
        """Return the processes that have not answered an earlier pull of a request."""
        return self._pulled.get(request_id, (set[int](), ""))[0]

    def lost(self, process: int) -> None:
        """Note that a process answers nothing any more of what it was asked for."""
        for request_id in [name for name, (silent, _) in self._pulled.items() if process in silent]:
            self.answered(request_id, process)

    def refusal(self, request_id: str, process: int) -> str | None:
        """Return why a process cannot begin a request; None if nothing is in the way."""
        deadline, reason = self._pushed.get(request_id, (0.0, ""))
        left = deadline - time.monotonic()
        if left > 0:
            return (
                f"{reason}; not all processes had asked for it, so that its id is refused for another {left:.1f} s, "
                "until its deadline: take another id to try again"
            )
        self._pushed.pop(request_id, None)
        return self.answered(request_id, process)

    def answered(self, request_id: str, process: int) -> str | None:
        """Note that a process has answered a pull; return why that is not wanted any more, if so."""
        silent, reason = self._pulled.get(request_id, (set[int](), ""))
        if process not in silent:
            return None
        silent.discard(process)
        if not silent:
            del self._pulled[request_id]
        return reason


def _make_room(remembered: MutableMapping[str, Any]) -> None:
    while len(remembered) >= _MAX_REMEMBERED:
        del remembered[next(iter(remembered))]
