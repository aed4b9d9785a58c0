from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from pdtx.errors import PlanError
from pdtx.kvspec import FullAttentionSpec
from pdtx.layout import LAYOUT_ORDERS, KVCacheLayout, make_layout
from pdtx.plan import Endpoint, Runs, TransferPlan, audit_runs, build_plan
from pdtx.plan.grids import GridAxis

PRESETS = tuple(LAYOUT_ORDERS)
H9_TOKENS, H9_BLOCKS, H9_POOL = 63 * 16, 63, 130
"""28 layers, 8 heads, 128 channels, bfloat16, 63 blocks of 16 tokens."""


def small(name: str, *, block_size: int = 4, num_blocks: int = 9, layers: int = 2, heads: int = 2) -> KVCacheLayout:
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=heads, head_size=4, dtype="float16")
    return make_layout(name, spec, num_layers=layers, num_blocks=num_blocks)


def tuples(runs: Runs) -> list[tuple[int, int, int]]:
    return list(zip(runs.src.tolist(), runs.dst.tolist(), runs.nbytes.tolist(), strict=True))


def runs_of(items: Iterable[tuple[int, int, int]]) -> Runs:
    columns = np.array(list(items), np.int64).reshape(-1, 3).T
    return Runs(*(np.ascontiguousarray(column) for column in columns))


