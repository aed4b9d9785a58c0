"""What the samples of a case amount to. Nothing is rounded here, and nothing is measured.

Those samples count that ended and are no warm-up. Where there was no warm-up the first is told apart as well, for it
has the cold costs in it; it still counts, so that as many count as were asked for.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pdtx.results.figures import Rate, Spread, median_rate, percentile, rate_of
from pdtx.results.model import CaseResult, LinkSample, Reference, Sample
from pdtx.results.overlap import overlaps


@dataclass(frozen=True)
class Yardstick:
    """A reference and the rate of its median round. percent: what the case's rate of a rank is of it."""

    name: str
    rate: Rate
    percent: float | None
    limits: bool
    detail: str = ""


@dataclass(frozen=True)
class CaseSummary:
    """A case in figures. Seconds and bytes; None where there is nothing to tell.

    asked, count, warmups: iterations asked for, those that count, and those that warmed up. first_s: the first
    iteration's moving where it was no warm-up.
    prepare, post, move: of a link in one iteration, over all links and counted iterations; wall: of whole iterations.
    latency: of one transfer, from its first byte posted to its acknowledgement.
    nbytes: that arrive in one iteration, as the receivers count them; wire_bytes, unique_bytes: as planned.
    per_rank: mean over links of bytes over that link's own moving; whole: bytes of all links over the wall time; each
    the median over iterations. whole_low, whole_high: the 10th and the 90th percentile.
    limit: the reference that limits; yardsticks: all that have figures.
    wrong: elements, in all iterations that were looked at (looked of all); None where none was.
    first_wrong: which iteration and coordinate. posts, deliveries: of all iterations that ended.
    hidden: share of the moving behind emulated computation, 0 to 1.
    failures: what makes the figures worthless, a line each.
    """

    asked: int
    count: int
    warmups: int
    first_s: float | None
    prepare: Spread | None
    post: Spread | None
    move: Spread | None
    wall: Spread | None
    latency: Spread | None
    nbytes: int
    wire_bytes: int
    unique_bytes: int
    runs: int
    run_sizes: tuple[tuple[int, int], ...]
    transfers: int
    per_rank: Rate | None
    whole: Rate | None
    whole_low: Rate | None
    whole_high: Rate | None
    limit: Yardstick | None
    yardsticks: tuple[Yardstick, ...]
    transport: str
    transports: tuple[str, ...]
    wrong: int | None
    looked: int
    of_samples: int
    first_wrong: str
    posts: int
    deliveries: int
    claimed_bytes: int
    received_bytes: int
    registered_bytes: int
    registered_regions: int
    registration_s: float
    hidden: float | None
    failures: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return all of it for files and programs: bytes, seconds, and rates in every unit that people use."""
        found = asdict(self) | {"ok": self.ok, "verdict": self.verdict}
        for name in ("per_rank", "whole", "whole_low", "whole_high"):
            rate: Rate | None = getattr(self, name)
            if rate is not None:
                found[name] |= {unit: getattr(rate, unit) for unit in ("gb_per_s", "gib_per_s", "gbit_per_s")}
        return found

    @property
    def ok(self) -> bool:
        """Whether the figures may be believed: nothing failed. Unverified ones are neither right nor wrong."""
        return not self.failures

    @property
    def amplification(self) -> float | None:
        """How many times the bytes asked for go over the wire."""
        return self.wire_bytes / self.unique_bytes if self.unique_bytes else None

    @property
    def verdict(self) -> str:
        """The column #wrong: a number, how much of the run it speaks of where not of all, or 'unverified'."""
        if self.wrong is None:
            return "unverified"
        part = f" in {self.looked} of {self.of_samples}" if self.looked < self.of_samples else ""
        return f"{self.wrong:,}{part}"

    @property
    def bytes_each(self) -> float | None:
        """Mean bytes of a run."""
        total = sum(nbytes * count for nbytes, count in self.run_sizes)
        runs = sum(count for _, count in self.run_sizes)
        return total / runs if runs else None


def counted_samples(case: CaseResult, *, cold: bool = True) -> list[Sample]:
    """Return the samples that count. cold: with the first one of a run that did not warm up."""
    counted = [sample for sample in case.samples if not sample.warmup and sample.error is None and sample.links]
    if not cold and case.warmup == 0 and counted and counted[0] is case.samples[0]:
        return counted[1:]
    return counted


