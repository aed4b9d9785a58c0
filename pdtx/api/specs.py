"""spec_of: what each layer of a model keeps."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from pdtx.errors import InputError
from pdtx.kvspec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec, StateSharding
from pdtx.models import layer_specs, load_config, state_sharding


@dataclass(frozen=True)
class ModelSpec:
    """What each layer of a whole model keeps, with all its KV heads.

    layers: by name, in their order. sharding: how ranks share the states of recurrent layers, if there are any.
    """

    name: str
    layers: Mapping[str, KVCacheSpec]
    sharding: StateSharding | None = field(default=None, repr=False)

    @property
    def kinds(self) -> dict[KVCacheSpec, list[str]]:
        """The different specs, each with the names of its layers."""
        found: dict[KVCacheSpec, list[str]] = {}
        for name, spec in self.layers.items():
            found.setdefault(spec, []).append(name)
        return found

    @property
    def spec(self) -> KVCacheSpec:
        """The spec that all layers have. Raises InputError if they have several, or there are none."""
        if len(self.kinds) != 1:
            raise InputError(f"{self.name} has {len(self.kinds)} kinds of layers, not one; take them from .kinds")
        return next(iter(self.kinds))

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of every layer, padding included."""
        return sum(spec.page_size_bytes for spec in self.layers.values())


@overload
def spec_of(
    model: str | Path | Mapping[str, Any],
    *,
    block_size: int = 16,
    num_layers: int | None = None,
    kv_cache_dtype: str = "auto",
    max_model_len: int | None = None,
) -> ModelSpec: ...


@overload
def spec_of(
    *,
    block_size: int = 16,
    num_layers: int | None = None,
    num_kv_heads: int,
    head_size: int,
    dtype: str = "bfloat16",
    sliding_window: int | None = None,
) -> ModelSpec: ...


def spec_of(
    model: str | Path | Mapping[str, Any] | None = None,
    *,
    block_size: int = 16,
    num_layers: int | None = None,
    kv_cache_dtype: str = "auto",
    max_model_len: int | None = None,
    num_kv_heads: int | None = None,
    head_size: int | None = None,
    dtype: str = "bfloat16",
    sliding_window: int | None = None,
) -> ModelSpec:
    """Return what the layers of a model keep, from its config, or of layers of attention from a few numbers.

    model: a preset's name, a config.json, a folder with one, or the config itself, as for `pdtx kvcache`. num_layers:
    the first so many of them; all where None. kv_cache_dtype, max_model_len: see pdtx.models.layer_specs.
    Without a model: num_layers (1) layers, called layers.0, ..., with num_kv_heads heads of head_size channels of
    dtype, all with the window if there is one.
    block_size: tokens in a block.
    Raises ModelError for a config that cannot be found or read, SpecError for impossible numbers, InputError for fields
    beside a model, or for neither.
    """
    if model is None:
        if kv_cache_dtype != "auto" or max_model_len is not None:
            raise InputError("kv_cache_dtype and max_model_len go with a model; give dtype")
        return _of_fields(num_layers, block_size, num_kv_heads, head_size, dtype, sliding_window)
    if num_kv_heads is not None or head_size is not None or sliding_window is not None or dtype != "bfloat16":
        raise InputError(
            "num_kv_heads, head_size, dtype and sliding_window are the model's; give kv_cache_dtype or no model"
        )
    config = dict(model) if isinstance(model, Mapping) else load_config(model)
    layers = layer_specs(config, block_size=block_size, kv_cache_dtype=kv_cache_dtype, max_model_len=max_model_len)
    name = str(config.get("model_type", "")) if isinstance(model, Mapping) else str(model)
    if num_layers is not None:
        if not 1 <= num_layers <= len(layers):
            raise InputError(f"{name} has {len(layers)} layers that keep something, so not the first {num_layers}")
        layers = dict(list(layers.items())[:num_layers])
    return ModelSpec(name, layers, state_sharding(config))


def _of_fields(
    num_layers: int | None,
    block_size: int,
    num_kv_heads: int | None,
    head_size: int | None,
    dtype: str,
    sliding_window: int | None,
) -> ModelSpec:
    if num_kv_heads is None or head_size is None:
        raise InputError("give a model, or num_kv_heads and head_size")
    if num_layers is not None and num_layers < 1:
        raise InputError(f"num_layers must be 1 or more, not {num_layers}")
    plain = FullAttentionSpec(block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size, dtype=dtype)
    spec: KVCacheSpec = plain
    if sliding_window is not None:
        spec = SlidingWindowSpec(
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            dtype=dtype,
            sliding_window=sliding_window,
        )
    return ModelSpec("layers of attention", {f"layers.{layer}": spec for layer in range(num_layers or 1)})
