"""From configs to layers: against vLLM's own layers where they lie beside the repository, and what is refused."""

import copy
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from pdtx.cli.kvcache import one_page_size
from pdtx.errors import ModelError
from pdtx.kvspec import (
    Growth,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    ServingLimits,
    SlidingWindowSpec,
    TQFullAttentionSpec,
)
from pdtx.models import growth_curves, layer_kinds, layer_specs, load_config, preset_names
from pdtx.pool import PoolSettings, blocks_per_request, plan_pool
from tests.vectors import Case, load_cases, make_spec

GiB = 2**30
Config = dict[str, Any]
Record = Callable[[str, object], None]

V4: Config = {
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 21,
    "head_dim": 512,
    "index_head_dim": 128,
    "sliding_window": 128,
    "max_position_embeddings": 1048576,
    "compress_ratios": [4, 128] * 10 + [4],
}


def changed(preset: str, **fields: object) -> Config:
    config = load_config(preset)
    config.get("text_config", config).update(fields)
    return config


def v4(*ratios: int) -> Config:
    return V4 | {"num_hidden_layers": len(ratios), "compress_ratios": list(ratios)}


# What each model of the vectors is here: a config, and how its cache is kept. Names are the vectors' first words.
MODELS: dict[str, tuple[Callable[[], Config], dict[str, Any]]] = {
    "Llama-3-8B": (lambda: load_config("llama-3-8b"), {}),
    "Llama-3-8B fp8_per_token_head": (
        lambda: load_config("llama-3-8b"),
        {"kv_cache_dtype": "fp8_per_token_head"},
    ),
    "Llama-3-8B fp8": (lambda: load_config("llama-3-8b"), {"kv_cache_dtype": "fp8"}),
    "Llama-3-8B TP2": (lambda: load_config("llama-3-8b"), {"tensor_parallel_size": 2}),
    "Llama-3-70B TP8": (lambda: load_config("llama-3-70b"), {"tensor_parallel_size": 8}),
    "Llama-3-8B nvfp4": (lambda: load_config("llama-3-8b"), {"kv_cache_dtype": "nvfp4"}),
    "Mistral-7B-v0.1": (lambda: load_config("mistral-7b"), {}),
    "Gemma-2-9B": (lambda: load_config("gemma-2-9b"), {}),
    "Gemma-3-27B": (lambda: load_config("gemma-3-27b"), {}),
    "Gemma-3-1B": (
        lambda: changed("gemma-3-27b", num_hidden_layers=26, num_key_value_heads=1, head_dim=256, sliding_window=512),
        {},
    ),
    "gpt-oss-20b": (lambda: load_config("gpt-oss-20b"), {}),
    "gpt-oss-120b": (lambda: changed("gpt-oss-20b", num_hidden_layers=36, layer_types=None), {}),
    "Llama-4-Scout": (lambda: load_config("llama-4-scout"), {}),
    "Jamba-v0.1": (lambda: load_config("jamba"), {}),
    "Bamba-9B": (lambda: load_config("bamba-9b"), {}),
    "Nemotron-H-8B": (lambda: load_config("nemotron-h-8b"), {}),
    "Qwen3-Next": (lambda: load_config("qwen3-next"), {}),
    "Kimi-Linear": (lambda: load_config("kimi-linear"), {}),
    "DeepSeek-V3 61 layers bf16": (lambda: load_config("deepseek-v3"), {"block_size": 64}),
    "DeepSeek-V3 61 layers fp8": (lambda: load_config("deepseek-v3"), {"block_size": 64, "kv_cache_dtype": "fp8"}),
    "DeepSeek-V3.2 bf16": (lambda: load_config("deepseek-v3.2"), {"block_size": 64}),
    "DeepSeek-V3.2 fp8_ds_mla": (
        lambda: load_config("deepseek-v3.2"),
        {"block_size": 64, "kv_cache_dtype": "fp8_ds_mla"},
    ),
    "DeepSeek-V4 21 layers": (lambda: V4, {}),
    "DeepSeek-V4 43 layers": (lambda: v4(0, 0, *([4, 128] * 20), 4), {}),
    "DeepSeek-V4 61 layers": (lambda: v4(128, 128, *([4, 128] * 29), 4), {}),
    "DeepSeek-V4 4 layers": (lambda: v4(4, 128, 4, 128), {}),
    "DeepSeek-V4 6 layers": (lambda: v4(0, 4, 128, 4, 128, 4), {}),
    "Whisper-large-v3": (lambda: load_config("whisper-large-v3") | {"torch_dtype": "bfloat16"}, {}),
}
# Cases of other settings than a config has: speculative tokens, and what only looks like a model's name.
ANOTHER = ("num_spec", "hidden state", "Gemma-4-like", "-like")


