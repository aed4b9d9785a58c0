"""One case, measured by a fleet: prepared, linked, moved again and again, counted and checked each time."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from pdtx.bench import calls
from pdtx.bench.fleet_references import FleetReference, reference_names, results_of
from pdtx.bench.fleet_remote import RemoteAgent, gather
from pdtx.bench.fleet_samples import make_sample
from pdtx.bench.patterns import Ends, Pattern
from pdtx.bench.work import LinkChecked, LinkMoved, Prepared, Role, StationWork
from pdtx.errors import DeadlineExceeded, PdtxError, TransferError, VerificationError
from pdtx.results.model import CaseResult, Link, Sample
from pdtx.transports.base import Path

Told = TypeVar("Told")
Agents = Mapping[tuple[Role, int], RemoteAgent]

STEP_S = 600.0
"""Longest that a step of a case may take, whatever time is left."""

GRACE_S = 5.0
"""Beyond a step's time: an agent that ends the step by itself says better why than a driver that gives it up."""

_START_MARGIN_S = 0.003
"""Between telling agents to start and the start itself, beside the way there."""


@dataclass(frozen=True)
class Progress:
    """How far a case is. phase: prepare, warm-up or measure; done of total iterations of it. detail: what is new."""

    phase: str
    done: int
    total: int
    detail: str = ""


@dataclass(frozen=True)
class CaseOptions:
    """How a case is measured. deadline: time.monotonic(). told: hears how far it is."""

    verify: bool
    references: Sequence[str]
    deadline: float
    told: Callable[[Progress], None]


