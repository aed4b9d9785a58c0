"""Tensor-parallel ranks on either side: every rank of the consumer gets its own heads, from the right rank."""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch

from pdtx.cache import KVCaches, PagedBuffer, PagedKVCache
from pdtx.engine import check_compatible
from pdtx.errors import IncompatiblePeer, ProtocolError, TransferError, VerificationError
from pdtx.kvspec import FullAttentionSpec, SlidingWindowSpec
from pdtx.layout import KVCacheLayout
from pdtx.parallel import Box, Cut, RankTransfer
from pdtx.plan import Runs
from pdtx.testing.codes import codes_for, fill_codes
from pdtx.testing.wrapped import WrappedConnection
from pdtx.transports import Connection, Region, TransferHandle, TransferKey
from tests.engine_pair import (
    Pair,
    WrappedMover,
    attention,
    begin,
    describe,
    join,
    latent,
    produce,
    require_contents,
    scramble,
)
from tests.heads_taken import HEADS_TAKEN

TOKENS, BLOCK, LAYERS, CHANNELS = 40, 16, 2, 8
UNREAD = 0xAB

LATENT_TAKEN = {(8, 4): [0, 2, 4, 6], (4, 8): [0, 0, 1, 1, 2, 2, 3, 3]}


class Recorder(WrappedConnection):
    """Notes what is put, by ranks; drop: puts that are said to be done and are not."""

    def __init__(
        self,
        inner: Connection,
        puts: list[tuple[TransferKey, Region, Runs]],
        drop: Callable[[TransferKey], bool] = lambda _: False,
    ) -> None:
        super().__init__(inner)
        self.puts, self.drop = puts, drop

    def put(
        self, key: TransferKey, region: Region, runs: Runs, deadline: float, *, staged: bool = False
    ) -> TransferHandle:
        self.puts.append((key, region, runs))
        if not self.drop(key):
            return self.inner.put(key, region, runs, deadline, staged=staged)
        handle = TransferHandle(key, runs.total, "peer", deadline)
        handle.post()
        handle.finish()
        return handle


def model(tp_size: int, heads: int, layout: str = "flash_attn_nhd", block_size: int = BLOCK) -> PagedKVCache:
    return attention(
        FullAttentionSpec, "full", layout, block_size, num_blocks=7, heads=heads, channels=CHANNELS, tp_size=tp_size
    )


def codes_of_rank(heads: Sequence[int], all_heads: int) -> npt.NDArray[np.uint16]:
    """code(l,kv,p,h,d) = ((((l*2+kv)*P + p)*H + h)*D + d) of some heads: (layer, kv, token, head, channel)."""
    l, kv, p, h, d = np.meshgrid(  # noqa: E741 - the formula's own letters
        np.arange(LAYERS), np.arange(2), np.arange(TOKENS), np.array(heads), np.arange(CHANNELS), indexing="ij"
    )
    codes: npt.NDArray[np.uint16] = ((((l * 2 + kv) * TOKENS + p) * all_heads + h) * CHANNELS + d).astype(np.uint16)
    return codes


