"""The audit of moves between ranks: right ones pass, and each kind of wrong cut is named."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

from pdtx.errors import ParallelError, PlanError
from pdtx.kvspec import FullAttentionSpec, KVCacheSpec, MambaSpec, MLAAttentionSpec, Segment, StateSharding
from pdtx.parallel import Box, Cut, RankTransfer, audit_moves, transfers
from pdtx.plan import CacheSide, plan_request

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
        r"rank 0 would get channel of conv 16 of the model \(segment x\) from rank 0 in the place of 32 \(segment B\)$",
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


def each_box(change: Callable[[Box], Box]) -> Callable[[list[RankTransfer]], list[RankTransfer]]:
    return lambda moves: [replace(move, boxes=tuple(map(change, move.boxes))) for move in moves]


HALF = Cut("channel", 0, 0, 4)
NOT_JUDGED: dict[str, tuple[Callable[[list[RankTransfer]], list[RankTransfer]], str]] = {
    "a source rank counted from the end": (
        lambda moves: [replace(moves[0], src_rank=-1), moves[1]], "nothing moves from rank -1 of 1 to rank 0 of 2",
    ),
    "a source rank that there is not": (
        lambda moves: [replace(moves[0], src_rank=1), moves[1]], "nothing moves from rank 1 of 1 to rank 0 of 2",
    ),
    "a destination rank that there is not": (
        lambda moves: [*moves, replace(moves[0], dst_rank=2)], "nothing moves from rank 0 of 1 to rank 2 of 2",
    ),
    "half of every head": (each_box(lambda box: replace(box, cuts=(*box.cuts, HALF))), ".* must be cut once"),
    "heads cut twice": (each_box(lambda box: replace(box, cuts=2 * box.cuts)), ".* must be cut once"),
    "tokens instead of heads": (
        each_box(lambda box: replace(box, cuts=(replace(box.cuts[0], axis="token"),))), ".* along head",
    ),
    "less than nothing": (
        lambda moves: [replace(moves[0], boxes=(*moves[0].boxes, Box((Cut("head", 0, 0, -1),)))), moves[1]],
        ".* must be cut once",
    ),
    "a part that there is not": (
        lambda moves: [replace(moves[0], boxes=(*moves[0].boxes, Box((), "scales of none"))), moves[1]],
        ".* is of no part",
    ),
    "all heads to a rank of some": (
        lambda moves: [replace(moves[0], boxes=(Box(),)), moves[1]], "KV head 0..4 of rank 0 lie outside",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", NOT_JUDGED)
def test_moves_that_units_cannot_judge_are_refused(fault: str) -> None:
    break_it, words = NOT_JUDGED[fault]
    moves = list(transfers(full(4), 1, 2))
    with pytest.raises(PlanError, match=f"audit: {words}"):
        audit_moves(full(4), break_it(moves), 1, 2)


def test_states_are_cut_along_channels_and_heads_only() -> None:
    moves = list(transfers(STATES, 1, 2, MAMBA2))
    for change in (
        lambda box: replace(box, cuts=(replace(box.cuts[0], axis="step"),)),
        lambda box: replace(box, cuts=(*box.cuts, Cut("step", 0, 0, 1))),
        lambda box: replace(box, part=""),
    ):
        with pytest.raises(PlanError, match="audit: "):
            audit_moves(STATES, each_box(change)(moves), 1, 2, MAMBA2)


def test_copies_come_from_ranks_that_there_are() -> None:
    latent = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=20, dtype="bfloat16")
    with pytest.raises(PlanError, match="audit: nothing moves from rank 9 of 2"):
        audit_moves(latent, [replace(move, src_rank=9) for move in transfers(latent, 2, 2)], 2, 2)


@pytest.mark.parametrize(("spec", "sharding"), [(STATES, MAMBA2), (full(4), None)])
def test_a_requests_plan_is_audited(
    spec: KVCacheSpec, sharding: StateSharding | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes alone would not tell: the wrong moves have the right sum, lie inside, and write nothing twice."""
    break_it = flat_half if sharding else swapped
    wrong = tuple(break_it(list(transfers(spec, 1, 2, sharding))))
    preset = "mamba_sd" if sharding else "flash_attn_nhd"
    src, dst = (CacheSide(layers={"layer": spec}, layout_for=lambda *_: preset, tp_size=size) for size in (1, 2))
    plan_request(src, dst, 20, sharding=sharding)
    monkeypatch.setattr("pdtx.plan.request.transfers", lambda *_: wrong)
    with pytest.raises(PlanError, match="audit: rank 0 would get"):
        plan_request(src, dst, 20, sharding=sharding)
    monkeypatch.setattr("pdtx.plan.request.audit_moves", lambda *_: None)
    plan_request(src, dst, 20, sharding=sharding)


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_moves_are_named(fault: str) -> None:
    spec, sharding, break_it, words = WRONG[fault]
    moves = list(transfers(spec, 1, 2, sharding))
    with pytest.raises(PlanError, match=f"audit: {words}"):
        audit_moves(spec, break_it(moves), 1, 2, sharding)
