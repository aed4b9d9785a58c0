"""What only moves together waits until all of it is computed, in whatever order that happens."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdtx.cache import CallerBlocks, KVCaches, PagedLatentCache
from pdtx.engine import KVConsumer, producer
from pdtx.engine.holding_back import HoldingBack
from pdtx.errors import InputError
from pdtx.kvspec import MLAAttentionSpec
from pdtx.transports import make_mover
from tests.engine_pair import PATIENCE_S, Pair, caches_of, describe, require_contents
from tests.test_engine_scales import LAYERS, TOKENS
from tests.test_engine_scales import cache as quantized


@given(st.integers(2, 9), st.integers(1, 40), st.data())
def test_slices_in_any_order_make_up_what_is_needed(unit: int, tokens: int, data: st.DataObject) -> None:
    needed = range(data.draw(st.integers(0, tokens)), tokens)
    edges = sorted({0, tokens, *data.draw(st.lists(st.integers(0, tokens)))})
    slices = data.draw(st.permutations([*pairwise(edges), (tokens, tokens)]))
    held, computed, sent = HoldingBack(unit, needed), set[int](), list[int]()
    waited = set[tuple[int, int]]()
    for start, stop in slices:
        computed |= set(range(start, stop))
        positions, fence = held.add(start, stop, partial(waited.add, (start, stop)))
        sent += positions
        for position in positions:
            whole = range(position // unit * unit, position // unit * unit + unit)
            assert {each for each in whole if each in needed} <= computed
        if positions:
            waited.clear()
            fence()
            of = {slice_ for slice_ in slices if set(range(*slice_)) & set(positions)}
            assert of <= waited
    assert sorted(sent) == list(needed)


def whole_blocks() -> tuple[KVCaches, KVCaches]:
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=132, dtype="uint8")
    source, destination = (
        PagedLatentCache(spec, layout="deepseek_indexer", num_layers=LAYERS, num_blocks=20) for _ in range(2)
    )
    return caches_of(source), caches_of(destination)


def scales() -> tuple[KVCaches, KVCaches]:
    return quantized("nvfp4", "flashinfer_nvfp4_nhd"), quantized("nvfp4", "flashinfer_nvfp4_hnd", 32)


def test_a_cached_beginning_ends_between_blocks_that_move_whole() -> None:
    _, destination = whole_blocks()
    consumer = KVConsumer(
        destination, describe(destination), make_mover("inproc"), verify=True, blocks=CallerBlocks(destination.groups)
    )
    with pytest.raises(
        InputError, match="cached_tokens=17: buffer latent has 16 tokens that only move together; say 16"
    ):
        consumer.expect("r", TOKENS, [[1, 2, 3, 4, 5]], cached_tokens=17, deadline_s=PATIENCE_S)
    consumer.close()
    consumer.mover.close()


@pytest.mark.parametrize(
    "slices", [((6, 16), (0, 6), (16, 75)), ((0, 75), (75, 75)), ((70, 75), (3, 70), (0, 3))], ids=str
)
@pytest.mark.parametrize("caches", [scales, whole_blocks])
def test_chunks_in_any_order_arrive(
    caches: object, slices: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk is written only once its fence is waited for."""
    source, destination = caches()  # type: ignore[operator]
    with Pair(source, destination, mover="tcp") as pair:
        request = pair.producer.begin("r", num_tokens=TOKENS, timeout_s=PATIENCE_S)
        (buffer,) = source.buffers
        shape = buffer.rows_shape(TOKENS)
        contents = {(buffer.name, name): torch.randint(256, shape, dtype=torch.uint8) for name in buffer.layer_names}
        for start, stop in slices:
            for layer, name in enumerate(buffer.layer_names):
                rows = contents[buffer.name, name][:, start:stop]

                def write(layer: int = layer, start: int = start, rows: torch.Tensor = rows) -> None:
                    if rows.shape[1]:
                        buffer.write_canonical(layer, request.tables[0], start, rows)

                monkeypatch.setattr(producer, "record_fence", lambda _device, write=write: write)
                pair.producer.layer_ready(request, 0, layer, start, stop)
        pair.producer.computed(request, 7)
        ready = pair.next_ready()
        require_contents(pair, ready, contents)
        pair.finish(ready)
        assert pair.producer.wait(request).text == "done"
