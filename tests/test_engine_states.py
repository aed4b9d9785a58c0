"""States of recurrent layers between tensor-parallel ranks: every rank gets its own parts, by way of both nodes."""

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
import torch

from pdtx.cache import KVCaches, PagedStateCache
from pdtx.engine import check_compatible
from pdtx.engine.describe import facts_of
from pdtx.errors import IncompatiblePeer, ProtocolError, VerificationError
from pdtx.kvspec import FullAttentionSpec, KVCacheSpec, Segment, StateSharding
from pdtx.parallel import RankTransfer, transfers
from pdtx.protocol import CacheDescription, ShardingDescription
from tests.engine_pair import Pair, attention, begin, describe, join, produce, require_contents, scramble
from tests.state_families import FAMILIES, elements_of, on_rank, share_of, state_cache

RANKS = [(1, 2), (2, 1), (2, 4), (4, 2)]


def caches(family: str, tp_size: int, layout: str, block_size: int) -> KVCaches:
    """Attention with two heads and states, as a hybrid model has them."""
    heads = "flash_attn_nhd" if layout == "mamba_sd" else "flashinfer_hnd"
    full = attention(FullAttentionSpec, "full", heads, block_size, heads=2, tp_size=tp_size)
    return join([full], [state_cache(family, tp_size, layout)])


@pytest.mark.parametrize("ranks", RANKS, ids="{0[0]}->{0[1]}".format)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_rank_gets_its_own_parts_through_tcp(family: str, ranks: tuple[int, int]) -> None:
    source, destination = caches(family, ranks[0], "mamba_sd", 16), caches(family, ranks[1], "mamba_ds", 32)
    with Pair(source, destination, mover="tcp") as pair:
        for seed, allocator in enumerate((pair.producer.allocator, pair.consumer.allocator)):
            scramble(allocator, seed)
        contents = produce(pair.producer, begin(pair.producer, 40), [17])
        ready = pair.next_ready()
        require_contents(pair, ready, contents)
        state = pair.destinations.buffer("state")
        block = int(ready.tables[state.group][0])
        for layer, name in enumerate(state.layer_names):
            whole = elements_of(family, contents["state", name][0, 0, 0].numpy())
            for rank in range(ranks[1]):
                meant, found = share_of(family, ranks[1], rank, whole), on_rank(state, rank, layer, block)
                assert all((one == other).all() for one, other in zip(found, meant, strict=True)), f"rank {rank}"
        pair.finish(ready)


# -- faults ------------------------------------------------------------------------------------------------------------

Moves = Callable[[KVCacheSpec, int, int, StateSharding | None], tuple[RankTransfer, ...]]


def flat(spec: KVCacheSpec, src_tp: int, dst_tp: int, sharding: StateSharding | None) -> tuple[RankTransfer, ...]:
    """Cut a convolution's channels as one, whatever they are made of."""
    if sharding is None:
        return transfers(spec, src_tp, dst_tp)
    sizes = [sum(segment.channels for segment in segments) for segments in sharding.conv]
    conv = tuple((Segment(name="all", channels=size, units=size),) for size in sizes)
    return transfers(spec, src_tp, dst_tp, replace(sharding, conv=conv))


def swapped(spec: KVCacheSpec, src_tp: int, dst_tp: int, sharding: StateSharding | None) -> tuple[RankTransfer, ...]:
    """Take another rank's heads of the recurrent state, and its own of the convolution."""
    moves = transfers(spec, src_tp, dst_tp, sharding)
    if sharding is None:
        return moves
    states = [tuple(box for box in move.boxes if box.part == "ssm") for move in moves]
    return tuple(
        replace(move, boxes=(*(box for box in move.boxes if box.part != "ssm"), *others))
        for move, others in zip(moves, (*states[1:], states[0]), strict=True)
    )


