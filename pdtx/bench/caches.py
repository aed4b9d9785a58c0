"""Paged caches of a model's shape, from its config alone."""

from collections.abc import Mapping
from dataclasses import dataclass

from pdtx.cache import CacheGroup, KVCaches, PagedKVCache, PagedLatentCache, group_kind
from pdtx.cache.buffer import PagedBuffer
from pdtx.errors import InputError
from pdtx.kvspec import (
    AttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)
from pdtx.layout import layout_for
from pdtx.plan import tokens_per_vector

Layers = Mapping[str, KVCacheSpec]

_REACHES = ("sliding_window", "attention_chunk_size")
_VECTORS = (MLAAttentionSpec, SlidingWindowMLASpec)
_NOT_BY_TOKENS = (CrossAttentionSpec, EncoderOnlyAttentionSpec)


@dataclass(frozen=True)
class _Kind:
    """What tells groups apart: their behaviour, how far back it reaches, tokens that share a vector."""

    kind: str
    reach: int
    ratio: int

    @classmethod
    def of(cls, spec: KVCacheSpec) -> "_Kind":
        reach = next((int(getattr(spec, name)) for name in _REACHES if getattr(spec, name, None)), 0)
        return cls(group_kind(spec), reach, tokens_per_vector(spec))

    @property
    def name(self) -> str:
        reach, ratio = str(self.reach or ""), f"by{self.ratio}" if self.ratio > 1 else ""
        return f"{self.kind}{reach}{ratio}"


def group_name(spec: KVCacheSpec) -> str:
    """Return what the group of a layer is called: "full", "window1024"; layers of equal names share block tables."""
    return _Kind.of(spec).name


def token_layers(layers: Layers) -> dict[str, KVCacheSpec]:
    """Return the layers whose blocks count the prompt's tokens: no states, no cross attention."""
    return {
        name: spec
        for name, spec in layers.items()
        if isinstance(spec, AttentionSpec) and not isinstance(spec, _NOT_BY_TOKENS)
    }


def block_bytes(layers: Layers, block_tokens: int) -> int:
    """Return the bytes that layers keep of so many tokens in a row, without padding.

    Layers with a window count as well: a tier keeps whatever a later prompt may end at.
    """
    return sum(spec.copy_with_new_block_size(block_tokens).unpadded_page_size_bytes for spec in layers.values())


def model_caches(
    layers: Layers, *, layouts: tuple[str, ...], num_blocks: int, tp_size: int = 1, shared: bool = False
) -> KVCaches:
    """Allocate caches for layers that count tokens: a group for each behaviour, a buffer for each spec.

    layouts: see pdtx.layout.layout_for. num_blocks: of each group, the null block among them. On the CPU.
    tp_size, shared: see PagedBuffer.
    Raises InputError for layers that no buffer here can keep, and whatever the buffers raise.
    """
    if not layers:
        raise InputError("the model keeps nothing for each token; there is nothing to put into a tier")
    kinds = list(dict.fromkeys(_Kind.of(spec) for spec in layers.values()))
    groups = list[CacheGroup]()
    for kind in kinds:
        spec = next(spec for spec in layers.values() if _Kind.of(spec) == kind)
        groups.append(CacheGroup(kind.name, group_kind(spec), spec.block_size, num_blocks, spec))
    buffers = list[tuple[int, PagedBuffer]]()
    for number, (spec, layout) in enumerate(_kept(layers, layouts)):
        names = [name for name, other in layers.items() if (other, layout_for(other, name, layouts)) == (spec, layout)]
        at = kinds.index(_Kind.of(spec))
        buffers.append((at, _buffer(spec, layout, f"{kinds[at].name}.{number}", names, num_blocks, tp_size, shared)))
    return KVCaches(groups, buffers)


def _kept(layers: Layers, layouts: tuple[str, ...]) -> list[tuple[KVCacheSpec, str]]:
    """Return what buffers are made for: specs with their layouts, each once."""
    return list(dict.fromkeys((spec, layout_for(spec, name, layouts)) for name, spec in layers.items()))


def _buffer(
    spec: KVCacheSpec, layout: str, name: str, layer_names: list[str], num_blocks: int, tp_size: int, shared: bool
) -> PagedBuffer:
    cls = PagedLatentCache if isinstance(spec, _VECTORS) else PagedKVCache
    return cls(
        spec,
        layout=layout,
        num_layers=len(layer_names),
        num_blocks=num_blocks,
        name=name,
        layer_names=layer_names,
        tp_size=tp_size,
        shared=shared,
    )
