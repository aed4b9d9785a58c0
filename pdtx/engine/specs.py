"""Specs on the wire: a class by its name, and its fields, checked before anything is made of them."""

from dataclasses import fields
from types import MappingProxyType
from typing import Any

import msgspec

from pdtx.errors import ProtocolError, SpecError
from pdtx.kvspec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    StateSharding,
    TQFullAttentionSpec,
)
from pdtx.protocol import ShardingDescription, SpecField

SPEC_CLASSES = MappingProxyType({
    cls.__name__: cls
    for cls in (
        FullAttentionSpec, SinkFullAttentionSpec, TQFullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec,
        CrossAttentionSpec, MLAAttentionSpec, SlidingWindowMLASpec, HiddenStateCacheSpec, MambaSpec,
    )
})  # fmt: skip
"""Every class that one layer's cache can have, by its name: no other name from a peer means anything."""


def spec_fields(spec: KVCacheSpec) -> dict[str, SpecField]:
    """Return a spec as it travels: the class as `kind`, then the fields. Raises ProtocolError for an unknown class."""
    kind = type(spec).__name__
    if SPEC_CLASSES.get(kind) is not type(spec):
        raise ProtocolError(f"a cache of {kind} cannot be described; one of {', '.join(SPEC_CLASSES)}")
    values: dict[str, Any] = {field.name: getattr(spec, field.name) for field in fields(spec)}
    plain: dict[str, SpecField] = msgspec.to_builtins({"kind": kind, **values})
    return plain


def spec_of(wire: dict[str, SpecField]) -> KVCacheSpec:
    """Rebuild a spec from its fields.

    Raises ProtocolError, naming the field, for an unknown class, a missing, unknown or ill-typed field, or numbers
    that are impossible.
    """
    cls = SPEC_CLASSES.get(str(wire.get("kind")))
    if cls is None:
        raise ProtocolError(f"unknown spec {wire.get('kind')!r}; one of {', '.join(SPEC_CLASSES)}")
    names = {field.name for field in fields(cls)}
    given = {name: value for name, value in wire.items() if name != "kind"}
    strange = sorted(names.symmetric_difference(given))
    if strange:
        state = "is missing" if strange[0] in names else "is unknown"
        raise ProtocolError(f"{cls.__name__}.{strange[0]} {state}")
    try:
        return msgspec.convert(given, type=cls)
    except (msgspec.ValidationError, SpecError) as error:
        raise ProtocolError(f"{cls.__name__} cannot be: {error}") from None


def sharding_fields(sharding: StateSharding | None) -> ShardingDescription | None:
    """Return how ranks share states as it travels. Raises ProtocolError for more parts than a description has."""
    if sharding is None:
        return None
    try:
        return msgspec.convert(sharding, type=ShardingDescription, from_attributes=True)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"how ranks share the states cannot be described: {error}") from None


def sharding_of(wire: ShardingDescription | None) -> StateSharding | None:
    """Rebuild how ranks share states. Raises ProtocolError for impossible numbers."""
    if wire is None:
        return None
    try:
        return msgspec.convert(wire, type=StateSharding, from_attributes=True)
    except (msgspec.ValidationError, SpecError) as error:
        raise ProtocolError(f"how ranks share the states cannot be: {error}") from None
