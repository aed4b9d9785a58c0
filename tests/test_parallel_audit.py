"""The audit of moves between ranks: right ones pass, and each kind of wrong cut is named."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

from pdtx.errors import ParallelError, PlanError
from pdtx.kvspec import FullAttentionSpec, KVCacheSpec, MambaSpec, MLAAttentionSpec, Segment, StateSharding
from pdtx.parallel import Box, Cut, RankTransfer, audit_moves, transfers

MAMBA2 = StateSharding(
    conv=((
        Segment(name="x", channels=32, units=8), Segment(name="B", channels=8, units=2),
        Segment(name="C", channels=8, units=2),
    ),),
    heads=8,
)  # fmt: skip
STATES = MambaSpec(block_size=16, shapes=((3, 48), (8, 4, 6)), dtypes=("bfloat16", "float32"))
SIZES = (1, 2, 4, 8)


def full(heads: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=8, dtype="bfloat16")


@pytest.mark.parametrize("heads", [1, 2, 4, 6, 8])
def test_all_that_transfers_makes_of_heads_passes(heads: int) -> None:
    for src_tp, dst_tp in product(SIZES, SIZES):
        try:
            moves = transfers(full(heads), src_tp, dst_tp)
        except ParallelError:
            continue
        audit_moves(full(heads), moves, src_tp, dst_tp)


def test_all_that_transfers_makes_of_states_and_copies_passes() -> None:
    latent = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=20, dtype="bfloat16")
    for src_tp, dst_tp in product(SIZES, SIZES):
        audit_moves(STATES, transfers(STATES, src_tp, dst_tp, MAMBA2), src_tp, dst_tp, MAMBA2)
        audit_moves(latent, transfers(latent, src_tp, dst_tp), src_tp, dst_tp)


def test_another_copy_is_as_good() -> None:
    """Of one head on two ranks either may be read."""
    moves = transfers(full(1), 2, 1)
    audit_moves(full(1), [replace(move, src_rank=1) for move in moves], 2, 1)


def flat_half(moves: list[RankTransfer]) -> list[RankTransfer]:
    """The convolution state as one run of channels: the sum is right, and no byte is written twice."""
    heads = {move.dst_rank: [box for box in move.boxes if box.part == "ssm"] for move in moves}
    return [
        RankTransfer(0, rank, (Box((Cut("channel", rank * 24, 0, 24),), "conv"), *heads[rank])) for rank in range(2)
    ]


def swapped(moves: list[RankTransfer]) -> list[RankTransfer]:
    return [replace(moves[0], boxes=moves[1].boxes), replace(moves[1], boxes=moves[0].boxes)]


WRONG: dict[str, tuple[KVCacheSpec, StateSharding | None, Callable[[list[RankTransfer]], list[RankTransfer]], str]] = {
    "a state cut as one flat half": (
        STATES, MAMBA2, flat_half,
        "rank 0 would get channel of conv 16 of the model from rank 0 in the place of 32",
    ),
    "heads swapped": (
        full(4), None, swapped, "rank 0 would get KV head 2 of the model from rank 0 in the place of 0",
    ),
    "a rank without its heads": (full(4), None, lambda moves: moves[:1], "rank 1 gets KV head 2 of the model 0 times"),
    "a head twice": (full(4), None, lambda moves: [*moves, moves[1]], "rank 1 gets KV head 2 of the model 2 times"),
    "heads beyond the last": (
        full(4), None, lambda moves: [RankTransfer(0, 0, (Box((Cut("head", 3, 0, 2),)),)), moves[1]],
        "KV head 0..2 of rank 0 lie outside what ranks keep",
    ),
    "heads of the state missed": (
        STATES, MAMBA2,
        lambda moves: [replace(move, boxes=tuple(box for box in move.boxes if box.part != "ssm")) for move in moves],
        "rank 0 gets head of the state 0 of the model 0 times",
    ),
    "a copy too many": (
        MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=20, dtype="bfloat16"), None,
        lambda moves: [*moves, moves[0]], "rank 0 gets 2 copies of what every rank keeps whole",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_moves_are_named(fault: str) -> None:
    spec, sharding, break_it, words = WRONG[fault]
    moves = list(transfers(spec, 1, 2, sharding))
    with pytest.raises(PlanError, match=f"audit: {words}"):
        audit_moves(spec, break_it(moves), 1, 2, sharding)
