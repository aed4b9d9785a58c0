"""Cases in which others moved wrong bytes, or more pieces than they knew: figures by hand, and the faults themselves.

Each fault is written down as a planner of its own, and the same check that passes the plan must turn it red.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest

from pdtx.errors import PlanError
from pdtx.kvspec import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec
from pdtx.layout import Axis, Layout, PartedLayout, RecordLayout, StridedLayout, any_layout, layout_for, make_layout
from pdtx.models import layer_specs, load_config, preset_names
from pdtx.parallel import Box, Cut, RankTransfer, heads_of_rank, rank_spec, transfers, unread_ranks
from pdtx.plan import CacheSide, Endpoint, Runs, TransferPlan, audit_runs, build_plan, plan_request
from tests.heads_taken import HEADS_TAKEN
from tests.plan_oracle import POISON, Cells, Content, Node, Scene, copy_runs

Int64s = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint16]


def tuples(runs: Runs) -> list[tuple[int, int, int]]:
    return list(zip(runs.src.tolist(), runs.dst.tolist(), runs.nbytes.tolist(), strict=True))


def runs_of(src: Int64s, dst: Int64s, nbytes: int) -> Runs:
    return Runs(src, dst, np.full(len(src), nbytes, np.int64))


def expanded(plan: TransferPlan) -> Runs:
    """(base, stride, count) as a list, expanded by a loop over all axes written for this test."""
    found = list[Int64s]()
    for grid in plan.runs.grids:
        groups = [len(grid.src) // grid.parts], [grid.parts]
        counts = [[axis.count for axis in loops] for loops in (grid.outer, grid.middle, grid.inner)]
        shape = [*counts[0], *groups[0], *counts[1], *groups[1], *counts[2]]
        at = np.indices(shape, dtype=np.int64).reshape(len(shape), -1)
        group, part = len(counts[0]), len(counts[0]) + 1 + len(counts[1])
        segment, loops = at[group] * grid.parts + at[part], np.delete(at, [group, part], axis=0)
        src, dst = grid.src[segment], grid.dst[segment]
        for axis, steps in zip((*grid.outer, *grid.middle, *grid.inner), loops, strict=True):
            src, dst = src + steps * axis.src_stride, dst + steps * axis.dst_stride
        found.append(np.stack((src, dst, grid.nbytes[segment])))
    return Runs(*np.concatenate(found, axis=1))


class TestKernelBlocks:
    """H4: manager's blocks of 768 tokens are 12 kernel blocks of 64; 1,152 bytes a token. Block 3 goes into block 5."""

    spec = MLAAttentionSpec(block_size=768, num_kv_heads=1, head_size=576, dtype="bfloat16")
    layout = any_layout("mla", spec, num_layers=1, num_blocks=8, kernel_block_size=64)
    step, whole = 73_728, 884_736

    @staticmethod
    def padded(stride: int) -> RecordLayout:
        """The same kernel blocks, each so many bytes after its neighbour."""
        axes = Axis("layer", 1, 96 * stride), Axis("block", 96, stride), Axis("token", 64, 1_152)
        return RecordLayout("padded", (*axes, Axis("head", 1, 1_152), Axis("byte", 1_152, 1)), 1, 96 * stride, 12)

    def plan(self, src: Layout, dst: Layout, *, merge: bool) -> Runs:
        return build_plan(Endpoint.of(src, [3]), Endpoint.of(dst, [5]), range(768), merge=merge).flat

    def test_ids_are_expanded(self) -> None:
        assert self.spec.page_size_bytes == self.whole
        assert Endpoint.of(self.layout, [3]).block_ids.tolist() == list(range(36, 48))
        assert Endpoint.of(self.layout, [5]).block_ids.tolist() == list(range(60, 72))

    def test_twelve_pieces_or_one(self) -> None:
        pieces = self.plan(self.layout, self.layout, merge=False)
        assert tuples(pieces) == [
            (2_654_208 + i * 73_728, 60 * 73_728 + i * 73_728, 73_728) for i in range(12)
        ]  # fmt: skip
        assert tuples(self.plan(self.layout, self.layout, merge=True)) == [(2_654_208, 60 * 73_728, 884_736)]

    @pytest.mark.parametrize("merge", [True, False])
    @pytest.mark.parametrize(
        ("src", "dst"), [(0, 0), (73_728, 73_728), (81_920, 73_728), (73_728, 81_920), (81_920, 81_920)]
    )
    def test_only_the_block_arrives(self, src: int, dst: int, merge: bool) -> None:
        sides = [self.padded(stride) if stride else self.layout for stride in (src, dst)]
        flat = self.plan(sides[0], sides[1], merge=merge)
        memory = np.random.default_rng(1).integers(0, 255, sides[0].size_bytes, np.uint8)
        target = np.full(sides[1].size_bytes, 255, np.uint8)
        for start, to, size in tuples(flat):
            assert (target[to : to + size] == 255).all(), "no two pieces may overlap"
            target[to : to + size] = memory[start : start + size]
        for i in range(12):
            read, write = (36 + i) * (src or self.step), (60 + i) * (dst or self.step)
            assert np.array_equal(target[write : write + self.step], memory[read : read + self.step])
            target[write : write + self.step] = 255
        assert (target == 255).all()
        assert flat.total == self.whole

    @pytest.mark.parametrize(("src", "dst"), [(81_920, 73_728), (73_728, 81_920), (81_920, 81_920)])
    def test_padded_pages_stay_pieces(self, src: int, dst: int) -> None:
        """Padding is not payload, so nothing is merged over it, whether both sides have it or one."""
        flat = self.plan(self.padded(src), self.padded(dst), merge=True)
        assert tuples(flat) == [((36 + i) * src, (60 + i) * dst, 73_728) for i in range(12)]

    @pytest.mark.parametrize(("src", "dst"), [(81_920, 73_728), (81_920, 81_920)])
    def test_pages_that_the_spec_pads(self, src: int, dst: int) -> None:
        """The same where the manager counts blocks of 64 itself, and a spec says how far they lie apart."""
        own = replace(self.spec, block_size=64)
        sides = [
            any_layout("mla", replace(own, page_size_padded=stride), num_layers=1, num_blocks=96)
            for stride in (src, dst)
        ]
        ends = [Endpoint.of(side, range(first, first + 12)) for side, first in zip(sides, (36, 60), strict=True)]
        flat = build_plan(ends[0], ends[1], range(768)).flat
        assert tuples(flat) == [((36 + i) * src, (60 + i) * dst, 73_728) for i in range(12)]
        assert flat.total == self.whole

    def test_the_managers_length_on_the_kernels_stride(self) -> None:
        """The fault: ids were expanded, the length was not."""
        ids = [Endpoint.of(self.layout, [block]).block_ids * self.step for block in (3, 5)]
        with pytest.raises(PlanError, match="length 884736 > stride 73728"):
            audit_runs(runs_of(ids[0], ids[1], self.whole), self.layout, self.layout, self.whole)

    def test_the_kernels_length_on_the_managers_ids(self) -> None:
        """The fault the other way round: neither was expanded, so a twelfth of the block moves, of another block."""
        ids = [np.array([block * self.step]) for block in (3, 5)]
        with pytest.raises(PlanError, match="the runs hold 73728 bytes, the request has 884736"):
            audit_runs(runs_of(ids[0], ids[1], self.step), self.layout, self.layout, self.whole)


