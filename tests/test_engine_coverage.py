"""Whether processes together have everything: any split of ranks and layers, and each kind of gap."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pdtx
from pdtx.cache import CacheGroup, KVCaches, PagedKVCache
from pdtx.cache.model_shapes import model_shapes
from pdtx.engine import Arrived, KVConsumer, KVProducer, OutboundRequest, describe_cache, facts_of
from pdtx.engine.coverage import require_all_received, require_all_sent
from pdtx.engine.describe import CacheFacts
from pdtx.engine.matching import ABSENT, Match, match_caches
from pdtx.errors import IncompatiblePeer, InputError
from pdtx.kvspec import FullAttentionSpec, KVCacheSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec
from pdtx.tiers.geometry import tier_caches
from pdtx.transports import make_mover
from tests.engine_pair import OPEN, PATIENCE_S, wait_until
from tests.rank_process import Side, fill, model, wrong

EXAMPLES = int(os.environ.get("PDTX_EXAMPLES", "150"))


def layers(draw: st.DrawFn) -> dict[str, KVCacheSpec]:
    """A model of a few layers of several kinds."""
    heads = draw(st.sampled_from([1, 2, 4]))
    common: dict[str, Any] = {"block_size": 16, "head_size": 8, "dtype": "bfloat16"}
    kinds = [
        FullAttentionSpec(num_kv_heads=heads, **common),
        SlidingWindowSpec(num_kv_heads=heads, sliding_window=24, **common),
        MLAAttentionSpec(num_kv_heads=1, **common),
    ]
    return {f"layers.{at}": draw(st.sampled_from(kinds)) for at in range(draw(st.integers(1, 5)))}


def processes(draw: st.DrawFn, names: list[str]) -> list[tuple[range, tuple[str, ...], int]]:
    """A split of an engine: for each process its ranks, its layers, and the tensor-parallel size."""
    tp_size = draw(st.sampled_from([1, 2, 4]))
    stage_of = [draw(st.integers(0, draw(st.integers(0, 2)))) for _ in names]
    per_process = draw(st.sampled_from([n for n in (1, 2, 4) if n <= tp_size]))
    stages = [tuple(name for name, own in zip(names, stage_of, strict=True) if own == at) for at in set(stage_of)]
    return [
        (range(first, first + per_process), stage, tp_size)
        for stage in stages
        for first in range(0, tp_size, per_process)
    ]


def facts(specs: dict[str, KVCacheSpec], ranks: range, held: tuple[str, ...], tp_size: int, layout: str) -> CacheFacts:
    shapes = model_shapes(specs, ("mla", layout), num_blocks=3, tp_size=tp_size, tp_ranks=ranks, held=held)
    return facts_of(describe_cache(KVCaches.allocate(*shapes), model="m", fingerprint="same"))


@st.composite
def engines(draw: st.DrawFn) -> tuple[dict[str, KVCacheSpec], list[CacheFacts], list[CacheFacts]]:
    specs = layers(draw)
    sides = [processes(draw, list(specs)) for _ in range(2)]
    prefill, decode = (
        [facts(specs, *process, layout) for process in side]
        for side, layout in zip(sides, ("flash_attn_nhd", "flashinfer_hnd"), strict=True)
    )
    return specs, prefill, decode


@settings(max_examples=EXAMPLES, deadline=None)
@given(engines())
def test_any_split_is_whole_and_brings_each_head_once(
    scene: tuple[dict[str, KVCacheSpec], list[CacheFacts], list[CacheFacts]],
) -> None:
    """Counted by hand: of each layer each head of each rank of decode's comes from one rank of one process."""
    specs, prefill, decode = scene
    for consumer in decode:
        matches = [match_caches(producer, consumer) for producer in prefill]
        require_all_received(matches)
        for buffer in range(len(consumer.buffers)):
            for layer, name in enumerate(consumer.buffers[buffer].layer_names):
                for rank in consumer.ranks:
                    assert came(matches, buffer, layer, rank) == held(specs[name], rank, consumer.tp_size)
    for producer in prefill:
        require_all_sent([match_caches(producer, consumer) for consumer in decode])