def model_of(name: str) -> str | None:
    """Return the longest name of MODELS that a vector's name starts with."""
    if any(words in name for words in ANOTHER):
        return None
    return max((model for model in MODELS if name.startswith(model)), key=len, default=None)


def specs_of(model: str) -> dict[str, KVCacheSpec]:
    make, options = MODELS[model]
    if model.startswith("DeepSeek-V4"):
        options = options | {"block_size": 256, "kv_cache_dtype": "fp8_ds_mla"}
    return layer_specs(make(), **options, max_model_len=8192)


def theirs(case: Case) -> dict[str, KVCacheSpec]:
    """Return vLLM's layers on all workers; padding that alignment brings is for pdtx to find."""
    specs = []
    for vector in case["distinct_specs"]:
        fields = vector["fields"] | ({"page_size_padded": None} if vector["fields"].get("alignment") else {})
        specs.append(make_spec(vector["spec_class"], fields))
    return {name: specs[index] for worker in case["layer_to_spec_index_per_worker"] for name, index in worker.items()}


def as_configured(spec: KVCacheSpec) -> KVCacheSpec:
    """Return a spec without what its neighbours do to it: a raised block, a padded page, a state's mode."""
    if isinstance(spec, MambaSpec):
        return replace(spec, block_size=8192, page_size_padded=None, mamba_cache_mode="none")
    return spec.copy_with_new_block_size(16)


def check_layers(case: Case, model: str) -> None:
    ours, expected = specs_of(model), theirs(case)
    if any(isinstance(spec, MambaSpec) for spec in expected.values()):  # their layers stand in other places
        if case["settings"].get("mamba_cache_mode") == "none":
            assert Counter(one_page_size(ours).values()) == Counter(expected.values()), case["case_id"]
        assert Counter(ours.values()) == Counter(map(as_configured, expected.values())), case["case_id"]
    elif model.startswith("DeepSeek-V"):
        assert ours == expected, case["case_id"]
    else:
        assert list(ours.values()) == list(expected.values()), case["case_id"]
    if model.startswith("DeepSeek-V4"):
        assert list(ours) == list(expected), case["case_id"]


def test_vector_layers_of_0_22(record_property: Record) -> None:
    found: Counter[str] = Counter()
    for case in load_cases("pools_0.22.json"):
        if (model := model_of(case["name"])) is not None:
            check_layers(case, model)
            found[model] += 1
    record_property("vector_models", dict(found))
    assert len(found) >= 15
    print(", ".join(f"{model}: {count}" for model, count in found.items()))  # noqa: T201 - shown by pytest -rP


def plain_facts(spec_class: str, fields: Case) -> tuple[object, ...]:
    """What both generations of vLLM say of a layer. States: their bytes only, for 0.32 has one convolution in Kimi."""
    names = ("num_kv_heads", "head_size", "dtype", "kv_quant_mode", "sliding_window", "attention_chunk_size")
    states = zip(fields.get("shapes", ()), fields.get("dtypes", ()), strict=True)
    nbytes = sum(prod(shape) * {"bfloat16": 2, "float32": 4}[dtype] for shape, dtype in states)
    return spec_class, nbytes, *(fields.get(name) for name in names)