def pool_ids(seed: int, *, consecutive: bool) -> Int64s:
    """63 blocks out of 130, none beside another unless consecutive."""
    if consecutive:
        return np.arange(5 + seed, 5 + seed + 63, dtype=np.int64)
    return np.random.default_rng(seed).permutation(np.arange(1, 130, 2, dtype=np.int64))[:63]


class TestPieces:
    """H9: 28 layers, 8 heads of 128, bfloat16, 63 blocks of 16 tokens."""

    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")

    def plans(
        self, name: str, *, consecutive: tuple[bool, bool] = (False, False), merge: bool = True, dst_tp: int = 1
    ) -> list[TransferPlan]:
        ends = [
            Endpoint.of(
                make_layout(name, rank_spec(self.spec, tp), num_layers=28, num_blocks=130),
                pool_ids(seed, consecutive=consecutive[seed]),
            )
            for seed, tp in enumerate((1, dst_tp))
        ]
        return [
            build_plan(ends[0], ends[1], range(63 * 16), merge=merge, boxes=move.boxes)
            for move in transfers(self.spec, 1, dst_tp)
        ]

    @pytest.mark.parametrize(
        ("name", "consecutive", "merge", "dst_tp", "pieces", "nbytes"),
        [
            ("flash_attn_nhd", (False, False), True, 1, 3_528, 32_768),
            ("flash_attn_nhd", (True, True), True, 1, 56, 2_064_384),
            ("flash_attn_nhd", (True, True), False, 1, 3_528, 32_768),
            ("flash_attn_nhd", (True, False), True, 1, 3_528, 32_768),
            ("flash_attn_nhd", (False, True), True, 1, 3_528, 32_768),
            ("flash_attn_hnd", (False, False), True, 1, 3_528, 32_768),
            ("flash_attn_hnd", (True, True), True, 1, 56, 2_064_384),
            ("sglang", (False, False), True, 1, 3_528, 32_768),
            ("flashinfer_hnd", (False, False), True, 1, 1_764, 65_536),
            ("flashinfer_hnd", (True, True), True, 1, 28, 4_128_768),
            ("vllm_lbnhc", (False, False), True, 1, 1_764, 65_536),
            ("vllm_lbnhc", (True, True), True, 1, 28, 4_128_768),
            ("flash_attn_nhd_cross_layer", (False, False), True, 1, 63, 1_835_008),
            ("flash_attn_nhd_cross_layer", (True, True), True, 1, 1, 115_605_504),
            ("flash_attn_nhd_cross_layer", (True, True), False, 1, 63, 1_835_008),
            ("flashinfer_hnd_cross_layer", (False, False), True, 1, 63, 1_835_008),
            ("vllm_blhnc", (False, False), True, 1, 63, 1_835_008),
            ("vllm_bhlnc", (True, True), True, 1, 1, 115_605_504),
            ("flash_attn_hnd", (False, False), True, 2, 3_528, 16_384),
            ("flashinfer_hnd", (False, False), True, 2, 3_528, 16_384),
            ("flash_attn_nhd", (False, False), True, 2, 56_448, 1_024),
            ("flashinfer_nhd", (False, False), True, 2, 56_448, 1_024),
        ],
    )
    def test_row(
        self, name: str, consecutive: tuple[bool, bool], merge: bool, dst_tp: int, pieces: int, nbytes: int
    ) -> None:
        plans = self.plans(name, consecutive=consecutive, merge=merge, dst_tp=dst_tp)
        assert sum(plan.nbytes for plan in plans) == 115_605_504
        for plan in plans:
            assert plan.sizes == {nbytes: pieces}
            assert (len(plan.flat), set(plan.flat.nbytes.tolist())) == (pieces, {nbytes})
            assert plan.nbytes == plan.flat.total == pieces * nbytes == 115_605_504 // dst_tp

    @pytest.mark.parametrize("dst_tp", [1, 2])
    @pytest.mark.parametrize(
        "name", ["flash_attn_nhd", "flash_attn_hnd", "flashinfer_nhd", "flash_attn_nhd_cross_layer"]
    )
    def test_strides_and_counts_are_the_list(self, name: str, dst_tp: int) -> None:
        for plan in self.plans(name, merge=False, dst_tp=dst_tp):
            found = expanded(plan)
            for side in ("src", "dst", "nbytes"):
                assert np.array_equal(getattr(found, side), getattr(plan.flat, side))

    def test_whole_pages_for_half_of_the_heads(self) -> None:
        """The fault: one read of the whole page for each D rank; twice the bytes."""
        layout = make_layout("flash_attn_nhd", self.spec, num_layers=28, num_blocks=130)
        ends = [Endpoint.of(layout, pool_ids(seed, consecutive=False)) for seed in range(2)]
        pages = build_plan(ends[0], ends[1], range(63 * 16)).flat
        with pytest.raises(PlanError, match="the runs hold 115605504 bytes, the request has 57802752"):
            audit_runs(pages, layout, layout, self.plans("flash_attn_nhd", dst_tp=2)[0].nbytes)

    def test_whole_pages_do_not_fit_the_halved_ones(self) -> None:
        """Nor can they be planned without a box: the sides have another number of heads."""
        sides = [
            make_layout("flash_attn_nhd", rank_spec(self.spec, tp), num_layers=28, num_blocks=130) for tp in (1, 2)
        ]
        ends = [Endpoint.of(side, pool_ids(seed, consecutive=False)) for seed, side in enumerate(sides)]
        with pytest.raises(PlanError, match=r"number of KV heads differs: source .* has 8, destination .* has 4"):
            build_plan(ends[0], ends[1], range(63 * 16))