@pytest.mark.parametrize(
    ("moves", "first", "wrong"),
    [
        # Of [q 8 | k 8 | v 16] rank 0 is to have 0..4, 8..12 and 16..24 and gets 0..16: 20 of 32 channels are wrong.
        (flat, "state conv step 0 channel 8 byte 16", 2 * 3 * 20 * 2),
        (swapped, "state ssm head 0 element 0 byte 192", 2 * 8 * 4 * 4),
    ],
)
def test_parts_that_go_to_the_wrong_rank_are_named(
    moves: Moves, first: str, wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdtx.engine.matching.transfers", moves)
    caches = [KVCaches.single(state_cache("gated delta net", tp)) for tp in (1, 2)]
    with pytest.raises(IncompatiblePeer, match=r"audit: rank 0 would get (channel of conv|head of the state) 4 of the"):
        Pair(*caches)
    # And if the audit missed it, verification would not.
    monkeypatch.setattr("pdtx.engine.matching.audit_moves", lambda *_: None)
    with Pair(*caches) as pair:
        contents = produce(pair.producer, begin(pair.producer, 5))
        ready = pair.next_ready()
        state = pair.destinations.buffer("state")
        found = [state.canonical(layer, torch.as_tensor(ready.tables[0]), 0, 1) for layer in range(2)]
        differing = sum(int((one != other).sum()) for one, other in zip(found, contents.values(), strict=True))
        assert wrong * 0.98 < differing <= wrong  # of random bytes one in 256 is right by chance
        with pytest.raises(VerificationError) as caught:
            pair.consumer.verify(ready)
        assert caught.value.wrong == differing
        assert f"first: buffer state rank 0 layer 0 {first} (block " in str(caught.value)
        pair.finish(ready, verify=False)


def test_a_copy_on_another_rank_that_differs_is_caught() -> None:
    with Pair(*(KVCaches.single(state_cache("mamba2 of 1 group", tp)) for tp in (1, 4))) as pair:
        produce(pair.producer, begin(pair.producer, 5))
        ready = pair.next_ready()
        pair.consumer.verify(ready)
        state = pair.destinations.buffer("state")
        conv = state.layout.parts[0]
        offset = conv.offset + int(ready.tables[0][0]) * conv.layout.stride("block") + 2 * conv.layout.stride("channel")
        state.ranks[3].memory[offset] ^= 1  # the first channel of B
        with pytest.raises(
            VerificationError, match=r"^1 of .* first: buffer state rank 3 layer 0 state conv step 0 channel 8 "
        ):
            pair.consumer.verify(ready)
        pair.finish(ready, verify=False)


@pytest.mark.parametrize("rank", range(4))
def test_a_stray_write_on_any_rank_is_caught(rank: int) -> None:
    with Pair(*(KVCaches.single(state_cache("mamba1", tp)) for tp in (2, 4))) as pair:
        produce(pair.producer, begin(pair.producer, 5))
        ready = pair.next_ready()
        state = pair.destinations.buffer("state")
        block = int(pair.consumer.allocator.free_blocks().groups[0].ids[0])
        state.ranks[rank].memory[block * state.layout.parts[0].layout.stride("block")] ^= 1
        with pytest.raises(VerificationError, match=r"^1 2-byte words outside .*: 1 in buffer state$"):
            pair.consumer.verify(ready)
        state.poison(torch.tensor([block]))
        pair.finish(ready)


# -- what the two sides must agree on ----------------------------------------------------------------------------------


def described(family: str, tp_size: int, sharding: StateSharding | None = None) -> CacheDescription:
    one = FAMILIES[family]
    return describe(
        PagedStateCache(one.spec, num_layers=1, num_blocks=3, tp_size=tp_size, sharding=sharding or one.sharding)
    )


def with_sharding(description: CacheDescription, sharding: ShardingDescription | None) -> CacheDescription:
    buffers = [msgspec.structs.replace(buffer, sharding=sharding) for buffer in description.buffers]
    return msgspec.structs.replace(description, buffers=buffers)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_how_ranks_share_survives_its_description(family: str, tp_size: int) -> None:
    description = described(family, tp_size)
    (facts,) = facts_of(msgspec.msgpack.decode(msgspec.msgpack.encode(description), type=CacheDescription)).buffers
    assert facts.sharding == FAMILIES[family].sharding


@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (2, 1), (2, 2)], ids=str)
def test_ranks_that_share_in_another_way_are_refused(ranks: tuple[int, int]) -> None:
    """x of 4 heads is as wide as x of 2: only the units tell them apart, whose heads a rank of 2 has alike."""
    other = StateSharding(
        conv=(
            (
                Segment(name="x", channels=8, units=2),
                Segment(name="B", channels=3, units=1),
                Segment(name="C", channels=3, units=1),
            ),
        ),
        heads=4,
    )
    with pytest.raises(IncompatiblePeer) as caught:
        check_compatible(described("mamba2 of 1 group", ranks[0], other), described("mamba2 of 1 group", ranks[1]))
    assert caught.value.field == "sharding of buffer state"
    assert caught.value.producer == "x 8/2 | B 3/1 | C 3/1; 4 heads"
    assert caught.value.consumer == "x 8/4 | B 3/1 | C 3/1; 4 heads"


