"""Which layout a backend gives to layers of a spec."""

from pdtx.errors import LayoutError
from pdtx.kvspec import (
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    TQFullAttentionSpec,
)
from pdtx.layout import StridedLayout, any_layout
from pdtx.layout.presets import PACKED_ORDERS, is_cross_layer

_BLOCKS = 2
"""Blocks of a layout that is only read for its strides: enough to have one block beside another."""


def backend_layout(backend: str, spec: KVCacheSpec, layers: int, *, beside_states: bool = False) -> StridedLayout:
    """Return the layout of layers with one spec.

    backend: flash_attn_nhd, flash_attn_hnd, flashinfer_nhd, flashinfer_hnd, one of these with _cross_layer (vLLM 0.22),
    or one of PACKED_ORDERS (0.32); default_nhd and default_hnd are FlashAttention's where it holds the layers, else
    that of the backend that does. Quantized layers take FlashInfer's place, latent ones have one layout in 0.22.
    beside_states: whether other layers of the model keep states.

    Raises LayoutError where the backend does not hold such layers in one layout, or its blocks cannot be moved.
    """
    name = _preset(backend, spec, beside_states)
    layout = any_layout(name, spec, num_layers=layers, num_blocks=_BLOCKS)
    if not isinstance(layout, StridedLayout):
        raise LayoutError(f"{name} lies in parts with strides of their own")
    layout.require_movable()
    return layout


def _preset(backend: str, spec: KVCacheSpec, beside_states: bool) -> str:
    if isinstance(spec, MambaSpec):
        raise LayoutError(f"{backend} holds keys and values, not states")
    mode = getattr(spec, "kv_quant_mode", KVQuantMode.NONE)
    if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
        return _alone(_latent(spec), backend)
    quantized = _quantized(spec, mode)
    if quantized and backend.startswith("flash_attn"):
        raise LayoutError(f"FlashAttention does not hold {quantized} caches")
    backend = backend.replace("default", "flashinfer" if quantized else "flash_attn")
    if quantized == "turboquant":
        return _alone(quantized, backend)
    if quantized:
        return _scaled(quantized, backend)
    if backend in PACKED_ORDERS:
        return f"vllm_{backend}"
    if beside_states and backend.startswith("flash_attn"):
        return "flash_attn_mamba"
    return backend


def _latent(spec: MLAAttentionSpec | SlidingWindowMLASpec) -> str:
    if spec.model_version == "deepseek_v4":
        return "deepseek_v4"
    return "mla" if isinstance(spec, MLAAttentionSpec) else "deepseek_v4_compressor"


def _alone(kind: str, backend: str) -> str:
    """A kind with one layout in 0.22, whatever backend and order of heads; without a cross-layer form."""
    if is_cross_layer(backend):
        raise LayoutError(f"{kind} has no cross-layer form")
    return f"{kind}_{backend}" if backend in PACKED_ORDERS else kind


def _quantized(spec: KVCacheSpec, mode: KVQuantMode) -> str:
    """The layouts of a spec whose records are more than elements; empty for plain ones."""
    if isinstance(spec, TQFullAttentionSpec):
        return "turboquant"
    if mode.is_per_token_head:
        return "per_token_head"
    return "nvfp4" if mode is KVQuantMode.NVFP4 else ""


def _scaled(kind: str, backend: str) -> str:
    """Elements with their scales, which one backend of 0.22 holds, in FlashInfer's order."""
    if backend in PACKED_ORDERS:
        return f"{kind}_{backend}"
    holder = "triton" if kind == "per_token_head" else "flashinfer"
    return backend.replace("flashinfer", f"{holder}_{kind}")
