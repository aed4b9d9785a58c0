"""In what pieces connectors move a cache. Expected numbers are those of vLLM's connectors, not of this code."""

import re
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtx.cli.kvcache import one_page_size
from pdtx.errors import InputError, LayoutError
from pdtx.granularity import (
    CONNECTORS,
    VLLM_VERSIONS,
    DescriptorRow,
    HeadSplit,
    OffloadSettings,
    Request,
    RequestKind,
    TransferRow,
    block_runs,
    descriptor_rows,
    offload_pools,
    offload_rows,
    request_kinds,
    symbols,
    transfer_rows,
)
from pdtx.granularity.pieces import layout_pieces
from pdtx.kvspec import FullAttentionSpec, KVCacheSpec
from pdtx.layout import make_layout
from pdtx.models import layer_specs, load_config

KIB, MIB = 2**10, 2**20
LONG = 131_072
CHUNKED = {"LMCacheV1", "LMCacheMP"}
"""Connectors that move whole chunks of tokens, not blocks."""
V4 = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 5,
    "compress_ratios": [0, 0, 4, 128, 4],
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "sliding_window": 128,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 1 << 20,
    "max_model_len": 1 << 20,
}


def kinds_of(
    model: str, tokens: int = LONG, *, ranks: int = 1, dtype: str = "auto", **request: int
) -> list[RequestKind]:
    layers = layer_specs(
        load_config(model), tensor_parallel_size=ranks, max_model_len=tokens, kv_cache_dtype=dtype, block_size=16
    )
    return request_kinds(one_page_size(layers), Request(tokens=tokens, **request))


def plain(layers: int, heads: int, tokens: int) -> list[RequestKind]:
    spec: KVCacheSpec = FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=128, dtype="bfloat16")
    named: Mapping[str, KVCacheSpec] = {f"layer.{index}": spec for index in range(layers)}
    return request_kinds(named, Request(tokens=tokens))


def moved(
    kinds: list[RequestKind], connector: str, version: str, variant: str = "", run_length: int = 1
) -> TransferRow:
    """Return the one row of a connector."""
    rows = [
        row
        for row in transfer_rows(kinds, versions=VLLM_VERSIONS, run_length=run_length)
        if (row.connector, row.version, row.variant) == (connector, version, variant)
    ]
    assert len(rows) == 1, rows
    return rows[0]


LLAMA = [
    # connector, version, variant, bytes of a unit, units of a request of 128K tokens
    ("NixlConnector", "0.22", "", 32 * KIB, 524_288),
    ("NixlConnector", "0.22", "FA cross-layer", 2 * MIB, 8_192),
    ("NixlConnector", "0.22", "FI cross-layer", MIB, 16_384),
    ("NixlConnector, Pull, Push", "0.32", "", 64 * KIB, 262_144),
    ("NixlConnector, Pull, Push", "0.32", "row", 2 * MIB, 8_192),
    ("NixlConnector, Pull, Push", "0.32", "LHBNC", 8 * KIB, 2_097_152),
    ("MooncakeConnector", "0.22", "FA", 32 * KIB, 524_288),
    ("MooncakeConnector", "0.22", "FI", 32 * KIB, 524_288),
    ("MooncakeConnector", "0.32", "", 64 * KIB, 262_144),
    ("MooncakeConnector", "0.32", "row", 2 * MIB, 8_192),
    ("MoRIIOConnector", "0.22", "", 32 * KIB, 524_288),
    ("MoRIIOConnector", "0.32", "", 64 * KIB, 262_144),
    ("P2pNcclConnector", "0.22", "", 512 * MIB, 32),
    ("OffloadingConnector", "0.22", "cross-layer", 2 * MIB, 8_192),
    ("OffloadingConnector", "0.22", "FA", 32 * KIB, 524_288),
    ("OffloadingConnector", "0.22", "FI, others", 64 * KIB, 262_144),
    ("OffloadingConnector", "0.32", "", 64 * KIB, 262_144),
    ("OffloadingConnector", "0.32", "packed", 2 * MIB, 8_192),
    ("SimpleCPUOffload", "0.22", "FA", 32 * KIB, 524_288),
    ("SimpleCPUOffload", "0.22", "FI", 64 * KIB, 262_144),
    ("LMCacheV1", "0.22", "", 32 * MIB, 512),
    ("LMCacheV1", "0.32", "layer-wise", MIB, 16_384),
    ("LMCacheMP", "0.32", "", 32 * MIB, 512),
    ("HF3FS", "0.22", "", 2 * MIB, 8_192),
    ("FlexKV", "0.22", "", 2 * MIB, None),
    ("ExampleConnector", "0.32", "", 512 * MIB, 32),
]


