"""Every kind of cache between any two layouts, rank counts and block sizes: each byte at its place, no other touched.

`PDTX_EXAMPLES=4200 pytest tests/test_transfer_properties.py` looks at that many scenes of each kind, by chance.
"""

import itertools
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from pdtx.errors import InputError, PlanError
from pdtx.kvspec import FullAttentionSpec
from pdtx.layout import AXIS_NAMES, ELEMENT_ORDERS, any_layout, make_layout
from pdtx.plan import Runs, RunSet, TransferPlan, audit_run_set, audit_runs
from pdtx.plan.grids import GridAxis, RunGrid
from tests.plan_oracle import Cells, Scene, check_arrival, copy_runs, moves_of, plan_of, views
from tests.plan_scenes import KINDS, scenes

_MANY = os.environ.get("PDTX_EXAMPLES")
pytestmark = pytest.mark.timeout(0 if _MANY else 120)
examples = settings(max_examples=int(_MANY), derandomize=False, database=None) if _MANY else settings()


def refused(scene: Scene) -> bool:
    """Plan a scene that cannot be carried out: some of its moves must be refused, and none may go wrong."""
    errors = 0
    for move in moves_of(scene):
        try:
            plan_of(scene, move)
        except InputError:
            errors += 1
    return errors > 0 or not (scene.tokens and scene.layers)


@pytest.mark.parametrize("kind", KINDS)
@examples
@given(data=st.data())
def test_every_byte_arrives_and_no_other_changes(kind: str, data: st.DataObject) -> None:
    """Run by run, and as a stream whose receiver knows the sender's layout but not its block table."""
    scene = data.draw(scenes(kind))
    if not scene.compatible:
        assert refused(scene)
    else:
        check_arrival(scene)


def expanded(runs: RunSet) -> list[tuple[int, int, int]]:
    """The compressed runs, expanded by loops written for this test."""
    found = []
    for grid in runs.grids:
        segments = list(zip(grid.src.tolist(), grid.dst.tolist(), grid.nbytes.tolist(), strict=True))
        groups = [segments[first : first + grid.parts] for first in range(0, len(segments), grid.parts)]
        axes = (*grid.outer, *grid.middle, *grid.inner)
        steps = [[range(axis.count) for axis in loops] for loops in (grid.outer, grid.middle, grid.inner)]
        for outer, group, middle, segment, inner in itertools.product(
            itertools.product(*steps[0]), groups, itertools.product(*steps[1]), range(grid.parts),
            itertools.product(*steps[2])
        ):  # fmt: skip
            src, dst, nbytes = group[segment]
            at = list(zip((*outer, *middle, *inner), axes, strict=True))
            src += sum(step * axis.src_stride for step, axis in at)
            dst += sum(step * axis.dst_stride for step, axis in at)
            found.append((src, dst, nbytes))
    return found


def tuples(runs: Runs) -> list[tuple[int, int, int]]:
    return list(zip(runs.src.tolist(), runs.dst.tolist(), runs.nbytes.tolist(), strict=True))


@examples
@given(scenes())
def test_compressed_and_merged_runs_are_the_same_bytes_in_the_same_order(scene: Scene) -> None:
    assume(scene.compatible)
    for move in moves_of(scene):
        merged, plan = plan_of(scene, move), plan_of(scene, move, merge=False)
        assert expanded(plan.runs) == tuples(plan.flat)
        assert len(plan.runs) == len(plan.flat)
        assert joined(tuples(merged.flat)) == joined(tuples(plan.flat))
        if not any(grid.looped for grid in plan.runs.grids):
            assert tuples(merged.flat) == joined(tuples(plan.flat)), "only loops may stand in the way of merging"
        assert merged.nbytes == plan.nbytes == merged.flat.total == plan.flat.total
        for side in ("source", "destination"):
            one, other = getattr(merged.flat, side)(), getattr(plan.flat, side)()
            assert (one.offsets.tolist(), one.nbytes.tolist()) == (other.offsets.tolist(), other.nbytes.tolist())
            ends, starts = one.offsets[:-1] + one.nbytes[:-1], one.offsets[1:]
            assert (ends != starts).all(), "what touches must have been joined"
        for each in (plan, merged):
            check_shortcuts(each)


