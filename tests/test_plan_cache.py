"""Plans of known shapes: the same runs as without a cache, and the same refusals."""

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

from pdtx.errors import PlanError
from pdtx.kvspec import FullAttentionSpec
from pdtx.layout import ELEMENT_ORDERS, Layout, any_layout
from pdtx.parallel import Box, Cut
from pdtx.plan import Endpoint, PlanCache, TransferPlan, audit_runs, build_plan
from pdtx.plan.proof import Cell, blocks_apart
from pdtx.plan.shape import PlanShape, make_shape
from tests.plan_oracle import Int64s, Node, Scene, moves_of
from tests.plan_scenes import scenes

SPEC = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=4, dtype="float16")
POOL = 40


def layout(name: str = "flash_attn_nhd", block_size: int = 4) -> Layout:
    return any_layout(name, replace(SPEC, block_size=block_size), num_layers=3, num_blocks=POOL)


def assert_same(found: TransferPlan, expected: TransferPlan) -> None:
    assert (found.nbytes, found.num_runs, found.sizes) == (expected.nbytes, expected.num_runs, expected.sizes)
    for side in ("src", "dst", "nbytes"):
        assert np.array_equal(getattr(found.flat, side), getattr(expected.flat, side)), side
    assert np.array_equal(found.destination().offsets, expected.destination().offsets)
    assert np.array_equal(found.source().offsets, expected.source().offsets)


def shuffled(node: Node, seed: int) -> Node:
    """The same table with other blocks wherever it has one."""
    ids = np.random.default_rng(seed).permutation(node.table[node.table != 0])
    table = node.table.copy()
    table[table != 0] = ids
    return replace(node, table=table)


def check_request(plans: PlanCache, scene: Scene, chunks: list[range], seed: int) -> None:
    """Plan a request as nodes do, layer by layer and chunk by chunk, with and without the cache."""
    here, there = (shuffled(node, seed).endpoint for node in (scene.src, scene.dst))
    for move in moves_of(scene):
        for tokens in chunks:
            for number, layer in enumerate(scene.layers):
                place = {"dst_layer": scene.dst_layer + number, "boxes": move.boxes}
                for source in (here, Endpoint.stand_in(scene.src.layout, scene.tokens.stop)):
                    cached = plans.plan(source, there, tokens, range(layer, layer + 1), **place)  # type: ignore[arg-type]
                    fresh = build_plan(source, there, tokens, range(layer, layer + 1), **place)  # type: ignore[arg-type]
                    assert_same(cached, fresh)
                    if source is here:
                        audit_runs(cached.flat, here.layout, there.layout, fresh.nbytes)


@given(scenes(), st.data())
def test_cached_is_uncached(scene: Scene, data: st.DataObject) -> None:
    """Other block ids, other layers and positions that begin elsewhere in a block, all through one cache."""
    assume(scene.compatible and scene.tokens and scene.layers)
    positions = st.integers(scene.tokens.start, scene.tokens.stop)
    chunks = [range(*sorted((data.draw(positions), data.draw(positions)))) for _ in range(3)]
    plans = PlanCache()
    for seed in range(2):
        check_request(plans, scene, [scene.tokens, *chunks], seed)
    event(f"hits: {plans.hits > 0}")
    assert plans.hits >= plans.misses


def test_what_makes_another_shape() -> None:
    """One cache for plans that differ in one thing each; whatever it confused would come out wrong."""
    plans, ids = PlanCache(), [3, 5, 8]
    first = layout(), layout("flash_attn_hnd"), None, range(2), (Box(),), range(1, 9)
    cases = [
        first,
        (layout("flashinfer_nhd"), *first[1:]),
        (first[0], layout("flashinfer_hnd"), *first[2:]),
        (*first[:2], layout("flashinfer_hnd"), *first[3:]),
        (*first[:3], range(1, 2), *first[4:]),
        (*first[:3], range(3), *first[4:]),
        (*first[:4], (Box((Cut("head", 0, 1, 1),)),), first[5]),
        (*first[:5], range(9)),
        (*first[:5], range(1, 10)),
    ]
    for _ in range(2):
        for src, dst, agreed, layers, boxes, tokens in cases:
            here, there = Endpoint.of(src, ids), Endpoint.of(dst, ids, agreed=agreed)
            found = plans.plan(here, there, tokens, layers, boxes=boxes)
            assert_same(found, build_plan(here, there, tokens, layers, boxes=boxes))
    assert (plans.hits, plans.misses) == (len(cases), len(cases))


class ForgetfulCache(PlanCache):
    """A cache that takes shapes for the same which begin at other places of a block."""

    def _shape(
        self, src: Layout, dst: Layout, order: Layout, boxes: tuple[Box, ...], num_layers: int, tokens: range
    ) -> PlanShape:
        return super()._shape(src, dst, order, boxes, num_layers, range(len(tokens)))


def test_a_cache_that_forgets_is_found_out() -> None:
    here, there = (Endpoint.of(layout(name), [3, 5, 8]) for name in ("flash_attn_nhd", "flashinfer_hnd"))
    for plans, right in ((PlanCache(), True), (ForgetfulCache(), False)):
        for start in (0, 1):
            tokens = range(start, start + 6)
            found, expected = plans.plan(here, there, tokens), build_plan(here, there, tokens)
            assert np.array_equal(found.flat.dst, expected.flat.dst) is (right or start == 0)


