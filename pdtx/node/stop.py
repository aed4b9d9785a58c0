"""What ends a decode node's run."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Stop(Protocol):
    """What ends a run, such as a threading.Event."""

    def is_set(self) -> bool:
        """Whether the run is to end."""


class Flag:
    """Set or not, for those who look now and then.

    Unlike a threading.Event, a signal's handler may set it whatever it interrupts: there is no lock.
    """

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        """Set it."""
        self._set = True

    def clear(self) -> None:
        """Have it not set."""
        self._set = False

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set


class AnyOf:
    """Set when one of several is."""

    def __init__(self, *stops: Stop) -> None:
        self._stops = stops

    def is_set(self) -> bool:
        """Whether one of them is set."""
        return any(stop.is_set() for stop in self._stops)
