"""Which units (KV heads, groups, channels) lie on which tensor-parallel rank, as vLLM places them."""

from dataclasses import dataclass, replace
from typing import TypeVar

from pdtx.errors import ParallelError
from pdtx.kvspec import (
    AttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    StateSharding,
    UniformTypeKVCacheSpecs,
)
from pdtx.units import ceil_div

Spec = TypeVar("Spec", bound=KVCacheSpec)
_REPLICATED = (MLAAttentionSpec, SlidingWindowMLASpec, HiddenStateCacheSpec)


def units_of_rank(rank: int, tp_size: int, units: int, what: str = "units") -> range:
    """Return the units that a rank holds: an equal, contiguous share, or a copy of one where ranks are more.

    Rank r holds r * units / tp_size .. (r + 1) * units / tp_size, or unit floor(r * units / tp_size).
    Raises ParallelError if neither number is a multiple of the other, or there is no such rank.
    """
    if tp_size < 1 or units < 1:
        raise ParallelError(
            f"{units} {what} cannot be divided over tensor_parallel_size {tp_size}; both must be 1 or more"
        )
    if not 0 <= rank < tp_size:
        raise ParallelError(f"rank {rank} is not one of 0..{tp_size - 1}, tensor_parallel_size {tp_size}")
    if units % tp_size and tp_size % units:
        raise ParallelError(f"{units} {what} cannot be divided over tensor_parallel_size {tp_size}, nor copied evenly")
    share = max(1, units // tp_size)
    first = rank * units // tp_size
    return range(first, first + share)


def heads_of_rank(rank: int, tp_size: int, num_kv_heads: int) -> range:
    """Return the model's KV heads that a rank holds, see units_of_rank. Raises ParallelError."""
    return units_of_rank(rank, tp_size, num_kv_heads, "KV heads")


@dataclass(frozen=True)
class Source:
    """Units that one destination rank takes from one source rank; src and dst count on the ranks themselves."""

    src_rank: int
    src: int
    dst: int
    count: int


def sources(dst_rank: int, src_tp: int, dst_tp: int, units: int, what: str = "units") -> tuple[Source, ...]:
    """Return where a destination rank's units come from: each unit from exactly one rank, in the order of units.

    Where the source has copies of a unit, the destination's copies read different ones as far as there are: copy j of
    n reads copy floor(j * copies / n). Raises ParallelError as units_of_rank does.
    """
    own = units_of_rank(dst_rank, dst_tp, units, what)
    units_of_rank(0, src_tp, units, what)
    copies, readers = ceil_div(src_tp, units), ceil_div(dst_tp, units)
    share = max(1, units // src_tp)
    found, unit = list[Source](), own.start
    while unit < own.stop:
        reader = dst_rank - unit * readers if readers > 1 else 0
        rank = unit * copies + reader * copies // readers if copies > 1 else unit // share
        held = units_of_rank(rank, src_tp, units, what)
        stop = min(own.stop, held.stop)  # all that the rank has of them: units may be many thousand channels
        found.append(Source(rank, unit - held.start, unit - own.start, stop - unit))
        unit = stop
    return tuple(found)


def replicated(spec: KVCacheSpec) -> bool:
    """Whether every rank keeps all of a layer: latent vectors belong to all heads."""
    return isinstance(spec, _REPLICATED)


def rank_spec(spec: Spec, tp_size: int, sharding: StateSharding | None = None) -> Spec:
    """Return what one rank keeps of a layer of which spec is the whole.

    sharding: of a MambaSpec's states, which does not say it itself; needed if tp_size is more than 1.
    Raises ParallelError if ranks cannot have equal shares, or sharding is needed and missing.
    """
    if tp_size == 1 or replicated(spec):
        return spec
    if isinstance(spec, MambaSpec):
        return replace(spec, shapes=_state_shapes(spec, tp_size, require_sharding(spec, sharding)))
    if isinstance(spec, UniformTypeKVCacheSpecs):
        layers = {name: rank_spec(layer, tp_size, sharding) for name, layer in spec.kv_cache_specs.items()}
        return replace(spec, kv_cache_specs=layers)
    if not isinstance(spec, AttentionSpec):
        raise ParallelError(f"{type(spec).__name__} has no rule for how ranks share it")
    if spec.page_size_padded is not None:
        raise ParallelError(f"a page padded to {spec.page_size_padded} bytes is a rank's own; give the rank's spec")
    return replace(spec, num_kv_heads=len(heads_of_rank(0, tp_size, spec.num_kv_heads)))


def require_sharding(spec: MambaSpec, sharding: StateSharding | None) -> StateSharding:
    """Return sharding. Raises ParallelError if it is missing, or does not fit the spec's shapes."""
    if sharding is None:
        raise ParallelError(
            "how ranks share a recurrent layer's states is not known; give its StateSharding, or use 1 rank"
        )
    convs, rest = spec.shapes[: len(sharding.conv)], spec.shapes[len(sharding.conv) :]
    for shape, segments in zip(convs, sharding.conv, strict=False):
        channels = sum(segment.channels for segment in segments)
        if len(shape) != 2 or shape[1] != channels:
            raise ParallelError(f"segments of {channels} channels do not make up a convolution state of shape {shape}")
    if len(convs) != len(sharding.conv) or len(rest) > 1 or any(shape[0] != sharding.heads for shape in rest):
        raise ParallelError(
            f"states of shapes {spec.shapes} are not {len(sharding.conv)} convolutions and {sharding.heads} heads"
        )
    return sharding


def _state_shapes(spec: MambaSpec, tp_size: int, sharding: StateSharding) -> tuple[tuple[int, ...], ...]:
    convs = [
        (
            shape[0],
            sum(
                len(units_of_rank(0, tp_size, s.units, f"units of {s.name}")) * (s.channels // s.units)
                for s in segments
            ),
        )
        for shape, segments in zip(spec.shapes, sharding.conv, strict=False)
    ]
    rest = [
        (len(units_of_rank(0, tp_size, sharding.heads, "heads of the state")), *shape[1:])
        for shape in spec.shapes[len(sharding.conv) :]
    ]
    return (*convs, *rest)
