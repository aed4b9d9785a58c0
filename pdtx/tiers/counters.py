"""What a tier holds and has done, in blocks and bytes, for each group."""

from dataclasses import dataclass, field


@dataclass
class Count:
    """Blocks, and the bytes of their payload."""

    blocks: int = 0
    nbytes: int = 0

    def add(self, blocks: int, nbytes: int) -> None:
        """Count some more."""
        self.blocks += blocks
        self.nbytes += nbytes


@dataclass
class GroupUsage:
    """One group of a tier.

    capacity: what there is room for; used: what is kept now; pinned: of those, what nothing may evict.
    stored, loaded, evicted: since the start. missed: asked for and not here, or of other tokens. failed: found, but not
    loaded, which makes them misses after all. refused: stores for which there was no room.
    """

    name: str
    capacity: Count = field(default_factory=Count)
    used: Count = field(default_factory=Count)
    pinned: Count = field(default_factory=Count)
    stored: Count = field(default_factory=Count)
    loaded: Count = field(default_factory=Count)
    evicted: Count = field(default_factory=Count)
    missed: Count = field(default_factory=Count)
    failed: Count = field(default_factory=Count)
    refused: Count = field(default_factory=Count)


@dataclass
class TierUsage:
    """A tier. asked: bytes it was to have; mapped: bytes that it took for blocks; overhead of neither is hidden.

    A ratio mapped / asked over 1.05 is a fault. details: what else is to be known, as in "NUMA node" or "pin time".
    """

    name: str
    groups: tuple[GroupUsage, ...]
    asked: int
    mapped: int
    details: dict[str, str] = field(default_factory=dict)

    @property
    def used(self) -> int:
        """Bytes of the blocks that are kept now."""
        return sum(group.used.nbytes for group in self.groups)
