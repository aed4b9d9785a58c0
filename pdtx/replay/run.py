"""A replay: jobs at their times through a producer, prefill emulated, a row for each."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pdtx.engine import KVProducer
from pdtx.replay.rows import ReplayRow, row_of
from pdtx.serving import Computer, Ended, Job, PrefillScheduler
from pdtx.tiers.prefix import PrefixCache


@dataclass(frozen=True)
class Stopped:
    """Why a replay has ended before its last request. code: to exit with, for a signal."""

    why: str
    code: int | None = None


@dataclass
class Outcome:
    """What has come of a replay so far. begun: time.monotonic(); seconds: until the last request's end."""

    rows: list[ReplayRow] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    stopped: Stopped | None = None


def run_replay(
    jobs: Iterable[Job],
    computer: Computer,
    producer: KVProducer,
    outcome: Outcome,
    *,
    chunk_size: int,
    max_num_seqs: int,
    timeout_s: float,
    until: float,
    prefix: PrefixCache | None,
    told: Callable[[ReplayRow], None],
    on_end: Callable[[Ended], None] | None = None,
) -> None:
    """Run all jobs, putting rows into outcome as they end, which holds what there is if this is interrupted.

    until: time.monotonic() at which what is under way fails. told: of each request at its end;
    on_end: of all that is known of it.
    """
    outcome.begun = time.monotonic()

    def end(ended: Ended) -> None:
        row = row_of(ended, outcome.begun)
        outcome.rows.append(row)
        outcome.seconds = time.monotonic() - outcome.begun
        told(row)
        if on_end is not None:
            on_end(ended)

    scheduler = PrefillScheduler(
        computer,
        producer,
        max_tokens=1,
        chunk_size=chunk_size,
        max_num_seqs=max_num_seqs,
        timeout_s=timeout_s,
        ignore_eos=True,
        prefix=prefix,
        on_end=end,
    )
    scheduler.run(jobs, until=until)
