"""What decides which entry of a tier goes when another comes."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

Pinned = Callable[[bytes], bool]
"""Whether an entry must stay: somebody pins it, it is being written, or has just been taken in."""


class Line:
    """Keys in order, the oldest first. Those that must stay are passed over.

    What take_oldest() passes over is set aside, so that the next one does not look at it again; restore() puts it back.
    """

    def __init__(self) -> None:
        self._keys, self._aside = OrderedDict[bytes, None](), list[bytes]()

    def __len__(self) -> int:
        return len(self._keys) + len(self._aside)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    @property
    def keys(self) -> list[bytes]:
        """All, the oldest first; between restore() and the next take_oldest()."""
        return list(self._keys)

    def push(self, key: bytes) -> None:
        """Make a key the newest, whether it is here or not."""
        self._keys[key] = None
        self._keys.move_to_end(key)

    def push_all(self, keys: Iterable[bytes]) -> None:
        """Push one key after another."""
        here, move = self._keys, self._keys.move_to_end  # this is most of what a lookup of many blocks costs
        for key in keys:
            here[key] = None
            move(key)

    def discard_all(self, keys: Iterable[bytes]) -> None:
        """Remove those of keys that are here."""
        for key in keys:
            self._keys.pop(key, None)

    def discard(self, key: bytes) -> bool:
        """Remove a key; return whether it was here."""
        if key not in self._keys:
            return False
        del self._keys[key]
        return True

    def take_oldest(self, pinned: Pinned | None = None) -> bytes | None:
        """Remove and return the oldest key that need not stay; None where all must."""
        while self._keys:
            key, _ = self._keys.popitem(last=False)
            if pinned is None or not pinned(key):
                return key
            self._aside.append(key)
        return None

    def restore(self) -> None:
        """Put what was set aside back where it stood."""
        for key in reversed(self._aside):
            self._keys[key] = None
            self._keys.move_to_end(key, last=False)
        self._aside.clear()


class Policy(ABC):
    """An order of a tier's entries, by their digests. Not safe to use from several threads: a Shelf guards it."""

    name: ClassVar[str]

    def __init__(self, capacity: int) -> None:
        """capacity: entries that there is room for."""
        self.capacity = capacity

    @abstractmethod
    def admit(self, keys: Sequence[bytes], room: int, pinned: Pinned) -> list[bytes]:
        """Take in new keys, the first `room` of them beside those that are here, each other in the place of a victim.

        Returns the victims, which have left; fewer than there are keys to replace where the others must stay: only the
        first room + len(victims) of the keys have then been taken in. pinned: true of the keys themselves.
        """

    @abstractmethod
    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that entries, which are all here, were used; the first of a prompt first."""

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """Forget an entry that has gone otherwise than as a victim."""
