"""Patterns: who sends what to whom."""

import pytest

from pdtx.bench.patterns import Pattern, plan_pattern
from pdtx.bench.work import StationWork
from pdtx.errors import InputError, ModelError, ParallelError
from pdtx.results.model import Case


def _ends(pattern: Pattern) -> list[tuple[int, int]]:
    assert [link.number for link in pattern.links] == list(range(len(pattern.links)))
    return [(link.prefill, link.decode) for link in pattern.links]


def _requests(work: StationWork | None) -> list[int]:
    assert work is not None
    return [request for link in work.links for request in link.requests]


def _both_ends_agree(pattern: Pattern) -> None:
    """The two stations of a link are told the same of it, and have pools for its requests that are alike."""
    for link in pattern.links:
        ends = pattern.prefill[link.prefill], pattern.decode[link.decode]
        seen = [next(one for one in work.links if one.number == link.number) for work in ends if work is not None]
        assert len(seen) == 2
        assert seen[0] == seen[1]
        pools = {work.pool_requests for work in ends if work is not None}
        assert len(pools) == 1
        assert seen[0].requests.stop <= pools.pop()


def test_pairs() -> None:
    pattern = plan_pattern(Case(batch=3, tp=(2, 4)), 2, 2)
    assert _ends(pattern) == [(0, 0), (1, 1)]
    _both_ends_agree(pattern)
    prefill, decode = pattern.prefill[1], pattern.decode[1]
    assert prefill is not None
    assert decode is not None
    assert (prefill.ranks, decode.ranks, prefill.pool_requests) == (range(2), range(4), 3)
    assert _requests(prefill) == [0, 1, 2]
    with pytest.raises(InputError, match="not 3 and 2"):
        plan_pattern(Case(), 2, 3)


@pytest.mark.parametrize(
    ("pattern", "prefill", "decode", "ends"),
    [
        ("fan-in", 3, 1, [(0, 0), (1, 0), (2, 0)]),
        ("fan-in", 5, 2, [(0, 0), (1, 1), (2, 0), (3, 1), (4, 0)]),
        ("fan-out", 1, 3, [(0, 0), (0, 1), (0, 2)]),
        ("fan-out", 2, 3, [(0, 0), (1, 1), (0, 2)]),
        ("fan-in", 1, 1, [(0, 0)]),
    ],
)
def test_fans(pattern: str, prefill: int, decode: int, ends: list[tuple[int, int]]) -> None:
    case = Case(batch=2, pattern="fan-in" if pattern == "fan-in" else "fan-out")
    found = plan_pattern(case, prefill, decode)
    assert _ends(found) == ends
    _both_ends_agree(found)
    for work in (*found.prefill, *found.decode):
        requests = _requests(work)
        assert len(requests) == len(set(requests))  # no request of a pool is moved twice


def test_fans_the_wrong_way() -> None:
    with pytest.raises(InputError, match="no more decode than prefill agents, not 3 and 1"):
        plan_pattern(Case(pattern="fan-in"), 1, 3)
    with pytest.raises(InputError, match="no more prefill than decode agents, not 3 and 1"):
        plan_pattern(Case(pattern="fan-out"), 3, 1)
    with pytest.raises(InputError, match="not 0 and 1"):
        plan_pattern(Case(), 0, 1)
    with pytest.raises(InputError, match="batch 0"):
        plan_pattern(Case(batch=0), 1, 1)


def test_ranks_are_linked_where_one_has_what_the_other_needs() -> None:
    # 8 heads: source ranks hold 4 each, destination ranks 2 each.
    pattern = plan_pattern(Case(pattern="tp", tp=(2, 4)), 2, 4)
    assert _ends(pattern) == [(0, 0), (0, 1), (1, 2), (1, 3)]
    _both_ends_agree(pattern)
    assert [work.ranks for work in pattern.decode if work is not None] == [range(at, at + 1) for at in range(4)]
    assert _ends(plan_pattern(Case(pattern="tp", tp=(4, 2)), 4, 1)) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    shared = plan_pattern(Case(pattern="tp", tp=(4, 4)), 2, 2)
    assert _ends(shared) == [(0, 0), (1, 1)]
    assert shared.prefill[1] is not None
    assert shared.prefill[1].ranks == range(2, 4)
    assert shared.prefill[1].links[0].decode_ranks == range(2, 4)


def test_ranks_whose_copies_nobody_reads_have_nothing_to_do() -> None:
    pattern = plan_pattern(Case(model="deepseek-v3", pattern="tp", tp=(4, 2)), 4, 2)
    assert _ends(pattern) == [(0, 0), (2, 1)]
    assert [work is None for work in pattern.prefill] == [False, True, False, True]


def test_ranks_that_cannot_be_shared_out() -> None:
    with pytest.raises(InputError, match="tp 2 of the prefill side cannot be shared out over 3 prefill agents"):
        plan_pattern(Case(pattern="tp", tp=(2, 2)), 3, 2)
    with pytest.raises(ParallelError):
        plan_pattern(Case(pattern="tp", tp=(3, 1)), 1, 1)
    with pytest.raises(ModelError):
        plan_pattern(Case(pattern="tp", model="no-such-model"), 1, 1)
