"""Policies by name.

They are written here because no library has them: cachetools and its kin know neither pins nor ARC nor S3-FIFO.
"""

from collections.abc import Sequence

from pdtx.errors import TierError
from pdtx.tiers.policies_arc import Arc
from pdtx.tiers.policies_base import Line, Pinned, Policy
from pdtx.tiers.policies_s3fifo import S3Fifo

__all__ = ["POLICIES", "Arc", "Fifo", "Lru", "Policy", "S3Fifo", "make_policy"]


class Fifo(Policy):
    """First in, first out. Of blocks that come together the last of the prompt goes first: it is of no use alone."""

    name = "fifo"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._line = Line()

    def admit(self, keys: Sequence[bytes], room: int, pinned: Pinned) -> list[bytes]:
        """See Policy."""
        victims = list[bytes]()
        while room + len(victims) < len(keys) and (victim := self._line.take_oldest(pinned)) is not None:
            victims.append(victim)
        self._line.restore()
        for key in reversed(keys[: room + len(victims)]):
            self._line.push(key)
        return victims

    def touch(self, keys: Sequence[bytes]) -> None:
        """Do nothing: use does not count."""

    def remove(self, key: bytes) -> None:
        """See Policy."""
        self._line.discard(key)


class Lru(Fifo):
    """The entry goes that has not been used for longest."""

    name = "lru"

    def touch(self, keys: Sequence[bytes]) -> None:
        """See Policy. The last of a prompt becomes the oldest of them."""
        self._line.push_all(reversed(keys))


_CLASSES: tuple[type[Policy], ...] = (Lru, Arc, Fifo, S3Fifo)

POLICIES = tuple(cls.name for cls in _CLASSES)
"""Names for make_policy."""


def make_policy(name: str, capacity: int) -> Policy:
    """Return the policy of a name, for so many entries. Raises TierError, listing the names."""
    found = next((cls for cls in _CLASSES if cls.name == name.strip().lower()), None)
    if found is None:
        raise TierError(f"unknown policy {name!r}; one of {', '.join(POLICIES)}")
    return found(capacity)