def summarize(case: CaseResult) -> CaseSummary:
    """Summarise a case; samples that a deadline has cut off, and cases without any, are no error."""
    counted = counted_samples(case)
    links = [link for sample in counted for link in sample.links]
    ended = [sample for sample in case.samples if sample.error is None]
    of_ended = [link for sample in ended for link in sample.links]
    looked = [sample for sample in ended if sample.wrong is not None]
    wholes = [rate for sample in counted if (rate := whole_rate(sample)) is not None]
    per_rank = median_rate([rate for sample in counted if (rate := rank_rate(sample)) is not None])
    yardsticks = tuple(_yardstick(one, per_rank) for one in case.references if one.seconds and one.nbytes > 0)
    transports = tuple(dict.fromkeys(_carried(link.path) for link in case.links if link.path))
    shares = [one.share for sample in counted for one in overlaps(case.case, sample)]
    return CaseSummary(
        asked=case.iterations,
        count=len(counted),
        warmups=sum(sample.warmup for sample in case.samples),
        first_s=_first(case),
        prepare=Spread.of([link.prepare_s for link in links]),
        post=Spread.of([link.post_s for link in links]),
        move=Spread.of([link.move_s for link in links]),
        wall=Spread.of([sample.wall_s for sample in counted]),
        latency=Spread.of(_latencies(case, counted)),
        nbytes=round(percentile([_received(sample) for sample in counted], 50)) if counted else 0,
        wire_bytes=sum(link.wire_bytes for link in case.links),
        unique_bytes=sum(link.unique_bytes for link in case.links),
        runs=sum(link.runs for link in case.links),
        run_sizes=_run_sizes(case),
        transfers=sum(link.num_transfers for link in case.links),
        per_rank=per_rank,
        whole=median_rate(wholes),
        whole_low=_at(wholes, 10),
        whole_high=_at(wholes, 90),
        limit=next((one for one in yardsticks if one.limits), None),
        yardsticks=yardsticks,
        transport=_transport(case.case.mover, transports),
        transports=transports,
        wrong=_wrong(looked) if looked else None,
        looked=len(looked),
        of_samples=len(ended),
        first_wrong=_first_wrong(looked),
        posts=sum(link.posts for link in of_ended),
        deliveries=sum(link.deliveries for link in of_ended),
        claimed_bytes=sum(link.claimed_bytes for link in of_ended),
        received_bytes=sum(link.received_bytes for link in of_ended),
        registered_bytes=sum(one.nbytes for one in case.registrations),
        registered_regions=sum(one.regions for one in case.registrations),
        registration_s=sum(one.seconds for one in case.registrations),
        hidden=sum(shares) / len(shares) if shares else None,
        failures=tuple(_failures(case, ended, len(counted))),
    )


def whole_rate(sample: Sample) -> Rate | None:
    """Return the rate of the whole system: bytes of all links over the time from the first begin to the last end."""
    return rate_of(_received(sample), sample.wall_s)


def rank_rate(sample: Sample) -> Rate | None:
    """Return the mean rate of a link: its bytes over its own moving. It says nothing of what all reach together."""
    rates = [rate for link in sample.links if (rate := rate_of(link.received_bytes, link.move_s)) is not None]
    return Rate(sum(rate.bytes_per_s for rate in rates) / len(rates)) if rates else None


def move_seconds(sample: Sample) -> float:
    """Return the moving of the slowest link of an iteration, in seconds."""
    return max(link.move_s for link in sample.links)


def _received(sample: Sample) -> int:
    return sum(link.received_bytes for link in sample.links)


def _at(rates: Sequence[Rate], percent: float) -> Rate | None:
    return Rate(percentile([rate.bytes_per_s for rate in rates], percent)) if rates else None


def _first(case: CaseResult) -> float | None:
    """The cold iteration's moving, where it was not a warm-up."""
    if not case.samples or case.warmup or case.samples[0].warmup or not case.samples[0].links:
        return None
    return move_seconds(case.samples[0])


