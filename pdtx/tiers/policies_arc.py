"""ARC (Megiddo and Modha, FAST 2003): two lists of what was used once and again, and the memory of what left them."""

from collections.abc import Sequence

from pdtx.tiers.policies_base import Line, Pinned, Policy


class Arc(Policy):
    """The pseudo-code of the paper's figure 4, with its names.

    t1, t2: entries used once, and more often. b1, b2: keys of what was evicted from them. p: what t1 is to have.
    An entry that must stay is passed over; where all of the list to be shortened must, the other one is.
    """

    name = "arc"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.t1, self.t2, self.b1, self.b2 = Line(), Line(), Line(), Line()
        self.p = 0.0

    def admit(self, keys: Sequence[bytes], room: int, pinned: Pinned) -> list[bytes]:
        """See Policy."""
        victims = list[bytes]()
        for number, key in enumerate(keys):
            if number >= room:
                victim = self._make_room(key, pinned)
                if victim is None:
                    break
                victims.append(victim)
            else:
                self._adapt(key)
            ghost = self.b1.discard(key) or self.b2.discard(key)
            (self.t2 if ghost else self.t1).push(key)
            self._forget()
        for line in (self.t1, self.t2):
            line.restore()
        return victims

    def _adapt(self, key: bytes) -> None:
        """Cases II and III: a list that was too short for a key becomes longer."""
        ours, theirs = len(self.b1), len(self.b2)
        if key in self.b1:
            self.p = min(float(self.capacity), self.p + max(theirs / ours, 1.0))
        elif key in self.b2:
            self.p = max(0.0, self.p - max(ours / theirs, 1.0))

    def _make_room(self, key: bytes, pinned: Pinned) -> bytes | None:
        """Choose a victim for a key."""
        before = self.p
        self._adapt(key)
        victim = self._replace(key in self.b2, pinned)
        if victim is None:
            self.p = before
        return victim

    def _replace(self, in_b2: bool, pinned: Pinned) -> bytes | None:
        size = len(self.t1)
        first = size > 0 and (size > self.p or (in_b2 and size == self.p))
        order = ((self.t1, self.b1), (self.t2, self.b2))
        for entries, ghosts in order if first else order[::-1]:
            victim = entries.take_oldest(pinned)
            if victim is not None:
                ghosts.push(victim)
                return victim
        return None

    def _forget(self) -> None:
        """Case IV: keep t1 and b1 together within the capacity, and all four within twice that.

        The paper forgets before it takes the key in, and here it is after; where t1 was all there is, what is forgotten
        is the victim itself.
        """
        while len(self.t1) + len(self.b1) > self.capacity and self.b1.take_oldest() is not None:
            pass
        lines = (self.t1, self.t2, self.b1, self.b2)
        while sum(map(len, lines)) > 2 * self.capacity and self.b2.take_oldest() is not None:
            pass

    def touch(self, keys: Sequence[bytes]) -> None:
        """See Policy: case I."""
        self.t1.discard_all(keys)
        self.t2.push_all(reversed(keys))

    def remove(self, key: bytes) -> None:
        """See Policy."""
        for line in (self.t1, self.t2):
            line.discard(key)