def scattered(seed: int, count: int, pool: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Block ids of which no two neighbours are consecutive."""
    ids = np.random.default_rng(seed).permutation(np.arange(1, pool, 2, dtype=np.int64))[:count]
    assert len(ids) == count
    return ids


def h9_plan(
    layout: str, src_ids: Sequence[int] | np.ndarray, dst_ids: Sequence[int] | np.ndarray, *, merge: bool = True
) -> TransferPlan:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    made = make_layout(layout, spec, num_layers=28, num_blocks=H9_POOL)
    return build_plan(Endpoint.of(made, src_ids), Endpoint.of(made, dst_ids), range(H9_TOKENS), merge=merge)


CONSECUTIVE = range(5, 5 + H9_BLOCKS)
OTHER_CONSECUTIVE = range(40, 40 + H9_BLOCKS)


class TestPredictedPieces:
    """H9: how many pieces, and how big, before a byte is sent."""

    @pytest.mark.parametrize("order", ["nhd", "hnd"])
    @pytest.mark.parametrize(
        ("backend", "consecutive", "merge", "pieces", "nbytes"),
        [
            ("flash_attn", (False, False), True, 3_528, 32_768),
            ("flash_attn", (True, True), True, 56, 2_064_384),
            ("flash_attn", (True, True), False, 3_528, 32_768),
            ("flash_attn", (True, False), True, 3_528, 32_768),
            ("flash_attn", (False, True), True, 3_528, 32_768),
            ("flashinfer", (False, False), True, 1_764, 65_536),
            ("flashinfer", (True, True), True, 28, 4_128_768),
            ("flashinfer", (True, True), False, 1_764, 65_536),
            ("flashinfer", (True, False), True, 1_764, 65_536),
        ],
    )
    def test_row(
        self, backend: str, order: str, consecutive: tuple[bool, bool], merge: bool, pieces: int, nbytes: int
    ) -> None:
        src = CONSECUTIVE if consecutive[0] else scattered(1, H9_BLOCKS, H9_POOL)
        dst = OTHER_CONSECUTIVE if consecutive[1] else scattered(2, H9_BLOCKS, H9_POOL)
        plan = h9_plan(f"{backend}_{order}", src, dst, merge=merge)
        assert (len(plan.flat), set(plan.flat.nbytes.tolist())) == (pieces, {nbytes})
        assert plan.nbytes == plan.flat.total == pieces * nbytes == 115_605_504
        assert len(plan.runs) == (3_528 if backend == "flash_attn" else 1_764), "compressed counts are unmerged"

    def test_between_split_and_fused_pieces_are_the_smaller_ones(self) -> None:
        spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
        split, fused = (
            make_layout(n, spec, num_layers=28, num_blocks=64) for n in ("flash_attn_nhd", "flashinfer_nhd")
        )
        plan = build_plan(Endpoint.of(split, range(1, 64)), Endpoint.of(fused, range(1, 64)), range(H9_TOKENS))
        assert (len(plan.flat), set(plan.flat.nbytes.tolist())) == (3_528, {32_768})

    def test_between_nhd_and_hnd_pieces_are_heads(self) -> None:
        spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
        nhd, hnd = (make_layout(f"flash_attn_{o}", spec, num_layers=1, num_blocks=4) for o in ("nhd", "hnd"))
        plan = build_plan(Endpoint.of(nhd, [2]), Endpoint.of(hnd, [3]), range(16))
        assert (len(plan.flat), set(plan.flat.nbytes.tolist())) == (2 * 16 * 8, {256})


def oracle_runs(src: Endpoint, dst: Endpoint, tokens: range, layers: range) -> set[tuple[int, int]]:
    """(source byte, destination byte) of every element, by coordinates alone."""

    def place(side: Endpoint, layer: int, kv: int, token: int, head: int, channel: int) -> int:
        block, offset = int(side.block_ids[token // side.layout.block_size]), token % side.layout.block_size
        at = {"layer": layer, "block": block, "kv": kv, "head": head, "token": offset, "channel": channel}
        return sum(axis.stride * at[axis.name] for axis in side.layout.parts[0].layout.axes)

    layout = src.layout.parts[0].layout
    return {
        (place(src, *at), place(dst, *at))
        for at in (
            (layer, kv, token, head, channel)
            for layer in layers
            for kv in range(2)
            for token in tokens
            for head in range(layout.extent("head"))
            for channel in range(layout.extent("channel"))
        )
    }


def elements(runs: Runs, itemsize: int) -> list[tuple[int, int]]:
    return [(s + i, d + i) for s, d, n in tuples(runs) for i in range(0, n, itemsize)]


def steps(axes: Sequence[GridAxis]) -> list[tuple[int, int]]:
    """What nested loops add to source and destination, step by step."""
    found = [(0, 0)]
    for axis in axes:
        found = [(s + i * axis.src_stride, d + i * axis.dst_stride) for s, d in found for i in range(axis.count)]
    return found


def expanded(plan: TransferPlan) -> list[tuple[int, int, int]]:
    """The compressed runs, expanded by loops written for this test."""
    found = []
    for grid in plan.runs.grids:
        segments = list(zip(grid.src.tolist(), grid.dst.tolist(), grid.nbytes.tolist(), strict=True))
        found += [
            (s + outer[0] + middle[0] + inner[0], d + outer[1] + middle[1] + inner[1], nbytes)
            for outer in steps(grid.outer)
            for group in range(0, len(segments), grid.parts)
            for middle in steps(grid.middle)
            for s, d, nbytes in segments[group : group + grid.parts]
            for inner in steps(grid.inner)
        ]
    return found


PAIRS = [(a, b) for a in PRESETS for b in PRESETS]
SRC_IDS, DST_IDS = [4, 5, 1, 8], [7, 2, 3, 6, 1, 8]


@pytest.mark.parametrize(("src_name", "dst_name"), PAIRS)
@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 7, 8, 11])
def test_boundaries(src_name: str, dst_name: str, tokens: int) -> None:
    """1, bs-1, bs, bs+1, 2bs-1, 2bs tokens and more: every element once, to its own place."""
    src, dst = Endpoint.of(small(src_name), SRC_IDS), Endpoint.of(small(dst_name), DST_IDS)
    plan = build_plan(src, dst, range(tokens))
    found = elements(plan.flat, 2)
    assert len(found) == len(set(found))
    assert set(found) == oracle_runs(src, dst, range(tokens), range(2))


@pytest.mark.parametrize(("src_size", "dst_size"), [(4, 2), (2, 4), (8, 2), (4, 4), (1, 4)])
@pytest.mark.parametrize(
    "tokens", [range(1), range(1, 2), range(3, 4), range(2, 7), range(3, 8), range(5, 5), range(8)]
)
@pytest.mark.parametrize("layers", [range(2), range(1), range(1, 2), range(1, 1)])
def test_parts_of_a_request(src_size: int, dst_size: int, tokens: range, layers: range) -> None:
    """Any sub-range of tokens and layers, also empty ones, with blocks of unlike size."""
    src = Endpoint.of(small("flash_attn_nhd", block_size=src_size), [4, 5, 1, 8, 7, 2, 3, 6])
    dst = Endpoint.of(small("flashinfer_hnd", block_size=dst_size), [7, 2, 3, 6, 1, 8, 5, 4])
    plan = build_plan(src, dst, tokens, layers)
    found = elements(plan.flat, 2)
    assert len(found) == len(set(found))
    assert set(found) == oracle_runs(src, dst, tokens, layers)
    assert plan.nbytes == plan.flat.total == len(tokens) * len(layers) * 2 * 2 * 4 * 2


@pytest.mark.parametrize(("src_name", "dst_name"), PAIRS)
@pytest.mark.parametrize(("src_size", "dst_size"), [(4, 4), (4, 2), (2, 4)])
def test_compressed_expands_to_the_flat_list(src_name: str, dst_name: str, src_size: int, dst_size: int) -> None:
    """(base, stride, count) and the list are the same, element for element and in the same order."""
    src = Endpoint.of(small(src_name, block_size=src_size), [4, 5, 1, 8])
    dst = Endpoint.of(small(dst_name, block_size=dst_size), [7, 2, 3, 6])
    plan = build_plan(src, dst, range(1, 7), merge=False)
    assert expanded(plan) == tuples(plan.flat) == tuples(plan.runs.flat)
    assert len(plan.runs) == len(plan.flat)
    merged = build_plan(src, dst, range(1, 7))
    assert sorted(elements(merged.flat, 2)) == sorted(elements(plan.flat, 2))
    assert merged.sizes == dict(Counter(merged.flat.nbytes.tolist()))
    if not merged.runs.looped:
        assert tuples(merged.flat) == tuples(plan.flat.merged())


@pytest.mark.parametrize(("src_name", "dst_name"), PAIRS)
def test_one_sided_slices_are_the_same_stream(src_name: str, dst_name: str) -> None:
    """Byte i of the source's slices belongs at byte i of the destination's: what scatter/gather movers rely on."""
    plan = build_plan(
        Endpoint.of(small(src_name), [4, 5, 1]), Endpoint.of(small(dst_name, block_size=2), [1, 2, 7, 3, 4]), range(10)
    )
    streams = []
    for slices in (plan.flat.source(), plan.flat.destination()):
        assert slices.total == plan.nbytes
        ranges = zip(slices.offsets.tolist(), slices.nbytes.tolist(), strict=True)
        streams.append([offset + i for offset, nbytes in ranges for i in range(nbytes)])
        ends, starts = slices.offsets[:-1] + slices.nbytes[:-1], slices.offsets[1:]
        assert (ends != starts).all(), "what touches must have been joined"
    pairs = [(s + i, d + i) for s, d, n in tuples(plan.flat) for i in range(n)]
    assert list(zip(*streams, strict=True)) == pairs


@pytest.mark.parametrize("name", ["flash_attn_nhd", "flashinfer_nhd"])
def test_zero_tokens_and_zero_layers_move_nothing(name: str) -> None:
    side = Endpoint.of(small(name), [])
    for plan in (build_plan(side, side, range(0)), build_plan(side, side, range(0), range(1, 1))):
        assert (len(plan.flat), plan.nbytes, len(plan.runs)) == (0, 0, 0)
        assert (len(plan.flat.source()), plan.flat.destination().total) == (0, 0)


def test_a_partial_last_block_merges_with_its_predecessors() -> None:
    """Two blocks and a half-filled one are still one run per layer and K/V part where the blocks are consecutive."""
    layout = small("flash_attn_nhd")
    plan = build_plan(Endpoint.of(layout, [2, 3, 4]), Endpoint.of(layout, [5, 6, 7]), range(10))
    token_bytes = 2 * 4 * 2
    assert (len(plan.flat), set(plan.flat.nbytes.tolist())) == (4, {10 * token_bytes})


def test_a_partial_last_block_of_hnd_does_not_merge() -> None:
    """Each head's tokens end before the block does, so a gap follows each of them."""
    layout = small("flash_attn_hnd")
    plan = build_plan(Endpoint.of(layout, [2, 3]), Endpoint.of(layout, [5, 6]), range(6))
    whole, two_tokens_of_a_head = 4 * 2 * 4 * 2, 2 * 4 * 2
    assert plan.flat.nbytes.tolist() == [whole] * 4 + [two_tokens_of_a_head] * 8


@pytest.mark.parametrize(("src_ids", "dst_ids"), [([2, 3], [5, 7]), ([2, 4], [5, 6]), ([3, 2], [6, 5])])
def test_runs_merge_only_where_both_sides_touch_in_order(src_ids: list[int], dst_ids: list[int]) -> None:
    layout = small("flash_attn_nhd")
    plan = build_plan(Endpoint.of(layout, src_ids), Endpoint.of(layout, dst_ids), range(8))
    assert (len(plan.flat), set(plan.flat.nbytes.tolist())) == (8, {4 * 2 * 4 * 2})


class TestRefusals:
    """Sides that cannot be matched are refused before anything moves, naming the field and both values."""

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"heads": 3},
                r"number of KV heads differs: source flash_attn_nhd has 2, destination flashinfer_hnd has 3",
            ),
            ({"layers": 3}, r"number of layers differs: .* has 2, .* has 3"),
            ({"block_size": 6}, r"block sizes 4 \(source\) and 6 \(destination\): neither divides the other"),
        ],
    )
    def test_unlike_caches(self, changes: dict[str, int], message: str) -> None:
        src, dst = small("flash_attn_nhd"), small("flashinfer_hnd", **changes)
        with pytest.raises(PlanError, match=message):
            build_plan(Endpoint.of(src, range(1, 9)), Endpoint.of(dst, range(1, 9)), range(4))

    @pytest.mark.parametrize(
        ("head_size", "dtype", "message"),
        [
            (8, "float16", r"number of channels differs: .* has 4, .* has 8"),
            (4, "float32", r"bytes of an element differs: .* has 2, .* has 4"),
        ],
    )
    def test_unlike_elements(self, head_size: int, dtype: str, message: str) -> None:
        spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=head_size, dtype=dtype)
        dst = make_layout("flash_attn_nhd", spec, num_layers=2, num_blocks=9)
        with pytest.raises(PlanError, match=message):
            build_plan(Endpoint.of(small("flash_attn_nhd"), [1]), Endpoint.of(dst, [1]), range(4))

    def test_too_few_blocks(self) -> None:
        layout = small("flash_attn_nhd")
        full, short = Endpoint.of(layout, [1, 2]), Endpoint.of(layout, [3])
        with pytest.raises(PlanError, match=r"source has 1 blocks of 4 tokens, too few for tokens 0\.\.5 \(2 needed\)"):
            build_plan(short, full, range(5))
        with pytest.raises(PlanError, match=r"destination has 1 blocks of 4 tokens, .* 3\.\.5 \(2 needed\)"):
            build_plan(full, short, range(3, 5))

    @pytest.mark.parametrize("bad", [-1, 9, 1 << 40])
    def test_block_ids_outside_the_pool(self, bad: int) -> None:
        layout = small("flash_attn_nhd")
        good, wrong = Endpoint.of(layout, [1, 2]), Endpoint.of(layout, [1, bad])
        with pytest.raises(PlanError, match=f"source block id {bad} is outside its pool of 9 blocks"):
            build_plan(wrong, good, range(5))
        with pytest.raises(PlanError, match=f"destination block id {bad} is outside its pool of 9 blocks"):
            build_plan(good, wrong, range(5))
        build_plan(good, wrong, range(4))  # that block is not touched

    def test_the_same_destination_block_twice(self) -> None:
        layout = small("flash_attn_nhd")
        with pytest.raises(PlanError, match="two runs write byte"):
            build_plan(Endpoint.of(layout, [1, 2]), Endpoint.of(layout, [3, 3]), range(8))

    def test_the_same_source_block_twice_is_a_shared_prefix(self) -> None:
        layout = small("flash_attn_nhd")
        assert build_plan(Endpoint.of(layout, [1, 1]), Endpoint.of(layout, [3, 4]), range(8)).nbytes == 512

    @pytest.mark.parametrize("layers", [range(3), range(-1, 1), range(0, 2, 2), range(2, 1)])
    def test_layers_that_are_not_there(self, layers: range) -> None:
        side = Endpoint.of(small("flash_attn_nhd"), [1])
        with pytest.raises(PlanError, match=r"are not a part of 0\.\.2"):
            build_plan(side, side, range(4), layers)

    @pytest.mark.parametrize("tokens", [range(-1, 2), range(0, 4, 2), range(3, 1), range(4, 0, -1)])
    def test_tokens_that_are_no_range_of_positions(self, tokens: range) -> None:
        side = Endpoint.of(small("flash_attn_nhd"), [1])
        with pytest.raises(PlanError, match="not a range of positions"):
            build_plan(side, side, tokens)


