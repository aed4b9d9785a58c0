"""A model without weights: caches of a real model's shapes, and prefill that takes as long as it is told to."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import torch
from blake3 import blake3

from pdtx.bench.caches import block_bytes, model_caches, token_layers
from pdtx.cache import KVCaches
from pdtx.errors import InputError
from pdtx.kvspec import KVCacheSpec
from pdtx.layout import parse_layouts
from pdtx.models import layer_specs, load_config
from pdtx.plan import tokens_per_vector
from pdtx.replay.contents import PrefixContents, Words, prefix_codes
from pdtx.runner import PagedSequence
from pdtx.runner.pages import OnLayer
from pdtx.serving import Job

_CONTENTS_VERSION = 1
_KEPT = 64
"""Prompts whose codes are kept from chunk to chunk."""


class SyntheticModel:
    """The layers of a model that count tokens, of which only what they keep is known.

    source: a preset, a config.json or a folder with one. layers: only so many of them. left_out: those that keep
    something else. name, fingerprint: as of a ModelRunner. Raises ModelError, or InputError for a model whose layers
    cannot be filled token by token, or that has fewer of them than layers.
    """

    def __init__(self, source: str, *, layers: int | None = None) -> None:
        self._config, self._layers = load_config(source), layers
        every = layer_specs(self._config)
        self.left_out = tuple(name for name in every if name not in token_layers(every))
        count = len(token_layers(every))
        if layers is not None and not 1 <= layers <= count:
            raise InputError(f"{source} has {count} layers that count tokens, so not the first {layers}")
        specs = self.specs(16)
        self.name = f"synthetic-{source.rstrip('/').rpartition('/')[2]}"
        told = [f"contents {_CONTENTS_VERSION}", *(f"{name}: {spec}" for name, spec in specs.items())]
        self.fingerprint = blake3("\n".join(told).encode()).hexdigest()

    def specs(self, block_size: int) -> dict[str, KVCacheSpec]:
        """Return what each layer keeps, in the order of layers."""
        found = token_layers(layer_specs(self._config, block_size=block_size))
        packed = next((name for name, spec in found.items() if tokens_per_vector(spec) > 1), None)
        if packed is not None:
            raise InputError(f"layer {packed} keeps one vector for several tokens; replay fills caches token by token")
        if not found:
            raise InputError("the model keeps nothing for each token; there is nothing to replay")
        return dict(list(found.items())[: self._layers])

    def blocks_in(self, nbytes: int, block_size: int) -> int:
        """Return how many blocks so many bytes have room for, of each group."""
        return nbytes // block_bytes(self.specs(block_size), block_size)

    def make_cache(
        self, *, layout: str, block_size: int, num_blocks: int, tp_size: int = 1, shared: bool = False
    ) -> KVCaches:
        """Allocate caches of the model's shapes on the CPU; see ModelRunner.make_cache."""
        specs = self.specs(block_size)
        return model_caches(specs, layouts=parse_layouts(layout), num_blocks=num_blocks, tp_size=tp_size, shared=shared)


class Pace(Protocol):
    """Says how long computing takes."""

    def ready(self, job: Job, start: int, stop: int, layers: int) -> Sequence[float]:
        """Return when each of so many layers of tokens start..stop is computed, in seconds after the chunk's begin."""


class SyntheticComputer:
    """Fills a cache with what its tokens say, no sooner than pace does. See pdtx.serving.Computer.

    late_s: seconds by which chunks took longer than they should have, summed: filling memory takes time, too.
    computed_s: seconds that chunks should have taken.
    """

    resumes = True

    def __init__(self, cache: KVCaches, layer_names: Sequence[str], pace: Pace) -> None:
        self.cache, self._pace = cache, pace
        self._contents = PrefixContents(cache)
        places = {
            name: (index, layer)
            for index, buffer in enumerate(cache.buffers)
            for layer, name in enumerate(buffer.layer_names)
        }
        self._order = [places[name] for name in layer_names]
        self._codes = OrderedDict[str, Words]()
        self.late_s = self.computed_s = 0.0

    @property
    def max_model_len(self) -> int:
        """Tokens that the whole pool has room for."""
        return min((group.num_blocks - 1) * group.block_size for group in self.cache.groups)

    def chunk(self, num_tokens: int, chunk_size: int) -> int:
        """Return how many of num_tokens tokens to compute at once."""
        return min(num_tokens, chunk_size)

    def compute(self, job: Job, sequence: PagedSequence, stop: int, on_layer: OnLayer) -> torch.Tensor:
        """Fill in a job's tokens up to stop, layer by layer; see Computer. The first new token is always 0."""
        start, begun = sequence.num_tokens, time.monotonic()
        codes = self._codes_of(job)[start:stop]
        due = self._pace.ready(job, start, stop, len(self._order))
        for (buffer, layer), seconds in zip(self._order, due, strict=True):
            kept = self.cache.buffers[buffer]
            table = sequence.table(kept.group)
            kept.write_canonical(layer, table, start, self._contents.rows(buffer, layer, codes))
            time.sleep(max(0.0, begun + seconds - time.monotonic()))
            on_layer(buffer, layer, start, stop)
        self.computed_s += due[-1]
        self.late_s += max(0.0, time.monotonic() - begun - due[-1])
        sequence.num_tokens = stop
        return torch.zeros(1)

    def _codes_of(self, job: Job) -> Words:
        codes = self._codes.get(job.request_id)
        if codes is None:
            codes = self._codes[job.request_id] = prefix_codes(job.token_ids)
            if len(self._codes) > _KEPT:
                self._codes.popitem(last=False)
        return codes
