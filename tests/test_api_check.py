"""check_transfer: moves that are wrong in known ways, made on plain tensors, must be found and named."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pdtx
from pdtx.cache import KVCaches, PagedStateCache
from pdtx.kvspec import FullAttentionSpec
from pdtx.parallel import transfers
from pdtx.plan import Endpoint, build_plan
from pdtx.ranges import copy_ranges
from tests.foreign_scenes import Pages, hybrid_bytes, hybrid_over
from tests.state_families import state_cache

LAYERS, HEADS, CHANNELS, BLOCK, BLOCKS = 2, 4, 16, 8, 12
SOURCE, DESTINATION, TOKENS = [3, 7, 5], [2, 1, 9], 20
Move = Callable[[Any, Any], None]


class Caches:
    """Two caches over plain tensors: NHD (layers, 2, blocks, tokens, heads, channels) into HND with blocks first."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.here = torch.zeros(LAYERS, 2, BLOCKS, BLOCK, HEADS, CHANNELS, dtype=dtype)
        self.there = torch.zeros(LAYERS, BLOCKS, 2, HEADS, BLOCK, CHANNELS, dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        self.spec = pdtx.spec_of(
            num_layers=LAYERS, num_kv_heads=HEADS, head_size=CHANNELS, dtype=name, block_size=BLOCK
        )

    def right(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Copy the blocks as they should be."""
        for ours, theirs in zip(source, destination, strict=True):
            self.there[:, theirs] = self.here[:, :, ours].transpose(2, 3)

    def element(self, layer: int, kv: int, token: int, head: int, channel: int | slice = slice(None)) -> Any:  # noqa: ANN401
        """Where an element, or a row, lies at the destination."""
        return self.there[layer, DESTINATION[token // BLOCK], kv, head, token % BLOCK, channel]

    def check(self, move: Move, **options: Any) -> pdtx.TransferReport:  # noqa: ANN401
        """Check a move."""
        return pdtx.check_transfer(
            pdtx.cache_of(self.spec, "flash_attn_nhd", num_blocks=BLOCKS, memory=self.here),
            pdtx.cache_of(self.spec, "flashinfer_hnd", num_blocks=BLOCKS, memory=self.there),
            move,
            **{"source_blocks": SOURCE, "destination_blocks": DESTINATION, "tokens": TOKENS, **options},
        )

    def broken(self, breaking: Callable[[], None], **options: Any) -> pdtx.TransferReport:  # noqa: ANN401
        """Check a move that is right, and then broken."""

        def move(source: Sequence[int], destination: Sequence[int]) -> None:
            self.right(source, destination)
            breaking()

        return self.check(move, **options)


@pytest.fixture(params=[torch.uint8, torch.bfloat16, torch.float32], ids=["1 byte", "2 bytes", "4 bytes"])
def caches(request: pytest.FixtureRequest) -> Caches:
    """Caches with elements of 1, 2 and 4 bytes."""
    return Caches(request.param)


def where(coordinate: Any) -> tuple[int, ...]:  # noqa: ANN401
    return coordinate.layer, coordinate.kv, coordinate.token, coordinate.head, coordinate.channel


def test_a_right_move_is_clean_and_called_once(caches: Caches) -> None:
    report = caches.check(caches.right)
    assert report.ok
    assert report.calls == 1
    assert report.compared == LAYERS * 2 * TOKENS * HEADS * CHANNELS
    assert (report.wrong, report.stray_bytes, report.source_changed, report.runs) == (0, 0, 0, ())
    report.raise_if_wrong()
    # Whole blocks were moved: the last one is not full. By chance a value of one byte is what was there before.
    beside = LAYERS * 2 * (len(DESTINATION) * BLOCK - TOKENS) * HEADS * CHANNELS
    assert beside * (1 if caches.here.itemsize > 1 else 0.95) <= report.spilled <= beside
    assert not caches.check(caches.right, exact=True).ok


def test_a_block_in_another_s_place_is_one_run_a_layer_and_part(caches: Caches) -> None:
    report = caches.check(lambda ours, theirs: caches.right([ours[1], ours[0], ours[2]], theirs))
    assert report.wrong == LAYERS * 2 * 2 * BLOCK * HEADS * CHANNELS
    assert report.num_runs == len(report.runs) == LAYERS * 2 * 2
    first = report.runs[0]
    assert where(first.first) == (0, 0, 0, 0, 0)
    assert where(first.last) == (0, 0, BLOCK - 1, HEADS - 1, CHANNELS - 1)
    assert first.source is not None
    assert where(first.source) == (0, 0, BLOCK, 0, 0)
    assert (first.block, first.elements, first.scattered) == (DESTINATION[0], BLOCK * HEADS * CHANNELS, False)
    assert str(first) == (
        f"layer 0 K token 0 head 0 to token 7 head 3 (block 2), {first.elements} elements: "
        "the values of layer 0 K token 8 head 0 on"
    )


def test_keys_and_values_exchanged_are_found(caches: Caches) -> None:
    def exchanged() -> None:
        caches.there[1, DESTINATION] = caches.there[1, DESTINATION].flip(1)

    report = caches.broken(exchanged)
    assert report.wrong == 2 * TOKENS * HEADS * CHANNELS
    assert dict(report.wrong_in) == {f"layer 1 {part}": TOKENS * HEADS * CHANNELS for part in "KV"}
    assert all(run.source is not None and run.source.kv == 1 - run.first.kv for run in report.runs)


def test_a_head_that_was_left_out_is_poison(caches: Caches) -> None:
    def left_out(source: Sequence[int], destination: Sequence[int]) -> None:
        for ours, theirs in zip(source, destination, strict=True):
            caches.there[:, theirs, :, :3] = caches.here[:, :, ours, :, :3].transpose(2, 3)

    report = caches.check(left_out)
    assert report.wrong == report.never_written == LAYERS * 2 * TOKENS * CHANNELS
    assert {run.first.head for run in report.runs} == {3}
    assert all(run.poisoned and run.source is None for run in report.runs)
    assert "never written, still poison" in str(report)


def test_runs_end_where_a_row_is_right_and_where_a_block_or_a_part_ends(caches: Caches) -> None:
    report = caches.check(lambda ours, theirs: None)
    # Nothing was written: one run for each layer, part and block.
    assert [(run.first.layer, run.first.kv, run.block) for run in report.runs] == [
        (layer, kv, block) for layer in range(LAYERS) for kv in range(2) for block in DESTINATION
    ]
    assert report.wrong == report.never_written == report.compared

    def gap() -> None:
        for token in (1, 3):
            caches.there[0, DESTINATION[0], 0, :, token] = caches.there[0, DESTINATION[0], 0, :, token + 3].clone()

    report = caches.broken(gap)
    assert [(run.first.token, run.last.token, run.elements) for run in report.runs] == [
        (token, token, HEADS * CHANNELS) for token in (1, 3)
    ]


def test_one_element_of_another_channel_is_named(caches: Caches) -> None:
    def shifted() -> None:
        caches.element(1, 0, 13, 2)[5] = caches.element(0, 1, 17, 3)[9]

    report = caches.broken(shifted)
    (run,) = report.runs
    assert (report.wrong, report.num_runs, run.elements) == (1, 1, 1)
    assert where(run.first) == where(run.last) == (1, 0, 13, 2, 5)
    assert run.source is not None
    assert where(run.source) == (0, 1, 17, 3, 9)
    assert (
        str(run)
        == "layer 1 K token 13 head 2 channel 5 (block 1) holds the value of layer 0 V token 17 head 3 channel 9"
    )


def test_transposed_keys_are_scattered_and_the_first_is_named() -> None:
    caches = Caches()

    def transposed() -> None:
        block = caches.there[0, DESTINATION[0], 0, 1]  # tokens, channels
        block.copy_(block.clone().reshape(CHANNELS, BLOCK).T)

    report = caches.broken(transposed)
    assert report.wrong > 0
    assert all(where(run.first)[:2] == (0, 0) and run.first.head == 1 for run in report.runs)
    first = report.runs[0]
    # Token 0 channel 1 holds what lay BLOCK elements into the page of head 1.
    assert where(first.first) == (0, 0, 0, 1, 1)
    assert first.source is not None
    assert where(first.source) == (0, 0, BLOCK // CHANNELS, 1, BLOCK % CHANNELS)
    assert first.scattered


def test_rows_that_many_elements_lie_between_are_told_apart() -> None:
    """The low 16 bits of both rows' numbers are equal."""
    spec = pdtx.spec_of(num_kv_heads=4, head_size=64, block_size=16)
    apart = 65536 // (4 * 64)
    blocks = list(range(1, 1 + 2 * apart // 16))
    source, destination = (pdtx.cache_of(spec, "flash_attn_nhd", num_blocks=len(blocks) + 1) for _ in range(2))
    here, there = (
        one.buffers[0].memory.view(torch.int16).view(2, len(blocks) + 1, 16, 4, 64) for one in (source, destination)
    )

    def move(_: object, __: object) -> None:
        there[:, 1:] = here[:, 1:]
        there[0, 1, 3] = here[0, 1 + apart // 16, 3]

    report = pdtx.check_transfer(
        source, destination, move, source_blocks=blocks, destination_blocks=blocks, tokens=2 * apart
    )
    (run,) = report.runs
    assert report.wrong == 4 * 64
    assert run.source is not None
    assert (run.first.token, run.source.token) == (3, 3 + apart)


def test_values_that_nobody_has_are_said_to_be_none(caches: Caches) -> None:
    def nonsense() -> None:
        caches.there[0, DESTINATION[0], 1, 2, 4].view(torch.uint8).fill_(0xFF)

    report = caches.broken(nonsense)
    (run,) = report.runs
    assert run.elements == report.wrong == CHANNELS
    assert run.source is None
    assert not run.poisoned
    assert "no row of the source holds this value" in str(run)


@pytest.mark.parametrize(
    ("dtype", "channels", "tokens"),
    [("bfloat16", 512, 16), ("bfloat16", 480, 16), ("uint8", 7, 4), ("uint8", 15, 4), ("uint8", 64, 16)],
)
def test_an_element_that_was_never_written_is_wrong_whichever_it_is(dtype: str, channels: int, tokens: int) -> None:
    spec = pdtx.spec_of(num_layers=2, num_kv_heads=2, head_size=channels, dtype=dtype, block_size=tokens)
    source, destination = (pdtx.cache_of(spec, "flash_attn_nhd", num_blocks=3) for _ in range(2))
    ours, theirs = (cache.buffers[0].memory.view(getattr(torch, dtype)) for cache in (source, destination))
    # Whatever looks like poison at the source is left out.
    poison, asked = theirs.view(torch.uint8 if dtype == "uint8" else torch.int16).clone(), []

    def move(_: object, __: object) -> None:
        here, there = (one.view(poison.dtype).view(2, 2, 3, -1)[:, :, 1] for one in (ours, theirs))
        left = here == poison.view(2, 2, 3, -1)[:, :, 1]
        asked.append(int(left.sum()))
        there[~left] = here[~left]

    report = pdtx.check_transfer(source, destination, move, source_blocks=[1], destination_blocks=[1], tokens=tokens)
    assert asked[0] == report.wrong == 0
    assert report.ok


@pytest.mark.parametrize("value", [0, 1, 0x51], ids=hex)
def test_a_constant_comes_from_nowhere(caches: Caches, value: int) -> None:
    # Whatever it is, it would be some element's index, were it taken for one.
    rows = [(0, 0, 0, 0), (1, 1, 12, 3)]

    def make_up() -> None:
        for row in rows:
            caches.element(*row).view(torch.uint8).fill_(value)

    report = caches.broken(make_up)
    assert report.wrong == len(rows) * CHANNELS
    assert [(where(run.first)[:4], run.source, run.poisoned) for run in report.runs] == [
        (row, None, False) for row in rows
    ]


def test_once_looks_for_rows(caches: Caches) -> None:
    def moved() -> None:
        caches.element(0, 0, 3, 1)[:] = caches.element(1, 1, 12, 0)
        caches.element(1, 0, 5, 2)[4:] = caches.element(1, 0, 5, 2)[3:-1].clone()

    report = caches.broken(moved, once=True)
    assert report.calls == 1
    first, second = report.runs
    assert first.source is not None
    assert where(first.first)[:4] == (0, 0, 3, 1)
    assert where(first.source)[:4] == (1, 1, 12, 0)
    assert second.source is None
    # By chance an element of few bits may be what it should be.
    assert CHANNELS - 2 <= first.elements <= CHANNELS
    assert caches.broken(moved).calls > 1


def test_once_knows_poison_and_values_of_several_rows() -> None:
    caches = Caches(torch.uint8)

    def breaking() -> None:
        caches.element(0, 0, 0, 0)[:] = 7

    report = caches.broken(breaking, once=True)
    assert report.runs[0].source is None
    report = caches.check(lambda ours, theirs: None, once=True)
    assert report.compared * 0.95 < report.wrong == report.never_written  # by chance some are what they should be


def test_a_move_that_is_wrong_only_once_is_wrong() -> None:
    caches, calls = Caches(), list[int]()

    def breaking() -> None:
        calls.append(1)
        if len(calls) == 1:
            caches.element(0, 0, 3, 1)[:] = caches.element(1, 1, 12, 0)

    report = caches.broken(breaking)
    assert not report.ok
    assert report.runs[0].source is not None
    assert where(report.runs[0].source)[:4] == (1, 1, 12, 0)


# -- outside of the blocks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [0, 4, BLOCKS - 1])
def test_bytes_in_other_blocks_are_strays(caches: Caches, block: int) -> None:
    def stray() -> None:
        caches.there[1, block, 1, 2, 3].view(torch.uint8)[1:4] += 1

    report = caches.broken(stray)
    assert not report.ok
    assert (report.wrong, report.stray_bytes, report.num_strays) == (0, 3, 1)
    at = caches.there[1, block, 1, 2, 3].data_ptr() - caches.there.data_ptr() + 1
    assert (report.strays[0].offset, report.strays[0].nbytes) == (at, 3)
    assert f"layer 1 block {block}:" in str(report.strays[0])
    with pytest.raises(pdtx.VerificationError, match=r"3 stray bytes.*; first: .*outside of the blocks named"):
        report.raise_if_wrong()


def test_padding_belongs_to_no_block() -> None:
    spec = FullAttentionSpec(block_size=8, num_kv_heads=2, head_size=16, dtype="float16", page_size_padded=1536)
    assert spec.unpadded_page_size_bytes == 1024
    model = pdtx.ModelSpec("padded", {"layers.0": spec})
    source, destination = (pdtx.cache_of(model, "flashinfer_nhd", num_blocks=4) for _ in range(2))

    def move(ours: Sequence[int], theirs: Sequence[int]) -> None:
        pages = [cache.buffers[0].memory[: 4 * 1536].view(4, 1536) for cache in (source, destination)]
        pages[1][theirs] = pages[0][ours]
        pages[1][theirs[0], 1024:1030] = 1

    report = pdtx.check_transfer(source, destination, move, source_blocks=[1], destination_blocks=[3], tokens=8)
    assert (report.wrong, report.stray_bytes) == (
        0,
        512,
    )  # the page was copied, padding and all: poison over poison, but 6
    assert report.strays[0].offset == 3 * 1536 + 1024


def test_nothing_but_the_blocks_named_is_written_in_memory_of_others(caches: Caches) -> None:
    for memory in (caches.here, caches.there):
        memory.view(torch.uint8).fill_(77)
    caches.check(lambda ours, theirs: None)
    for memory, named in ((caches.here.transpose(1, 2), SOURCE), (caches.there, DESTINATION)):
        others = [block for block in range(BLOCKS) if block not in named]
        assert bool((memory[:, others].contiguous().view(torch.uint8) == 77).all())


def test_a_source_that_changes_is_wrong(caches: Caches) -> None:
    def changing() -> None:
        caches.here[0, 0, SOURCE[1], 2, 1, 5:6].view(torch.uint8)[:1] += 1

    report = caches.broken(changing)
    assert not report.ok
    assert (report.wrong, report.source_changed) == (0, 1)
    assert "1 elements of the source changed" in report.summary


def test_a_source_block_that_nobody_named_is_not_to_change_either(caches: Caches) -> None:
    other = next(block for block in range(1, BLOCKS) if block not in SOURCE)

    def changing() -> None:
        caches.here[0, 0, other, 2, 1, 5:7].view(torch.uint8).add_(1)

    report = caches.broken(changing)
    assert (report.ok, report.wrong, report.source_changed) == (False, 0, 2)


# -- anybody's elements, at random ---------------------------------------------------------------------------------

POINT = st.tuples(*(st.integers(0, size - 1) for size in (LAYERS, 2, TOKENS, HEADS, CHANNELS)))


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(POINT, POINT, max_size=12), st.sampled_from([torch.bfloat16, torch.float32]))
def test_every_wrong_element_is_counted_and_its_source_named(copies: dict[Any, Any], dtype: torch.dtype) -> None:
    caches = Caches(dtype)

    def breaking() -> None:
        before = caches.there.clone()
        for to, origin in copies.items():
            layer, kv, token, head, channel = origin
            caches.element(*to).copy_(before[layer, DESTINATION[token // BLOCK], kv, head, token % BLOCK, channel])

    report = caches.broken(breaking)
    wrong = {to: origin for to, origin in copies.items() if to != origin}
    assert report.wrong == len(wrong)
    assert report.ok is not bool(wrong)
    assert sum(run.elements for run in report.runs) == len(wrong)
    for run in report.runs:
        assert run.source is not None
        assert wrong[where(run.first)] == where(run.source)


# -- other kinds of caches -----------------------------------------------------------------------------------------


def by_plan(source: pdtx.Cache, destination: pdtx.Cache, tables: Sequence[dict[str, list[int]]], tokens: int) -> None:
    """Copy what plans of each buffer say, run by run."""
    for ours, theirs in zip(source.buffers, destination.buffers, strict=True):
        group = source.groups[ours.group]
        positions = group.positions(tokens)
        plan = pdtx.plan(
            ours.layout,
            tables[0][group.name],
            theirs.layout,
            tables[1][group.name],
            positions,
            source_tp=ours.tp_size,
            destination_tp=theirs.tp_size,
            spec=ours.spec,
        )
        for rank in plan.ranks:
            memories = ours.ranks[rank.source_rank].memory, theirs.ranks[rank.destination_rank].memory
            here, there = (memory.numpy().data for memory in memories)
            for start, stop, nbytes in rank.descriptors.tolist():
                there[stop : stop + nbytes] = here[start : start + nbytes]


def tables_of(cache: pdtx.Cache, tokens: int, seed: int) -> dict[str, list[int]]:
    """Give every group blocks for its positions, and the null block before them."""
    found = {}
    for group in cache.groups:
        positions = group.positions(tokens)
        first, last = positions.start // group.block_size, -(-positions.stop // group.block_size)
        ids = np.random.default_rng(seed).permutation(np.arange(1, group.num_blocks))[: last - first]
        found[group.name] = [0] * first + ids.tolist()
    return found


@pytest.mark.parametrize(
    ("model", "layers", "layouts", "sizes", "tps", "tokens"),
    [
        ("llama-3-8b", 1, ("flash_attn_nhd", "flashinfer_hnd"), (16, 32), (1, 1), 40),
        ("llama-3-8b", 1, ("vllm_lbnhc", "cpu_attn_lbhnc"), (16, 16), (4, 2), 33),
        ("llama-3-8b", 1, ("flashinfer_hnd", "flash_attn_nhd"), (32, 16), (2, 16), 40),
        ("gemma-3-27b", 6, ("flash_attn_nhd", "flashinfer_hnd"), (16, 32), (1, 2), 1100),
        ("deepseek-v3", 1, ("mla", "mla_lbnhc"), (64, 64), (1, 2), 70),
        ("jamba", 6, ("flash_attn_nhd", "flashinfer_hnd,mamba_ds"), (16, 16), (1, 1), 20),
    ],
)
def test_plans_of_every_kind_of_cache_are_clean_and_a_broken_one_is_not(
    model: str, layers: int, layouts: tuple[str, str], sizes: tuple[int, int], tps: tuple[int, int], tokens: int
) -> None:
    source, destination = (
        pdtx.cache_of(pdtx.spec_of(model, num_layers=layers, block_size=size), layout, num_blocks=90, tp_size=tp)
        for layout, size, tp in zip(layouts, sizes, tps, strict=True)
    )
    tables = [tables_of(side, tokens, seed) for seed, side in enumerate((source, destination))]
    options: dict[str, Any] = {"source_blocks": tables[0], "destination_blocks": tables[1], "tokens": tokens}
    report = pdtx.check_transfer(
        source, destination, lambda *_: by_plan(source, destination, tables, tokens), **options
    )
    assert report.ok, str(report)
    assert report.compared

    def broken(ours: object, theirs: object) -> None:
        by_plan(source, destination, tables, tokens)
        last = destination.buffers[-1]
        name = destination.groups[last.group].name
        page = last.layout.block_steps([tables[1][name][-1]])
        part = last.layout.parts[0]
        at = part.offset + int(page[0]) * part.layout.stride("block")
        last.ranks[-1].memory[at] ^= 1  # token 0 of the last block, on the last rank alone

    report = pdtx.check_transfer(source, destination, broken, **options)
    assert (report.wrong, report.num_runs) == (1, 1)
    assert report.runs[0].rank == tps[1] - 1


def test_layers_of_two_buffers_exchanged_are_found() -> None:
    full = FullAttentionSpec(block_size=8, num_kv_heads=2, head_size=16, dtype="float16")
    groups = [pdtx.CacheGroup("full", "full", 8, 4, full)]
    shapes = [pdtx.BufferShape(name, "full", full, "flash_attn_nhd", [name], 4) for name in ("one", "two")]
    source, destination = pdtx.Cache.allocate(groups, shapes), pdtx.Cache.allocate(groups, shapes)

    def exchanged(_: object, __: object) -> None:
        for ours, theirs in zip(source.buffers, destination.buffers[::-1], strict=True):
            theirs.memory.view(2, 4, -1)[:, 2] = ours.memory.view(2, 4, -1)[:, 1]

    for once in (False, True):
        report = pdtx.check_transfer(
            source, destination, exchanged, source_blocks=[1], destination_blocks=[2], tokens=8, once=once
        )
        assert report.wrong == report.compared
        assert "buffer one" in str(report.runs[0].first)
        assert "buffer two" in str(report.runs[0].source)


def test_a_value_behind_its_key_in_one_row_is_not_called_a_key() -> None:
    spec = FullAttentionSpec(block_size=8, num_kv_heads=2, head_size=16, head_size_v=8, dtype="float16")
    groups = [pdtx.CacheGroup("full", "full", 8, 4, spec)]
    shape = pdtx.BufferShape("full", "full", spec, "flash_attn_diffkv_nhd", ["layers.0"], 4)
    source, destination = (pdtx.Cache.allocate(groups, [shape]) for _ in range(2))

    def broken(_: object, __: object) -> None:
        ours, theirs = (side.buffers[0].memory.view(torch.int16).view(4, 8, 2, 24) for side in (source, destination))
        theirs[2] = ours[1]
        theirs[2, 3, 1, 17] = ours[1, 5, 0, 18]

    report = pdtx.check_transfer(source, destination, broken, source_blocks=[1], destination_blocks=[2], tokens=8)
    assert dict(report.wrong_in) == {"layer 0": 1}
    assert str(report.runs[0]) == (
        "layer 0 token 3 head 1 channel 17 (block 2) holds the value of layer 0 token 5 head 0 channel 18"
    )


def test_runs_are_limited_and_counted(caches: Caches) -> None:
    def mixed() -> None:
        caches.there[:, DESTINATION] = caches.there[:, DESTINATION].flip(3)  # heads

    report = caches.broken(mixed, max_runs=3)
    assert len(report.runs) == 3
    assert report.num_runs > 100
    lines = report.lines(2)
    assert lines[0] == report.summary
    assert lines[-1] == f"  ... and {report.num_runs - 2:,} more wrong runs"
    assert len(lines) == 5


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"source_blocks": [3, 7]}, r"source group full has 2 blocks of 8; positions 0\.\.20 need 3"),
        ({"destination_blocks": [2, 0, 9]}, r"destination group full: block 0 is none of 1\.\.11"),
        ({"destination_blocks": [2, 12, 9]}, r"destination group full: block 12 is none of 1\.\.11"),
        ({"destination_blocks": [2, 9, 9]}, "names a block twice"),
        ({"destination_blocks": {"fool": [2, 1, 9]}}, "blocks are of fool; its groups are full"),
        ({"tokens": 0}, "0 tokens leave nothing to be moved"),
        ({"tokens": range(4, 20, 2)}, "no range of positions"),
        ({"tokens": True}, "a number of tokens or a range of positions, not True"),
        ({"tokens": 20.0}, r"a number of tokens or a range of positions, not 20\.0"),
        (
            {"source_blocks": [3.5, 7, 5]},
            r"source group full: a block table is a list of ids, not float64 of shape \(3,\)",
        ),
        ({"destination_blocks": [[2, 1, 9]]}, r"a block table is a list of ids, not int64 of shape \(1, 3\)"),
    ],
)
def test_blocks_that_do_not_fit_are_refused_before_anything_is_written(options: dict[str, Any], text: str) -> None:
    caches = Caches()
    with pytest.raises(pdtx.InputError, match=text):
        caches.check(lambda ours, theirs: pytest.fail("moved"), **options)
    assert not caches.here.any()
    assert not caches.there.any()


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor], ids=["list", "tuple", "array", "tensor"])
def test_tables_and_tokens_may_be_of_any_whole_numbers(kind: Callable[[list[int]], Any]) -> None:
    caches = Caches()
    for tokens in (TOKENS, np.int64(TOKENS)):
        assert caches.check(
            caches.right, source_blocks=kind(SOURCE), destination_blocks=kind(DESTINATION), tokens=tokens
        ).ok


def test_a_block_of_two_groups_of_one_pool_is_refused() -> None:
    ours, theirs = (Pages(hybrid_bytes(10), seed) for seed in range(2))
    here, there = (hybrid_over(pages.memory, num_blocks=10) for pages in (ours, theirs))
    apart = {"full": [1, 2, 3], "window.0": [0, 4, 5], "window.1": [6, 7, 8]}
    for source, destination, side in (
        (apart | {"window.0": [0, 4, 2]}, apart, "source"),
        (apart, apart | {"window.0": [0, 4, 2]}, "destination"),
    ):
        with pytest.raises(pdtx.InputError, match=f"{side} groups full and window.0 both name block 2 of pool one"):
            pdtx.check_transfer(
                here,
                there,
                lambda *_: pytest.fail("moved"),
                source_blocks=source,
                destination_blocks=destination,
                tokens=12,
            )
    assert not ours.changed() | theirs.changed()


def test_elements_of_eight_bytes_are_refused() -> None:
    spec = pdtx.spec_of(num_kv_heads=2, head_size=16, dtype="float64", block_size=8)
    here, there = (pdtx.cache_of(spec, num_blocks=3) for _ in range(2))
    with pytest.raises(pdtx.InputError, match="elements of 8 bytes cannot be checked; their size is one of 1, 2, 4"):
        pdtx.check_transfer(here, there, lambda *_: None, source_blocks=[1], destination_blocks=[1], tokens=3)


def test_caches_of_different_things_are_refused() -> None:
    ours = pdtx.cache_of(pdtx.spec_of(num_kv_heads=2, head_size=16), num_blocks=3)
    theirs = pdtx.cache_of(pdtx.spec_of(num_kv_heads=4, head_size=16), num_blocks=3)
    blocks: dict[str, Any] = {"source_blocks": [1], "destination_blocks": [1], "tokens": 3}
    with pytest.raises(pdtx.InputError, match="KV heads of the model differ: source 2, destination 4"):
        pdtx.check_transfer(ours, theirs, lambda *_: None, **blocks)
    with pytest.raises(pdtx.InputError, match="share memory"):
        pdtx.check_transfer(ours, ours, lambda *_: None, **blocks)


def test_what_the_move_raises_is_raised() -> None:
    def failing(_: object, __: object) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        Caches().check(failing)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_caches_on_a_device_are_checked_alike() -> None:
    caches = Caches()
    caches.here, caches.there = caches.here.cuda(), caches.there.cuda()
    assert caches.check(caches.right).ok
    report = caches.broken(lambda: caches.element(0, 0, 3, 1).copy_(caches.element(1, 1, 12, 0)))
    assert report.wrong == CHANNELS
    assert report.runs[0].source is not None
    assert where(report.runs[0].source)[:4] == (1, 1, 12, 0)


def move_states(source: PagedStateCache, destination: PagedStateCache, *, wrong: bool) -> None:
    """Move block 3 into block 1; wrong: heads of the recurrent state go to the ranks in the opposite order."""
    for move in transfers(source.spec, source.tp_size, destination.tp_size, source.sharding):
        for box in move.boxes:
            rank = destination.tp_size - 1 - move.dst_rank if wrong and box.part == "ssm" else move.dst_rank
            src, dst = (Endpoint.of(one.layout, np.array([at])) for one, at in ((source, 3), (destination, 1)))
            runs = build_plan(src, dst, range(1), boxes=(box,)).flat
            memories = source.ranks[move.src_rank].memory, destination.ranks[rank].memory
            copy_ranges(memories[0], runs.source(), memories[1], runs.destination())


@pytest.mark.parametrize("ranks", [(1, 2), (2, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("family", ["mamba2 of 1 group", "gated delta net"])
def test_states_are_checked_on_every_rank(family: str, ranks: tuple[int, int]) -> None:
    source, destination = state_cache(family, ranks[0]), state_cache(family, ranks[1], "mamba_ds")
    found = [
        pdtx.check_transfer(
            KVCaches.single(source),
            KVCaches.single(destination),
            lambda *_, wrong=wrong: move_states(source, destination, wrong=wrong),
            source_blocks=[3],
            destination_blocks=[1],
            tokens=1,
        )
        for wrong in (False, True)
    ]
    assert found[0].ok
    heads, width = source.spec.shapes[1][0], 4 * source.spec.shapes[1][1] * source.spec.shapes[1][2]
    assert found[1].wrong == 2 * heads * width
    first = found[1].runs[0]
    assert "layer 0 state ssm head 0 element 0 byte " in str(first.first)
    assert first.source is not None
    assert f"state ssm head {heads - heads // ranks[1]} element 0 byte " in str(first.source)
