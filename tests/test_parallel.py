"""Which rank holds which heads, and who sends what to whom (case H2's table)."""

import pytest

from pdtx.errors import ModelError, ParallelError, SpecError
from pdtx.kvspec import FullAttentionSpec, KVCacheSpec, MambaSpec, MLAAttentionSpec, Segment, StateSharding
from pdtx.models import layer_specs, load_config, preset_names, state_sharding
from pdtx.parallel import Box, Cut, heads_of_rank, rank_spec, sources, transfers, unread_ranks
from tests.heads_taken import HEADS_TAKEN


def attention(heads: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=128, dtype="bfloat16")


MLA = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype="bfloat16")


def global_heads(src_rank: int, src_tp: int, heads: int, boxes: tuple[Box, ...]) -> list[int]:
    """The model's heads that boxes take from a source rank."""
    own = heads_of_rank(src_rank, src_tp, heads)
    cuts = [cut for box in boxes for cut in box.cuts]
    return [own[cut.src + step] for cut in cuts for step in range(cut.count)]


@pytest.mark.parametrize("case", HEADS_TAKEN)
def test_the_tables_rows(case: tuple[int, int, int]) -> None:
    (src_tp, dst_tp, heads), expected = case, HEADS_TAKEN[case]
    moves = transfers(attention(heads), src_tp, dst_tp)
    for rank in range(dst_tp):
        found = [
            (move.src_rank, global_heads(move.src_rank, src_tp, heads, move.boxes))
            for move in moves
            if move.dst_rank == rank
        ]
        assert found == expected[rank]


@pytest.mark.parametrize(
    ("src_tp", "dst_tp", "expected"), [(8, 4, [0, 2, 4, 6]), (4, 8, [0, 0, 1, 1, 2, 2, 3, 3]), (2, 2, [0, 1])]
)
def test_latent_vectors_come_from_one_of_their_copies(src_tp: int, dst_tp: int, expected: list[int]) -> None:
    moves = transfers(MLA, src_tp, dst_tp)
    assert [(move.src_rank, move.dst_rank, move.boxes) for move in moves] == [
        (src, dst, (Box(),)) for dst, src in enumerate(expected)
    ]


def test_ranks_that_nobody_reads_are_named() -> None:
    assert unread_ranks(transfers(attention(2), 8, 1), 8) == [1, 2, 3, 5, 6, 7]
    assert unread_ranks(transfers(attention(1), 2, 1), 2) == [1]
    assert unread_ranks(transfers(MLA, 8, 4), 8) == [1, 3, 5, 7]
    assert unread_ranks(transfers(attention(8), 4, 2), 4) == []


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12])
def test_every_head_of_every_destination_rank_comes_once_from_who_holds_it(heads: int) -> None:
    degrees = [tp for tp in (1, 2, 3, 4, 6, 8, 12, 16, 24) if heads % tp == 0 or tp % heads == 0]
    for src_tp in degrees:
        for dst_tp in degrees:
            moves = transfers(attention(heads), src_tp, dst_tp)
            for rank in range(dst_tp):
                mine, filled = heads_of_rank(rank, dst_tp, heads), list[int]()
                for move in (move for move in moves if move.dst_rank == rank):
                    held = heads_of_rank(move.src_rank, src_tp, heads)
                    for box in move.boxes or (Box((Cut("head", 0, 0, heads),)),):
                        for cut in box.cuts or (Cut("head", 0, 0, heads),):
                            for step in range(cut.count):
                                assert held[cut.src + step] == mine[cut.dst + step]
                                filled.append(cut.dst + step)
                assert sorted(filled) == list(range(len(mine)))


def test_copies_are_read_evenly() -> None:
    """Four ranks each keep one of two heads: each destination rank reads a copy of its own."""
    assert [sources(rank, 4, 4, 2)[0].src_rank for rank in range(4)] == [0, 1, 2, 3]
    assert [sources(rank, 8, 4, 2)[0].src_rank for rank in range(4)] == [0, 2, 4, 6]


