"""What a plan costs: the first of its shape, the next ones, and expanding it into one run after another.

32 layers of Llama-3-8B, K and V, blocks of 16 tokens scattered on both sides, 16 to 8,192 blocks, between some layouts.
The bars: 524,288 runs (8,192 blocks, split K/V) planned and expanded in 50 ms, and planned again for other blocks in
1 ms, audit included both times. The other rows have no bar; beside them stands, for building, the least that any
planner does for its blocks (two products and the audit's sort), and for expanding, the same runs written down as sums
of numpy arrays. These are rates, larger where better.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle

import numpy as np

from benchmarks.rows import Row
from benchmarks.settings import Settings
from pdtx.kvspec import FullAttentionSpec
from pdtx.layout import make_layout
from pdtx.plan import Endpoint, PlanCache, Runs, TransferPlan, build_plan
from pdtx.plan.grids import GridAxis
from pdtx.plan.runs import Int64s

LAYERS, BLOCK_SIZE = 32, 16
SPEC = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype="bfloat16")
BLOCKS = (16, 128, 1_024, 8_192)
PAIRS = (
    ("flash_attn_nhd", "flash_attn_nhd"),
    ("flashinfer_nhd", "flashinfer_nhd"),
    ("flash_attn_nhd", "flashinfer_nhd"),
    ("flash_attn_nhd_cross_layer", "flash_attn_nhd_cross_layer"),
    ("vllm_bhlnc", "vllm_lbhnc"),
    ("flash_attn_nhd", "flash_attn_hnd"),
)
_QUICK_BLOCKS = (4, 16)
MOST_RUNS = 1 << 21
"""Plans of more runs stay compressed: only building them is timed."""

BAR_RUNS, FIRST_MS, REPEATED_MS = 524_288, 50.0, 1.0
_OTHER_TABLES = 3
"""Block tables that a repeated plan is made for in turns: never the one of the plan before."""


@dataclass(frozen=True)
class _Case:
    """One plan: names of the layouts, and scattered blocks of two pools."""

    src_name: str
    dst_name: str
    src_ids: Int64s
    dst_ids: Int64s

    @classmethod
    def of(cls, names: tuple[str, str], blocks: int, seed: int = 1) -> "_Case":
        # Every second block, so that no two are neighbours and nothing merges.
        ids = (np.random.default_rng(at).permutation(blocks).astype(np.int64) * 2 + 1 for at in (seed, -seed % 1000))
        return cls(*names, *ids)

    def endpoints(self) -> tuple[Endpoint, Endpoint]:
        pool = 2 * len(self.src_ids) + 1
        src, dst = (
            Endpoint.of(make_layout(name, SPEC, num_layers=LAYERS, num_blocks=pool), ids)
            for name, ids in ((self.src_name, self.src_ids), (self.dst_name, self.dst_ids))
        )
        return src, dst

    @property
    def tokens(self) -> range:
        return range(len(self.src_ids) * BLOCK_SIZE)

    def plan(self, ends: tuple[Endpoint, Endpoint]) -> TransferPlan:
        return build_plan(*ends, self.tokens)

    def plan_and_expand(self, ends: tuple[Endpoint, Endpoint]) -> Runs:
        return self.plan(ends).flat

    def least_for_building(self, ends: tuple[Endpoint, Endpoint]) -> Int64s:
        """Place the blocks on both sides, sort one."""
        src, dst = (side.block_ids * side.layout.parts[0].layout.stride("block") for side in ends)
        order: Int64s = np.argsort(dst, kind="stable")
        return src[order]

    @property
    def nbytes(self) -> int:
        return LAYERS * len(self.src_ids) * SPEC.page_size_bytes

    def __str__(self) -> str:
        return f"{self.src_name}>{self.dst_name} {len(self.src_ids)}"


def _loops_by_hand(plan: TransferPlan) -> Runs:
    """Write down the runs of a plan of one grid: one sum for each loop."""
    (grid,) = plan.runs.grids

    def added(before: Int64s, axes: tuple[GridAxis, ...], name: str) -> Int64s:
        for axis in reversed(axes):
            before = np.add.outer(np.arange(axis.count, dtype=np.int64) * getattr(axis, name), before)
        return before

    def side(segments: Int64s, name: str) -> Int64s:
        found = segments.reshape(-1, grid.parts)
        for axis in grid.inner:
            found = np.add.outer(found, np.arange(axis.count, dtype=np.int64) * getattr(axis, name))
        if grid.middle:
            found = np.stack([added(group, grid.middle, name) for group in found])
        return added(found, grid.outer, name).reshape(-1)

    src = side(grid.src, "src_stride")
    return Runs(src, side(grid.dst, "dst_stride"), np.full(len(src), grid.nbytes[0], np.int64))


def _split_by_hand(ends: tuple[Endpoint, Endpoint]) -> Runs:
    """Write down the runs between split K/V layouts from the backend's own shape, (layers, 2, blocks, page)."""
    page = SPEC.page_size_bytes // 2
    halves = np.arange(LAYERS * 2, dtype=np.int64)[:, None]
    src, dst = (
        ((halves * side.layout.parts[0].layout.extent("block") + side.block_ids) * page).reshape(-1) for side in ends
    )
    return Runs(src, dst, np.full(len(src), page, np.int64))