PAIRS = [
    ("flash_attn_nhd", "flash_attn_nhd"),
    ("flash_attn_hnd", "flash_attn_hnd"),
    ("flashinfer_hnd", "flash_attn_nhd"),
    ("vllm_lbhnc", "flashinfer_nhd"),
    ("flash_attn_hnd_cross_layer", "sglang"),
]


class TestRanks:
    """H2: 2 layers, 40 tokens, blocks of 16, heads of 8 two-byte elements; what each rank has in memory."""

    tokens, layers = 40, 2
    tables: tuple[list[int], list[int]] = ([3, 1, 5], [2, 6, 4])

    def spec(self, heads: int) -> FullAttentionSpec:
        return FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=8, dtype="bfloat16")

    def layout(self, name: str, heads: int, tp_size: int) -> StridedLayout:
        return make_layout(name, rank_spec(self.spec(heads), tp_size), num_layers=self.layers, num_blocks=7)

    def codes(self, heads: int, own: list[int]) -> Words:
        """((((l * 2 + kv) * P + p) * H + h) * D + d, of the heads that a rank has: (layer, kv, token, head, channel)"""
        layer, kv, token, head, channel = np.ogrid[: self.layers, :2, : self.tokens, :heads, :8]
        codes = (((layer * 2 + kv) * self.tokens + token) * heads + head) * 8 + channel
        return codes[:, :, :, own].astype(np.uint16)

    def view(self, memory: Words, layout: StridedLayout) -> Words:
        names = ("layer", "kv", "block", "token", "head", "channel")
        shape, strides = zip(*((layout.extent(name), layout.stride(name)) for name in names), strict=True)
        return np.lib.stride_tricks.as_strided(memory, shape, strides)

    def places(self, side: int) -> tuple[Int64s, Int64s]:
        token = np.arange(self.tokens)
        return np.array(self.tables[side])[token // 16], token % 16

    def source(self, name: str, heads: int, tp_size: int, own: list[int]) -> Words:
        layout = self.layout(name, heads, tp_size)
        memory = np.full(layout.size_bytes // 2, 0xBEEF, np.uint16)
        block, place = self.places(0)
        self.view(memory, layout)[:, :, block, place] = self.codes(heads, own)
        return memory

    def carry(
        self, moves: tuple[RankTransfer, ...], names: tuple[str, str], heads: int, tps: tuple[int, int]
    ) -> list[int]:
        """Send as moves say; return the number of wrong elements of each D rank, its foreign ones included."""
        layouts = [self.layout(name, heads, tp) for name, tp in zip(names, tps, strict=True)]
        ends = [Endpoint.of(layout, table) for layout, table in zip(layouts, self.tables, strict=True)]
        targets = [np.full(layouts[1].size_bytes // 2, 0xDEAD, np.uint16) for _ in range(tps[1])]
        for move in moves:
            plan = build_plan(ends[0], ends[1], range(self.tokens), boxes=move.boxes)
            memory = self.source(names[0], heads, tps[0], list(heads_of_rank(move.src_rank, tps[0], heads)))
            for src, dst, nbytes in tuples(plan.flat):
                targets[move.dst_rank].view(np.uint8)[dst : dst + nbytes] = memory.view(np.uint8)[src : src + nbytes]
        wrong, (block, place) = list[int](), self.places(1)
        for rank, target in enumerate(targets):
            own = [head for head in range(heads) if self.holds(rank, tps[1], head, heads)]
            expected = np.full(len(target), 0xDEAD, np.uint16)
            self.view(expected, layouts[1])[:, :, block, place] = self.codes(heads, own)
            wrong.append(int((target != expected).sum()))
        return wrong

    @staticmethod
    def holds(rank: int, tp_size: int, head: int, heads: int) -> bool:
        return head * tp_size // heads == rank if tp_size < heads else rank * heads // tp_size == head

    @pytest.mark.parametrize("names", PAIRS, ids="-".join)
    @pytest.mark.parametrize("case", HEADS_TAKEN)
    def test_each_rank_has_its_own_heads(self, case: tuple[int, int, int], names: tuple[str, str]) -> None:
        (src_tp, dst_tp, heads), sources = case, HEADS_TAKEN[case]
        moves = transfers(self.spec(heads), src_tp, dst_tp)
        assert self.carry(moves, names, heads, (src_tp, dst_tp)) == [0] * dst_tp
        for rank in range(dst_tp):
            found = [
                (move.src_rank, [
                    heads_of_rank(move.src_rank, src_tp, heads)[cut.src + step]
                    for box in move.boxes for cut in box.cuts for step in range(cut.count)
                ])
                for move in moves if move.dst_rank == rank
            ]  # fmt: skip
            assert found == sources[rank]
        read = {rank for taken in sources.values() for rank, _ in taken}
        assert unread_ranks(moves, src_tp) == sorted(set(range(src_tp)) - read)

    @pytest.mark.parametrize(("src_tp", "dst_tp", "sources"), [(8, 4, [0, 2, 4, 6]), (4, 8, [0, 0, 1, 1, 2, 2, 3, 3])])
    def test_latent_vectors(self, src_tp: int, dst_tp: int, sources: list[int]) -> None:
        spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype="bfloat16")
        layout = any_layout("mla", spec, num_layers=2, num_blocks=7)
        moves = transfers(spec, src_tp, dst_tp)
        assert [(move.src_rank, move.dst_rank) for move in moves] == [(src, dst) for dst, src in enumerate(sources)]
        for move in moves:
            plan = build_plan(
                Endpoint.of(layout, [3, 1, 5]), Endpoint.of(layout, [2, 6, 4]), range(40), boxes=move.boxes
            )
            assert plan.nbytes == 2 * 40 * 8 * 2

    @pytest.mark.parametrize(
        ("src_tp", "dst_tp", "heads", "wire", "unique"),
        [
            (4, 2, 8, 132_120_576, 132_120_576),
            (8, 16, 8, 264_241_152, 132_120_576),
            (1, 4, 2, 66_060_288, 33_030_144),
        ],
    )
    def test_bytes(self, src_tp: int, dst_tp: int, heads: int, wire: int, unique: int) -> None:
        """32 layers, heads of 128, bfloat16, 1,000 tokens in 63 blocks of 16, whole blocks."""
        spec = FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=128, dtype="bfloat16")
        ends = [
            Endpoint.of(
                make_layout("flash_attn_hnd", rank_spec(spec, tp), num_layers=32, num_blocks=130),
                pool_ids(seed, consecutive=False),
            )
            for seed, tp in enumerate((src_tp, dst_tp))
        ]
        plans = [
            build_plan(ends[0], ends[1], range(1_008), boxes=move.boxes) for move in transfers(spec, src_tp, dst_tp)
        ]
        assert sum(plan.nbytes for plan in plans) == sum(plan.flat.total for plan in plans) == wire
        assert 63 * 32 * spec.page_size_bytes == unique
        if (src_tp, dst_tp) == (4, 2):
            assert [plan.sizes for plan in plans] == [{8_192: 63 * 32 * 2}] * 4

    def test_bytes_of_latent_vectors(self) -> None:
        spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype="bfloat16")
        layout = any_layout("mla", spec, num_layers=61, num_blocks=33)
        ends = Endpoint.of(layout, range(1, 17)), Endpoint.of(layout, range(16, 32))
        plans = [build_plan(*ends, range(1_024), boxes=move.boxes) for move in transfers(spec, 8, 4)]
        assert [plan.nbytes for plan in plans] == [71_958_528] * 4

    @pytest.mark.parametrize("rank", range(4))
    def test_one_slice_for_each_rank(self, rank: int) -> None:
        """The fault, 1 rank to 4 with 2 heads: slice r of 4. The last two lie outside the page; the second is wrong."""
        wrong = (RankTransfer(0, rank, (Box((Cut("head", rank, 0, 1),)),)),)
        if rank >= 2:
            with pytest.raises(
                PlanError, match=f"KV heads {rank}..{rank + 1} lie outside the 2 that flash_attn_hnd has"
            ):
                self.carry(wrong, ("flash_attn_hnd", "flash_attn_hnd"), 2, (1, 4))
        else:
            found = self.carry(wrong, ("flash_attn_hnd", "flash_attn_hnd"), 2, (1, 4))[rank]
            assert found == (0 if rank == 0 else self.layers * 2 * self.tokens * 8)

    @pytest.mark.parametrize("rank", [2, 3])
    def test_one_slice_for_each_rank_as_bare_offsets(self, rank: int) -> None:
        """The same from somebody who adds r slices to the page's address: in the last block, outside the region."""
        src, dst = (self.layout("flash_attn_hnd", 2, tp) for tp in (1, 4))
        slice_bytes = 16 * 8 * 2
        page, first = (self.layers * 2 * 7 - 1) * 2 * slice_bytes, np.zeros(1, np.int64)
        with pytest.raises(PlanError, match=rf"beyond its region of {src.size_bytes}"):
            audit_runs(runs_of(first + page + rank * slice_bytes, first, slice_bytes), src, dst, slice_bytes)


Planner = Callable[[Scene], list[Runs]]
"""Returns the runs of a scene of one rank a side, for each of a layer's buffers."""


@dataclass(frozen=True)
class Verdict:
    """What came of a transfer: refused by the audit, or so many bytes wrong."""

    refused: str = ""
    wrong: int = 0

    @property
    def red(self) -> bool:
        return bool(self.refused) or self.wrong > 0


def verdict(scene: Scene, runs: Runs) -> Verdict:
    """Audit runs, copy as they say, compare every byte of the destination."""
    expected = scene.expected(whole := scene.whole(), 0)
    try:
        audit_runs(runs, scene.src.layout, scene.dst.layout, int(np.count_nonzero(expected != POISON)))
    except PlanError as error:
        return Verdict(refused=str(error))
    memory: Cells = scene.poisoned()
    copy_runs(scene.source(whole, 0), memory, runs)
    return Verdict(wrong=int((memory != expected).sum()))


def planned(scene: Scene, *, src: Endpoint | None = None, dst: Endpoint | None = None) -> Runs:
    """Return pdtx's plan, or what it would be if one side were another."""
    return build_plan(src or scene.src.endpoint, dst or scene.dst.endpoint, scene.tokens).flat


def scene_of(
    names: tuple[str, str], tables: tuple[list[int], list[int]], tokens: range, *, kernel: int | None = None,
    block_size: int = 4, heads: int = 2,
) -> Scene:  # fmt: skip
    """Two layers, heads of 3 two-byte channels, 8 blocks a side."""
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=heads, head_size=3, dtype="float16")
    src, dst = (
        Node(
            any_layout(name, spec, num_layers=2, num_blocks=8, kernel_block_size=kernel), np.array(table), 1, block_size
        )
        for name, table in zip(names, tables, strict=True)
    )
    content = Content(3, 2, ((heads, 1),))
    return Scene(spec, src, dst, tokens, range(2), 0, {"key": content, "value": content})


