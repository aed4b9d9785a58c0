"""A node's model, the caches of its shapes, and the keys of its side channel."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from pdtx.node.config import CacheConfig, ModelConfig, SecurityConfig

if TYPE_CHECKING:
    from pdtx.cache import KVCaches
    from pdtx.protocol import CacheDescription
    from pdtx.replay.synthetic import SyntheticModel
    from pdtx.runner import ModelRunner
    from pdtx.sidechannel import Security

OnNote = Callable[[str], None]
"""Called with a line about progress."""


class CacheMaker(Protocol):
    """A model, or one without weights, as far as its caches are concerned; see ModelRunner."""

    name: str
    fingerprint: str

    def make_cache(
        self, *, layout: str, block_size: int, num_blocks: int, tp_size: int = 1, shared: bool = False
    ) -> "KVCaches":
        """Allocate the model's caches."""


def load_model(config: ModelConfig, on_note: OnNote) -> "ModelRunner | SyntheticModel":
    """Load a model, or the shapes of one. Raises ModelError or InputError."""
    if config.synthetic is not None:
        return load_synthetic(config.synthetic, config.layers, on_note)
    return load_runner(config, on_note)


def load_runner(config: ModelConfig, on_note: OnNote) -> "ModelRunner":
    """Find and load a model with weights. Raises ModelError or InputError."""
    from pdtx.cache import open_device
    from pdtx.runner import ModelRunner, resolve_model

    open_device(config.device)
    path = resolve_model(config.model, on_note)
    on_note(f"loading {path.name} ({config.dtype}, {config.device})")
    return ModelRunner.load(path, config.dtype, config.device, config.threads)


def load_synthetic(source: str, layers: int | None, on_note: OnNote) -> "SyntheticModel":
    """Find the shapes of a model that has no weights here. Raises ModelError or InputError."""
    from pdtx.replay.synthetic import SyntheticModel

    model = SyntheticModel(source, layers=layers)
    if model.left_out:
        on_note(f"left out, for they do not count tokens: {', '.join(model.left_out)}")
    return model


def open_cache(
    runner: CacheMaker, config: CacheConfig, *, shared: bool = False
) -> tuple["KVCaches", "CacheDescription"]:
    """Allocate the paged caches of a model, and make the description that a peer gets of them.

    shared: in memory that other processes of this host can be let map.
    """
    from pdtx.engine import describe_cache

    cache = runner.make_cache(
        layout=config.layout,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        tp_size=config.tensor_parallel_size,
        shared=shared,
    )
    return cache, describe_cache(cache, model=runner.name, fingerprint=runner.fingerprint)


def open_security(config: SecurityConfig) -> "Security":
    """Read the keys that were given. Raises InputError for a key that cannot be read."""
    from pdtx.sidechannel import read_security

    return read_security(config.key, config.peer_key or (), insecure=config.insecure)
