"""Prompts that are to be run, and what is known of one at its end."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

import torch

from pdtx.engine import OutboundRequest
from pdtx.errors import InputError
from pdtx.report import RequestRow


@dataclass(frozen=True)
class Job:
    """A prompt to run: its tokens, and the features of a model with an encoder (mel, frames).

    max_tokens: to generate; None for what the scheduler says. arrival_s: seconds after the run's begin before which
    nothing is known of it; jobs come in this order. Raises InputError for numbers that neither can be.
    """

    request_id: str
    token_ids: Sequence[int]
    features: torch.Tensor | None = None
    max_tokens: int | None = None
    arrival_s: float = 0.0

    def __post_init__(self) -> None:
        most, arrival = self.max_tokens, self.arrival_s
        if most is not None and not (isinstance(most, int) and most >= 1):
            raise InputError(f"request {self.request_id}: max_tokens is {most!r}; give 1 or more, or None")
        if not (isinstance(arrival, int | float) and 0.0 <= arrival < inf):
            raise InputError(f"request {self.request_id}: arrival_s is {arrival!r}; give seconds, 0 or more")


@dataclass(frozen=True)
class Chunk:
    """Tokens start..stop of a prompt, computed at once. begun: time.monotonic().

    ready: (buffer, layer, seconds after begun) of each layer, in the order in which they were computed.
    """

    start: int
    stop: int
    begun: float
    ready: list[tuple[int, int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Ended:
    """A job at its end. request: None where it could not be begun. arrived: time.monotonic()."""

    job: Job
    row: RequestRow
    arrived: float
    request: OutboundRequest | None = None
    chunks: Sequence[Chunk] = ()


class Arrivals:
    """Jobs as they arrive, of which only the next one is looked at, so that there may be any number of them."""

    def __init__(self, jobs: Iterable[Job], begun: float) -> None:
        self._jobs: Iterator[Job] = iter(jobs)
        self._begun = begun
        self.next: Job | None = next(self._jobs, None)

    @property
    def due(self) -> float:
        """When the next job arrives, in time.monotonic(); never where there is none."""
        return self.time_of(self.next) if self.next is not None else float("inf")

    def time_of(self, job: Job) -> float:
        """Return when a job arrives, in time.monotonic()."""
        return self._begun + job.arrival_s

    def advance(self) -> None:
        """Pass over the next job."""
        self.next = next(self._jobs, None)
