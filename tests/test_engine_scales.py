"""Quantized caches with their scales: between layouts, block sizes and ranks, and what is wrong is named."""

from collections.abc import Callable

import pytest
import torch

from pdtx.cache import CacheGroup, CallerBlocks, KVCaches, PagedQuantizedCache
from pdtx.engine import KVConsumer, KVProducer
from pdtx.errors import CacheError, InputError, LayoutError, VerificationError
from pdtx.kvspec import AttentionSpec, FullAttentionSpec, KVQuantMode, TQFullAttentionSpec, TurboQuantSlot
from pdtx.transports import make_mover
from tests.engine_pair import OPEN, PATIENCE_S, Pair, begin, describe, produce, require_contents
from tests.test_engine_callers_blocks import poll

TOKENS, HEADS, LAYERS, SIZE = 75, 4, 2, 64


def per_token_head(mode: KVQuantMode, dtype: str) -> Callable[[int], AttentionSpec]:
    return lambda block_size: FullAttentionSpec(
        block_size=block_size, num_kv_heads=HEADS, head_size=SIZE, dtype=dtype, kv_quant_mode=mode
    )


def turboquant(preset: str) -> Callable[[int], AttentionSpec]:
    slot = TurboQuantSlot(preset=preset, head_size=SIZE).slot_bytes_aligned
    return lambda block_size: TQFullAttentionSpec(
        block_size=block_size, num_kv_heads=HEADS, head_size=SIZE, dtype="uint8", tq_slot_size=slot
    )


MODES: dict[str, tuple[Callable[[int], AttentionSpec], str, tuple[str, ...]]] = {
    "int8": (
        per_token_head(KVQuantMode.INT8_PER_TOKEN_HEAD, "int8"), "triton_per_token_head_nhd",
        ("triton_per_token_head_hnd", "per_token_head_lbhnc", "per_token_head_blnhc"),
    ),
    "fp8": (
        per_token_head(KVQuantMode.FP8_PER_TOKEN_HEAD, "uint8"), "triton_per_token_head_nhd",
        ("triton_per_token_head_hnd", "per_token_head_lbhnc"),
    ),
    "nvfp4": (
        per_token_head(KVQuantMode.NVFP4, "uint8"), "flashinfer_nvfp4_nhd",
        ("flashinfer_nvfp4_hnd", "nvfp4_lbhnc", "flashinfer_nvfp4_nhd"),
    ),
    "turboquant 3 bits": (turboquant("turboquant_3bit_nc"), "turboquant", ("turboquant_lbhnc", "turboquant_blnhc")),
    "turboquant k8v4": (turboquant("turboquant_k8v4"), "turboquant", ("turboquant_lbhnc",)),
}  # fmt: skip
CASES = [(mode, layout) for mode, (_, _, others) in MODES.items() for layout in others]


def cache(mode: str, layout: str, block_size: int = 16, tp_size: int = 1) -> KVCaches:
    spec = MODES[mode][0](block_size)
    buffer = PagedQuantizedCache(spec, layout=layout, num_layers=LAYERS, num_blocks=20, tp_size=tp_size)
    return KVCaches([CacheGroup("full", "full", block_size, 20, spec)], [(0, buffer)])


def row_bytes(mode: str) -> int:
    (buffer,) = cache(mode, MODES[mode][1]).buffers
    planes, _, heads, nbytes = buffer.rows_shape(1)
    return planes * heads * nbytes


@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (2, 1), (2, 4)], ids=str)
@pytest.mark.parametrize(("mode", "layout"), CASES)
def test_elements_and_scales_arrive(mode: str, layout: str, ranks: tuple[int, int]) -> None:
    source, destination = cache(mode, MODES[mode][1], 16, ranks[0]), cache(mode, layout, 32, ranks[1])
    with Pair(source, destination, mover="tcp") as pair:
        request = begin(pair.producer, TOKENS)
        contents = produce(pair.producer, request, [11, 32])
        ready = pair.next_ready()
        require_contents(pair, ready, contents)
        # Scales of NVFP4 move in groups of 4 tokens: 0 to 8, 8 to 40, 40 to 76 for the three chunks.
        scales = LAYERS * HEADS * 2 * 4 * (76 - TOKENS) if mode == "nvfp4" else 0
        assert ready.received_bytes == LAYERS * TOKENS * row_bytes(mode) + scales
        pair.finish(ready)
        assert pair.producer.wait(request).text == "done"


@pytest.mark.parametrize("mover", ["shm"])
def test_over_other_transports(mover: str) -> None:
    with Pair(
        cache("int8", "triton_per_token_head_nhd"), cache("int8", "triton_per_token_head_hnd"), mover=mover
    ) as pair:
        contents = produce(pair.producer, begin(pair.producer, TOKENS))
        ready = pair.next_ready()
        require_contents(pair, ready, contents)
        pair.finish(ready)


def swapped(buffer: PagedQuantizedCache, table: torch.Tensor) -> None:
    """The scales of two heads are exchanged."""
    fields = [each.clone() for each in buffer.read(1, table, 0, TOKENS)]
    fields[1][:, 40, [0, 1]] = fields[1][:, 40, [1, 0]]
    buffer.write(1, table, 0, *fields)


