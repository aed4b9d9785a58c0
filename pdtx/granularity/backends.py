"""Which layout a backend gives to layers of a spec."""

from pdtx.errors import LayoutError
from pdtx.kvspec import KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec
from pdtx.layout import QuantizedLayout, StridedLayout, any_layout, cache_kind
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
    if isinstance(layout, QuantizedLayout):
        layout = layout.whole  # connectors move pages, and know nothing of scales
    if not isinstance(layout, StridedLayout):
        raise LayoutError(f"{name} lies in parts with strides of their own")
    layout.require_movable()
    return layout


def _preset(backend: str, spec: KVCacheSpec, beside_states: bool) -> str:
    kind = cache_kind(spec)
    if kind == "mamba":
        raise LayoutError(f"{backend} holds keys and values, not states")
    if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
        return _alone(kind, backend)
    plain = kind in ("plain", "diffkv")
    if not plain and backend.startswith("flash_attn"):
        raise LayoutError(f"FlashAttention does not hold {kind} caches")
    backend = backend.replace("default", "flash_attn" if plain else "flashinfer")
    if kind == "turboquant":
        return _alone(kind, backend)
    if not plain:
        return _scaled(kind, backend)
    if backend in PACKED_ORDERS:
        return f"vllm_{backend}"
    if beside_states and backend.startswith("flash_attn"):
        return "flash_attn_mamba"
    return backend


def _alone(kind: str, backend: str) -> str:
    """A kind with one layout in 0.22, whatever backend and order of heads; without a cross-layer form."""
    if is_cross_layer(backend):
        raise LayoutError(f"{kind} has no cross-layer form")
    return f"{kind}_{backend}" if backend in PACKED_ORDERS else kind


def _scaled(kind: str, backend: str) -> str:
    """Elements with their scales, which one backend of 0.22 holds, in FlashInfer's order."""
    if backend in PACKED_ORDERS:
        return f"{kind}_{backend}"
    holder = "triton" if kind == "per_token_head" else "flashinfer"
    return backend.replace("flashinfer", f"{holder}_{kind}")
