"""Paged caches of a model's shape, from its config alone."""

from collections.abc import Mapping

from pdtx.cache import KVCaches
from pdtx.cache.groups import GroupBehaviour
from pdtx.cache.model_shapes import model_shapes
from pdtx.errors import InputError
from pdtx.kvspec import AttentionSpec, CrossAttentionSpec, EncoderOnlyAttentionSpec, KVCacheSpec

Layers = Mapping[str, KVCacheSpec]

_NOT_BY_TOKENS = (CrossAttentionSpec, EncoderOnlyAttentionSpec)


def group_name(spec: KVCacheSpec) -> str:
    """Return what the group of a layer is called: "full", "window1024"; layers of equal names share block tables."""
    return GroupBehaviour.of(spec).name


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
    groups, shapes = model_shapes(layers, layouts, num_blocks=num_blocks, tp_size=tp_size)
    return KVCaches.allocate(groups, shapes, shared=shared)