def test_a_side_of_one_rank_must_say_how_as_well_unless_both_are() -> None:
    silent = with_sharding(described("kimi delta", 1), None)
    for ours, theirs in ((silent, described("kimi delta", 2)), (described("kimi delta", 2), silent)):
        with pytest.raises(IncompatiblePeer, match=r"sharding of buffer state.*not given"):
            check_compatible(ours, theirs)
    check_compatible(silent, described("kimi delta", 1))
    check_compatible(described("kimi delta", 1), silent)


X = {"name": "x", "channels": 8, "units": 8}


@pytest.mark.parametrize(
    ("sharding", "words"),
    [
        ({"conv": [[X]], "heads": 7}, "are not 1 convolutions and 7 heads"),
        ({"conv": [[X], [X]], "heads": 8}, "segments of 8 channels do not make up a convolution state of shape"),
        ({"conv": [], "heads": 8}, "are not 0 convolutions and 8 heads"),
        ({"conv": [[X | {"channels": 9}]], "heads": 8}, "segment x: 9 channels are not 8 equal units"),
        ({"conv": [[X | {"units": 3, "channels": 9}]], "heads": 8}, "segments of 9 channels do not make up"),
        (None, "give its StateSharding"),
    ],
)
def test_a_sharding_that_cannot_be_is_refused(sharding: dict[str, object] | None, words: str) -> None:
    wire = None if sharding is None else msgspec.convert(sharding, ShardingDescription)
    for tp_size in (1, 2) if wire else (2,):
        with pytest.raises(ProtocolError, match=words):
            facts_of(with_sharding(described("mamba1", tp_size), wire))


def test_a_sharding_of_keys_and_values_is_refused() -> None:
    description = describe(attention(FullAttentionSpec, "full"))
    sharding = msgspec.convert({"conv": [[X]], "heads": 8}, ShardingDescription)
    with pytest.raises(ProtocolError, match="buffer full cannot be: it says how ranks share states, and keeps none"):
        facts_of(with_sharding(description, sharding))


@pytest.mark.parametrize(
    "sharding", [{"conv": [[X] * 17]}, {"conv": [[X]] * 17}, {"conv": [[]]}, {"conv": [[X | {"units": 0}]]}]
)
def test_a_sharding_is_bounded_on_the_wire(sharding: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(sharding | {"heads": 1}, ShardingDescription)


def test_more_parts_than_a_description_has_are_not_sent() -> None:
    segments = tuple(Segment(name=f"x{place}", channels=2, units=1) for place in range(17))
    spec = replace(FAMILIES["short convolution"].spec, shapes=((3, 34),))
    cache = PagedStateCache(spec, num_layers=1, num_blocks=2, sharding=StateSharding(conv=(segments,), heads=0))
    with pytest.raises(ProtocolError, match="how ranks share the states cannot be described"):
        describe(cache)