@pytest.mark.parametrize(("connector", "version", "variant", "nbytes", "units"), LLAMA)
def test_llama(connector: str, version: str, variant: str, nbytes: int, units: int | None) -> None:
    row = moved(kinds_of("llama-3-8b"), connector, version, variant)
    assert (row.unit_bytes, row.units) == (nbytes, units)


@pytest.mark.parametrize(
    ("version", "variant", "objects", "segments", "nbytes"),
    [
        ("0.22", "FA", 8_192, 64, 32 * KIB),
        ("0.22", "FI", 8_192, 32, 64 * KIB),
        ("0.22", "cross-layer", 8_192, 1, 2 * MIB),
        ("0.32", "", 8_192, 32, 64 * KIB),
        ("0.32", "row", 8_192, 1, 2 * MIB),
    ],
)
def test_objects_of_a_store(version: str, variant: str, objects: int, segments: int, nbytes: int) -> None:
    row = moved(kinds_of("llama-3-8b"), "MooncakeStore", version, variant)
    assert (row.objects, row.units, row.unit_bytes) == (objects, objects * segments, nbytes)


@pytest.mark.parametrize(
    ("connector", "nbytes", "units"),
    [
        ("NixlConnector", 18_432, 499_712),
        ("P2pNcclConnector", 18_432 * 8_192, 61),
        ("LMCacheV1", 256 * 61 * 1_152, 512),
        ("HF3FS", 61 * 18_432, 8_192),
        ("ExampleConnector", LONG * 1_152, 61),
    ],
)
@pytest.mark.parametrize("ranks", [1, 8])
def test_latent_vectors_are_never_divided(ranks: int, connector: str, nbytes: int, units: int) -> None:
    row = moved(kinds_of("deepseek-v3", ranks=ranks), connector, "0.22")
    assert (row.unit_bytes, row.units) == (nbytes, units)


def test_hisparse_moves_latent_rows_only() -> None:
    assert moved(kinds_of("deepseek-v3"), "HiSparse", "0.32").unit_bytes == 18_432
    row = moved(kinds_of("llama-3-8b"), "HiSparse", "0.32")
    assert (row.unit_bytes, row.units) == (None, None)
    assert "latent" in row.note


@pytest.mark.parametrize(
    ("connector", "units", "words"),
    [("DecodeBench", 0, "made-up values"), ("ExampleHiddenStates", None, "not KV"), ("Multi", None, "children")],
)
@pytest.mark.parametrize("version", VLLM_VERSIONS)
def test_connectors_that_move_no_kv_are_listed(connector: str, units: int | None, words: str, version: str) -> None:
    row = moved(kinds_of("llama-3-8b"), connector, version)
    assert (row.unit_bytes, row.total_bytes, row.units) == (None, None, units)
    assert words in row.note


LLAMA_DESCRIPTORS = [
    # layout, regions, bytes, stride, descriptors of a block, of 128K tokens
    ("FlashAttention NHD", 64, 32 * KIB, 32 * KIB, 64, 524_288),
    ("FlashAttention HND", 64, 32 * KIB, 32 * KIB, 64, 524_288),
    ("FlashInfer NHD", 32, 32 * KIB, 64 * KIB, 64, 524_288),
    ("FlashInfer HND", 32, 32 * KIB, 64 * KIB, 64, 524_288),
    ("FA cross-layer HND", 1, 2 * MIB, 2 * MIB, 1, 8_192),
    ("FI cross-layer HND", 1, MIB, 2 * MIB, 2, 16_384),
    ("LBHNC", 32, 64 * KIB, 64 * KIB, 32, 262_144),
    ("LBNHC", 32, 64 * KIB, 64 * KIB, 32, 262_144),
    ("LHBNC", 256, 8 * KIB, 8 * KIB, 256, 2_097_152),
    ("BLHNC", 32, 64 * KIB, 2 * MIB, 32, 262_144),
    ("BLNHC", 1, 2 * MIB, 2 * MIB, 1, 8_192),
    ("BHLNC", 1, 2 * MIB, 2 * MIB, 1, 8_192),
]