def on_rank(buffer: PagedBuffer, rank: int, table: npt.NDArray[np.int64]) -> npt.NDArray[np.uint16]:
    """What lies on one rank, element by element by the strides alone: (layer, kv, token, head, channel)."""
    layout = buffer.layout
    assert isinstance(layout, KVCacheLayout)
    token = np.arange(TOKENS)
    size = layout.block_size
    place = table[token // size] * layout.stride("block") + token % size * layout.stride("token")
    grids = np.ix_(
        *(np.arange(layout.extent(axis)) * layout.stride(axis) for axis in ("layer", "kv")),
        place,
        *(np.arange(layout.extent(axis)) * layout.stride(axis) for axis in ("head", "channel")),
    )
    offsets = sum(grids[1:], grids[0])
    memory = buffer.ranks[rank].memory.numpy()
    words: npt.NDArray[np.uint16] = memory[offsets].astype(np.uint16) | memory[offsets + 1].astype(np.uint16) << 8
    return words


@pytest.mark.parametrize("layouts", [("flash_attn_nhd", "flashinfer_hnd"), ("flashinfer_hnd", "sglang")], ids="->".join)
@pytest.mark.parametrize("case", HEADS_TAKEN, ids=lambda case: "{}->{} of {}".format(*case))
def test_every_rank_gets_its_own_heads_codes(case: tuple[int, int, int], layouts: tuple[str, str]) -> None:
    (src_tp, dst_tp, heads), taken = case, HEADS_TAKEN[case]
    source, destination = model(src_tp, heads, layouts[0]), model(dst_tp, heads, layouts[1])
    puts = list[tuple[TransferKey, Region, Runs]]()
    read = {rank for pieces in taken.values() for rank, _ in pieces}
    wrap = partial(WrappedMover, wrap=partial(Recorder, puts=puts))
    with Pair(source, destination, wrap=wrap) as pair:
        for seed, allocator in enumerate((pair.producer.allocator, pair.consumer.allocator)):
            scramble(allocator, seed)
        request = begin(pair.producer, TOKENS)
        fill_codes(source, request.tables[0].numpy(), codes_for(source, TOKENS))
        for rank in set(range(src_tp)) - read:
            source.ranks[rank].memory.fill_(UNREAD)
        for start, stop in ((0, 17), (17, TOKENS)):
            for layer in range(LAYERS):
                pair.producer.layer_ready(request, 0, layer, start, stop)
        pair.producer.computed(request, 7)
        ready = pair.next_ready()
        for rank, pieces in taken.items():
            own = [head for _, some in pieces for head in some]
            found = on_rank(destination, rank, ready.tables[0])
            assert np.array_equal(found, codes_of_rank(own, heads)), f"rank {rank}"
        pairs = {(key.src_rank, key.dst_rank) for key, _, _ in puts}
        assert pairs == {(src, dst) for dst, pieces in taken.items() for src, _ in pieces}
        for key, region, _ in puts:
            assert region.address == source.ranks[key.src_rank].memory.data_ptr()
        moved = sum(len(some) for pieces in taken.values() for _, some in pieces)
        assert request.nbytes == ready.received_bytes == LAYERS * 2 * TOKENS * CHANNELS * 2 * moved
        pair.finish(ready)
        assert pair.producer.wait(request).text == "done"
        # Ranks that are not read share their blocks with those that are.
        pair.require_all_free(2.0)


@pytest.mark.parametrize("case", LATENT_TAKEN, ids="{0[0]}->{0[1]}".format)
def test_every_rank_gets_latent_vectors_from_one_rank(case: tuple[int, int]) -> None:
    source, destination = latent("latent", 20, tp_size=case[0]), latent("latent", 20, 64, tp_size=case[1])
    puts = list[tuple[TransferKey, Region, Runs]]()
    with Pair(source, destination, wrap=partial(WrappedMover, wrap=partial(Recorder, puts=puts))) as pair:
        request = begin(pair.producer, TOKENS)
        contents = produce(pair.producer, request, [17])
        ready = pair.next_ready()
        require_contents(pair, ready, contents)
        assert {(key.dst_rank, key.src_rank) for key, _, _ in puts} == set(enumerate(LATENT_TAKEN[case]))
        assert request.nbytes == ready.received_bytes == case[1] * 2 * TOKENS * 40
        pair.finish(ready)
        pair.require_all_free(2.0)


LAYOUTS = ("flash_attn_nhd", "flash_attn_hnd", "flashinfer_hnd", "cpu_attn_lbhnc")


@pytest.mark.parametrize("dst_layout", LAYOUTS)
@pytest.mark.parametrize("src_layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [(2, 4), (4, 2), (1, 8), (8, 1)], ids=str)
def test_random_bytes_between_ranks_through_tcp(ranks: tuple[int, int], src_layout: str, dst_layout: str) -> None:
    """A window group and a full one, blocks of 16 tokens to blocks of 32, four heads on one to eight ranks."""

    def caches(layout: str, block_size: int, tp_size: int) -> KVCaches:
        make = partial(attention, layout=layout, block_size=block_size, heads=4, tp_size=tp_size)
        return join([make(FullAttentionSpec, "full")], [make(SlidingWindowSpec, "window", sliding_window=24)])

    source, destination = caches(src_layout, 16, ranks[0]), caches(dst_layout, 32, ranks[1])
    with Pair(source, destination, mover="tcp") as pair:
        scramble(pair.consumer.allocator, 5)
        for tokens in (77, 5, 32):
            request = begin(pair.producer, tokens, f"r{tokens}")
            contents = produce(pair.producer, request, [tokens // 2])
            ready = pair.next_ready()
            require_contents(pair, ready, contents)
            pair.finish(ready)
            assert pair.producer.wait(request).text == "done"


# -- teeth -------------------------------------------------------------------------------------------------------------


def test_one_slice_for_each_rank_is_caught_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heads on four ranks: slice r of four lies outside the page for r = 2 and 3."""

    def slices(spec: object, src_tp: int, dst_tp: int, _: object) -> tuple[RankTransfer, ...]:
        return tuple(RankTransfer(0, r, (Box((Cut("head", r, 0, 1),)),)) for r in range(dst_tp))

    monkeypatch.setattr("pdtx.engine.matching.transfers", slices)
    with pytest.raises(
        IncompatiblePeer, match="audit: rank 1 would get KV head 1 of the model from rank 0 in the place"
    ):
        check_compatible(describe(model(1, 2)), describe(model(4, 2)))
    monkeypatch.setattr("pdtx.engine.matching.audit_moves", lambda *_: None)
    with pytest.raises(IncompatiblePeer, match=r"KV heads 2..3 lie outside the 2 that flash_attn_nhd has"):
        check_compatible(describe(model(1, 2)), describe(model(4, 2)))


def test_a_rank_that_gets_another_ranks_heads_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def crossed(spec: object, src_tp: int, dst_tp: int, _: object) -> tuple[RankTransfer, ...]:
        return tuple(RankTransfer(r ^ 1, r) for r in range(dst_tp))

    monkeypatch.setattr("pdtx.engine.matching.transfers", crossed)
    with pytest.raises(IncompatiblePeer, match="audit: rank 0 would get KV head 2 of the model from rank 1"):
        Pair(model(4, 8), model(4, 8, "flashinfer_hnd", 32))
    # And if the audit missed it, verification would not.
    monkeypatch.setattr("pdtx.engine.matching.audit_moves", lambda *_: None)
    with Pair(model(4, 8), model(4, 8, "flashinfer_hnd", 32)) as pair:
        produce(pair.producer, begin(pair.producer, TOKENS))
        ready = pair.next_ready()
        with pytest.raises(VerificationError, match=r"buffer full rank 0: heads 0, 1 come from no rank that has them"):
            pair.consumer.verify(ready)
        pair.finish(ready, verify=False)


@pytest.mark.parametrize("rank", [1, 3])
def test_a_copy_on_another_rank_that_differs_is_caught(rank: int) -> None:
    """Of two heads on four ranks, ranks 0 and 2 speak for them; the copies must be looked at too."""
    with Pair(model(1, 2), model(4, 2, "flashinfer_hnd", 32)) as pair:
        produce(pair.producer, begin(pair.producer, TOKENS))
        ready = pair.next_ready()
        pair.consumer.verify(ready)
        layout = pair.destination.layout
        assert isinstance(layout, KVCacheLayout)
        offset = int(ready.tables[0][1]) * layout.stride("block") + 3 * layout.stride("token") + layout.stride("layer")
        pair.destination.ranks[rank].memory[offset] ^= 1
        found = rf"^1 of .* elements are wrong; first: buffer full rank {rank} layer 1 K token 35 head {rank // 2} "
        with pytest.raises(VerificationError, match=found):
            pair.consumer.verify(ready)
        pair.finish(ready, verify=False)


@pytest.mark.parametrize("rank", range(4))
def test_a_stray_write_on_any_rank_is_caught(rank: int) -> None:
    with Pair(model(2, 4), model(4, 4, "flashinfer_hnd", 32)) as pair:
        produce(pair.producer, begin(pair.producer, TOKENS))
        ready = pair.next_ready()
        block = int(pair.consumer.allocator.free_blocks().groups[0].ids[0])
        pair.destination.ranks[rank].memory[block * pair.destination.layout.parts[0].layout.stride("block")] ^= 1
        with pytest.raises(VerificationError, match=r"^1 2-byte words outside .*: 1 in buffer full$"):
            pair.consumer.verify(ready)
        pair.destination.poison(torch.tensor([block]))
        pair.finish(ready)


def test_a_rank_that_got_nothing_of_a_layer_is_named() -> None:
    """The producer believes that all was sent; what never came is named with both ranks."""

    def drop(key: TransferKey) -> bool:
        return key.dst_rank == 3 and key.layer_start == 1 and key.token_start > 0

    wrap = partial(WrappedMover, wrap=partial(Recorder, puts=[], drop=drop))
    with Pair(model(2, 4), model(4, 4, "flashinfer_hnd", 32), wrap=wrap) as pair:
        request = begin(pair.producer, TOKENS)
        produce(pair.producer, request, [10])
        with pytest.raises(TransferError) as caught:
            pair.producer.wait(request)
        lacking = "30 of 320 layer x position slices have not arrived, first layer 1 position 10 from rank 1 to rank 3"
        assert f"group full, buffer full: {lacking}" in str(caught.value)
        assert pair.consumer.next_ready(0.1) is None


# -- what ranks can share ----------------------------------------------------------------------------------------------


def test_neither_number_of_ranks_need_divide_the_other() -> None:
    """Six heads on two ranks to three: the middle one takes from both."""
    puts = list[tuple[TransferKey, Region, Runs]]()
    wrap = partial(WrappedMover, wrap=partial(Recorder, puts=puts))
    with Pair(model(2, 6), model(3, 6, "flashinfer_hnd", 32), wrap=wrap) as pair:
        contents = produce(pair.producer, begin(pair.producer, TOKENS))
        ready = pair.next_ready()
        require_contents(pair, ready, contents)
        assert {(key.src_rank, key.dst_rank) for key, _, _ in puts} == {(0, 0), (0, 1), (1, 1), (1, 2)}
        pair.finish(ready)


def test_ranks_that_the_heads_do_not_allow_are_refused() -> None:
    impossible = msgspec.structs.replace(describe(model(2, 8)), tp_size=3)
    with pytest.raises(ProtocolError, match=r"buffer full cannot be: 8 KV heads cannot be divided .* 3"):
        check_compatible(impossible, describe(model(2, 8)))