def alone(name: str, spec: KVCacheSpec, nbytes: int) -> Scene:
    """One latent buffer, one rank a side."""
    layout = any_layout(name, spec, num_layers=2, num_blocks=8)
    nodes = [Node(layout, np.array(table), 1, 4) for table in ([3, 1, 5], [2, 6, 4])]
    together = "indexer" in name
    content = {"": Content(nbytes, 1, ((1, 1),), replicated=True)}
    return Scene(spec, nodes[0], nodes[1], range(10), range(2), 0, content, together=together)


class TestFiveRoots:
    """Where the wrong addresses of the field came from. Each fault must be refused, or seen in the bytes."""

    TABLES = [3, 2, 5], [2, 6, 4]

    @pytest.mark.parametrize(
        ("real", "guessed"),
        [
            ("flash_attn_nhd", "flashinfer_nhd"),
            ("flashinfer_nhd", "flash_attn_nhd"),
            ("flash_attn_nhd", "flash_attn_hnd"),
            ("vllm_lbnhc", "flashinfer_nhd"),
            ("cpu_attn_lbhnc", "vllm_lbhnc"),
        ],
    )
    @pytest.mark.parametrize("heads", [1, 2, 4])
    def test_layout_guessed_from_the_shape(self, real: str, guessed: str, heads: int) -> None:
        """Both readings have the same bytes, and with 4 tokens and 4 heads, or 2 blocks, the same shape."""
        scene = scene_of((real, "flashinfer_hnd"), self.TABLES, range(10), heads=heads)
        wrong = any_layout(guessed, scene.spec, num_layers=2, num_blocks=8)
        assert wrong.size_bytes == scene.src.layout.size_bytes
        assert not verdict(scene, planned(scene)).red
        found = verdict(scene, planned(scene, src=Endpoint.of(wrong, scene.src.table)))
        assert found.red or (heads == 1 and {real, guessed} == {"flash_attn_nhd", "flash_attn_hnd"}), (
            "one head has no order"
        )

    @pytest.mark.parametrize(
        ("src_tp", "dst_tp", "heads", "head_of"),
        [
            (1, 4, 2, lambda rank: rank % 2),  # round robin instead of neighbours
            (8, 16, 8, lambda rank: rank % 8),
            (2, 4, 8, lambda rank: rank * 2 % 4),  # a head range that begins at every rank anew
        ],
    )
    def test_heads_by_the_rank_instead_of_the_model(
        self, src_tp: int, dst_tp: int, heads: int, head_of: Callable[[int], int]
    ) -> None:
        ranks = TestRanks()
        share = max(1, heads // dst_tp)
        per_source, moves = max(1, heads // src_tp), list[RankTransfer]()
        for rank in range(dst_tp):
            head = head_of(rank)
            moves.append(RankTransfer(head // per_source, rank, (Box((Cut("head", head % per_source, 0, share),)),)))
        names = ("flash_attn_nhd", "flashinfer_hnd")
        assert sum(ranks.carry(tuple(moves), names, heads, (src_tp, dst_tp))) > 0
        right = transfers(ranks.spec(heads), src_tp, dst_tp)
        assert ranks.carry(right, names, heads, (src_tp, dst_tp)) == [0] * dst_tp

    @pytest.mark.parametrize("fault", ["from the tail", "from the head", "look-ahead blocks", "none"])
    def test_lists_paired_by_count(self, fault: str) -> None:
        """The receiver holds two blocks of four already, and the sender has one block more than the prompt needs."""
        src_table, dst_table = [3, 1, 5, 2, 7], [1, 2, 6, 4]
        scene = scene_of(("flash_attn_nhd", "flash_attn_nhd"), (src_table, dst_table), range(8, 15))
        wanted = {
            "from the tail": src_table[-2:],  # counts the look-ahead block as the prompt's
            "from the head": src_table[:2],
            "look-ahead blocks": src_table[1:3],
            "none": src_table[2:4],
        }[fault]
        by_count = Endpoint.of(scene.src.layout, [0, 0, *wanted])
        assert verdict(scene, planned(scene, src=by_count)).red is (fault != "none")

    @pytest.mark.parametrize("name", ["flash_attn_nhd", "flashinfer_hnd", "vllm_lbnhc"])
    def test_the_managers_ids_taken_for_the_kernels(self, name: str) -> None:
        """Blocks of 4 tokens that a kernel sees as two of 2."""
        scene = scene_of((name, name), self.TABLES, range(10), kernel=2)
        assert not verdict(scene, planned(scene)).red
        layout = scene.src.layout
        for wrong in (np.repeat(scene.src.table, 2), scene.src.table.repeat(2) + np.tile([0, 1], 3)):
            assert verdict(scene, planned(scene, src=Endpoint(layout, wrong))).red
        # Ids multiplied, lengths those of the manager's block.
        steps = [node.endpoint.block_ids for node in (scene.src, scene.dst)]
        page = layout.bytes_per_block
        assert verdict(scene, runs_of(steps[0] * page, steps[1] * page, 2 * page)).red

    def test_a_forgotten_buffer(self) -> None:
        """Latent vectors arrive, the index keys of the same layers and blocks do not."""
        common = {"block_size": 4, "num_kv_heads": 1}
        latent = alone("mla", MLAAttentionSpec(**common, head_size=6, dtype="bfloat16"), 12)  # type: ignore[arg-type]
        keys = MLAAttentionSpec(**common, head_size=5, dtype="uint8")  # type: ignore[arg-type]
        indexer = alone("deepseek_indexer", keys, 5)
        both = [(scene, planned(scene)) for scene in (latent, indexer)]
        assert not any(verdict(scene, runs).red for scene, runs in both)
        nothing = Runs(*(np.zeros(0, np.int64) for _ in range(3)))
        assert verdict(indexer, nothing).refused == "audit: the runs hold 0 bytes, the request has 120"

    @pytest.mark.parametrize("model", preset_names())
    def test_no_layer_of_a_model_is_forgotten(self, model: str) -> None:
        """Whatever kinds of layers a model has, each layer is in one buffer's plan, and its bytes are planned."""
        layers = layer_specs(load_config(model))
        side = CacheSide(layers=layers, layout_for=lambda spec, name: layout_for(spec, name, ("flash_attn_nhd",)))
        found = plan_request(side, side, 100, encoder_positions=50)
        planned_names = [name for buffer in found.buffers for name in buffer.layer_names]
        assert sorted(planned_names) == sorted(layers)
        for buffer in found.buffers:
            assert [plan.nbytes for plan in buffer.plans] == [buffer.wire_bytes]
            assert buffer.wire_bytes >= len(buffer.layer_names) > 0, f"nothing is sent of {buffer.layer_names[0]}"

    def test_a_forgotten_part(self) -> None:
        """Keys arrive, values do not."""
        scene = scene_of(("cpu_attn_lbhnc", "flash_attn_nhd"), self.TABLES, range(10))
        assert isinstance(scene.src.layout, PartedLayout)
        keys = build_plan(scene.src.endpoint, scene.dst.endpoint, scene.tokens, boxes=(Box(part="key"),)).flat
        assert verdict(scene, keys).refused == "audit: the runs hold 240 bytes, the request has 480"
