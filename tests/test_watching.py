"""What nodes tell of their requests, when they are asked at any moment."""

import sys
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest

from pdtx.errors import DeadlineExceeded
from pdtx.metrics import NodeCounts
from pdtx.node.watching import DecodeWatch, PrefillWatch
from pdtx.report.rows import RequestRow
from pdtx.serving import Ended, Job

Counts = Callable[[], NodeCounts]
Scene = tuple[Counts, Callable[[], None]]
"""What a scrape asks, and what a request of which everything is counted does at its end."""

_TIERS = cast("Any", SimpleNamespace(prefix=SimpleNamespace(usages=lambda: ())))


class _Metrics:
    """Keeps what it is told to ask."""

    counts: Counts
    transfers = 0

    def watch(self, _engine_id: str, counts: Counts) -> None:
        self.counts = counts

    def transferred(self, **_: object) -> None:
        self.transfers += 1


def _engine() -> Any:  # noqa: ANN401
    allocator = SimpleNamespace(pools=[SimpleNamespace(num_blocks=2)], num_free=[1])
    return SimpleNamespace(allocator=allocator, engine_id="node", num_failed=0, num_expired=0)


def _ended(error: str | None = None) -> Ended:
    row = RequestRow(request_id="r", prompt_tokens=64, cached_tokens=64, error=error)
    request = cast("Any", SimpleNamespace(error=DeadlineExceeded("the end", "r", 1.0)))
    return Ended(Job("r", [1] * 64), row, 0.0, request)


def _prefill() -> Scene:
    metrics = _Metrics()
    watch = PrefillWatch(_engine(), _TIERS, cast("Any", metrics), None)
    return metrics.counts, lambda: watch.ended(_ended("too late"))


def _decode() -> Scene:
    metrics, consumer = _Metrics(), _engine()
    watch = DecodeWatch(consumer, _TIERS, cast("Any", metrics))
    request = cast("Any", SimpleNamespace(num_tokens=64, fetched=SimpleNamespace(num_tokens=64), received_bytes=1))
    request.received_runs = 1

    def ends() -> None:
        consumer.num_failed += 1
        consumer.num_expired += 1
        watch.finished(request)

    return metrics.counts, ends


def _read(counts: Counts, ends: Callable[[], None], step: int) -> tuple[NodeCounts, bool]:
    """Read counts; before one of the steps of Python in that a request ends. Also whether there is such a step."""
    taken = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Any:  # noqa: ANN401
        nonlocal taken
        frame.f_trace_opcodes = True
        if event == "opcode":
            if taken == step:
                ends()
            taken += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        found = counts()
    finally:
        sys.settrace(before)
    return found, taken > step


@pytest.mark.parametrize("scene", [_prefill, _decode])
def test_a_part_is_never_more_than_its_whole_whenever_a_scrape_comes(scene: Callable[[], Scene]) -> None:
    step, more = 0, True
    while more:
        counts, ends = scene()
        found, more = _read(counts, ends, step)
        assert (found.hits <= found.queries, found.expired <= found.failed) == (True, True)
        step += 1
    assert step > 20
    ends()
    assert (found.hits, found.expired) == (0, 0)
    found = counts()
    assert (found.hits, found.queries, found.expired, found.failed) == (64, 64, 1, 1)


def test_what_is_counted_has_been_written_down() -> None:
    """So that a capture has what a scrape has told of, were the node killed right after."""
    metrics, seen = _Metrics(), list[int]()
    recorder = SimpleNamespace(record=lambda _: seen.append(metrics.transfers))
    PrefillWatch(_engine(), _TIERS, cast("Any", metrics), cast("Any", recorder)).ended(_ended())
    assert (seen, metrics.transfers) == ([0], 1)
