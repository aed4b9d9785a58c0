"""What one request keeps on one rank: kinds of layers, the groups they lie in, the blocks that are needed."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pdtx.errors import InputError
from pdtx.kvspec import (
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)
from pdtx.plan import needed_positions
from pdtx.pool import get_kv_cache_groups
from pdtx.units import ceil_div


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request that is to be moved. tokens: computed so far. encoder_tokens: of an encoder's input, if there is one.

    Raises InputError for less than one token.
    """

    tokens: int
    encoder_tokens: int = 1

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.encoder_tokens < 1:
            raise InputError(
                f"a request needs 1 or more tokens, not {self.tokens} (encoder's input: {self.encoder_tokens})"
            )


@dataclass(frozen=True, kw_only=True)
class RequestKind:
    """Layers with one spec, and what a request keeps in them.

    groups: for each size of a group, (layers of this spec in the group, number of such groups).
    positions: what the decoder still needs: token positions, encoder positions, or one state.
    """

    spec: KVCacheSpec
    groups: tuple[tuple[int, int], ...]
    positions: range

    @property
    def layers(self) -> int:
        """Layers in all groups."""
        return sum(layers * count for layers, count in self.groups)

    @property
    def is_state(self) -> bool:
        """Whether the layers keep a state, not tokens."""
        return isinstance(self.spec, MambaSpec)

    @property
    def is_latent(self) -> bool:
        """Whether the layers keep one vector a token, which no tensor parallelism divides."""
        return isinstance(self.spec, MLAAttentionSpec | SlidingWindowMLASpec)

    @property
    def blocks(self) -> int:
        """Blocks of the request in one layer that hold a needed position."""
        size = 1 if self.is_state else self.spec.block_size
        return ceil_div(self.positions.stop, size) - self.positions.start // size

    @property
    def page_bytes(self) -> int:
        """Payload of one page of one layer, without padding."""
        return self.spec.unpadded_page_size_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the request in all layers of the kind, in whole blocks."""
        return self.blocks * self.layers * self.page_bytes

    def bytes_of(self, positions: int) -> int:
        """Bytes of so many positions in one layer, rounded up where a stored vector stands for several."""
        return ceil_div(positions * self.page_bytes, self.spec.block_size)


def request_kinds(layers: Mapping[str, KVCacheSpec], request: Request) -> list[RequestKind]:
    """Return the kinds of layers of a model, in the order of vLLM's groups; [] for a model that keeps nothing.

    layers: specs on one rank, states and attention with pages of one size.
    Raises SpecError if they cannot share a pool.
    """
    sizes: dict[KVCacheSpec, Counter[int]] = {}
    for group in get_kv_cache_groups(layers):
        spec = group.kv_cache_spec
        own = (
            spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else dict.fromkeys(group.layer_names, spec)
        )
        for kind, count in Counter(own[name] for name in group.layer_names).items():
            sizes.setdefault(kind, Counter())[count] += 1
    return [
        RequestKind(
            spec=spec,
            groups=tuple(sorted(counts.items(), reverse=True)),
            positions=needed_positions(spec, request.tokens, request.encoder_tokens),
        )
        for spec, counts in sizes.items()
    ]
