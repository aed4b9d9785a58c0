"""What a plan costs: building it (audit included), and expanding it into one run after another.

32 layers of Llama-3-8B, K and V, blocks of 16 tokens scattered on both sides, 16 to 8,192 blocks, between some layouts.
The bar: 524,288 runs (8,192 blocks, split K/V) built and expanded in 50 ms. The other rows have no bar; beside them
stands, for building, the least that any planner does for its blocks (two products and the audit's sort), and for
expanding, the same runs written down as three sums of numpy arrays. All are rates, larger where better.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from benchmarks.rows import Row
from pdtx.kvspec import FullAttentionSpec
from pdtx.layout import make_layout
from pdtx.plan import Endpoint, Runs, TransferPlan, build_plan
from pdtx.plan.runs import Int64s

NAME = "plans"
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
ROUNDS = 7
MOST_RUNS = 1 << 21
"""Plans of more runs stay compressed: only building them is timed."""

BAR_RUNS, BAR_S = 524_288, 0.050


@dataclass(frozen=True)
class _Case:
    """One plan: names of the layouts, and scattered blocks of two pools."""

    src_name: str
    dst_name: str
    src_ids: Int64s
    dst_ids: Int64s

    @classmethod
    def of(cls, names: tuple[str, str], blocks: int) -> "_Case":
        # Every second block, so that no two are neighbours and nothing merges.
        ids = (np.random.default_rng(seed).permutation(blocks).astype(np.int64) * 2 + 1 for seed in (1, 2))
        return cls(*names, *ids)

    def endpoints(self) -> tuple[Endpoint, Endpoint]:
        pool = 2 * len(self.src_ids) + 1
        src, dst = (
            Endpoint.of(make_layout(name, SPEC, num_layers=LAYERS, num_blocks=pool), ids)
            for name, ids in ((self.src_name, self.src_ids), (self.dst_name, self.dst_ids))
        )
        return src, dst

    def plan(self, ends: tuple[Endpoint, Endpoint]) -> TransferPlan:
        return build_plan(*ends, range(len(self.src_ids) * BLOCK_SIZE))

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
    """Write down the runs of a plan of one grid: three sums."""
    (grid,) = plan.runs.grids

    def side(segments: Int64s, name: str) -> Int64s:
        found = segments
        for axis in grid.inner:
            found = np.add.outer(found, np.arange(axis.count, dtype=np.int64) * getattr(axis, name))
        for axis in reversed(grid.outer):
            found = np.add.outer(np.arange(axis.count, dtype=np.int64) * getattr(axis, name), found)
        return found.reshape(-1)

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
    amount: int, ours: Callable[[], object], reference: Callable[[], object], unit_s: float
) -> list[list[float]]:
    """Time both in turns; return their rates by round, amount in each unit_s seconds. The first round warms up."""
    rounds = [(_seconds(ours), _seconds(reference)) for _ in range(ROUNDS + 1)][1:]
    return [[amount * unit_s / seconds for seconds in column] for column in zip(*rounds, strict=True)]


def _bar() -> Row:
    """524,288 runs, built and expanded."""
    case = _Case.of(PAIRS[0], BLOCKS[-1])
    ends = case.endpoints()
    wrong = _differing(case.plan_and_expand(ends), _split_by_hand(ends))
    rates = _rates(BAR_RUNS, partial(case.plan_and_expand, ends), partial(_split_by_hand, ends), 1e-6)
    return Row(f"plan and expand {BAR_RUNS} runs", "runs/us", rates[0], [BAR_RUNS * 1e-6 / BAR_S], 1.0, wrong)


def _build(case: _Case) -> Row:
    """Building alone, by blocks: what is left of the cost where a plan stays compressed."""
    ends = case.endpoints()
    wrong = int(case.plan(ends).nbytes != case.nbytes)
    ours, least = _rates(len(case.src_ids), partial(case.plan, ends), partial(case.least_for_building, ends), 1e-3)
    return Row(f"build {case}", "blk/ms", ours, least, 0.0, wrong)


def _expand(case: _Case) -> Row | None:
    """Expanding alone, merging included, by runs; None for a plan of too many."""
    plan = case.plan(case.endpoints())
    if len(plan.runs) > MOST_RUNS:
        return None
    wrong = _differing(plan.flat, _loops_by_hand(plan))
    # A copy has not expanded itself yet.
    rates = _rates(len(plan.runs), lambda: replace(plan).flat, partial(_loops_by_hand, plan), 1e-6)
    return Row(f"expand {case}", "runs/us", rates[0], rates[1], 0.0, wrong)


def measure() -> list[Row]:
    """Return the bar's row, then those without a bar."""
    cases = [_Case.of(pair, blocks) for pair in PAIRS for blocks in BLOCKS]
    rows = [_bar(), *(_build(case) for case in cases)]
    return rows + [row for row in map(_expand, cases) if row is not None]