class TestSafety:
    """What the audit would find is found where a known shape needs no audit."""

    plans: PlanCache

    @pytest.fixture(autouse=True)
    def _warm(self) -> None:
        self.plans = PlanCache()
        for seed in range(2):
            ids = np.random.default_rng(seed).permutation(POOL - 1)[:3] + 1
            self.plan(ids, ids[::-1])
        assert (self.plans.hits, self.plans.misses) == (1, 1)

    def plan(self, src: list[int] | Int64s, dst: list[int] | Int64s) -> TransferPlan:
        return self.plans.plan(Endpoint.of(layout(), src), Endpoint.of(layout(), dst), range(1, 11))

    def test_a_block_twice_at_the_destination(self) -> None:
        with pytest.raises(PlanError, match="two runs write byte"):
            self.plan([1, 2, 3], [4, 5, 4])
        assert self.plan([1, 2, 1], [4, 5, 6]).nbytes == 10 * 3 * 2 * 2 * 4 * 2, "a shared prefix may be read twice"

    @pytest.mark.parametrize("bad", [-1, POOL, 1 << 40])
    def test_a_block_outside_the_pool(self, bad: int) -> None:
        for src, dst, side in (([1, bad, 3], [4, 5, 6], "source"), ([1, 2, 3], [4, bad, 6], "destination")):
            with pytest.raises(PlanError, match=f"{side} block id {bad} is outside its pool of {POOL} blocks"):
                self.plan(src, dst)

    @pytest.mark.parametrize("at", range(3))
    def test_the_null_block(self, at: int) -> None:
        ids = [4, 5, 6]
        ids[at] = 0
        with pytest.raises(PlanError, match="source has the null block"):
            self.plan(ids, [1, 2, 3])
        with pytest.raises(PlanError, match="destination has the null block"):
            self.plan([1, 2, 3], ids)

    def test_too_few_blocks_and_layers_that_are_not_there(self) -> None:
        with pytest.raises(PlanError, match="destination has 2 blocks of 4 tokens, too few"):
            self.plan([1, 2, 3], [4, 5])
        ends = Endpoint.of(layout(), [1, 2, 3]), Endpoint.of(layout(), [4, 5, 6])
        self.plans.plan(*ends, range(1, 11), range(1, 2))
        with pytest.raises(PlanError, match=r"destination layers 3\.\.4 are not a part of 0\.\.3"):
            self.plans.plan(*ends, range(1, 11), range(1, 2), dst_layer=3)


@pytest.mark.parametrize("dst_size", [2, 4, 8])
@pytest.mark.parametrize("dst", ELEMENT_ORDERS)
@pytest.mark.parametrize("src", ["flash_attn_nhd", "flashinfer_hnd", "flash_attn_nhd_cross_layer"])
def test_every_plain_layout_is_proved_once_for_all(src: str, dst: str, dst_size: int) -> None:
    """None of them falls back to an audit of every plan."""
    there = layout(dst, dst_size)
    assert make_shape(layout(src), there, there, (Box(),), 1, range(1, 21)).blocks_apart


class TestProof:
    good = Cell(stride=64, count=10, layer=640, places=frozenset({0, 640}), low=0, high=64, reach=1280)

    def test_cells_of_a_layout_pass(self) -> None:
        assert blocks_apart([self.good, replace(self.good, low=32)], 1280)
        assert blocks_apart([], 0)

    @pytest.mark.parametrize(
        "bad",
        [
            replace(good, high=65),  # reaches into the next block
            replace(good, low=-1),
            replace(good, reach=1281),
            replace(good, places=None),
            replace(good, places=frozenset({0, 600})),  # planes closer than all blocks
            replace(good, stride=32, high=32),  # not the others' blocks
        ],
    )
    def test_what_may_overlap_is_not_proved(self, bad: Cell) -> None:
        assert not blocks_apart([self.good, bad], 1280)


def test_the_least_recently_used_is_forgotten() -> None:
    plans, ends = PlanCache(2), (Endpoint.of(layout(), [1, 2]), Endpoint.of(layout(), [3, 4]))
    for length in (1, 2, 1, 3, 1, 2):
        plans.plan(*ends, range(length))
    assert (len(plans), plans.hits, plans.misses) == (2, 2, 4)
    with pytest.raises(PlanError, match="1 shape or more, not 0"):
        PlanCache(0)


def test_positions_a_block_further_on_are_the_same_shape() -> None:
    plans, ids = PlanCache(), [5, 2, 9, 4, 1, 3]
    here, there = Endpoint.of(layout(), ids), Endpoint.of(layout("flash_attn_hnd", 8), ids[:3])
    for start in (1, 9, 17):
        tokens = range(start, start + 7)
        assert_same(plans.plan(here, there, tokens), build_plan(here, there, tokens))
    assert (plans.hits, plans.misses) == (2, 1)


def test_many_threads_share_a_cache() -> None:
    plans, errors = PlanCache(3), list[BaseException]()

    def work(seed: int) -> Callable[[], None]:
        def go() -> None:
            random = np.random.default_rng(seed)
            try:
                for _ in range(50):
                    ids = random.permutation(POOL - 1)[:4] + 1
                    ends = Endpoint.of(layout(), ids), Endpoint.of(layout("flash_attn_hnd"), ids)
                    tokens = range(int(random.integers(1, 16)))
                    assert_same(plans.plan(*ends, tokens), build_plan(*ends, tokens))
            except BaseException as error:  # noqa: BLE001 - shown by the test's own thread
                errors.append(error)

        return go

    threads = [threading.Thread(target=work(seed)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(plans) <= 3