@pytest.mark.parametrize(("tp", "heads"), [(4, 3), (3, 4), (16, 24)])
def test_heads_that_cannot_be_divided(tp: int, heads: int) -> None:
    with pytest.raises(ParallelError, match=f"{heads} KV heads cannot be divided over tensor_parallel_size {tp}"):
        transfers(attention(heads), 1, tp)
    with pytest.raises(ParallelError, match=f"{heads} KV heads cannot be divided over tensor_parallel_size {tp}"):
        transfers(attention(heads), tp, 1)


def test_ranks_that_are_not_there() -> None:
    with pytest.raises(ParallelError, match=r"rank 4 is not one of 0\.\.3"):
        heads_of_rank(4, 4, 8)
    with pytest.raises(ParallelError, match="tensor_parallel_size 0"):
        heads_of_rank(0, 0, 8)


class TestRankSpec:
    @pytest.mark.parametrize(("tp", "own"), [(1, 8), (2, 4), (8, 1), (16, 1)])
    def test_heads_are_divided_or_copied(self, tp: int, own: int) -> None:
        assert rank_spec(attention(8), tp).num_kv_heads == own

    def test_latent_vectors_are_whole_on_every_rank(self) -> None:
        assert rank_spec(MLA, 8) is MLA

    def test_states_need_their_sharding(self) -> None:
        with pytest.raises(ParallelError, match="StateSharding"):
            rank_spec(MAMBA2, 2)
        wrong = StateSharding(conv=((Segment(name="x", channels=8, units=2),),), heads=4)
        with pytest.raises(ParallelError, match="segments of 8 channels do not make up"):
            rank_spec(MAMBA2, 2, wrong)
        assert rank_spec(MAMBA2, 1) is MAMBA2


# Mamba 2 with 4 heads of 2, one group of 3 for B and C: [x 8 | B 3 | C 3].
MAMBA2 = MambaSpec(block_size=64, shapes=((3, 14), (4, 2, 3)), dtypes=("bfloat16", "float32"))
SHARDING = StateSharding(
    conv=((
        Segment(name="x", channels=8, units=4),
        Segment(name="B", channels=3, units=1),
        Segment(name="C", channels=3, units=1),
    ),),
    heads=4,
)  # fmt: skip


def test_convolution_states_are_cut_in_x_b_and_c() -> None:
    """Each rank has [its x | B | C]: halving the channels instead would take C's for x's."""
    assert rank_spec(MAMBA2, 2, SHARDING).shapes == ((3, 4 + 3 + 3), (2, 2, 3))
    first, second = transfers(MAMBA2, 1, 2, SHARDING)
    assert first.boxes == (
        Box((Cut("channel", 0, 0, 4),), "conv"),
        Box((Cut("channel", 8, 4, 3),), "conv"),
        Box((Cut("channel", 11, 7, 3),), "conv"),
        Box((Cut("head", 0, 0, 2),), "ssm"),
    )
    assert second.boxes == (
        Box((Cut("channel", 4, 0, 4),), "conv"),
        Box((Cut("channel", 8, 4, 3),), "conv"),
        Box((Cut("channel", 11, 7, 3),), "conv"),
        Box((Cut("head", 2, 0, 2),), "ssm"),
    )
    joined = transfers(MAMBA2, 2, 1, SHARDING)
    assert [move.src_rank for move in joined] == [0, 1]
    assert joined[1].boxes == (Box((Cut("channel", 0, 4, 4),), "conv"), Box((Cut("head", 0, 2, 2),), "ssm"))


def test_segments_of_unequal_units_are_refused() -> None:
    with pytest.raises(SpecError, match="segment B: 7 channels are not 2 equal units"):
        Segment(name="B", channels=7, units=2)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", preset_names())
def test_a_ranks_spec_is_what_the_model_rules_say(name: str, tp: int) -> None:
    """Two ways to a rank's share: from the config for so many ranks, and from the whole model's spec."""
    config = load_config(name)
    sharding, whole = state_sharding(config), layer_specs(config)

    def shares() -> dict[str, KVCacheSpec]:
        return {layer: rank_spec(spec, tp, sharding) for layer, spec in whole.items()}

    try:
        expected = layer_specs(config, tensor_parallel_size=tp)
    except ModelError:
        with pytest.raises(ParallelError):
            shares()
    else:
        assert shares() == expected