def held(spec: KVCacheSpec, rank: int, tp_size: int) -> list[int]:
    heads = 1 if isinstance(spec, MLAAttentionSpec) else getattr(spec, "num_kv_heads", 1)
    if heads >= tp_size:
        return list(range(rank * heads // tp_size, (rank + 1) * heads // tp_size))
    return [rank * heads // tp_size]


def came(matches: list[Match], buffer: int, layer: int, rank: int) -> list[int]:
    """The model's heads that a rank gets of a layer, from whichever processes."""
    found = list[int]()
    for match in matches:
        one = match.of_consumer.get(buffer)
        if one is None or one.layers[layer] == ABSENT:
            continue
        for move in (move for move in one.moves if move.dst_rank == rank):
            here = held(one.consumer.spec, move.src_rank, match.producer.tp_size)
            boxes = [box.cuts[0] for box in move.boxes if box.cuts]
            found += [here[cut.src + at] for cut in boxes for at in range(cut.count)] if boxes else here
    return sorted(found)


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(engines(), st.data())
def test_a_process_that_is_missing_is_noticed(
    scene: tuple[dict[str, KVCacheSpec], list[CacheFacts], list[CacheFacts]], data: st.DataObject
) -> None:
    """Unless nothing is read from it."""
    _, prefill, decode = scene
    gone = data.draw(st.sampled_from(prefill))
    for consumer in decode:
        reads = match_caches(gone, consumer).moves_anything
        others = [match_caches(producer, consumer) for producer in prefill if producer is not gone]
        if not others:
            continue
        if reads:
            with pytest.raises(IncompatiblePeer):
                require_all_received(others)
            with pytest.raises(IncompatiblePeer):
                require_all_received([*others, match_caches(gone, consumer), match_caches(gone, consumer)])
        else:
            require_all_received(others)


# -- a pipeline whose stages have a prefix already ---------------------------------------------------------------------

TOKENS, SEED = 75, 3


def stages(template: Side, parts: list[list[str]]) -> list[KVCaches]:
    return [replace(template, layers=tuple(part)).cache() for part in parts]


def fill_all(cache: KVCaches, tables: list[torch.Tensor], start: int, stop: int) -> None:
    """Write tokens start..stop of all layers of a stage."""
    for buffer in cache.buffers:
        for layer in range(buffer.num_layers):
            fill(buffer, tables[buffer.group], layer, start, stop, SEED)


def wrong_in(cache: KVCaches, tables: list[torch.Tensor]) -> int:
    positions = [group.positions(TOKENS) for group in cache.groups]
    return sum(wrong(buffer, tables[buffer.group], positions[buffer.group], TOKENS, SEED) for buffer in cache.buffers)


def arrived(consumer: KVConsumer) -> Arrived:
    found = list[Arrived]()

    def look() -> bool:
        found.extend(consumer.poll())
        return bool(found)

    wait_until(look, "the request")
    return found[0]


def compute(producer: KVProducer, request: OutboundRequest) -> None:
    """Two chunks of a stage's layers."""
    for start, stop in ((0, 30), (30, TOKENS)):
        fill_all(producer.cache, list(request.tables), start, stop)
        for index, buffer in enumerate(producer.cache.buffers):
            for layer in range(buffer.num_layers):
                producer.layer_ready(request, index, layer, start, stop)
    producer.computed(request)


@pytest.mark.parametrize("cached", [0, 16, 40])
def test_stages_with_a_cached_beginning_get_the_rest(cached: int) -> None:
    """Windows and full attention over two stages on either side; what is cached is neither sent nor touched."""
    names = [name for name, spec in model("hybrid", 16).items() if not isinstance(spec, MambaSpec)]
    here, there = stages(Side("hybrid"), [names[:1], names[1:]]), stages(
        Side("hybrid", layout="flashinfer_hnd"), [names[:3], names[3:]]
    )  # fmt: skip
    about = {"model": "m", "fingerprint": "same"}
    consumers = [
        KVConsumer(
            cache, describe_cache(cache, **about), make_mover("tcp"), verify=True,
            blocks=pdtx.CallerBlocks(cache.groups), engine_id="decode", process=at, processes=2,
        )
        for at, cache in enumerate(there)
    ]  # fmt: skip
    producers = [
        KVProducer(
            cache, describe_cache(cache, **about), make_mover("tcp"), engine_id="prefill", process=at, processes=2
        )
        for at, cache in enumerate(here)
    ]
    addresses = [consumer.listen("127.0.0.1:0", security=OPEN) for consumer in consumers]
    tables = [[torch.arange(group + 1, group + 11, 2) for group, _ in enumerate(cache.groups)] for cache in there]
    for producer in producers:
        producer.connect(addresses, security=OPEN)
    for consumer, own in zip(consumers, tables, strict=True):
        fill_all(consumer.cache, own, 0, cached)
        blocks = [table.tolist() for table in own]
        consumer.expect("r", TOKENS, blocks, cached_tokens=cached, deadline_s=PATIENCE_S)
    requests = [producer.begin("r", num_tokens=TOKENS, timeout_s=PATIENCE_S) for producer in producers]
    for producer, request in zip(producers, requests, strict=True):
        compute(producer, request)
    for consumer, own in zip(consumers, tables, strict=True):
        assert arrived(consumer).error is None
        assert wrong_in(consumer.cache, own) == 0
    for producer, request in zip(producers, requests, strict=True):
        assert producer.wait(request).verified
    close([*producers, *consumers])


def close(engines: list[KVProducer | KVConsumer]) -> None:
    for engine in engines:
        engine.close()
        engine.mover.close()


# -- what needs the whole model ----------------------------------------------------------------------------------------


def test_what_is_about_the_whole_model_is_refused_for_some_ranks() -> None:
    shapes = model_shapes(model("4", 16), ("flash_attn_nhd",), num_blocks=5, tp_size=2, tp_ranks=range(1, 2))
    cache = KVCaches.allocate(*shapes)
    words = r"needs all ranks of the model in one process; this cache has 1..1 of 2"
    with pytest.raises(InputError, match=f"a tier {words}"):
        tier_caches(cache, block_tokens=16, nbytes=1 << 20)
    with pytest.raises(InputError, match=rf"check_transfer\(\) {words}"):
        pdtx.check_transfer(cache, cache, lambda *_: None, source_blocks=[1], destination_blocks=[2], tokens=4)


def test_layers_in_a_buffer_of_another_name_are_told_from_layers_that_are_not_there() -> None:
    def side(buffer: str) -> CacheFacts:
        spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype="bfloat16")
        groups = [CacheGroup("full", "full", 16, 3, spec)]
        layers = ("layers.0", "layers.1")
        cache = KVCaches(groups, [(0, PagedKVCache(spec, num_blocks=3, num_layers=2, name=buffer, layer_names=layers))])
        return facts_of(describe_cache(cache, model="m", fingerprint="same"))

    match = match_caches(side("full"), side("full.0"))
    with pytest.raises(IncompatiblePeer, match=r"the consumer has them in buffer full\.0; give the buffers one name"):
        require_all_sent([match])
    with pytest.raises(IncompatiblePeer, match="the producer has them in buffer full; give the buffers one name"):
        require_all_received([match])
