"""The names of the layouts, and the order of their axes in memory, outermost first."""

from collections.abc import Mapping
from types import MappingProxyType

from pdtx.errors import LayoutError

Order = tuple[str, ...]

LAYOUT_ORDERS: Mapping[str, Order] = MappingProxyType({
    # vLLM 0.22, one tensor a layer: FlashAttention (2, nb, ...), FlashInfer (nb, 2, ...).
    "flash_attn_nhd": ("layer", "kv", "block", "token", "head", "channel"),
    "flash_attn_hnd": ("layer", "kv", "block", "head", "token", "channel"),
    "flashinfer_nhd": ("layer", "block", "kv", "token", "head", "channel"),
    "flashinfer_hnd": ("layer", "block", "kv", "head", "token", "channel"),
})  # fmt: skip
"""The four basic layouts. Everything else is in ELEMENT_, PARTED_, RECORD_ and STATE_ORDERS."""

# vLLM 0.22's cross-layer forms: one tensor for all layers, of which a block of all layers is one run.
_FLASH_ATTN_CROSS = {
    "nhd": ("block", "layer", "kv", "token", "head", "channel"),
    "hnd": ("block", "head", "layer", "kv", "token", "channel"),
}
_FLASHINFER_CROSS = {
    "nhd": ("block", "layer", "kv", "token", "head", "channel"),
    "hnd": ("block", "kv", "head", "layer", "token", "channel"),
}
# vLLM 0.32: [L, B, H, N, C] in six memory orders.
PACKED_ORDERS = ("lbhnc", "lbnhc", "lhbnc", "blhnc", "blnhc", "bhlnc")
"""The memory orders of vLLM 0.32: Layer, Block, Head, tokeN, Content."""
_LETTERS = {"l": ("layer",), "b": ("block",), "h": ("head",), "n": ("token",), "c": ("channel",)}


def expand(letters: str, **changed: Order) -> Order:
    """Return the axes of one of PACKED_ORDERS, some letters standing for other axes than usual."""
    return tuple(axis for letter in letters for axis in (_LETTERS | changed)[letter])


ELEMENT_ORDERS: Mapping[str, Order] = MappingProxyType({
    **LAYOUT_ORDERS,
    **{f"flash_attn_{key}_cross_layer": order for key, order in _FLASH_ATTN_CROSS.items()},
    **{f"flashinfer_{key}_cross_layer": order for key, order in _FLASHINFER_CROSS.items()},
    **{f"triton_{key}": LAYOUT_ORDERS[f"flashinfer_{key}"] for key in ("nhd", "hnd")},
    **{f"triton_{key}_cross_layer": order for key, order in _FLASHINFER_CROSS.items()},
    # FlashAttention beside Mamba layers: still a (2, nb, ...) tensor, but each block's K and V lie together.
    "flash_attn_mamba": LAYOUT_ORDERS["flashinfer_nhd"],
    # These have no HND form: VLLM_KV_CACHE_LAYOUT changes nothing.
    "flex_attn": LAYOUT_ORDERS["flash_attn_nhd"],
    "rocm_attn": LAYOUT_ORDERS["flash_attn_nhd"],
    "cpu_attn": LAYOUT_ORDERS["flash_attn_hnd"],
    # vLLM 0.32: K, then V, for each token and head.
    **{f"vllm_{letters}": expand(letters, c=("kv", "channel")) for letters in PACKED_ORDERS},
    # SGLang's MHATokenToKVPool: a list of K tensors and a list of V tensors, one a layer, (slots, heads, channels).
    "sglang": ("kv", "layer", "block", "token", "head", "channel"),
})  # fmt: skip
"""Layouts with one stride an axis (KVCacheLayout)."""