def described(kinds: list[RequestKind], *splits: HeadSplit | None) -> dict[str, DescriptorRow]:
    return {row.layout: row for row in descriptor_rows(kinds, versions=VLLM_VERSIONS, splits=splits)}


def test_llama_descriptors() -> None:
    rows = described(kinds_of("llama-3-8b")).values()
    found = [(row.layout, row.regions, row.nbytes, row.stride, row.per_block, row.count) for row in rows]
    assert found == LLAMA_DESCRIPTORS


def test_latent_descriptors() -> None:
    row = described(kinds_of("deepseek-v3"))["MLA"]
    assert (row.regions, row.nbytes, row.per_block, row.count) == (61, 18_432, 61, 499_712)


@pytest.mark.parametrize(
    ("ranks", "heads", "nbytes"), [(1, 8, 32_768), (2, 4, 16_384), (8, 1, 4_096), (16, 1, 4_096), (32, 1, 4_096)]
)
def test_heads_of_a_rank(ranks: int, heads: int, nbytes: int) -> None:
    """Divided as long as there are heads, then copied: the same units, never smaller than a head."""
    kinds = kinds_of("llama-3-8b", ranks=ranks)
    assert symbols(kinds[0])["H"] == heads
    row = moved(kinds, "NixlConnector", "0.22")
    assert (row.unit_bytes, row.units) == (nbytes, 524_288)


