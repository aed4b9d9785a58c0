"""What ends a decode node's run."""

from typing import Protocol


class Stop(Protocol):
    """What ends a run, such as a threading.Event."""

    def is_set(self) -> bool:
        """Whether the run is to end."""


class AnyOf:
    """Set when one of several is."""

    def __init__(self, *stops: Stop) -> None:
        self._stops = stops

    def is_set(self) -> bool:
        """Whether one of them is set."""
        return any(stop.is_set() for stop in self._stops)
