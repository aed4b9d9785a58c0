"""Spans of time on one clock."""

from collections.abc import Iterable


def union_seconds(spans: Iterable[tuple[float, float]], until: float = float("inf")) -> float:
    """Return the seconds that at least one span (begin, end) covers, counting only what lies before until."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        end = min(end, until)
        begin = max(begin, reached)
        if end > begin:
            covered += end - begin
            reached = end
    return covered