class CaseRun:
    """Carries out a case and writes what comes of it into result, iteration by iteration, so that what there is stays.

    agents: by role and number.
    """

    def __init__(self, agents: Agents, pattern: Pattern, result: CaseResult, options: CaseOptions) -> None:
        self._agents, self._pattern, self._result, self._options = agents, pattern, result, options
        self._case = result.case
        self._posting = {end.number: agents[pattern.posts(end, self._case.op)] for end in pattern.links}
        self._listening = {end.number: agents[pattern.listens(end, self._case.op)] for end in pattern.links}
        self._written = {end.number: agents["decode", end.decode] for end in pattern.links}
        works: list[tuple[Role, int, StationWork | None]] = [
            *(("prefill", number, work) for number, work in enumerate(pattern.prefill)),
            *(("decode", number, work) for number, work in enumerate(pattern.decode)),
        ]
        self._works = {agents[role, number]: work for role, number, work in works if work is not None}
        self._references = list[FleetReference]()

    def run(self) -> None:
        """Measure. Raises PeerLost for an agent that is gone, and what made the case fail."""
        try:
            self._measure()
        except DeadlineExceeded as error:
            if time.monotonic() < self._options.deadline:
                raise
            done = sum(not sample.warmup and not sample.error for sample in self._result.samples)
            raise PdtxError(
                f"cut off by the deadline after {done} of {self._result.iterations} iterations: {error}"
            ) from None
        finally:
            self._result.references = results_of(self._references)

    def _measure(self) -> None:
        self._tell("prepare", 0, 1)
        self._prepare()
        self._tell("prepare", 1, 1)
        warmup, iterations = self._result.warmup, self._result.iterations
        for number in range(warmup + iterations):
            counts = number >= warmup
            sample = self._iterate(number, not counts)
            self._result.samples.append(sample)
            _require_sound(sample)
            if counts:
                for reference in self._references:
                    reference.round(self._limit())
                self._tell("measure", number - warmup + 1, iterations)
            else:
                self._tell("warm-up", number + 1, warmup)

    def _tell(self, phase: str, done: int, total: int) -> None:
        self._options.told(Progress(phase, done, total))

    def _limit(self) -> float:
        """Return until when to wait for a step. Raises DeadlineExceeded if no time is left for it."""
        now = time.monotonic()
        if now >= self._options.deadline:
            raise DeadlineExceeded("the next step", "the agents", 0.0)
        return min(self._options.deadline, now + STEP_S) + GRACE_S

    # -- once ---------------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        remotes = list(self._works)
        loads = gather([remote.start(calls.LOAD) for remote in remotes], self._limit())
        self._result.load_average = [load.average for load in loads]
        answers = gather([remote.start(calls.PREPARE, work) for remote, work in self._works.items()], self._limit())
        prepared: dict[RemoteAgent, Prepared] = dict(zip(remotes, answers, strict=True))
        self._result.registrations = [
            msgspec.structs.replace(one, node=self._node(remote))
            for remote, answer in prepared.items()
            for one in answer.registrations
        ]
        paths = self._connect(prepared)
        # Asked now: how a link moves its bytes is known for sure once it is connected.
        facts = gather(
            [remote.start(calls.FACTS, calls.LinkCall(link)) for link, remote in self._posting.items()], self._limit()
        )
        self._result.links = [
            self._link(end, one, path) for end, one, path in zip(self._pattern.links, facts, paths, strict=True)
        ]
        self._open_references(paths[0])

    def _connect(self, prepared: Mapping[RemoteAgent, Prepared]) -> list[Path]:
        limit = self._limit()
        timeout_s = limit - GRACE_S - time.monotonic()
        started = list[tuple[RemoteAgent, calls.ConnectCall]]()
        for end in self._pattern.links:
            at = prepared[self._listening[end.number]]
            call = calls.ConnectCall(end.number, at.address, at.token, timeout_s)
            started.append((self._posting[end.number], call))
        return gather([remote.start(calls.CONNECT, call) for remote, call in started], limit)

    def _link(self, end: Ends, facts: Mapping[str, Any], path: Path) -> Link:
        return msgspec.convert(
            {
                **facts,
                "prefill": self._node(self._agents["prefill", end.prefill]),
                "decode": self._node(self._agents["decode", end.decode]),
                "path": msgspec.to_builtins(path),
            },
            Link,
        )

    def _node(self, remote: RemoteAgent) -> int:
        """Return the index of an agent among the result's nodes: prefill agents, then decode agents."""
        return list(self._agents.values()).index(remote)

    def _open_references(self, path: Path) -> None:
        first = self._pattern.links[0].number
        link = self._result.links[0]
        for name in reference_names(self._options.references, self._case.mover, path):
            listens, posts = self._listening[first], self._posting[first]
            reference = FleetReference(name, listens, posts, link.wire_bytes, link.run_sizes)
            self._references.append(reference)
            reference.open(self._limit())

    # -- again and again ----------------------------------------------------------------------------------------------

    def _iterate(self, number: int, warmup: bool) -> Sample:
        ready = calls.ReadyCall(number)
        gather([remote.start(calls.READY, ready) for remote in self._works], self._limit())
        for remote in self._works:
            remote.refresh_clock(self._limit())
        every = [end.number for end in self._pattern.links]
        turns = [[link] for link in every] if self._case.isolated else [every]
        moved = [one for links in turns for one in self._move(links)]
        checked = self._check(every)
        clocks = {link: remote.clock for link, remote in self._posting.items()}
        return make_sample(number, warmup, moved, checked, clocks, one_by_one=self._case.isolated)

    def _move(self, links: Sequence[int]) -> list[LinkMoved]:
        """Move links at once; return what was told of each, in their order."""
        limit = self._limit()
        timeout_s = limit - GRACE_S - time.monotonic()
        by_agent = _grouped(links, self._posting)
        margin = _START_MARGIN_S + 4 * max(remote.clock.error_s for remote in by_agent)
        start = time.monotonic() + margin
        started = [
            remote.start(calls.MOVE, calls.MoveCall(tuple(own), remote.clock.there(start), timeout_s))
            for remote, own in by_agent.items()
        ]
        answers: list[calls.Moved] = gather(started, limit)
        told = {one.link: one for answer in answers for one in answer}
        return [_of_link(told, link) for link in links]

    def _check(self, links: Sequence[int]) -> dict[int, LinkChecked]:
        call = [
            remote.start(calls.CHECK, calls.CheckCall(tuple(own), self._options.verify))
            for remote, own in _grouped(links, self._written).items()
        ]
        answers: list[calls.Checked] = gather(call, self._limit())
        told = {one.link: one for answer in answers for one in answer}
        return {link: _of_link(told, link) for link in links}


def _grouped(links: Sequence[int], agents: Mapping[int, RemoteAgent]) -> dict[RemoteAgent, list[int]]:
    """Return the links of each agent."""
    found: dict[RemoteAgent, list[int]] = {}
    for link in links:
        found.setdefault(agents[link], []).append(link)
    return found


def _of_link(told: Mapping[int, Told], link: int) -> Told:
    if link not in told:
        raise TransferError(f"an agent says nothing of link {link}")
    return told[link]


def _require_sound(sample: Sample) -> None:
    """Raise TransferError for a sample whose ends count differently, VerificationError for one with wrong elements."""
    if sample.error:
        raise TransferError(f"iteration {sample.iteration}: {sample.error}")
    if sample.wrong:
        raise VerificationError(
            f"iteration {sample.iteration}: {sample.wrong} wrong elements; first {sample.first_wrong}", sample.wrong
        )