def shifted(buffer: PagedQuantizedCache, table: torch.Tensor) -> None:
    """Each token has the scale of the one before."""
    fields = [each.clone() for each in buffer.read(1, table, 0, TOKENS)]
    fields[1][:, 1:] = fields[1][:, :-1].clone()
    buffer.write(1, table, 0, *fields)


def left_out(buffer: PagedQuantizedCache, table: torch.Tensor) -> None:
    """The scales of one token did not move."""
    fields = [each.clone() for each in buffer.read(1, table, 0, TOKENS)]
    fields[1][:, 40] = torch.frombuffer(bytearray(b"\xad\xde" * (fields[1].shape[-1] // 2)), dtype=torch.uint8)
    buffer.write(1, table, 0, *fields)


Fault = Callable[[PagedQuantizedCache, torch.Tensor], None]
FAULTS: dict[Fault, tuple[str, str]] = {
    swapped: ("token 40 head 0", "holds the {field} of buffer full layer 1 {kv}token 40 head 1$"),
    shifted: ("token 1 head 0", "holds the {field} of buffer full layer 1 {kv}token 0 head 0$"),
    left_out: ("token 40 head 0", "was never written: it holds poison$"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("mode", ["int8", "fp8", "nvfp4", "turboquant 3 bits"])
def test_wrong_scales_are_named(mode: str, fault: Fault) -> None:
    with Pair(cache(mode, MODES[mode][1]), cache(mode, MODES[mode][2][0], 32), mover="inproc") as pair:
        produce(pair.producer, begin(pair.producer, TOKENS))
        ready = pair.next_ready()
        (buffer,) = pair.destinations.buffers
        assert isinstance(buffer, PagedQuantizedCache)
        fault(buffer, torch.as_tensor(ready.tables[0]))
        kv, field = ("", "value") if mode.startswith("turboquant") else ("K ", "scale")
        row, cause = FAULTS[fault]
        words = rf"first: buffer full layer 1 {kv}{row} {field} byte \d+ \(block \d+\) "
        with pytest.raises(VerificationError, match=words + cause.format(field=field, kv=kv)):
            pair.consumer.verify(ready)
        pair.finish(ready, verify=False)


def test_a_cached_beginning_ends_where_scales_can_be_told_apart() -> None:
    source, destination = cache("nvfp4", "flashinfer_nvfp4_nhd"), cache("nvfp4", "flashinfer_nvfp4_hnd", 32)
    consumer = KVConsumer(
        destination, describe(destination), make_mover("tcp"), verify=True, blocks=CallerBlocks(destination.groups)
    )
    producer = KVProducer(source, describe(source), make_mover("tcp"))
    producer.connect(consumer.listen("127.0.0.1:0", security=OPEN), security=OPEN)
    with pytest.raises(InputError, match="cached_tokens=41: buffer full has 4 tokens that only move together; say 40"):
        consumer.expect("r", TOKENS, [[5, 3, 7]], cached_tokens=41, deadline_s=PATIENCE_S)
    table = torch.tensor([5, 3, 7])
    (buffer,) = destination.buffers
    before = torch.randint(256, buffer.rows_shape(40), dtype=torch.uint8)
    for layer in range(LAYERS):
        buffer.write_canonical(layer, table, 0, before)
    consumer.expect("r", TOKENS, [table.tolist()], cached_tokens=40, deadline_s=PATIENCE_S)
    request = begin(producer, TOKENS)
    contents = produce(producer, request, [11, 32])
    (arrived,) = poll(consumer.poll)
    assert arrived.error is None
    for (_, name), meant in contents.items():
        layer = buffer.layer_names.index(name)
        assert torch.equal(buffer.canonical(layer, table, 40, TOKENS), meant[:, 40:])
        assert torch.equal(buffer.canonical(layer, table, 0, 40), before)
    for engine in (producer, consumer):
        engine.close()
        engine.mover.close()


def test_what_a_page_beside_the_request_holds_is_looked_at() -> None:
    with Pair(cache("nvfp4", "flashinfer_nvfp4_nhd"), cache("nvfp4", "flashinfer_nvfp4_hnd", 32)) as pair:
        produce(pair.producer, begin(pair.producer, TOKENS))
        ready = pair.next_ready()
        (buffer,) = pair.destinations.buffers
        assert isinstance(buffer, PagedQuantizedCache)
        last = torch.as_tensor(ready.tables[0][-1:])
        rows = buffer.canonical(0, last, 20, 21)
        buffer.write_canonical(0, last, 20, rows ^ 1)
        with pytest.raises(
            VerificationError, match="152 2-byte words outside the request's tokens were written: 152 in buffer"
        ):
            pair.consumer.verify(ready)
        buffer.write_canonical(0, last, 20, rows)
        pair.finish(ready)


def value_scale(caches: KVCaches, table: torch.Tensor, token: int, head: int, scale: int) -> int:
    """Where vLLM's store kernel puts a scale of a value, as its swizzle_scale_offset has it: the byte of the memory."""
    (buffer,) = caches.buffers
    size, scales, place = buffer.block_size, SIZE // 16, token % buffer.block_size
    line = place // 4 * 4 + scale // (scales // 4)
    column = scale % (scales // 4) * 4 + place % 4
    row = head * size + line if "hnd" in buffer.layout.name else line * HEADS + head
    side = HEADS * size * (SIZE // 2 + scales)
    return (int(table[token // size]) * 2 + 1) * side + HEADS * size * SIZE // 2 + row * scales + column


@pytest.mark.parametrize("tokens", [1, 5, 6, 7, 8, 35])
@pytest.mark.parametrize("sizes", [(16, 16), (16, 32), (32, 16)], ids=str)
def test_value_scales_of_nvfp4_arrive_where_the_kernel_looks_for_them(tokens: int, sizes: tuple[int, int]) -> None:
    source, there = cache("nvfp4", "flashinfer_nvfp4_nhd", sizes[0]), cache("nvfp4", "flashinfer_nvfp4_hnd", sizes[1])
    with Pair(source, there, mover="tcp") as pair:
        request = begin(pair.producer, tokens)
        table = torch.as_tensor(request.tables[0])
        produce(pair.producer, request)
        ready = pair.next_ready()
        (src,), (dst,) = source.buffers, there.buffers
        assert isinstance(src, PagedQuantizedCache)
        (_, told) = src.read(0, table, 0, tokens)
        for token in range(tokens):
            for head in range(HEADS):
                for scale in range(SIZE // 16):
                    sent = int(src.memory[value_scale(source, table, token, head, scale)])
                    assert sent == told[1, token, head, scale]
                    assert dst.memory[value_scale(there, torch.as_tensor(ready.tables[0]), token, head, scale)] == sent
        pair.finish(ready)


class TestMemory:
    def test_nvfp4_lies_as_elements_and_then_scales(self) -> None:
        """By hand: K of a page is 16 tokens x 4 heads x 32 bytes, and behind that x 4 bytes of scales."""
        (buffer,) = cache("nvfp4", "flashinfer_nvfp4_nhd").buffers
        assert isinstance(buffer, PagedQuantizedCache)
        elements, scales = torch.full((2, 1, HEADS, 32), 7, dtype=torch.uint8), torch.full((2, 1, HEADS, 4), 9)
        elements[0, 0, 2], scales[0, 0, 2] = 50, 60
        before = buffer.memory.clone()
        buffer.write(0, torch.tensor([3]), 5, elements, scales.to(torch.uint8))
        changed = (buffer.memory != before).nonzero()[:, 0]
        page, side = 3 * 2 * (16 * HEADS * 36), 16 * HEADS * 36
        assert buffer.memory[page + (5 * HEADS + 2) * 32] == 50
        assert buffer.memory[page + 16 * HEADS * 32 + (5 * HEADS + 2) * 4] == 60
        assert buffer.memory[page + side + (5 * HEADS + 2) * 32] == 7
        assert len(changed) == 2 * HEADS * 36

    def test_other_fields_are_refused(self) -> None:
        (buffer,) = cache("int8", "triton_per_token_head_nhd").buffers
        assert isinstance(buffer, PagedQuantizedCache)
        with pytest.raises(CacheError, match=r"takes element \(2, 1, 4, 64\), scale \(2, 1, 4, 4\), not"):
            buffer.write(0, torch.tensor([1]), 0, torch.zeros(2, 1, HEADS, 64, dtype=torch.uint8))

    @pytest.mark.parametrize("layout", ["nvfp4_lbnhc", "nvfp4_lhbnc"])
    def test_orders_that_do_not_tell_whose_a_scale_is(self, layout: str) -> None:
        with pytest.raises(LayoutError, match="which bytes are whose scale is not known"):
            cache("nvfp4", layout)

    def test_plain_elements_are_another_buffers(self) -> None:
        spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype="bfloat16")
        with pytest.raises(LayoutError, match="does not hold quantized heads"):
            PagedQuantizedCache(spec, layout="flash_attn_nhd", num_layers=1, num_blocks=2)

    def test_a_probe_names_the_byte(self) -> None:
        (buffer,) = (caches := cache("int8", "triton_per_token_head_nhd")).buffers
        assert isinstance(buffer, PagedQuantizedCache)

        def flipped(name: str, block: int, *fields: torch.Tensor) -> None:
            layer = buffer.layer_names.index(name)
            buffer.write(layer, torch.tensor([block]), 0, fields[0], fields[1].flip(1))

        with pytest.raises(
            LayoutError, match=r"layer 0 K token 0 head 0 scale byte 0 \(block 3\) holds what was .*token 15"
        ):
            caches.probe(flipped, 3)

    def test_a_probe_passes(self) -> None:
        for mode, (_, layout, _) in MODES.items():
            (buffer,) = (caches := cache(mode, layout)).buffers
            assert isinstance(buffer, PagedQuantizedCache)

            def right(name: str, block: int, *fields: torch.Tensor, buffer: PagedQuantizedCache = buffer) -> None:
                buffer.write(buffer.layer_names.index(name), torch.tensor([block]), 0, *fields)

            caches.probe(right, 3)
