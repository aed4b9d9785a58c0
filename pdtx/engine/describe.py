"""What a node tells its peer about its cache, and whether two caches can exchange K/V at all."""

from dataclasses import fields
from typing import TYPE_CHECKING

from pdtx.errors import IncompatiblePeer, PdtxError, ProtocolError
from pdtx.kvspec import dtype_size
from pdtx.layout import Axis, KVCacheLayout
from pdtx.protocol import AxisDescription, CacheDescription, LayoutDescription

if TYPE_CHECKING:
    from pdtx.cache import PagedKVCache


def describe_cache(cache: "PagedKVCache", *, model: str, fingerprint: str) -> CacheDescription:
    """Return the description that the handshake carries. fingerprint: of the model's config and weights."""
    spec: dict[str, int | str | None] = {"kind": type(cache.spec).__name__}
    spec |= {field.name: getattr(cache.spec, field.name) for field in fields(cache.spec)}
    layout = cache.layout
    axes = [AxisDescription(name=axis.name, extent=axis.extent, stride=axis.stride) for axis in layout.axes]
    return CacheDescription(
        spec=spec,
        model=model,
        fingerprint=fingerprint,
        num_layers=cache.num_layers,
        num_blocks=cache.num_blocks,
        layout=LayoutDescription(name=layout.name, axes=axes, itemsize=layout.itemsize, size_bytes=layout.size_bytes),
        device=str(cache.device),
    )


def layout_of(description: CacheDescription) -> KVCacheLayout:
    """Rebuild a peer's layout from its description.

    Raises ProtocolError if it is impossible or does not fit the spec beside it.
    """
    wire, spec = description.layout, description.spec
    try:
        axes = tuple(Axis(axis.name, axis.extent, axis.stride) for axis in wire.axes)
        layout = KVCacheLayout(wire.name, axes, wire.itemsize, wire.size_bytes)
        itemsize = dtype_size(str(spec.get("dtype")))
    except PdtxError as error:
        raise ProtocolError(f"the peer's layout cannot be: {error}") from error
    promised = {
        "layer": description.num_layers,
        "block": description.num_blocks,
        "kv": 2,
        "token": spec.get("block_size"),
        "head": spec.get("num_kv_heads"),
        "channel": spec.get("head_size"),
    }
    for name, extent in promised.items():
        if layout.extent(name) != extent:
            raise ProtocolError(f"the peer's layout has {layout.extent(name)} on axis {name}, its spec says {extent}")
    if layout.itemsize != itemsize:
        raise ProtocolError(f"the peer's layout has elements of {layout.itemsize} bytes, its spec {spec.get('dtype')}")
    return layout


def check_compatible(producer: CacheDescription, consumer: CacheDescription) -> None:
    """Raise IncompatiblePeer, naming the first field that differs and both values, unless K/V can be exchanged.

    Layouts, block sizes that divide one another, pool sizes and devices may differ: the plan bridges them.
    """
    mine, theirs = producer.spec, consumer.spec
    must_agree = [
        (
            "fingerprint",
            producer.fingerprint,
            consumer.fingerprint,
            f"the models are {producer.model} and {consumer.model}",
        ),
        ("num_layers", producer.num_layers, consumer.num_layers, ""),
        ("tp_size", producer.tp_size, consumer.tp_size, "start both sides with the same tensor-parallel size"),
    ]
    names = [name for name in dict.fromkeys((*mine, *theirs)) if name != "block_size"]
    advice = {"dtype": "give both sides the same --dtype; K/V are shipped as they are, never converted"}
    differing = [(name, mine.get(name), theirs.get(name), advice.get(name, "")) for name in names]
    # The spec first: "dtype" says more than a fingerprint that differs because of it.
    for field, ours, other, hint in (*differing, *must_agree):
        if ours != other:
            raise IncompatiblePeer(field, str(ours), str(other), hint)
    sizes = mine.get("block_size"), theirs.get("block_size")
    small, large = sorted(size if isinstance(size, int) else 0 for size in sizes)
    if small < 1 or large % small:
        raise IncompatiblePeer("block_size", str(sizes[0]), str(sizes[1]), "one must be a multiple of the other")
