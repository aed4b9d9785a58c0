"""Which layers share a block table (vLLM 0.22, v1/core/kv_cache_utils.py, get_kv_cache_groups)."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from pdtx.errors import SpecError
from pdtx.kvspec import (
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
    dtype_size,
)
from pdtx.kvspec.attention import one_recorded
from pdtx.pool.config import KVCacheGroupSpec
from pdtx.pool.deepseek_v4 import deepseek_v4_groups
from pdtx.pool.keep_all import keep_all_tokens
from pdtx.units import ceil_div

Layers = Mapping[str, KVCacheSpec]


def get_kv_cache_groups(layers: Layers, *, disable_hybrid: bool = False) -> tuple[KVCacheGroupSpec, ...]:
    """Return the groups of a model's layers (specs by name, in the model's order).

    Layers alike: one group with one spec. Layers of one family: one group with a UniformTypeKVCacheSpecs. Latent
    windows among them: DeepSeek V4's groups. Else pages are made equal and each kind is cut into groups of about
    equally many layers. No layer: no group. disable_hybrid: windows and chunks keep all tokens first.

    Raises SpecError if the layers cannot share a pool.
    """
    _refuse_encoders(layers)
    if disable_hybrid and layers and single_group(layers) is None:
        layers = keep_all_tokens(layers)
        if single_group(layers) is None:
            kinds = ", ".join(dict.fromkeys(type(spec).__name__ for spec in layers.values()))
            raise SpecError(f"{kinds} cannot share one group; leave the hybrid manager enabled")
    if not layers:
        return ()
    if (group := single_group(layers)) is not None:
        return (group,)
    if any(isinstance(spec, SlidingWindowMLASpec) for spec in layers.values()):
        return deepseek_v4_groups(layers)
    return _hybrid_groups(layers)


def _refuse_encoders(layers: Layers) -> None:
    for name, spec in layers.items():
        if isinstance(spec, EncoderOnlyAttentionSpec):
            raise SpecError(f"layer {name!r} is encoder-only and keeps no cache; leave it out of the pool")


def single_group(layers: Layers) -> KVCacheGroupSpec | None:
    """Return the one group of layers alike or of one family, or None if there is none.

    Raises SpecError for layers of full attention that recorded two windows or two chunks, as vLLM does.
    """
    specs = list(layers.values())
    full = [s for s in specs if isinstance(s, FullAttentionSpec) and not isinstance(s, MLAAttentionSpec)]
    if len(full) == len(specs):
        one_recorded("sliding_window", [spec.sliding_window for spec in full])
        one_recorded("attention_chunk_size", [spec.attention_chunk_size for spec in full])
    spec = _merged(layers) or UniformTypeKVCacheSpecs.from_specs(layers)
    return None if spec is None else KVCacheGroupSpec(layer_names=tuple(layers), kv_cache_spec=spec)


def _merged(layers: Layers) -> KVCacheSpec | None:
    specs = list(layers.values())
    try:
        return specs[0].merge(specs)
    except SpecError:
        return None


def _hybrid_groups(layers: Layers) -> tuple[KVCacheGroupSpec, ...]:
    """Return groups of several kinds with pages of one size; hidden states come last, each a group of its own."""
    hidden = {name: spec for name, spec in layers.items() if isinstance(spec, HiddenStateCacheSpec)}
    others = unify_page_sizes({name: spec for name, spec in layers.items() if name not in hidden})
    kinds: dict[KVCacheSpec, list[str]] = defaultdict(list)
    for name, spec in others.items():
        kinds[spec].append(name)
    size = _layers_per_group([len(names) for names in kinds.values()])
    groups = [
        KVCacheGroupSpec(layer_names=tuple(part), kv_cache_spec=spec)
        for spec, names in kinds.items()
        for part in _dealt(names, ceil_div(len(names), size))
    ]
    page = groups[0].kv_cache_spec.page_size_bytes
    own = [KVCacheGroupSpec(layer_names=(name,), kv_cache_spec=_fit_hidden(s, page)) for name, s in hidden.items()]
    return (*groups, *own)


def _dealt(names: list[str], hands: int) -> list[list[str]]:
    """Deal layers out like cards: hand i gets i, i + hands, ..., so that every pipeline stage has some of each."""
    return [names[hand::hands] for hand in range(hands)]


def _layers_per_group(counts: list[int]) -> int:
    """Return the layers of a group: as many as the rarest kind has, or as the commonest where that is near (1.5)."""
    fewest, most = min(counts), max(counts)
    return most if most < 1.5 * fewest else fewest


def unify_page_sizes(layers: Layers) -> dict[str, KVCacheSpec]:
    """Return the layers with pages of one size, that of the largest: smaller pages get more tokens (block_size).

    Raises SpecError if the largest is no multiple of another, or there is no layer.
    """
    if not layers:
        raise SpecError("hidden states of different block sizes need a layer of another kind to share a pool with")
    largest = max(spec.page_size_bytes for spec in layers.values())
    return {name: _grown(name, spec, largest) for name, spec in layers.items()}


def _grown(name: str, spec: KVCacheSpec, page: int) -> KVCacheSpec:
    times, rest = divmod(page, spec.page_size_bytes)
    try:
        grown = spec if times == 1 else spec.copy_with_new_block_size(spec.block_size * times)
    except SpecError:  # its padding is too small for more tokens
        grown = spec
    if rest or grown.page_size_bytes != page:
        raise SpecError(
            f"layer {name!r} has a page of {spec.page_size_bytes} bytes, which no block_size makes the largest page, "
            f"{page} bytes; pad its page to that (page_size_padded)"
        )
    return grown


def _fit_hidden(spec: HiddenStateCacheSpec, page: int) -> HiddenStateCacheSpec:
    """Return the spec with as many tokens as a page of the others holds, padded to it. Raises SpecError if none."""
    token = spec.num_kv_heads * spec.head_size * dtype_size(spec.dtype)
    if token > page:
        raise SpecError(f"hidden states of {token} bytes a token do not fit the pool's pages of {page} bytes")
    return replace(spec, block_size=page // token, page_size_padded=page)