def test_vector_layers_of_0_32(record_property: Record) -> None:
    """Models that the 0.22 vectors do not have; 0.32's own fields are left aside."""
    found: Counter[str] = Counter()
    for case in load_cases("pools_0.32.json"):
        model = model_of(case["name"])
        if model is None or model.startswith("DeepSeek-V4"):
            continue  # other fields for the same bytes
        kinds = [plain_facts(spec["spec_class"], spec["fields"]) for spec in case["distinct_specs"]]
        layers = {name: index for worker in case["layer_to_spec_index_per_worker"] for name, index in worker.items()}
        expected = Counter(kinds[index] for index in layers.values())
        ours = Counter(plain_facts(type(spec).__name__, vars(spec)) for spec in specs_of(model).values())
        assert ours == expected, case["case_id"]
        found[model] += 1
    record_property("vector_models", dict(found))
    assert {"gpt-oss-20b", "Llama-4-Scout", "Kimi-Linear", "Whisper-large-v3"} <= found.keys()
    print(", ".join(f"{model}: {count}" for model, count in found.items()))  # noqa: T201 - shown by pytest -rP


@pytest.mark.parametrize(
    ("preset", "block_size", "dtype", "memory", "groups", "num_blocks"),
    [
        ("llama-3-8b", 16, "auto", 56, 1, 28_672),
        ("gemma-3-27b", 16, "auto", 40, 7, 32_768),
        ("gemma-2-9b", 16, "auto", 40, 2, 15_603),
        ("gpt-oss-20b", 16, "auto", 20, 2, 54_613),
        ("llama-4-scout", 16, "auto", 40, 4, 54_613),
        ("jamba", 16, "auto", 20, 8, 16_384),
        ("deepseek-v3", 64, "auto", 40, 1, 9_549),
        ("deepseek-v3.2", 64, "auto", 40, 1, 8_568),
        ("deepseek-v3.2", 64, "fp8_ds_mla", 40, 1, 13_961),
        ("whisper-large-v3", 16, "auto", 10, 2, 4_096),
    ],
)
def test_pools_of_presets(preset: str, block_size: int, dtype: str, memory: int, groups: int, num_blocks: int) -> None:
    """The pools that vLLM 0.22 makes of these models."""
    layers = layer_specs(load_config(preset), block_size=block_size, kv_cache_dtype=dtype, max_model_len=8192)
    settings = PoolSettings(limits=ServingLimits(max_model_len=8192))
    config = plan_pool([one_page_size(layers)], [memory * GiB], settings).configs[0]
    assert (len(config.kv_cache_groups), config.num_blocks) == (groups, num_blocks)


@pytest.mark.parametrize(
    ("preset", "block_size", "page"),
    [
        ("jamba", 80, 327_680),
        ("bamba-9b", 528, 2_162_688),
        ("nemotron-h-8b", 1040, 4_259_840),
        ("qwen3-next", 1056, 2_162_688),
        ("kimi-linear", 1888, 2_174_976),
    ],
)
def test_attention_is_raised_to_the_size_of_a_state(preset: str, block_size: int, page: int) -> None:
    layers = one_page_size(layer_specs(load_config(preset)))
    assert {spec.page_size_bytes for spec in layers.values()} == {page}
    assert {spec.block_size for spec in layers.values() if not isinstance(spec, MambaSpec)} == {block_size}


def test_deepseek_v4_pool() -> None:
    layers = layer_specs(V4, block_size=256, kv_cache_dtype="fp8_ds_mla")
    limits = ServingLimits(max_model_len=131_072)
    config = plan_pool([layers], [40 * GiB], PoolSettings(limits=limits, block_size=256)).configs[0]
    assert (len(config.kv_cache_groups), config.num_blocks) == (5, 81_670)


@pytest.mark.parametrize(("batched", "blocks"), [(2048, 385), (8192, 769)])
def test_window_is_reserved_with_a_batch(batched: int, blocks: int) -> None:
    limits = ServingLimits(max_model_len=32_768, max_num_batched_tokens=batched)
    layers = layer_specs(load_config("mistral-7b"))
    plan = plan_pool([layers], [40 * GiB], PoolSettings(limits=limits))
    assert blocks_per_request(plan.configs[0].kv_cache_groups, limits) == blocks


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_has_layers_on_one_and_two_ranks(preset: str) -> None:
    config = load_config(preset)
    ranks = {"smollm2-135m": 3, "bamba-9b": 1}.get(preset, 2)  # Bamba: in the test after the next
    one, shared = layer_specs(config), layer_specs(config, tensor_parallel_size=ranks)
    assert list(one) == list(shared)
    for name, spec in one.items():
        copied = isinstance(spec, MLAAttentionSpec)
        assert spec.page_size_bytes == shared[name].page_size_bytes * (1 if copied else ranks), name


