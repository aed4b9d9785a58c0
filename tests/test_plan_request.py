"""Plans of whole requests: kinds of layers, trimming, prefix hits, ranks; and the modes they are moved in."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pdtx.errors import PlanError
from pdtx.kvspec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from pdtx.layout import layout_for
from pdtx.models import layer_specs, load_config, state_sharding
from pdtx.plan import (
    CacheSide,
    Costs,
    Mode,
    RequestPlan,
    choose_mode,
    needed_positions,
    plan_request,
    state_block,
)

COMMON: dict[str, Any] = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
FULL = FullAttentionSpec(**COMMON)
WINDOW = SlidingWindowSpec(**COMMON, sliding_window=100)
CHUNK = ChunkedLocalAttentionSpec(**COMMON, attention_chunk_size=100)
CROSS = CrossAttentionSpec(**COMMON)
STATE = MambaSpec(block_size=64, shapes=((3, 14), (4, 2, 3)), dtypes=("bfloat16", "float32"))


class TestNeededPositions:
    @pytest.mark.parametrize(
        ("spec", "num_tokens", "expected"),
        [
            (FULL, 250, range(250)),
            (WINDOW, 250, range(151, 250)),  # token 250 sees 151..249 and itself: 100
            (WINDOW, 99, range(99)),
            (WINDOW, 100, range(1, 100)),
            (replace(WINDOW, sliding_window=1), 5, range(5, 5)),
            (CHUNK, 250, range(200, 250)),
            (CHUNK, 200, range(200, 200)),  # token 200 begins a chunk
            (CHUNK, 99, range(99)),
            (STATE, 250, range(1)),
            (CROSS, 250, range(1500)),
            (EncoderOnlyAttentionSpec(**COMMON), 250, range(0)),
            (FULL, 0, range(0)),
        ],
    )
    def test_rule(self, spec: KVCacheSpec, num_tokens: int, expected: range) -> None:
        assert needed_positions(spec, num_tokens, 1500) == expected

    @pytest.mark.parametrize("num_tokens", range(1, 40))
    def test_against_the_mask(self, num_tokens: int) -> None:
        """Exactly the positions that the next token's mask lets through: of a window of 7, of chunks of 5."""
        next_token = num_tokens
        window, chunk = replace(WINDOW, sliding_window=7), replace(CHUNK, attention_chunk_size=5)
        seen = [p for p in range(num_tokens) if next_token - p < 7]
        assert list(needed_positions(window, num_tokens)) == seen
        seen = [p for p in range(num_tokens) if p // 5 == next_token // 5]
        assert list(needed_positions(chunk, num_tokens)) == seen

    @pytest.mark.parametrize(("num_tokens", "expected"), [(5, range(4)), (7, range(4, 4)), (40, range(36, 40))])
    def test_a_window_of_compressed_vectors(self, num_tokens: int, expected: range) -> None:
        spec = SlidingWindowMLASpec(
            block_size=16, num_kv_heads=1, head_size=8, dtype="bfloat16", compress_ratio=4, sliding_window=3
        )
        assert needed_positions(spec, num_tokens) == expected

    def test_cross_attention_needs_the_encoders_length(self) -> None:
        with pytest.raises(PlanError, match="say how many"):
            needed_positions(CROSS, 3)

    def test_the_slot_that_bears_the_state(self) -> None:
        assert state_block([7], 1000, 64) == 7
        assert [state_block([7, 8, 9], tokens, 64) for tokens in (1, 64, 65, 129)] == [7, 7, 8, 9]
        for tokens, size in ((0, 64), (5, 0)):
            with pytest.raises(PlanError, match="both must be 1 or more"):
                state_block([7, 8], tokens, size)
        with pytest.raises(PlanError, match="3 blocks of 64 tokens hold no state of 193 tokens"):
            state_block([7, 8, 9], 193, 64)


def side(
    layers: Mapping[str, KVCacheSpec],
    layout: str = "flash_attn_nhd",
    *,
    tp_size: int = 1,
    fragmented: bool = True,
    seed: int = 0,
) -> CacheSide:
    def choose(spec: KVCacheSpec, name: str) -> str:
        return layout_for(spec, name, (layout,))

    return CacheSide(layers=layers, layout_for=choose, tp_size=tp_size, fragmented=fragmented, seed=seed)


def runs_of(found: RequestPlan) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for buffer in found.buffers:
        for plan in buffer.plans:
            for size, count in plan.sizes.items():
                sizes[size] = sizes.get(size, 0) + count
    return sizes


H9 = {f"model.layers.{layer}.self_attn.attn": FULL for layer in range(28)}


@pytest.mark.parametrize(
    ("layout", "fragmented", "merge", "dst_tp", "expected"),
    [
        ("flash_attn_nhd", True, True, 1, {32_768: 3_528}),
        ("flash_attn_nhd", False, True, 1, {2_064_384: 56}),
        ("flash_attn_nhd", False, False, 1, {32_768: 3_528}),
        ("flashinfer_nhd", True, True, 1, {65_536: 1_764}),
        ("flashinfer_nhd", False, True, 1, {4_128_768: 28}),
        ("flash_attn_nhd_cross_layer", True, True, 1, {1_835_008: 63}),
        ("flash_attn_nhd_cross_layer", False, True, 1, {115_605_504: 1}),
        ("flash_attn_hnd", True, True, 2, {16_384: 2 * 3_528}),
        ("flash_attn_nhd", True, True, 2, {1_024: 2 * 56_448}),
    ],
)
def test_pieces_of_h9(layout: str, fragmented: bool, merge: bool, dst_tp: int, expected: dict[int, int]) -> None:
    here = side(H9, layout, fragmented=fragmented, seed=1)
    there = side(H9, layout, fragmented=fragmented, seed=2, tp_size=dst_tp)
    found = plan_request(here, there, 63 * 16, merge=merge)
    assert runs_of(found) == expected
    assert found.wire_bytes == found.unique_bytes == 115_605_504
    assert found.num_runs == sum(len(plan.flat) for buffer in found.buffers for plan in buffer.plans)


class TestRanks:
    """The byte figures of H2: 32 layers, 128 channels, bfloat16, blocks of 16, 1,000 tokens in 63 blocks."""

    @pytest.mark.parametrize(
        ("src_tp", "dst_tp", "heads", "wire", "unique"),
        [
            (4, 2, 8, 132_120_576, 132_120_576),
            (8, 16, 8, 264_241_152, 132_120_576),
            (1, 4, 2, 66_060_288, 33_030_144),
        ],
    )
    def test_wire_and_unique_bytes(self, src_tp: int, dst_tp: int, heads: int, wire: int, unique: int) -> None:
        layers = {f"layers.{layer}": replace(FULL, num_kv_heads=heads) for layer in range(32)}
        found = plan_request(side(layers, tp_size=src_tp), side(layers, tp_size=dst_tp), 1_000, whole_blocks=True)
        assert (found.wire_bytes, found.unique_bytes) == (wire, unique)
        assert found.amplification == wire / unique

    def test_latent_vectors_are_whole_on_each_rank(self) -> None:
        layers = layer_specs(load_config("deepseek-v3"), block_size=64)
        found = plan_request(side(layers, tp_size=8), side(layers, tp_size=4), 1_000, whole_blocks=True)
        (buffer,) = found.buffers
        assert [plan.nbytes for plan in buffer.plans] == [71_958_528] * 4
        assert buffer.unread == (1, 3, 5, 7)
        assert found.amplification == 4

    def test_by_default_the_last_block_is_not_filled_up(self) -> None:
        layers = {"x": FULL, "y": WINDOW}
        exact, whole = (plan_request(side(layers), side(layers), 250, whole_blocks=whole) for whole in (False, True))
        assert [buffer.positions for buffer in exact.buffers] == [range(250), range(151, 250)]
        assert [buffer.positions for buffer in whole.buffers] == [range(256), range(144, 256)]

    @pytest.mark.parametrize("model", ["jamba", "bamba-9b", "nemotron-h-8b", "qwen3-next", "kimi-linear"])
    @pytest.mark.parametrize(("src_tp", "dst_tp"), [(1, 2), (2, 1), (2, 4), (4, 2), (2, 2)])
    def test_states_are_cut_for_ranks(self, model: str, src_tp: int, dst_tp: int) -> None:
        config = load_config(model)
        layers = layer_specs(config)
        found = plan_request(
            side(layers, tp_size=src_tp), side(layers, tp_size=dst_tp), 100, sharding=state_sharding(config)
        )
        for buffer in found.buffers:
            if isinstance(buffer.spec, MambaSpec):
                per_rank = layer_specs(config, tensor_parallel_size=dst_tp)[buffer.layer_names[0]]
                expected = dst_tp * len(buffer.layer_names) * per_rank.page_size_bytes
                assert buffer.wire_bytes == expected


@pytest.mark.parametrize(
    "dtype", ["auto", "fp8", "int8_per_token_head", "fp8_per_token_head", "nvfp4", "turboquant_k8v4"]
)
def test_nothing_is_counted_twice_where_one_rank_sends_whole_blocks_to_one(dtype: str) -> None:
    """Scales are payload like elements: without copies every byte on the wire is unique."""
    layers = layer_specs(load_config("llama-3-8b"), kv_cache_dtype=dtype)
    found = plan_request(side(layers), side(layers), 1_024)
    assert found.wire_bytes == found.unique_bytes


class TestKindsOfLayers:
    LAYERS: Mapping[str, KVCacheSpec] = {"a": FULL, "b": WINDOW, "c": WINDOW, "d": CHUNK, "e": STATE, "f": CROSS}

    def plan(self, cached_tokens: int = 0) -> RequestPlan:
        ends = side(self.LAYERS), side(self.LAYERS, seed=5)
        return plan_request(*ends, 250, cached_tokens=cached_tokens, encoder_positions=30)

    def test_each_kind_moves_what_is_needed_of_it(self) -> None:
        token = 2 * 8 * 128 * 2
        moved = {buffer.layer_names: (buffer.positions, buffer.wire_bytes) for buffer in self.plan().buffers}
        assert moved == {
            ("a",): (range(250), 250 * token),
            ("b", "c"): (range(151, 250), 2 * 99 * token),
            ("d",): (range(200, 250), 50 * token),
            ("e",): (range(1), STATE.real_page_size_bytes),
            ("f",): (range(30), 30 * token),
        }

    def test_a_prefix_that_is_there_is_not_sent_again(self) -> None:
        starts = [buffer.positions.start for buffer in self.plan(cached_tokens=180).buffers]
        assert starts == [180, 180, 200, 0, 0]

    def test_a_full_hit_moves_what_is_not_counted_in_tokens(self) -> None:
        moved = {buffer.layer_names: buffer.wire_bytes for buffer in self.plan(cached_tokens=250).buffers}
        encoder = 30 * 2 * 8 * 128 * 2
        assert moved == {("a",): 0, ("b", "c"): 0, ("d",): 0, ("e",): STATE.real_page_size_bytes, ("f",): encoder}

    @pytest.mark.parametrize(("tokens", "cached", "vectors"), [(42, 0, 10), (3, 0, 0), (42, 10, 8), (42, 42, 0)])
    def test_only_whole_vectors_of_several_tokens_move(self, tokens: int, cached: int, vectors: int) -> None:
        layers = {"m": MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype="bfloat16", compress_ratio=4)}
        found = plan_request(side(layers), side(layers), tokens, cached_tokens=cached)
        assert found.wire_bytes == found.unique_bytes == vectors * 16
        only_attention = {"a": FULL}
        full = plan_request(side(only_attention), side(only_attention), 250, cached_tokens=250)
        assert (full.wire_bytes, full.num_runs, full.amplification) == (0, 0, 1.0)

    def test_layers_of_the_source_alone_are_named(self) -> None:
        found = plan_request(side({"x": FULL, "draft.0": FULL, "draft.1": FULL}), side({"x": FULL}), 10)
        assert found.not_sent == ("draft.0", "draft.1")
        assert [buffer.layer_names for buffer in found.buffers] == [("x",)]

    @pytest.mark.parametrize(
        ("ours", "theirs", "message"),
        [
            ({"x": FULL}, {"x": FULL, "y": FULL}, "layer y is the destination's, but the source has no such layer"),
            ({"x": FULL}, {"x": WINDOW}, "kind of layer x differs: source FullAttentionSpec, destination Slid"),
            ({"x": FULL}, {"x": replace(FULL, num_kv_heads=4)}, "num_kv_heads of layer x differs: source 8, .* 4"),
            (
                {"x": FULL},
                {"x": replace(FULL, dtype="float16")},
                "dtype of layer x differs: source bfl.*float16",
            ),
            ({"x": WINDOW}, {"x": replace(WINDOW, sliding_window=64)}, "sliding_window of layer x differs: .*100.*64"),
            (
                {"x": FULL},
                {"x": replace(FULL, head_size=64, head_size_v=64)},
                "head_size of layer x .*128.*64",
            ),
        ],
    )
    def test_unlike_layers_are_refused(
        self, ours: Mapping[str, KVCacheSpec], theirs: Mapping[str, KVCacheSpec], message: str
    ) -> None:
        with pytest.raises(PlanError, match=message):
            plan_request(side(ours), side(theirs), 10)

    @pytest.mark.parametrize("cached", [-1, 11])
    def test_cached_tokens_are_a_part_of_the_request(self, cached: int) -> None:
        with pytest.raises(PlanError, match="cached tokens are not a part of a request of 10 tokens"):
            plan_request(side({"x": FULL}), side({"x": FULL}), 10, cached_tokens=cached)


