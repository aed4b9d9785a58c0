"""Which specs hold plain elements, nothing beside them: a key and a value for every token and head."""

from pdtx.errors import LayoutError
from pdtx.kvspec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

KeyValueSpec = FullAttentionSpec | SlidingWindowSpec | ChunkedLocalAttentionSpec | CrossAttentionSpec

# Exactly these: the latent specs derive from them. A layer of an encoder only keeps nothing, so it has no layout.
_CLASSES = (
    FullAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
)
_WITHOUT_SCALES = (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)


def keys_and_values(spec: KVCacheSpec) -> KeyValueSpec | None:
    """Return a spec as what it is if its pages hold a key and a value for every token, else None."""
    return spec if isinstance(spec, _CLASSES) and type(spec) in _CLASSES else None


def head_size_v(spec: KeyValueSpec) -> int:
    """Channels of a value head: those of a key head in specs that do not tell them apart."""
    return spec.head_size_v if isinstance(spec, FullAttentionSpec | SlidingWindowSpec) else spec.head_size


def check_plain(name: str, spec: KVCacheSpec) -> KeyValueSpec:
    """Return a spec of elements of its dtype and nothing else. Raises LayoutError for any other."""
    plain = keys_and_values(spec)
    if plain is None or plain.kv_quant_mode not in _WITHOUT_SCALES:
        mode = f" with {plain.kv_quant_mode.value}" if plain else ""
        raise LayoutError(f"{name} holds plain keys and values, not {type(spec).__name__}{mode}")
    return plain


def check_alike(name: str, spec: KeyValueSpec) -> None:
    """Raise LayoutError unless key and value heads have one size."""
    if spec.head_size != head_size_v(spec):
        raise LayoutError(
            f"{name} keeps K and V alike; head_size {spec.head_size} and head_size_v {head_size_v(spec)} differ"
        )