def check_shortcuts(plan: TransferPlan) -> None:
    """What is told or made without expanding all is what the list says."""
    flat = plan.flat
    assert plan.num_runs == len(flat) == len(plan.to_move)
    assert plan.num_destination_ranges == len(flat.destination())
    assert tuples(plan.to_move) == tuples(flat)
    assert plan.to_move.total == flat.total
    for ours, theirs in (
        (plan.source(), flat.source()), (plan.destination(), flat.destination()),
        (plan.to_move.source(), flat.source()), (plan.to_move.destination(), flat.destination()),
    ):  # fmt: skip
        assert ours.offsets.tolist() == theirs.offsets.tolist()
        assert ours.nbytes.tolist() == theirs.nbytes.tolist()


def joined(runs: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Neighbours joined where they touch on both sides."""
    found = list[tuple[int, int, int]]()
    for src, dst, nbytes in runs:
        last = found[-1] if found else (-1, -1, 0)
        if found and (last[0] + last[2], last[1] + last[2]) == (src, dst):
            found[-1] = (last[0], last[1], last[2] + nbytes)
        else:
            found.append((src, dst, nbytes))
    return found


@examples
@given(scenes())
def test_sizes_are_predicted_without_expanding(scene: Scene) -> None:
    assume(scene.compatible)
    for move in moves_of(scene):
        for merge in (True, False):
            plan = plan_of(scene, move, merge=merge)
            assert plan.sizes == dict(Counter(plan.flat.nbytes.tolist()))


@examples
@given(scenes(), st.data())
def test_chunks_and_layers_add_up_to_the_whole(scene: Scene, data: st.DataObject) -> None:
    """Shipped in two chunks of tokens, layer by layer, every rank ends up the same."""
    assume(scene.compatible)
    cut = data.draw(st.integers(scene.tokens.start, max(scene.tokens.start, scene.tokens.stop)))
    whole, moves = scene.whole(), moves_of(scene)
    sources = [scene.source(whole, rank) for rank in range(scene.src.tp_size)]
    memories = [scene.poisoned() for _ in range(scene.dst.tp_size)]
    for chunk in (range(scene.tokens.start, cut), range(cut, scene.tokens.stop)):
        for number, layer in enumerate(scene.layers):
            part = replace(
                scene, tokens=chunk, layers=range(layer, layer + 1), dst_layer=scene.dst_layer + number
            )  # fmt: skip
            for move in moves:
                copy_runs(sources[move.src_rank], memories[move.dst_rank], plan_of(part, move).flat)
    for rank, memory in enumerate(memories):
        assert np.array_equal(memory, scene.expected(whole, rank))


@examples
@given(scenes(), st.data())
def test_the_null_block_is_never_read_or_written(scene: Scene, data: st.DataObject) -> None:
    """Wherever it stands in the part of the table that tokens lie in, the plan is refused."""
    assume(scene.compatible and scene.tokens and scene.layers)
    name = data.draw(st.sampled_from(["source", "destination"]))
    side = "src" if name == "source" else "dst"
    node = getattr(scene, side)
    token = data.draw(st.integers(scene.tokens.start, scene.tokens.stop - 1))
    table = node.table.copy()
    table[token // scene.tokens_per_step // node.steps_per_block] = 0
    broken = replace(scene, **{side: replace(node, table=table)})
    for move in moves_of(broken):
        with pytest.raises(PlanError, match=f"{name} has the null block where tokens"):
            plan_of(broken, move)


_REGION = 400
_LAYOUT = make_layout(
    "flash_attn_nhd",
    FullAttentionSpec(block_size=1, num_kv_heads=1, head_size=1, dtype="uint8"),
    num_layers=1,
    num_blocks=_REGION // 2,
)


@st.composite
def run_sets(draw: st.DrawFn) -> RunSet:
    """Compressed runs that may overlap or leave the region: about half of them are right."""
    strides = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 100, 128])
    axes = st.builds(GridAxis, st.integers(1, 4), strides, strides)
    outer = tuple(draw(st.lists(axes, max_size=2)))
    grids = []
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.integers(0, 4))
        starts = st.lists(st.integers(-1 if draw(st.integers(0, 9)) == 0 else 0, 100), min_size=count, max_size=count)
        src, dst = (np.array(draw(starts), np.int64) for _ in range(2))
        if draw(st.booleans()):  # segments that stand apart
            dst = np.arange(count, dtype=np.int64) * draw(st.integers(1, 30)) + draw(st.integers(0, 50))
        nbytes = np.full(count, draw(st.sampled_from([1, 1, 2, 3, 4, 8])), np.int64)
        if draw(st.integers(0, 3)) == 0:
            outer = tuple(draw(st.lists(axes, max_size=2)))
        inner = tuple(draw(st.lists(axes, max_size=2)))
        parts = draw(st.sampled_from([part for part in (1, 2, 3, 4) if count % part == 0]))
        middle = tuple(draw(st.lists(axes, max_size=1))) if parts > 1 else ()
        grids.append(RunGrid(src, dst, nbytes, outer, inner, parts, middle))
    return RunSet(tuple(grids))


@settings(examples, max_examples=3 * examples.max_examples)
@given(run_sets())
def test_loops_and_lists_are_the_same(runs: RunSet) -> None:
    """Loops of any kind, also ones that no layout makes: expanded, joined on either side, and judged as touching."""
    flat = runs.flat
    assert tuples(flat) == expanded(runs)
    assert joined(tuples(runs.merged().flat)) == joined(tuples(flat))
    for side, slices in (("src", flat.source()), ("dst", flat.destination())):
        found = runs.ranges("src" if side == "src" else "dst")
        assert (found.offsets.tolist(), found.nbytes.tolist()) == (slices.offsets.tolist(), slices.nbytes.tolist())
        assert runs.num_ranges("src" if side == "src" else "dst") == len(slices)
    if not runs.touching:
        assert joined(tuples(flat)) == tuples(flat)


_ONE, _TWO = GridAxis(2, 8, 8), GridAxis(2, 32, 32)


@pytest.mark.parametrize(
    ("starts", "outer", "middle", "parts", "inner"),
    [
        ([0], (), (), 1, (GridAxis(2, 4, 4),)),  # the innermost steps
        ([0], (), (), 1, (GridAxis(2, 12, 12), _ONE)),  # the innermost loop's end, and its next beginning
        ([0, 12], (), (), 1, (_ONE,)),  # a segment after a segment's loop
        ([0, 12], (), (_TWO,), 2, (_ONE,)),  # a segment of the same group
        ([0, 20], (), (GridAxis(2, 24, 24),), 2, ()),  # a group's last segment, and its first of the next step
        ([0, 20, 56, 80], (), (_TWO,), 2, ()),  # a group after a group
        ([0, 20], (GridAxis(2, 24, 24),), (), 1, ()),  # the last segment, and the first of the next step
        ([0], (GridAxis(2, 24, 24), GridAxis(2, 12, 12)), (), 1, (_ONE,)),
    ],
)
def test_every_way_of_touching_is_seen(
    starts: list[int],
    outer: tuple[GridAxis, ...],
    middle: tuple[GridAxis, ...],
    parts: int,
    inner: tuple[GridAxis, ...],
) -> None:
    """Runs of 4 bytes that touch only where one loop goes on, and not if that place is moved a byte."""
    for shift in (0, 1):
        at = np.array(starts, np.int64)
        at[1:] += shift * (len(at) > 1)
        grid = RunGrid(at, at, np.full(len(at), 4, np.int64), outer, inner, parts, middle)
        runs = RunSet((grid,))
        joins = len(runs.flat.merged()) < len(runs)
        assert runs.touching is joins
        assert runs.num_ranges("dst") == len(runs.ranges("dst")) == len(runs.flat.destination())
        assert joins or shift


def test_grids_that_follow_one_another_may_touch() -> None:
    def grid(at: int) -> RunGrid:
        start = np.array([at], np.int64)
        return RunGrid(start, start, np.array([4], np.int64), (GridAxis(2, 8, 8),))

    for at, ranges in ((12, 3), (13, 4)):
        runs = RunSet((grid(0), grid(at)))
        assert runs.touching is (at == 12)
        assert runs.num_ranges("src") == len(runs.ranges("src")) == ranges


def check_audit(runs: RunSet) -> bool:
    """Let both audits judge runs; return whether they are right by a count of how often each byte is written."""
    flat, total = runs.flat, runs.total
    written = np.zeros(_REGION, np.int64)
    right = not len(flat) or bool(
        min(int(flat.src.min()), int(flat.dst.min())) >= 0
        and max(int((side + flat.nbytes).max()) for side in (flat.src, flat.dst)) <= _REGION
    )
    if right:
        for _, dst, nbytes in tuples(flat):
            written[dst : dst + nbytes] += 1
        right = bool(written.max() <= 1)
    checks: list[Callable[[], None]] = [
        lambda: audit_run_set(runs, _LAYOUT, _LAYOUT, total),
        lambda: audit_runs(flat, _LAYOUT, _LAYOUT, total),
    ]
    for check in checks:
        if right:
            check()
        else:
            with pytest.raises(PlanError, match="audit: "):
                check()
    with pytest.raises(PlanError):
        audit_run_set(runs, _LAYOUT, _LAYOUT, total + 1)
    return right


@settings(examples, max_examples=3 * examples.max_examples)
@given(run_sets())
def test_the_audit_of_compressed_runs_accepts_what_bytes_accept(runs: RunSet) -> None:
    event(f"right: {check_audit(runs)}")


@pytest.mark.parametrize(("at", "right"), [(104, False), (108, True)])
def test_an_audit_follows_the_loops_of_every_run(at: int, right: bool) -> None:
    """Of two neighbours, only the second goes on to where a third is."""

    def grid(dst: int, *loops: tuple[int, int]) -> RunGrid:
        start = np.array([dst], np.int64)
        axes = tuple(GridAxis(count, stride, stride) for count, stride in loops)
        return RunGrid(np.zeros(1, np.int64), start, np.array([4], np.int64), axes)

    assert check_audit(RunSet((grid(0, (2, 8)), grid(4, (2, 8), (3, 100)), grid(at)))) is right


class TestOracle:
    """The oracle itself, once, against the definition: an element lies at the sum of coordinate * stride."""

    spec = FullAttentionSpec(block_size=2, num_kv_heads=2, head_size=3, dtype="float16")

    @pytest.mark.parametrize("name", ELEMENT_ORDERS)
    def test_views(self, name: str) -> None:
        layout = make_layout(name, self.spec, num_layers=2, num_blocks=3)
        memory: Cells = np.arange(layout.size_bytes, dtype=np.int32)
        for kv, part in enumerate(("key", "value")):
            view = views(memory, layout)[part]
            for layer, block, token, head, channel in np.ndindex(*view.shape[:-1]):
                at = dict(zip(AXIS_NAMES, (layer, block, kv, head, token, channel), strict=True))
                offset = sum(layout.stride(axis) * step for axis, step in at.items())
                assert view[layer, block, token, head, channel].tolist() == [offset, offset + 1]

    def test_views_cover_every_byte_once(self) -> None:
        for name in ("flash_attn_nhd", "cpu_attn_lbhnc", "diffkv_lbnhc", "vllm_bhlnc"):
            layout = any_layout(name, self.spec, num_layers=2, num_blocks=3)
            cells = np.arange(layout.size_bytes, dtype=np.int32)
            found = np.concatenate([view.reshape(-1) for view in views(cells, layout).values()])
            assert sorted(found.tolist()) == cells.tolist()