def _latencies(case: CaseResult, counted: Sequence[Sample]) -> list[float]:
    """Seconds of single transfers: as stamped; without stamps only where each link had one under way at a time.

    Wall time over the number of all transfers would be too little wherever links work side by side.
    """
    stamped = [one.ended - one.posted for sample in counted for one in sample.transfers]
    if stamped or case.case.depth != 1:
        return stamped
    transfers = [link.num_transfers for link in case.links]
    return [
        link.move_s / transfers[link.link]
        for sample in counted
        for link in sample.links
        if link.link < len(transfers) and transfers[link.link]
    ]


def _yardstick(reference: Reference, per_rank: Rate | None) -> Yardstick:
    rate = Rate(reference.nbytes / max(percentile(reference.seconds, 50), 1e-12))
    percent = 100 * per_rank.bytes_per_s / rate.bytes_per_s if per_rank is not None else None
    return Yardstick(reference.name, rate, percent, reference.limits, reference.detail)


def _run_sizes(case: CaseResult) -> tuple[tuple[int, int], ...]:
    sizes = Counter[int]()
    for link in case.links:
        sizes.update({int(nbytes): count for nbytes, count in link.run_sizes.items()})
    return tuple(sorted(sizes.items()))


def _carried(path: dict[str, object]) -> str:
    """What carried a link's payload, in short."""
    return f"{path.get('kind', 'unknown')}{', emulated' if path.get('emulated') else ''}"


def _transport(mover: str, transports: Sequence[str]) -> str:
    """The mover, and what really carried the payload where that is something else."""
    others = " and ".join(transports)
    return mover if others in ("", mover) else f"{mover} over {others}"


def _wrong(samples: Sequence[Sample]) -> int:
    """Elements that are not right; nothing that is counted makes up for another's."""
    return sum(abs(sample.wrong or 0) for sample in samples)


def _first_wrong(looked: Sequence[Sample]) -> str:
    bad = next((sample for sample in looked if sample.wrong), None)
    if bad is None:
        return ""
    return f"iteration {bad.iteration}{': ' if bad.first_wrong else ''}{bad.first_wrong}"


def _failures(case: CaseResult, ended: Sequence[Sample], count: int) -> list[str]:
    """What makes figures worthless, or fewer than asked for."""
    found = [case.error] if case.error is not None else []
    found += [f"iteration {sample.iteration}: {sample.error}" for sample in case.samples if sample.error is not None]
    if count < case.iterations and case.skipped is None:
        found.append(f"{count} of {case.iterations} iterations were measured")
    if wrong := _wrong(ended):
        found.append(f"{wrong:,} wrong elements; the first in {_first_wrong(ended)}")
    found += _undelivered([link for sample in ended for link in sample.links])
    return found + _unplanned(case)


def _unplanned(case: CaseResult) -> list[str]:
    """Where a link's receiver or sender counts other bytes than were planned, or a link is missing in an iteration.

    Nothing was planned where wire_bytes is 0: version 1 does not tell.
    """
    for sample in counted_samples(case):
        moved = {link.link for link in sample.links}
        if missing := [number for number in range(len(case.links)) if number not in moved]:
            return [f"iteration {sample.iteration}: nothing is told of link {missing[0]}"]
        for one in sample.links:
            planned = case.links[one.link].wire_bytes if one.link < len(case.links) else 0
            if planned and {one.received_bytes, one.claimed_bytes} != {planned}:
                counted = f"{one.received_bytes:,} B received and {one.claimed_bytes:,} B claimed"
                return [f"iteration {sample.iteration}, link {one.link}: {counted}; {planned:,} B were planned"]
    return []


def _undelivered(links: Sequence[LinkSample]) -> list[str]:
    """What was posted and did not arrive; each iteration by itself, for a surplus here makes up for no lack there."""
    found = []
    if any(link.deliveries != link.posts for link in links):
        delivered, posts = sum(link.deliveries for link in links), sum(link.posts for link in links)
        found.append(f"delivered {delivered} of {posts}")
    if any(link.received_bytes != link.claimed_bytes for link in links):
        received, claimed = sum(link.received_bytes for link in links), sum(link.claimed_bytes for link in links)
        found.append(f"the receiver has counted {received:,} B of {claimed:,} B that the sender claims")
    return found
