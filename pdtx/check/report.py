"""What a check has found, as numbers and as short lines."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdtx.cache.verify import Coordinate
from pdtx.errors import VerificationError

_SHOWN = 8


@dataclass(frozen=True)
class WrongRun:
    """Wrong elements that lie together at the destination, within one block, and have one cause.

    first, last: their coordinates, of the model's layers and heads. rank: the destination's. block: id.
    elements: how many they are. source: the coordinate whose value the first of them holds; the others hold those that
    follow it, unless scattered, where each of them comes from another direction. source is None if they were never
    written (poisoned is True), or hold what no coordinate of the source has, or what several have (ambiguous is True).
    """

    first: Coordinate
    last: Coordinate
    rank: int
    block: int
    elements: int
    source: Coordinate | None
    poisoned: bool = False
    scattered: bool = False
    ambiguous: bool = False
    ranked: bool = field(default=False, repr=False)

    def __str__(self) -> str:
        rank = f"rank {self.rank} " if self.ranked else ""
        if self.elements == 1:
            return f"{rank}{self.first} (block {self.block}) {self._holds}"
        return f"{rank}{self._span} (block {self.block}), {self.elements:,} elements: {self._holds}"

    @property
    def _span(self) -> str:
        """From the first to the last, as short as it can be said."""
        first, last = self.first, self.last
        if first.row == last.row:
            return f"{first.row} channels {first.channel}..{last.channel}"
        if first.token == last.token:
            return f"{first.row}..{last.head}"
        return f"{first.row} to token {last.token} head {last.head}"

    @property
    def _holds(self) -> str:
        if self.poisoned:
            return "never written, still poison"
        if self.ambiguous:
            return "the values of more than one row of the source"
        if self.source is None:
            return "no row of the source holds this value"
        if self.elements == 1:
            return f"holds the value of {self.source}"
        if self.scattered:
            return f"values from several places, the first that of {self.source}"
        name = str(self.source) if self.source.channel else self.source.row
        return f"the values of {name}{'' if self.first.row == self.last.row else ' on'}"


@dataclass(frozen=True)
class Stray:
    """Bytes that were written outside of the blocks named. offset: in the memory of a rank of the destination.

    where: layer and block in or after which they lie.
    """

    rank: int
    offset: int
    nbytes: int
    where: str

    def __str__(self) -> str:
        return f"{self.where}: {self.nbytes:,} bytes written from byte {self.offset} on, outside of the blocks named"


@dataclass(frozen=True, kw_only=True)
class TransferReport:
    """What a check has found.

    compared: elements looked at, of all destination ranks. wrong: of these, elements that are not the source's;
    wrong_in: how many of them are in each layer's keys, values or records, by "layer 0 K". never_written: of wrong,
    those that still are poison. stray_bytes: bytes of the destination's memory that were changed outside of the blocks
    named, padding among them. spilled: elements that were written inside the blocks named, before or after the
    positions asked for; an error only if exact. source_changed: elements of the source's memory that changed.
    runs: the first of num_runs runs of wrong elements. strays: the first of num_strays runs of stray bytes.
    calls: how often move was called.
    """

    compared: int
    wrong: int
    wrong_in: Mapping[str, int]
    never_written: int
    stray_bytes: int
    spilled: int
    source_changed: int
    runs: tuple[WrongRun, ...]
    num_runs: int
    strays: tuple[Stray, ...]
    num_strays: int
    exact: bool
    calls: int

    @property
    def ok(self) -> bool:
        """Whether everything arrived, and nothing else was written."""
        return not (self.wrong or self.stray_bytes or self.source_changed or (self.exact and self.spilled))

    def raise_if_wrong(self) -> None:
        """Raise VerificationError, with the summary and the first thing that is wrong, unless ok."""
        if not self.ok:
            first = next((str(one) for one in (*self.runs, *self.strays)), "")
            raise VerificationError(f"{self.summary}; first: {first}" if first else self.summary, self.wrong)

    @property
    def summary(self) -> str:
        """One line."""
        words = [f"{self.compared:,} elements compared", f"{self.wrong:,} wrong"]
        if self.never_written:
            words[-1] += f" ({self.never_written:,} of them never written)"
        if self.stray_bytes:
            words.append(f"{self.stray_bytes:,} stray bytes")
        if self.spilled:
            words.append(f"{self.spilled:,} elements of the blocks written beside the positions asked for")
        if self.source_changed:
            words.append(f"{self.source_changed:,} elements of the source changed")
        return ", ".join(words)

    def lines(self, limit: int = _SHOWN) -> list[str]:
        """Return the summary, where elements are wrong, then at most limit wrong runs and limit strays, a line each."""
        found = [self.summary]
        if self.wrong_in:
            names = list(self.wrong_in)
            more = f" and {len(names) - limit} more" if len(names) > limit else ""
            found.append(f"  wrong in {', '.join(names[:limit])}{more}")
        for what, shown, total in (("wrong runs", self.runs, self.num_runs), ("strays", self.strays, self.num_strays)):
            found += [f"  {one}" for one in shown[:limit]]
            if total > limit:
                found.append(f"  ... and {total - limit:,} more {what}")
        return found

    def __str__(self) -> str:
        return "\n".join(self.lines())
