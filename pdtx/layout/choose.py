"""Which preset a layer's cache lies in, given the user's choice for attention."""

from collections.abc import Mapping, Sequence

from pdtx.errors import LayoutError
from pdtx.kvspec import (
    HiddenStateCacheSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    TQFullAttentionSpec,
)
from pdtx.layout.plain import head_size_v, keys_and_values
from pdtx.layout.presets import (
    ELEMENT_ORDERS,
    PARTED_ORDERS,
    RECORD_ORDERS,
    STATE_ORDERS,
    is_cross_layer,
    is_packed,
    preset_name,
)

_LATENT = (MLAAttentionSpec, SlidingWindowMLASpec)
_KEYS_AND_VALUES = ("plain", "diffkv", "per_token_head", "nvfp4", "turboquant")


def parse_layouts(text: str) -> tuple[str, ...]:
    """Return the presets named in a user's text, separated by commas: one for attention, perhaps others for the rest.

    'flashinfer_hnd,mamba_ds'. Raises LayoutError for an unknown name, or two for the same kind of layer.
    """
    names = tuple(preset_name(part) for part in text.split(","))
    for orders in (ELEMENT_ORDERS, PARTED_ORDERS, STATE_ORDERS):
        same = [name for name in names if name in orders]
        if len(same) > 1:
            raise LayoutError(f"{same[0]} and {same[1]} are for the same layers; name one of them")
    return names


def layout_for(spec: KVCacheSpec, layer_name: str, names: tuple[str, ...]) -> str:
    """Return the preset for one layer: the one of names that is for layers of its kind, or else the kin of the first.

    Kin: for the attention layout flashinfer_hnd, per-token-head K/V lie in triton_per_token_head_hnd; for vLLM 0.32's
    orders, latent vectors lie in mla_lbnhc, and so on. layer_name tells an indexer's cache from latent vectors.
    """
    kind = cache_kind(spec, layer_name)
    named = [name for name in names if _is_for(name, kind)]
    return named[0] if named else _kin(kind, names[0])


def require_held(names: Sequence[str], layers: Mapping[str, KVCacheSpec]) -> None:
    """Raise LayoutError where layout_for() would have to choose a preset for keys and values by itself.

    layers: specs by layer names. Where an order of plain elements is named, its kin and the defaults are meant. Else
    only what is no keys and values (states, an indexer's cache) may lie as usual, beside layers in a named preset.
    """
    if any(name in ELEMENT_ORDERS for name in names):
        return
    chosen = {layer: layout_for(spec, layer, tuple(names)) for layer, spec in layers.items()}
    used = not set(names).isdisjoint(chosen.values())
    for layer, preset in chosen.items():
        if preset not in names and (not used or cache_kind(layers[layer], layer) in _KEYS_AND_VALUES):
            raise LayoutError(
                f"{', '.join(names)}: this does not hold {layer}, a layer for a preset such as {preset}; name that too"
            )


def cache_kind(spec: KVCacheSpec, layer_name: str = "") -> str:
    """Return what a layer keeps, in the words of the presets' names; "plain" or "diffkv" for elements alone.

    layer_name: tells an indexer's cache from latent vectors.
    """
    if isinstance(spec, MambaSpec):
        return "mamba"
    if isinstance(spec, TQFullAttentionSpec) and spec.tq_slot_size:
        return "turboquant"
    if isinstance(spec, HiddenStateCacheSpec):
        return "hidden_states"
    if isinstance(spec, _LATENT):
        if "indexer" in layer_name and "compressor" not in layer_name:
            return "deepseek_indexer"
        if spec.model_version == "deepseek_v4":
            return "deepseek_v4"
        return "deepseek_v4_compressor" if isinstance(spec, SlidingWindowMLASpec) else "mla"
    mode = getattr(spec, "kv_quant_mode", KVQuantMode.NONE)
    if mode.is_per_token_head:
        return "per_token_head"
    if mode is KVQuantMode.NVFP4:
        return "nvfp4"
    plain = keys_and_values(spec)
    return "diffkv" if plain is not None and plain.head_size != head_size_v(plain) else "plain"


def _is_for(name: str, kind: str) -> bool:
    if kind == "plain":
        return name in ELEMENT_ORDERS or name == "cpu_attn_lbhnc"
    if kind == "diffkv":
        return "diffkv" in name
    if kind == "mamba":
        return name in STATE_ORDERS
    stem = name.rpartition("_")[0] if is_packed(name) else name
    return name in RECORD_ORDERS and (stem == kind or f"_{kind}_" in f"_{stem}_")


def _kin(kind: str, name: str) -> str:
    """The preset of a kind that goes with an attention layout."""
    if kind == "plain":
        return "flash_attn_nhd"
    if kind == "mamba":
        return "mamba_sd"
    if is_packed(name) and f"{kind}_{name.rpartition('_')[2]}" in {**RECORD_ORDERS, **PARTED_ORDERS}:
        return f"{kind}_{name.rpartition('_')[2]}"
    if kind in RECORD_ORDERS:
        return kind
    backend = {"per_token_head": "triton", "nvfp4": "flashinfer", "diffkv": "flash_attn"}[kind]
    order = "hnd" if "hnd" in name else "nhd"
    return f"{backend}_{kind}_{order}" + ("_cross_layer" if is_cross_layer(name) else "")