def test_heads_are_copied_where_there_are_more_ranks() -> None:
    spec = layer_specs(load_config("llama-3-8b"), tensor_parallel_size=16)["model.layers.0.self_attn.attn"]
    assert spec.page_size_bytes == 16 * 2 * 128 * 2


def test_mamba_groups_are_copied_to_every_rank() -> None:
    """Bamba has one group: each of 2 ranks keeps its B and C, so the convolution is more than half."""
    one, half = (layer_specs(load_config("bamba-9b"), tensor_parallel_size=n)["model.layers.0.mamba"] for n in (1, 2))
    assert isinstance(one, MambaSpec)
    assert isinstance(half, MambaSpec)
    assert one.shapes == ((3, 8448), (128, 64, 128))
    assert half.shapes == ((3, (8192 + 2 * 2 * 128) // 2), (64, 64, 128))


@pytest.mark.parametrize(
    ("dtype", "page"),
    [
        ("auto", 65_536),
        ("float32", 131_072),
        ("fp8", 32_768),
        ("fp8_e5m2", 32_768),
        ("int8_per_token_head", 33_792),
        ("fp8_per_token_head", 33_792),
        ("nvfp4", 18_432),
    ],
)
def test_kv_cache_dtypes(dtype: str, page: int) -> None:
    specs = set(layer_specs(load_config("llama-3-8b"), kv_cache_dtype=dtype).values())
    assert [spec.page_size_bytes for spec in specs] == [page]


@pytest.mark.parametrize(
    ("preset", "slot"),
    [("turboquant_k8v4", 196), ("turboquant_4bit_nc", 134), ("turboquant_k3v4_nc", 118), ("turboquant_3bit_nc", 102)],
)
def test_turboquant_leaves_the_outer_layers(preset: str, slot: int) -> None:
    specs = list(layer_specs(load_config("llama-3-8b"), kv_cache_dtype=preset).values())
    packed = [isinstance(spec, TQFullAttentionSpec) for spec in specs]
    assert packed == [False] * 2 + [True] * 28 + [False] * 2
    assert {spec.page_size_bytes for spec in specs} == {65_536, 16 * 8 * slot}


def test_turboquant_leaves_no_more_layers_than_there_are() -> None:
    specs = layer_specs(changed("llama-3-8b", num_hidden_layers=3), kv_cache_dtype="turboquant_k8v4")
    assert [isinstance(spec, TQFullAttentionSpec) for spec in specs.values()] == [False, True, False]


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3"])
def test_sparse_latent_attention_keeps_records_for_every_fp8(dtype: str) -> None:
    for config, block_size in ((load_config("deepseek-v3.2"), 64), (V4, 256)):
        records = layer_specs(config, block_size=block_size, kv_cache_dtype="fp8_ds_mla")
        assert layer_specs(config, block_size=block_size, kv_cache_dtype=dtype) == records


@pytest.mark.parametrize(
    ("preset", "dtype"),
    [
        ("llama-3-8b", "fp8_ds_mla"),
        ("llama-3-8b", "int3"),
        ("mistral-7b", "turboquant_k8v4"),
        ("deepseek-v3", "fp8_ds_mla"),
        ("deepseek-v3", "nvfp4"),
        ("deepseek-v3.2", "nvfp4"),
        ("jamba", "turboquant_k8v4"),
        ("kimi-linear", "fp8_per_token_head"),
        ("whisper-large-v3", "nvfp4"),
    ],
)
def test_dtypes_that_a_model_cannot_have(preset: str, dtype: str) -> None:
    with pytest.raises(ModelError, match=f"no kv_cache_dtype '{dtype}'"):
        layer_specs(load_config(preset), kv_cache_dtype=dtype)


# Without these there is a rule of the architecture, or they are read by nobody here.
OPTIONAL = {
    "llama-3-8b": (), "llama-3-70b": (), "smollm2-135m": (), "mistral-7b": ("sliding_window",),
    "qwen2.5-7b": ("sliding_window", "max_window_layers"),
    "qwen3-8b": ("use_sliding_window", "sliding_window", "max_window_layers", "hidden_size", "num_attention_heads"),
    "gemma-2-9b": ("hidden_size", "num_attention_heads"), "gpt-oss-20b": ("hidden_size", "num_attention_heads",
                                                                         "layer_types"),
    "deepseek-v3": ("hidden_size", "num_attention_heads", "num_key_value_heads"),
    "deepseek-v3.2": ("hidden_size", "num_attention_heads", "num_key_value_heads", "index_n_heads", "index_topk"),
    "nemotron-h-8b": ("hidden_size", "num_attention_heads"), "jamba": (), "bamba-9b": (),
    "qwen3-next": ("hidden_size", "num_attention_heads"),
    "kimi-linear": ("hidden_size", "num_attention_heads", "num_key_value_heads"),
    "whisper-large-v3": ("encoder_layers", "max_source_positions", "max_target_positions"),
    "gemma-3-27b": ("hidden_size", "num_attention_heads", "sliding_window_pattern", "model_type"),
    "llama-4-scout": ("hidden_size", "num_attention_heads", "no_rope_layers", "attention_chunk_size", "model_type"),
}  # fmt: skip
NOT_FOR_LAYERS = ("max_position_embeddings", "model_max_length", "text_config")


@pytest.mark.parametrize("preset", preset_names())
def test_a_missing_field_is_refused_by_name(preset: str) -> None:
    config = load_config(preset)
    where = "text_config" if "text_config" in config else None
    for name in config[where] if where else config:
        if name in OPTIONAL[preset] or name in NOT_FOR_LAYERS:
            continue
        poorer = copy.deepcopy(config)
        del (poorer[where] if where else poorer)[name]
        with pytest.raises(ModelError, match=name):
            layer_specs(poorer, max_model_len=8192)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "no model_type"),
        ({"model_type": "mamba3"}, "no rule for what model_type 'mamba3'"),
        ({"model_type": "gemma3"}, "no text_config"),
        (changed("llama-3-8b", num_hidden_layers="32"), "num_hidden_layers must be an int of 1 or more, not '32'"),
        (changed("llama-3-8b", num_hidden_layers=True), "num_hidden_layers must be an int"),
        (changed("llama-3-8b", torch_dtype="bf16"), "torch_dtype is 'bf16'"),
        (changed("llama-3-8b", hidden_size=4097), "no multiple of 32 heads"),
        (changed("llama-3-8b", quantization_config={"kv_cache_scheme": {"num_bits": 8}}), "give kv_cache_dtype"),
        (changed("gpt-oss-20b", layer_types=["full_attention"]), "1 entries for 24 layers"),
        (changed("gpt-oss-20b", layer_types=["linear"] * 24), "'linear', for which there is no rule"),
        (changed("gpt-oss-20b", layer_types="full_attention"), "must be a list"),
        (changed("qwen2.5-7b", use_sliding_window=True), "say in layer_types"),
        (changed("gemma-3-27b", use_bidirectional_attention=True), "makes an encoder"),
        (changed("bamba-9b", attn_layer_indices=[40]), "has 40, but there are 32 layers"),
        (changed("nemotron-h-8b", hybrid_override_pattern="MX" * 26), "'X', for which there is no rule"),
        (changed("kimi-linear", num_hidden_layers=28), "each of layers 1 to 28 once"),
        (changed("whisper-large-v3", d_model=1281), "no multiple of decoder_attention_heads"),
        ({"model_type": "bert", "num_hidden_layers": 12, "is_decoder": True}, "no rule for that"),
        (V4, "DeepSeek V4 has no kv_cache_dtype 'auto'"),
    ],
)
def test_configs_that_are_refused(config: Config, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        layer_specs(config)
    assert "\n" not in str(caught.value)


def test_v4_in_other_blocks_is_refused() -> None:
    with pytest.raises(ModelError, match="blocks of 256 tokens"):
        layer_specs(V4, block_size=64, kv_cache_dtype="fp8_ds_mla")


@pytest.mark.parametrize(("preset", "ranks"), [("llama-3-8b", 3), ("smollm2-135m", 2), ("jamba", 3), ("bamba-9b", 0)])
def test_ranks_that_cannot_share_are_refused(preset: str, ranks: int) -> None:
    with pytest.raises(ModelError, match="tensor_parallel_size"):
        layer_specs(load_config(preset), tensor_parallel_size=ranks)


def test_encoders_keep_nothing() -> None:
    assert layer_specs({"model_type": "bert", "num_hidden_layers": 12}) == {}


def test_configs_are_found_by_file_folder_and_name(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "bert"}))
    assert load_config(tmp_path) == load_config(str(file)) == {"model_type": "bert"}
    file.write_text("[]")
    with pytest.raises(ModelError, match="no JSON object"):
        load_config(tmp_path)
    file.write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        load_config(file)
    with pytest.raises(ModelError, match=r"presets: .*llama-3-8b"):
        load_config(tmp_path / "absent")