def _differing(one: Runs, other: Runs) -> int:
    """Count the runs that are not the same."""
    if len(one) != len(other):
        return max(len(one), len(other))
    return int(((one.src != other.src) | (one.dst != other.dst) | (one.nbytes != other.nbytes)).sum())


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _rates(
    rounds: int, amount: float, ours: Callable[[], object], reference: Callable[[], object]
) -> tuple[list[float], list[float]]:
    """Time both in turns; return their rates by round, amount a second. The first round warms up."""
    _seconds(ours), _seconds(reference)
    pairs = [(amount / _seconds(ours), amount / _seconds(reference)) for _ in range(rounds)]
    return [one for one, _ in pairs], [other for _, other in pairs]


def _within(name: str, most_ms: float, seconds: list[float], wrong: int, detail: str) -> Row:
    """Hold milliseconds to a bar."""
    return Row(
        name=f"{name} : {most_ms:g} ms",
        unit="ms",
        ours=[one * 1e3 for one in seconds],
        reference=[most_ms],
        at_least=1.0,
        wrong=wrong,
        less_is_better=True,
        against="the bar itself",
        detail=detail,
        limit="numpy on one core",
    )


def _first(blocks: int, rounds: int) -> Row:
    """The first plan of a shape, expanded."""
    case = _Case.of(PAIRS[0], blocks)
    ends = case.endpoints()
    wrong = _differing(case.plan_and_expand(ends), _split_by_hand(ends))
    seconds = [_seconds(partial(case.plan_and_expand, ends)) for _ in range(rounds + 1)][1:]
    runs = blocks * BAR_RUNS // BLOCKS[-1]
    return _within(f"plan and expand {runs} runs", FIRST_MS, seconds, wrong, "no shape known before")


def _repeated(blocks: int, rounds: int) -> Row:
    """Plans of a shape that is known, for other blocks each time; compressed, as planned."""
    cases = [_Case.of(PAIRS[0], blocks, seed) for seed in range(1, _OTHER_TABLES + 1)]
    cache, turns = PlanCache(), cycle([(case, case.endpoints()) for case in cases])
    first, ends = next(turns)
    cache.plan(*ends, first.tokens)

    def again() -> tuple[TransferPlan, tuple[Endpoint, Endpoint], float]:
        case, ends = next(turns)
        begun = time.perf_counter()
        plan = cache.plan(*ends, case.tokens)
        return plan, ends, time.perf_counter() - begun

    done = [again() for _ in range(rounds + 1)][1:]
    wrong = sum(_differing(plan.flat, _split_by_hand(ends)) for plan, ends, _ in done[:_OTHER_TABLES])
    runs = blocks * BAR_RUNS // BLOCKS[-1]
    detail = f"shape known {cache.hits} times of {cache.hits + cache.misses}; not expanded"
    return _within(f"plan {runs} runs again", REPEATED_MS, [seconds for *_, seconds in done], wrong, detail)


def _build(case: _Case, rounds: int) -> Row:
    """Building alone, by blocks: what is left of the cost where a plan stays compressed."""
    ends = case.endpoints()
    wrong = int(case.plan(ends).nbytes != case.nbytes)
    ours, least = _rates(
        rounds, len(case.src_ids) * 1e-3, partial(case.plan, ends), partial(case.least_for_building, ends)
    )
    against = "two products and a sort"
    return Row(name=f"build {case}", unit="blk/ms", ours=ours, reference=least, wrong=wrong, against=against)


def _expand(case: _Case, rounds: int) -> Row | None:
    """Expanding alone, merging included, by runs; None for a plan of too many."""
    plan = case.plan(case.endpoints())
    if plan.num_runs > MOST_RUNS:
        return None
    wrong = _differing(plan.flat, _loops_by_hand(plan))
    # A copy has not expanded itself yet.
    ours, sums = _rates(rounds, plan.num_runs * 1e-6, lambda: replace(plan).flat, partial(_loops_by_hand, plan))
    against = "sums of arrays"
    return Row(name=f"expand {case}", unit="runs/us", ours=ours, reference=sums, wrong=wrong, against=against)


def plans(settings: Settings) -> list[Row]:
    """Return the rows with bars, then those without."""
    sizes, rounds = _QUICK_BLOCKS if settings.quick else BLOCKS, settings.rounds
    cases = [_Case.of(pair, blocks) for pair in PAIRS for blocks in sizes]
    expanded = (_expand(case, rounds) for case in cases)
    return [
        _first(sizes[-1], rounds),
        _repeated(sizes[-1], rounds),
        *(_build(case, rounds) for case in cases),
        *(row for row in expanded if row is not None),
    ]
