"""What a model's layers come to: kinds of layers, and how a request grows in each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pdtx.kvspec import Growth, KVCacheSpec, MambaSpec, ServingLimits


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Layers with one spec.

    count: how many there are. max_memory_bytes: what the greatest request takes in all of them.
    """

    spec: KVCacheSpec
    count: int
    growth: Growth
    max_memory_bytes: int

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of one token in one layer, or None where a page is not made of tokens."""
        if isinstance(self.spec, MambaSpec):
            return None
        return self.spec.page_size_bytes / self.spec.block_size


@dataclass(frozen=True, kw_only=True)
class GrowthCurve:
    """Bytes that a request of tokens[i] tokens takes in all layers of one growth."""

    growth: Growth
    tokens: tuple[int, ...]
    nbytes: tuple[int, ...]


def layer_kinds(layers: Mapping[str, KVCacheSpec], limits: ServingLimits) -> list[LayerKind]:
    """Return the kinds of layers, in the order of their first."""
    counts: dict[KVCacheSpec, int] = {}
    for spec in layers.values():
        counts[spec] = counts.get(spec, 0) + 1
    return [
        LayerKind(
            spec=spec,
            count=count,
            growth=spec.growth(limits),
            max_memory_bytes=count * spec.max_memory_usage_bytes(limits),
        )
        for spec, count in counts.items()
    ]


def growth_curves(
    layers: Mapping[str, KVCacheSpec], limits: ServingLimits, lengths: Sequence[int]
) -> list[GrowthCurve]:
    """Return a curve for each growth that the layers have: what requests of these lengths can come to take.

    What is reserved for a window includes the batch that is being computed, as in max_memory_usage_bytes.
    """
    points: dict[Growth, list[int]] = {}
    kinds = layer_kinds(layers, limits)
    for growth in dict.fromkeys(kind.growth for kind in kinds):
        points[growth] = [
            sum(
                kind.count * kind.spec.max_memory_usage_bytes(replace(limits, max_model_len=length))
                for kind in kinds
                if kind.growth is growth
            )
            for length in lengths
        ]
    return [
        GrowthCurve(growth=growth, tokens=tuple(lengths), nbytes=tuple(values)) for growth, values in points.items()
    ]
