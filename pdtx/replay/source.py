"""What is replayed: requests of a trace or a capture, and the prompts that stand for them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from pdtx.bench.trace import MOONCAKE_BLOCK_TOKENS, read_trace
from pdtx.errors import InputError
from pdtx.replay.contents import Words, mixed
from pdtx.results.capture import CapturedChunk, CaptureHeader, is_capture, read_capture
from pdtx.serving import Job
from pdtx.units import ceil_div

_MOST_TOKEN = np.uint64(0x7FFFFFFF)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Source:
    """A file of requests. block_tokens: that one hash id stands for there; header: of a capture."""

    path: Path
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    header: CaptureHeader | None = None

    @classmethod
    def open(cls, path: Path, block_tokens: int | None = None) -> "Source":
        """Look at a file. block_tokens: of a trace, if not Mooncake's 512. Raises InputError."""
        if is_capture(path):
            header, _ = read_capture(path)
            return cls(path, header.block_tokens, header)
        return cls(path, block_tokens or MOONCAKE_BLOCK_TOKENS)

    def requests(self, most: int | None) -> "Iterator[TimedRequest]":
        """Yield the first requests of the file in the order in which they arrive, those without a prompt left out.

        Raises InputError as the readers do.
        """
        yield from sorted(self._first(most), key=lambda one: one.timestamp)

    def out_of_order(self, most: int | None) -> int:
        """Return how many of them arrive before one that stands above them in the file."""
        latest, found = 0.0, 0
        for one in self._first(most):
            found += one.timestamp < latest
            latest = max(latest, one.timestamp)
        return found

    def _first(self, most: int | None) -> "Iterator[TimedRequest]":
        return islice((one for one in self._all() if one.input_length), most)

    def _all(self) -> "Iterator[TimedRequest]":
        if self.header is not None:
            for captured in read_capture(self.path)[1]:
                yield TimedRequest(
                    captured.timestamp,
                    captured.input_length,
                    captured.output_length,
                    captured.hash_ids,
                    captured.chunks,
                )
            return
        for one in read_trace(self.path, self.block_tokens):
            yield TimedRequest(one.timestamp, one.input_length, one.output_length, one.hash_ids)


@dataclass(frozen=True)
class TimedRequest:
    """One request. timestamp: milliseconds. Lengths in tokens. chunks: how it was computed, if that was captured."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: Sequence[int]
    chunks: Sequence[CapturedChunk] = ()


@dataclass(frozen=True)
class Scale:
    """How a file's requests become prompts here.

    block_tokens: of the file. by: tokens there that one token here stands for; it must divide block_tokens, or
    InputError is raised. speedup: seconds there that pass in one second here.
    """

    block_tokens: int
    by: int = 1
    speedup: float = 1.0

    def __post_init__(self) -> None:
        if self.by < 1 or self.block_tokens % self.by:
            raise InputError(
                f"--scale-tokens {self.by} does not divide a block of {self.block_tokens} tokens; "
                f"give {_divisors(self.block_tokens)}"
            )
        if not self.speedup > 0:
            raise InputError(f"--speedup {self.speedup:g} never comes to the first request; give more than 0")

    def length(self, request: TimedRequest) -> int:
        """Return the tokens of a request's prompt here, 1 or more."""
        whole, rest = divmod(request.input_length, self.block_tokens)
        return max(1, whole * (self.block_tokens // self.by) + ceil_div(rest, self.by))

    def output(self, request: TimedRequest) -> int:
        """Return the tokens of a request's answer here, 1 or more."""
        return max(1, ceil_div(request.output_length, self.by))

    def jobs(self, requests: Iterator[TimedRequest]) -> Iterator[Job]:
        """Yield a job for each request, named r0, r1, ...; the first one arrives at once.

        requests: in the order in which they arrive, see Source.requests.
        """
        first: float | None = None
        for number, request in enumerate(requests):
            first = request.timestamp if first is None else first
            yield Job(
                f"r{number}",
                token_ids_of(request.hash_ids, self.length(request), self.block_tokens // self.by),
                max_tokens=self.output(request),
                arrival_s=(request.timestamp - first) / 1e3 / self.speedup,
            )


def token_ids_of(hash_ids: Sequence[int], num_tokens: int, block_tokens: int) -> list[int]:
    """Return the tokens of a prompt by its blocks' names: equal names are equal tokens, others differ.

    The last block may be part full. Token ids are less than 2**31.
    """
    names: Words = np.array(hash_ids, np.uint64)
    with np.errstate(over="ignore"):
        spread: Words = names * _SPREAD + _SPREAD
        within: Words = np.arange(block_tokens, dtype=np.uint64)
        places: Words = mixed(spread)[:, None] + within
        tokens = mixed(places) & _MOST_TOKEN
    found: list[int] = tokens.reshape(-1)[:num_tokens].tolist()
    return found


def _divisors(number: int) -> str:
    return ", ".join(str(one) for one in range(1, number + 1) if number % one == 0)