PARTED_ORDERS: Mapping[str, Order] = MappingProxyType({
    # FlashAttention with a value head of another size: (nb, B, H, dk + dv).
    "flash_attn_diffkv_nhd": ("layer", "block", "token", "head", "channel"),
    "flash_attn_diffkv_hnd": ("layer", "block", "head", "token", "channel"),
    "flash_attn_diffkv_nhd_cross_layer": ("block", "layer", "token", "head", "channel"),
    "flash_attn_diffkv_hnd_cross_layer": ("block", "head", "layer", "token", "channel"),
    **{f"diffkv_{letters}": expand(letters) for letters in PACKED_ORDERS},
    # vLLM 0.32 on CPUs: LBHNC by its shape, but in each block and head K lies transposed, then V.
    "cpu_attn_lbhnc": ("layer", "block", "head", "token", "channel"),
})  # fmt: skip
"""Layouts whose keys and values have strides of their own (PartedLayout); the axes of both without kv."""

RECORD_KINDS = ("mla", "deepseek_v4", "deepseek_indexer", "deepseek_v4_compressor", "turboquant", "hidden_states")
"""What a record is, where the name has to say it."""
_RECORD_AXES = ("layer", "block", "token", "head", "byte")

RECORD_ORDERS: Mapping[str, Order] = MappingProxyType({
    **dict.fromkeys(RECORD_KINDS, _RECORD_AXES),
    **{
        f"{kind}_{letters}": expand(letters, c=("byte",))
        for kind in RECORD_KINDS
        if kind != "deepseek_v4_compressor"
        for letters in PACKED_ORDERS
    },
    # Quantized with their scales in the page: Triton's inside each head, NVFP4's after all data of a K or V part.
    **{
        f"{backend}_{suffix}_{key}{cross}": tuple(
            "byte" if axis == "channel" else axis for axis in ELEMENT_ORDERS[f"{backend}_{key}{cross}"]
        )
        for backend, suffix in (("triton", "per_token_head"), ("flashinfer", "nvfp4"))
        for key in ("nhd", "hnd")
        for cross in ("", "_cross_layer")
    },
    **{f"per_token_head_{letters}": expand(letters, c=("kv", "byte")) for letters in PACKED_ORDERS},
    # All K heads, then all V heads.
    **{f"nvfp4_{letters}": expand(letters, h=("kv", "head"), c=("byte",)) for letters in PACKED_ORDERS},
})  # fmt: skip
"""Layouts of records (RecordLayout): vLLM 0.22's under the kind's name, 0.32's with the memory order behind it."""

STATE_ORDERS: Mapping[str, Order] = MappingProxyType({
    # VLLM_SSM_CONV_STATE_LAYOUT: SD, its default, and DS.
    "mamba_sd": ("layer", "block", "step", "channel"),
    "mamba_ds": ("layer", "block", "channel", "step"),
})  # fmt: skip
"""Layouts of states (StateLayout); the axes of a convolution's state, the only one in which they differ."""


def is_cross_layer(name: str) -> bool:
    """Whether a preset is one of vLLM 0.22's cross-layer forms."""
    return name.endswith("_cross_layer")


def is_packed(name: str) -> bool:
    """Whether a preset is one of vLLM 0.32's memory orders."""
    return name.rpartition("_")[2] in PACKED_ORDERS


def _known(text: str, names: Mapping[str, Order]) -> str:
    name = text.strip().lower().replace("-", "_").replace(":", "_").replace("flashattention", "flash_attn")
    name = name.replace("flashattn", "flash_attn").replace("flash_infer", "flashinfer")
    name = name.replace("triton_attn", "triton")
    if name not in names:
        raise LayoutError(f"unknown layout {text!r}; one of {', '.join(names)}")
    return name


def layout_name(text: str) -> str:
    """Return the preset of plain elements that a user's spelling means ('FlashInfer-HND', 'FLASH_ATTN:NHD', ...).

    Raises LayoutError, listing the presets.
    """
    return _known(text, ELEMENT_ORDERS)


def preset_name(text: str) -> str:
    """Return the preset of any kind that a user's spelling means. Raises LayoutError, listing the presets."""
    return _known(text, {**ELEMENT_ORDERS, **PARTED_ORDERS, **RECORD_ORDERS, **STATE_ORDERS})