@pytest.mark.parametrize("times", [2, 4, 8])
def test_more_ranks_on_the_other_side_take_as_many_smaller_pieces(times: int) -> None:
    own, other = plain(32, 8, LONG), HeadSplit.of(8, 8 // times)
    whole, rows = described(own), described(own, other)
    for layout in (
        "FlashAttention HND",
        "FlashInfer HND",
        "FA cross-layer HND",
        "FI cross-layer HND",
        "LBHNC",
        "BHLNC",
    ):
        assert rows[layout].nbytes == (whole[layout].nbytes or 0) // times, layout
        assert rows[layout].count == whole[layout].count, layout
    for layout in ("FlashAttention NHD", "FlashInfer NHD", "LBNHC", "BLNHC"):
        assert rows[layout].nbytes is None, layout
        assert "not split between ranks" in rows[layout].note


@pytest.mark.parametrize("times", [2, 4, 8])
def test_fewer_ranks_on_the_other_side_take_more_pieces(times: int) -> None:
    own = plain(32, 8 // times, LONG)
    whole, rows = described(own), described(own, HeadSplit.of(8 // times, 8))
    for layout, row in rows.items():
        assert row.nbytes == whole[layout].nbytes, layout
        assert row.count == (whole[layout].count or 0) * times, layout


def test_copied_heads_are_no_split() -> None:
    assert HeadSplit.of(1, 1) == HeadSplit(heads=1, times=1)
    with pytest.raises(InputError, match="3 heads here and 2 there"):
        HeadSplit.of(3, 2)


def test_the_head_split_of_mooncake() -> None:
    kinds = kinds_of("llama-3-8b")
    assert "peer-tp" in moved(kinds, "MooncakeConnector", "0.32", "head-split").note
    for version, whole in (("0.22", 32 * KIB), ("0.32", 64 * KIB)):
        rows = transfer_rows(kinds, versions=[version], splits=[HeadSplit.of(8, 2)])
        row = next(row for row in rows if row.variant == "head-split")
        assert (row.unit_bytes, row.total_bytes) == (whole // 4, 4 * 2**30)


@pytest.mark.parametrize(
    ("backend", "joins", "heads", "pieces", "nbytes"),
    [
        # 28 layers, 8 heads of 128, bfloat16, 63 blocks of 16 tokens; counted outside of this project.
        ("flash_attn_nhd", 1, 8, 3_528, 32_768),
        ("flash_attn_nhd", 63, 8, 56, 2_064_384),
        ("lbhnc", 1, 8, 1_764, 65_536),
        ("lbhnc", 63, 8, 28, 4_128_768),
        ("blnhc", 1, 8, 63, 1_835_008),
        ("blnhc", 63, 8, 1, 115_605_504),
        ("flash_attn_hnd", 1, 4, 3_528, 16_384),
    ],
)
def test_how_many_pieces_and_how_large(backend: str, joins: int, heads: int, pieces: int, nbytes: int) -> None:
    kind = plain(28, 8, 1_000)[0]
    (found,) = layout_pieces(kind, backend, run_length=joins, split=HeadSplit.of(8, heads))
    assert (found.count, found.nbytes) == (pieces, nbytes)
    assert found.total == 115_605_504 * heads // 8


def test_runs_join_only_where_blocks_touch() -> None:
    kinds = kinds_of("llama-3-8b")
    assert moved(kinds, "MooncakeConnector", "0.22", "FA", run_length=8).units == 524_288 // 8
    assert moved(kinds, "MooncakeConnector", "0.32", run_length=8).unit_bytes == 8 * 64 * KIB
    halves = moved(kinds, "MooncakeConnector", "0.22", "FI", run_length=8)
    assert (halves.units, halves.unit_bytes, halves.coalesces) == (524_288, 32 * KIB, "no")
    assert moved(kinds, "NixlConnector", "0.22", run_length=8).units == 524_288
    assert moved(kinds, "MooncakeConnector", "0.32", "row", run_length=10**9).units == 1


def test_gemma_moves_the_window_only() -> None:
    kinds = kinds_of("gemma-3-27b")
    window, full = kinds
    assert (window.layers, window.groups, window.blocks) == (52, ((9, 4), (8, 2)), 64)
    assert (full.layers, full.groups, full.blocks) == (10, ((10, 1),), 8_192)
    rows = transfer_rows(kinds, versions=["0.22"])
    assert [row.units for row in rows if row.connector == "NixlConnector" and not row.variant] == [
        2 * 52 * 64,
        2 * 10 * 8_192,
    ]
    assert all("one group" in row.note for row in rows if "cross-layer" in row.variant)


def test_rows_of_blocks_hold_the_layers_of_a_group() -> None:
    """52 layers in four groups of 9 and two of 8: no block has a row of 52."""
    rows = transfer_rows(kinds_of("gemma-3-27b"), versions=["0.32"])
    page, found = 131_072, [row for row in rows if row.variant == "row" and row.connector.startswith("Nixl")]
    assert [(row.kind, row.unit_bytes, row.units) for row in found] == [
        (0, 9 * page, 4 * 64),
        (0, 8 * page, 2 * 64),
        (1, 10 * page, 8_192),
    ]


@pytest.mark.parametrize("tokens", [1, 16, 1_023, 1_024, 1_025, 4_096, LONG])
def test_a_window_has_as_many_blocks_as_its_tokens_lie_in(tokens: int) -> None:
    window = kinds_of("gemma-3-27b", tokens)[0]
    assert window.blocks == len({position // 16 for position in range(tokens) if position > tokens - 1_024})


def test_a_chunk_that_is_full_is_not_needed() -> None:
    chunks = kinds_of("llama-4-scout", 8_192 * 2)[0]
    assert (chunks.blocks, chunks.nbytes) == (0, 0)
    rows = transfer_rows([chunks], versions=VLLM_VERSIONS)
    assert {row.units for row in rows if row.total_bytes is not None} == {0}
    assert kinds_of("llama-4-scout", 8_192 * 2 + 17)[0].blocks == 2


def test_encoders_positions_are_those_of_its_input() -> None:
    cross = kinds_of("whisper-large-v3", 448, encoder_tokens=1_500)[1]
    assert cross.blocks == 94
    assert moved([cross], "NixlConnector", "0.22").units == 2 * 32 * 94


@pytest.mark.parametrize("tokens", [1, 100_000, 262_144])
def test_states_do_not_grow(tokens: int) -> None:
    states = kinds_of("jamba", tokens)[0]
    rows = [row for row in transfer_rows([states], versions=["0.22"]) if row.connector == "NixlConnector"]
    assert [(row.unit, row.unit_bytes, row.units) for row in rows] == [
        ("state x layer x conv", 3 * 8_192 * 2, 28),
        ("state x layer x ssm", 8_192 * 16 * 2, 28),
    ]
    assert sum(row.total_bytes or 0 for row in rows) == 28 * 311_296


def test_mamba_2_has_four_descriptors_a_layer() -> None:
    states = kinds_of("bamba-9b", 1_000)[0]
    rows = descriptor_rows([states], versions=["0.22"])
    assert [(row.nbytes, row.count) for row in rows] == [(3 * 8_192 * 2, 29), (3 * 128 * 2, 58), (2_097_152, 29)]
    assert sum(row.count or 0 for row in rows) == 4 * 29
    assert sum((row.nbytes or 0) * (row.count or 0) for row in rows) == 29 * 2_147_840


def test_what_cuts_by_tokens_has_no_unit_for_states() -> None:
    rows = transfer_rows(kinds_of("jamba", 1_000), versions=["0.22"])
    lmcache = [row for row in rows if row.connector == "LMCacheV1" and row.kind == 0]
    assert lmcache
    assert all(row.unit_bytes is None and "a state has none" in row.note for row in lmcache)


def test_attention_beside_states_keeps_a_blocks_k_and_v_together() -> None:
    """FlashAttention's two planes become one page a block (vLLM 0.22), which is then moved whole."""
    attention = [row for row in transfer_rows(kinds_of("jamba", LONG), versions=["0.22"]) if row.kind == 1]
    row = next(row for row in attention if (row.connector, row.variant) == ("OffloadingConnector", "FA"))
    assert (row.unit_bytes, row.units) == (327_680, 4 * 1_639)


def test_quantized_caches_take_the_place_of_flashinfer() -> None:
    kinds = kinds_of("llama-3-8b", dtype="nvfp4")
    assert moved(kinds, "NixlConnector", "0.22").unit_bytes == 16 * 8 * 72
    assert "FlashAttention does not hold nvfp4" in moved(kinds, "OffloadingConnector", "0.22", "FA").note
    assert moved(kinds, "OffloadingConnector", "0.22", "FI, others").unit_bytes == 2 * 16 * 8 * 72
    split = transfer_rows(kinds, versions=["0.22"], splits=[HeadSplit.of(8, 4)])
    assert next(row for row in split if row.variant == "head-split").unit_bytes is None


def test_deepseek_v4_counts_stored_vectors() -> None:
    layers = layer_specs(V4, block_size=256, kv_cache_dtype="fp8_ds_mla")
    kinds = request_kinds(layers, Request(tokens=LONG))
    rows = transfer_rows(kinds, versions=["0.22"])
    nixl = {row.unit_bytes for row in rows if row.connector == "NixlConnector"}
    assert {64 * 584, 2 * 584} <= nixl
    for row in rows:
        if row.connector == "NixlConnector":
            assert row.total_bytes == kinds[row.kind].nbytes, row
    assert {letters["c"] for letters in map(symbols, kinds) if "c" in letters} == {4, 128}


# Rules that hold for every model.

MODELS = (
    "llama-3-8b",
    "deepseek-v3",
    "deepseek-v3.2",
    "gemma-3-27b",
    "jamba",
    "bamba-9b",
    "llama-4-scout",
    "gpt-oss-20b",
)


@given(
    model=st.sampled_from(MODELS),
    tokens=st.integers(1, 20_000),
    run_length=st.integers(1, 50),
    version=st.sampled_from(VLLM_VERSIONS),
)
def test_pieces_make_up_the_request(model: str, tokens: int, run_length: int, version: str) -> None:
    """Bytes of a unit times units are the request's bytes; a longer last unit is never counted as more than it is."""
    kinds = kinds_of(model, tokens)
    sums: dict[tuple[str, str, int], int] = {}
    for row in transfer_rows(kinds, versions=[version], run_length=run_length):
        if row.total_bytes is None or row.unit_bytes is None or row.units is None:
            continue
        key = (row.connector, row.variant, row.kind)
        sums[key] = sums.get(key, 0) + row.total_bytes
        assert row.total_bytes <= row.unit_bytes * row.units
        if row.coalesces == "no":
            assert row.total_bytes == row.unit_bytes * row.units, row
    for (connector, variant, index), total in sums.items():
        kind = kinds[index]
        if connector in CHUNKED:
            assert kind.layers * kind.bytes_of(len(kind.positions)) <= total
        elif connector == "ExampleConnector" and not kind.is_state:
            assert total == kind.layers * len(kind.positions) * kind.page_bytes // kind.spec.block_size
        else:
            assert total == kind.nbytes, (connector, variant)


@given(model=st.sampled_from(MODELS), tokens=st.integers(1, 300).map(lambda blocks: blocks * 1_280))
def test_whole_blocks_and_chunks_leave_nothing_over(model: str, tokens: int) -> None:
    """Where every length divides, even the gathering connectors move equal units."""
    for row in transfer_rows(kinds_of(model, tokens)[-1:], versions=["0.22"]):
        if row.total_bytes is not None and row.unit_bytes is not None and row.units is not None:
            assert row.total_bytes == row.unit_bytes * row.units, row


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        *(("llama-3-8b", dtype) for dtype in ("auto", "fp8", "nvfp4", "int8_per_token_head", "turboquant_k8v4")),
        *(("gemma-3-27b", dtype) for dtype in ("auto", "fp8", "nvfp4")),
        *(("deepseek-v3", dtype) for dtype in ("auto", "fp8")),
        ("deepseek-v3.2", "fp8_ds_mla"),
        ("jamba", "auto"),
    ],
)
def test_formulas_come_to_their_bytes(model: str, dtype: str) -> None:
    kinds = kinds_of(model, 5_000, dtype=dtype)
    rows = transfer_rows(kinds, versions=VLLM_VERSIONS, run_length=3)
    checked = 0
    for row in rows:
        kind = kinds[row.kind]
        if row.unit_bytes is None or kind.is_state:
            continue
        layers = int(found[1]) if (found := re.search(r"(\d+) layers", row.unit)) else kind.layers
        letters = {**symbols(kind), "L": layers, "r": 3}
        value = Fraction(1)
        for term in row.formula.split("*"):
            over, _, under = term.partition("/")
            value *= Fraction(letters.get(over) or int(over), letters[under] if under else 1)
        assert value == row.unit_bytes, row
        checked += 1
    assert checked > len(rows) // 3


@pytest.mark.parametrize("name", ["flash_attn_hnd", "flashinfer_nhd", "vllm_lhbnc", "vllm_blnhc", "sglang"])
def test_runs_are_contiguous_and_whole(name: str) -> None:
    """Against every element's place: the elements of a block fall into so many runs of so many bytes."""
    spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=3, dtype="bfloat16")
    layout = make_layout(name, spec, num_layers=3, num_blocks=5)
    offsets = [1 * layout.stride("block")]
    for axis in layout.axes:
        if axis.name != "block":
            offsets = [offset + step * axis.stride for offset in offsets for step in range(axis.extent)]
    offsets.sort()
    starts = [offset for place, offset in enumerate(offsets) if not place or offset != offsets[place - 1] + 2]
    runs = block_runs(layout)
    assert (runs.count, runs.count * runs.nbytes) == (len(starts), 2 * len(offsets))


def test_padding_is_not_moved_and_keeps_blocks_apart() -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=4, dtype="bfloat16", page_size_padded=256)
    runs = block_runs(make_layout("flashinfer_nhd", spec, num_layers=3, num_blocks=5))
    assert (runs.nbytes, runs.stride, runs.adjacent_blocks_join) == (128, 256, False)


def test_every_version_lists_every_connector_that_it_has() -> None:
    both = {
        "LMCacheV1",
        "LMCacheMP",
        "HF3FS",
        "FlexKV",
        "ExampleConnector",
        "ExampleHiddenStates",
        "DecodeBench",
        "Multi",
    }
    both |= {"MooncakeConnector", "MoRIIOConnector", "OffloadingConnector", "MooncakeStore", "SimpleCPUOffload"}
    names = {version: {each.name for each in CONNECTORS if each.version == version} for version in VLLM_VERSIONS}
    assert names["0.22"] == both | {"NixlConnector", "P2pNcclConnector"}
    assert names["0.32"] == both | {"NixlConnector, Pull, Push", "HiSparse"}
    for model in ("llama-3-8b", "deepseek-v3"):
        rows = transfer_rows(kinds_of(model, 100), versions=VLLM_VERSIONS)
        assert {(row.connector, row.version) for row in rows} == {(each.name, each.version) for each in CONNECTORS}


# Offloading.


def offloads(tokens: int | None = None, **settings: int) -> OffloadSettings:
    return OffloadSettings(block_size=16, offload_block_size=tokens, **settings)


@pytest.mark.parametrize(("tokens", "factor"), [(None, 1), (16, 1), (256, 16)])
def test_blocks_of_the_host(tokens: int | None, factor: int) -> None:
    rows = offload_rows(kinds_of("llama-3-8b"), offloads(tokens), versions=["0.22"])
    found = {(row.connector, row.variant): (row.gpu_bytes, row.factor, row.cpu_bytes) for row in rows}
    assert found["OffloadingConnector", "cross-layer"] == (2 * MIB, factor, 2 * MIB * factor)
    assert found["OffloadingConnector", "FA"] == (32 * KIB, factor, 32 * KIB * factor)
    assert found["SimpleCPUOffload", "FI"] == (64 * KIB, 1, 64 * KIB)


def test_small_pages_are_loaded_by_a_kernel() -> None:
    def loads(model: str) -> dict[str, str]:
        rows = offload_rows(kinds_of(model), offloads(), versions=["0.32"])
        return {row.variant: row.load for row in rows if row.connector == "OffloadingConnector"}

    assert loads("llama-3-8b") == {"": "DMA batch", "packed": "DMA batch"}
    assert loads("deepseek-v3") == {"": "Triton kernel", "packed": "DMA batch"}


@pytest.mark.parametrize(
    ("settings", "blocks", "tokens"),
    [
        (offloads(), [8_192, 4_096], [131_072, 65_536]),
        (offloads(256), [512, 4_096], [131_072, 65_536]),
        (offloads(memory=2**30), [512, 512], [8_192, 8_192]),
        (offloads(ranks=2), [4_096, 2_048], [65_536, 32_768]),
    ],
)
def test_pools(settings: OffloadSettings, blocks: list[int], tokens: list[int]) -> None:
    pools = offload_pools(kinds_of("llama-3-8b"), settings, block_bytes=2 * MIB, groups=1, versions=["0.22"])
    assert [pool.blocks for pool in pools] == blocks
    assert [pool.tokens for pool in pools] == tokens


def test_latent_vectors_are_stored_once_in_032() -> None:
    kinds, settings = kinds_of("deepseek-v3", ranks=8), offloads(ranks=8)
    block = 61 * 18_432
    for version, ranks in (("0.22", 8), ("0.32", 1)):
        pool = offload_pools(kinds, settings, block_bytes=block, groups=1, versions=[version])[0]
        assert pool.block_bytes == block * ranks


def test_groups_share_the_blocks_of_the_pool() -> None:
    pools = offload_pools(kinds_of("gemma-3-27b"), offloads(), block_bytes=10 * 131_072, groups=7, versions=["0.22"])
    assert [pool.tokens for pool in pools] == [None, None]


@pytest.mark.parametrize(
    "wrong", [{"offload_block_size": 24}, {"offload_block_size": 8}, {"memory": 0}, {"bytes_per_second": 0}]
)
def test_impossible_offloads(wrong: dict[str, int]) -> None:
    with pytest.raises(InputError):
        replace(offloads(), **wrong)


def test_impossible_requests() -> None:
    with pytest.raises(InputError, match="1 or more tokens"):
        Request(tokens=0)
    with pytest.raises(LayoutError, match="states"):
        layout_pieces(kinds_of("jamba", 10)[0], "flash_attn_nhd")
