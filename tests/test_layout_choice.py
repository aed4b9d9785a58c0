"""Which preset each kind of layer gets, for the layout that the user names for attention."""

import pytest

from pdtx.errors import LayoutError
from pdtx.kvspec import FullAttentionSpec, SlidingWindowSpec
from pdtx.layout import any_layout, layout_for, parse_layouts
from pdtx.models import layer_specs, load_config, preset_names

NAMES = ("flash_attn_nhd", "flashinfer_hnd", "vllm_lbnhc", "flashinfer_nhd_cross_layer", "sglang")


@pytest.mark.parametrize("attention", NAMES)
@pytest.mark.parametrize("model", preset_names())
def test_every_layer_of_every_model_gets_a_layout_that_holds_it(model: str, attention: str) -> None:
    for name, spec in layer_specs(load_config(model), block_size=64).items():
        layout = any_layout(layout_for(spec, name, (attention,)), spec, num_layers=1, num_blocks=3)
        assert layout.movable


@pytest.mark.parametrize("dtype", ["fp8_per_token_head", "nvfp4", "turboquant_k8v4", "fp8"])
def test_quantized_kv_gets_its_kin(dtype: str) -> None:
    for name, spec in layer_specs(load_config("llama-3-8b"), kv_cache_dtype=dtype).items():
        any_layout(layout_for(spec, name, ("flashinfer_hnd",)), spec, num_layers=2, num_blocks=3)
        any_layout(layout_for(spec, name, ("vllm_lbnhc",)), spec, num_layers=2, num_blocks=3)


def spec(**changes: int) -> FullAttentionSpec:
    return FullAttentionSpec(**{"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": "float16", **changes})  # type: ignore[arg-type]


def test_the_names_for_a_kind_come_before_its_kin() -> None:
    states = next(s for s in layer_specs(load_config("jamba")).values() if type(s).__name__ == "MambaSpec")
    assert layout_for(states, "model.layers.0.mamba", ("sglang",)) == "mamba_sd"
    assert layout_for(states, "model.layers.0.mamba", ("sglang", "mamba_ds")) == "mamba_ds"
    assert layout_for(spec(), "a", ("mamba_ds",)) == "flash_attn_nhd"
    assert layout_for(spec(head_size_v=4), "a", ("flashinfer_hnd",)) == "flash_attn_diffkv_hnd"
    assert layout_for(spec(head_size_v=4), "a", ("vllm_lbhnc",)) == "diffkv_lbhnc"
    window = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=8, dtype="float16", sliding_window=4)
    assert layout_for(window, "a", ("sglang",)) == "sglang"


def test_an_indexer_is_told_by_its_name_from_latent_vectors() -> None:
    kinds = {
        layout_for(s, name, ("flash_attn_nhd",))
        for name, s in layer_specs(load_config("deepseek-v3.2"), kv_cache_dtype="fp8_ds_mla").items()
    }
    assert kinds == {"mla", "deepseek_indexer"}


def test_texts() -> None:
    assert parse_layouts("FlashInfer-HND,mamba_ds") == ("flashinfer_hnd", "mamba_ds")
    with pytest.raises(LayoutError, match="unknown layout 'nope'"):
        parse_layouts("flash_attn_nhd,nope")
    with pytest.raises(LayoutError, match="sglang and flash_attn_nhd are for the same layers"):
        parse_layouts("sglang,flash_attn_nhd")