class TestModes:
    def test_nothing_is_moved_directly(self) -> None:
        assert choose_mode(0, 0, num_ranges=0).mode is Mode.DIRECT

    def test_auto_takes_large_runs_directly_and_packs_small_ones(self) -> None:
        large = choose_mode(64, 64 << 22, num_ranges=64)
        small = choose_mode(1 << 20, 64 << 22, num_ranges=1 << 13)
        assert (large.mode, small.mode) == (Mode.DIRECT, Mode.STAGED)
        assert large.direct_s < large.staged_s
        assert small.direct_s > small.staged_s
        assert "1,048,576 runs of 256 B on average to 8,192 ranges" in small.reason

    def test_packing_does_not_help_where_the_destination_is_in_pieces(self) -> None:
        assert choose_mode(1 << 20, 64 << 22, num_ranges=1 << 20).mode is Mode.DIRECT

    @pytest.mark.parametrize(
        ("runs", "nbytes", "ranges", "piece"), [(-1, 10, 0, 1), (1, -1, 1, 1), (5, 0, 1, 0), (5, 10, 6, 1)]
    )
    def test_impossible_numbers_are_refused(self, runs: int, nbytes: int, ranges: int, piece: int) -> None:
        with pytest.raises(PlanError, match="cannot be moved"):
            choose_mode(runs, nbytes, num_ranges=ranges, piece_bytes=piece)

    def test_auto_follows_the_measured_costs(self) -> None:
        cheap_runs = Costs(run_s=1e-9, pack_run_s=1e-6)
        assert choose_mode(1 << 20, 64 << 22, costs=cheap_runs, num_ranges=1).mode is Mode.DIRECT

    @pytest.mark.parametrize("mode", [Mode.DIRECT, Mode.STAGED])
    def test_what_is_asked_for_is_done(self, mode: Mode) -> None:
        for runs in (64, 1 << 20):
            choice = choose_mode(runs, 64 << 22, mode, num_ranges=64)
            assert choice.mode is mode
            assert choice.reason.endswith("as asked for")