class TestAudit:
    """A plan that is wrong must not get past the audit, whoever made it."""

    layout = small("flash_attn_nhd")  # 9 blocks of 64 bytes, K and V, 2 layers: 2,304 bytes

    def audit(self, *runs: tuple[int, int, int], expected: int | None = None) -> None:
        total = sum(nbytes for _, _, nbytes in runs)
        audit_runs(runs_of(runs), self.layout, self.layout, total if expected is None else expected)

    def test_accepts_what_is_right(self) -> None:
        self.audit((0, 2240, 64), (2240, 0, 64), (0, 64, 64))
        self.audit()

    @pytest.mark.parametrize(
        ("run", "message"),
        [
            ((2241, 0, 64), r"run 1 covers bytes 2241\.\.2305 of the source, beyond its region of 2304"),
            ((-1, 0, 64), r"run 1 covers bytes -1\.\.63 of the source"),
            ((0, 2241, 64), r"run 1 covers bytes 2241\.\.2305 of the destination, beyond its region of 2304"),
            ((0, -8, 8), r"run 1 covers bytes -8\.\.0 of the destination"),
            ((1 << 40, 0, 64), "of the source, beyond"),
        ],
    )
    def test_rejects_what_leaves_a_region(self, run: tuple[int, int, int], message: str) -> None:
        with pytest.raises(PlanError, match=message):
            self.audit((0, 128, 64), run)

    @pytest.mark.parametrize("second", [(64, 64, 64), (64, 127, 64), (64, 1, 64), (64, 80, 4)])
    def test_rejects_two_writes_of_one_byte(self, second: tuple[int, int, int]) -> None:
        with pytest.raises(PlanError, match="two runs write byte"):
            self.audit((0, 64, 64), second)

    def test_rejects_an_overlap_behind_a_longer_run(self) -> None:
        with pytest.raises(PlanError, match="two runs write byte"):
            self.audit((0, 0, 640), (0, 640, 64), (64, 600, 8))

    @pytest.mark.parametrize("expected", [0, 63, 65, 128])
    def test_rejects_a_wrong_sum(self, expected: int) -> None:
        with pytest.raises(PlanError, match=f"the runs hold 64 bytes, the request has {expected}"):
            self.audit((0, 0, 64), expected=expected)

    @pytest.mark.parametrize("nbytes", [0, -64])
    def test_rejects_runs_without_bytes(self, nbytes: int) -> None:
        with pytest.raises(PlanError, match=f"a run of {nbytes} bytes"):
            self.audit((0, 0, 64), (64, 64, nbytes))

    def test_rejects_doctored_plans(self) -> None:
        """One changed offset or length in a real plan: each kind of fault is named."""
        layout = self.layout
        plan = build_plan(Endpoint.of(layout, [1, 2]), Endpoint.of(layout, [4, 6]), range(8), merge=False)
        flat = plan.flat
        audit_runs(flat, layout, layout, plan.nbytes)
        longer, shifted, far = flat.nbytes.copy(), flat.dst.copy(), flat.src.copy()
        longer[3] += 2
        shifted[3] = shifted[2] + 2
        far[0] = layout.size_bytes - 2
        for doctored, message in (
            (replace(flat, nbytes=longer), "the runs hold"),
            (replace(flat, dst=shifted), "two runs write"),
            (replace(flat, src=far), "of the source, beyond"),
        ):
            with pytest.raises(PlanError, match=message):
                audit_runs(doctored, layout, layout, plan.nbytes)