def test_a_preset_wins_over_a_file_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preset = load_config("llama-3-8b")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-3-8b").mkdir()
    (tmp_path / "llama-3-8b" / "config.json").write_text('{"model_type": "bert"}')
    assert load_config("llama-3-8b") == preset
    assert load_config("./llama-3-8b") == load_config("llama-3-8b/config.json") == {"model_type": "bert"}


def _pipe(folder: Path) -> str:
    os.mkfifo(folder / "pipe")
    return str(folder / "pipe")


def _huge(folder: Path) -> str:
    (folder / "huge.json").touch()
    os.truncate(folder / "huge.json", (16 << 20) + 1)
    return str(folder / "huge.json")


def _folder_of_a_pipe(folder: Path) -> str:
    os.mkfifo(folder / "config.json")
    return str(folder)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda _: "a" * 5000, "cannot read aaa"),
        (lambda _: "a\0b", r"cannot read a\?b: embedded null byte"),
        (lambda _: "nobody's\n\x1b[31m", r"at nobody's\?\?\[31m and no preset"),
        (lambda _: "/dev/zero", "no regular file"),
        (_pipe, "no regular file"),
        (_folder_of_a_pipe, "no regular file"),
        (_huge, "has more than 16,777,216 bytes"),
    ],
)
def test_what_is_no_config_is_refused_in_one_line(tmp_path: Path, make: Callable[[Path], str], words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        load_config(make(tmp_path))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


# The rule of each architecture for configs without layer_types, against transformers' own.
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Gemma2Config", {}),
        ("Gemma3TextConfig", {}),
        ("GptOssConfig", {}),
        ("Llama4TextConfig", {}),
        ("Qwen3NextConfig", {"full_attention_interval": 4}),
        ("JambaConfig", {}),
    ],
)
def test_layer_kinds_are_those_of_transformers(name: str, fields: Config) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, name)()
    values = {key: value for key, value in config.to_dict().items() if key != "layer_types"}
    specs = layer_specs(values | {"torch_dtype": "bfloat16"} | fields)
    kinds = {
        "FullAttentionSpec": "full_attention",
        "SlidingWindowSpec": "sliding_attention",
        "ChunkedLocalAttentionSpec": "chunked_attention",
        "MambaSpec": "linear_attention",
    }
    assert [kinds[type(spec).__name__] for spec in specs.values()] == list(config.layer_types)


def test_growth_curves() -> None:
    limits = ServingLimits(max_model_len=131_072)
    layers = layer_specs(load_config("gemma-3-27b"))
    curves = {curve.growth: curve for curve in growth_curves(layers, limits, [16, 32, 65_536, 131_072])}
    assert curves.keys() == {Growth.WINDOW, Growth.TOKENS}
    assert curves[Growth.TOKENS].nbytes == tuple(10 * 8192 * tokens for tokens in (16, 32, 65_536, 131_072))
    assert curves[Growth.WINDOW].nbytes[2] == curves[Growth.WINDOW].nbytes[3]
    kinds = layer_kinds(layers, limits)
    assert sum(curve.nbytes[-1] for curve in curves.values()) == sum(kind.max_memory_bytes for kind in kinds)
    assert [kind.bytes_per_token for kind in kinds] == [8192, 8192]
    assert isinstance(kinds[0].spec, SlidingWindowSpec)
