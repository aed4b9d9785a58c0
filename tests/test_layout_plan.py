"""Every pair of layouts that hold the same things, one transfer each, without chance; and that a cache takes them."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pdtx.cache import PagedKVCache
from pdtx.errors import LayoutError, PlanError
from pdtx.kvspec import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    TQFullAttentionSpec,
)
from pdtx.layout import (
    ELEMENT_ORDERS,
    PARTED_ORDERS,
    RECORD_ORDERS,
    STATE_ORDERS,
    AnyLayout,
    QuantizedLayout,
    any_layout,
)
from pdtx.parallel import rank_spec
from pdtx.plan import Endpoint, build_plan
from tests.plan_oracle import Content, Node, Scene, check_arrival, moves_of, plan_of

BLOCK_SIZE, POOL, TOKENS = 4, 6, range(1, 10)
TABLES = [4, 1, 3], [3, 5, 2]
COMMON: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 4}
PLAIN = FullAttentionSpec(**COMMON, head_size=3, dtype="float16")
LATENT: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "dtype": "uint8"}


def key_value(key: int, value: int, itemsize: int) -> dict[str, Content]:
    return {name: Content(size, itemsize, ((4, 1),)) for name, size in (("key", key), ("value", value))}


def latent(nbytes: int, heads: int = 1) -> dict[str, Content]:
    return {"": Content(nbytes, 1, ((heads, 1),), replicated=True)}


def named(*words: str) -> list[str]:
    return [name for name in RECORD_ORDERS if any(word in name for word in words) and "compressor" not in name]


DIFFKV = [name for name in PARTED_ORDERS if "diffkv" in name]
PER_TOKEN_HEAD = FullAttentionSpec(**COMMON, head_size=2, dtype="int8", kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD)
CASES: dict[str, tuple[KVCacheSpec, list[str], dict[str, Content]]] = {
    "plain": (PLAIN, [*ELEMENT_ORDERS, *PARTED_ORDERS], key_value(3, 3, 2)),
    "diffkv": (replace(PLAIN, head_size_v=2), DIFFKV, key_value(3, 2, 2)),
    "mla": (MLAAttentionSpec(**LATENT, head_size=6), named("mla"), latent(6)),
    "indexer": (MLAAttentionSpec(**LATENT, head_size=5), named("indexer"), latent(5)),
    "deepseek_v4": (
        MLAAttentionSpec(
            **LATENT, head_size=512, cache_dtype_str="fp8_ds_mla", model_version="deepseek_v4", alignment=576
        ),
        named("deepseek_v4"),
        latent(584),
    ),
    "hidden_states": (
        HiddenStateCacheSpec(**(LATENT | {"num_kv_heads": 3}), head_size=5),
        named("hidden_states"),
        latent(5, 3),
    ),
    "per_token_head": (PER_TOKEN_HEAD, named("per_token_head"), key_value(6, 6, 1)),
    "turboquant": (
        TQFullAttentionSpec(**COMMON, head_size=8, dtype="uint8", tq_slot_size=6),
        named("turboquant"),
        {"": Content(6, 1, ((4, 1),))},
    ),
}


Changes = tuple[dict[str, Any], dict[str, Any]]


def scene_of(name: str, presets: tuple[str, str], tps: tuple[int, int] = (1, 1), changes: Changes = ({}, {})) -> Scene:
    """Layers 1 and 2 of three to layers 0 and 1 of two; changes: kernel_block_size, or the spec's page_size_padded."""
    spec, _, contents = CASES[name]
    nodes = []
    for preset, tp_size, table, changed, layers in zip(presets, tps, TABLES, changes, (3, 2), strict=True):
        own = rank_spec(spec, tp_size)
        if "page_size_padded" in changed:
            own = replace(own, page_size_padded=changed["page_size_padded"])  # type: ignore[call-arg]
        layout: AnyLayout = any_layout(
            preset, own, num_layers=layers, num_blocks=POOL, kernel_block_size=changed.get("kernel_block_size")
        )
        nodes.append(Node(layout, np.array(table), tp_size, BLOCK_SIZE))
    together = name in ("indexer", "deepseek_v4")
    return Scene(spec, nodes[0], nodes[1], TOKENS, range(1, 3), 0, contents, together=together)


@pytest.mark.parametrize(("name", "src"), [(name, src) for name, (_, presets, _) in CASES.items() for src in presets])
def test_every_pair(name: str, src: str) -> None:
    for dst in CASES[name][1]:
        check_arrival(scene_of(name, (src, dst)))


@pytest.mark.parametrize("tps", [(2, 1), (1, 4), (4, 2), (2, 8)])
@pytest.mark.parametrize("name", CASES)
def test_ranks(name: str, tps: tuple[int, int]) -> None:
    """Each layout once on either side, to and from the one after it."""
    presets = CASES[name][1]
    for src, dst in zip(presets, [*presets[1:], presets[0]], strict=True):
        check_arrival(scene_of(name, (src, dst), tps))


@pytest.mark.parametrize("preset", ["flash_attn_nhd", "flashinfer_hnd", "vllm_lbnhc", "cpu_attn_lbhnc", "sglang"])
@pytest.mark.parametrize("other", ["flash_attn_nhd", "flashinfer_hnd", "vllm_lbnhc", "cpu_attn_lbhnc", "sglang"])
def test_kernel_blocks(preset: str, other: str) -> None:
    for sizes in ((2, None), (None, 2), (2, 1), (1, 4)):
        src, dst = ({"kernel_block_size": size} for size in sizes)
        check_arrival(scene_of("plain", (preset, other), changes=(src, dst)))


@pytest.mark.parametrize("preset", ["triton_nhd", "flashinfer_hnd", "vllm_lbnhc", "vllm_blhnc", "diffkv_lbhnc"])
@pytest.mark.parametrize("other", ["flash_attn_nhd", "vllm_bhlnc", "cpu_attn_lbhnc"])
def test_padded_pages(preset: str, other: str) -> None:
    padded = {"page_size_padded": PLAIN.page_size_bytes + 20}
    check_arrival(scene_of("plain", (preset, other), changes=(padded, {})))
    check_arrival(scene_of("plain", (other, preset), changes=({}, padded)))
    check_arrival(scene_of("plain", (preset, preset), changes=(padded, padded | {"page_size_padded": 1_000})))


@pytest.mark.parametrize("src", STATE_ORDERS)
@pytest.mark.parametrize("dst", STATE_ORDERS)
def test_states(src: str, dst: str) -> None:
    """A state is position 0; its convolution is transposed where the orders differ."""
    spec = MambaSpec(block_size=64, shapes=((3, 4), (2, 2, 3)), dtypes=("bfloat16", "float32"), page_size_padded=80)
    contents = {"conv": Content(3, 2, ((4, 1),)), "ssm": Content(6, 4, ((2, 1),))}
    sides = (any_layout(name, spec, num_layers=2, num_blocks=4) for name in (src, dst))
    nodes = [Node(layout, np.array([block]), 1, 1) for layout, block in zip(sides, (3, 1), strict=True)]
    check_arrival(Scene(spec, nodes[0], nodes[1], range(1), range(2), 0, contents))


@pytest.mark.parametrize("consecutive", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_no_plan_is_expanded_for_its_audit(name: str, consecutive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loops alone are proof: a request of 8,192 blocks may have 67 million runs."""

    def expanded(*_: object) -> None:
        raise AssertionError("the runs were audited one by one")

    monkeypatch.setattr("pdtx.plan.audit.audit_runs", expanded)
    for src, dst in itertools.product(CASES[name][1], repeat=2):
        scene = scene_of(name, (src, dst), (1, 2))
        if consecutive:
            nodes = [replace(node, table=np.array([2, 3, 4])) for node in (scene.src, scene.dst)]
            scene = replace(scene, src=nodes[0], dst=nodes[1])
        for move in moves_of(scene):
            plan_of(scene, move)


def test_a_key_and_the_value_behind_it_are_one_piece() -> None:
    """One token of one head and layer: two grids, one run; the sizes foretell it."""
    spec = replace(PLAIN, block_size=1, num_kv_heads=1)
    layout = any_layout("diffkv_lbnhc", spec, num_layers=1, num_blocks=POOL)
    plan = build_plan(Endpoint.of(layout, [3]), Endpoint.of(layout, [4]), range(1))
    assert plan.sizes == {12: 1}
    assert (plan.flat.src.tolist(), plan.flat.dst.tolist(), plan.flat.nbytes.tolist()) == ([36], [48], [12])


NVFP4 = FullAttentionSpec(**COMMON, head_size=16, dtype="uint8", kv_quant_mode=KVQuantMode.NVFP4)
IN_PIECES = ("flashinfer_nvfp4_hnd_cross_layer", "nvfp4_lhbnc", "nvfp4_bhlnc")


@pytest.mark.parametrize("src", named("nvfp4"))
@pytest.mark.parametrize("dst", named("nvfp4"))
def test_blocks_whose_insides_are_unknown(src: str, dst: str) -> None:
    """NVFP4: anything between pages whose K and V each lie in one piece; else pages of one order inside, whole."""
    inside = [[axis for axis in RECORD_ORDERS[name] if axis not in ("layer", "block")] for name in (src, dst)]
    sides = [any_layout(name, NVFP4, num_layers=2, num_blocks=POOL) for name in (src, dst)]
    nodes = [Node(side, np.array(table), 1, BLOCK_SIZE) for side, table in zip(sides, TABLES, strict=True)]
    parted = [isinstance(side, QuantizedLayout) for side in sides]
    contents = key_value(9, 9, 1)
    if all(parted):
        contents = {
            f"{part} {which}": Content(size, 1, ((4, 1),))
            for part, size in (("elements", 8), ("scales", 1))
            for which in ("key", "value")
        }
    scene = Scene(NVFP4, nodes[0], nodes[1], TOKENS, range(2), 0, contents, together=not all(parted))
    (move,) = moves_of(scene)
    if {src, dst} & set(IN_PIECES):
        with pytest.raises(LayoutError, match="cannot be transferred"):
            plan_of(scene, move)
    elif not all(parted) and inside[0] != inside[1]:
        with pytest.raises(PlanError, match="inside bytes that must stay together"):
            plan_of(scene, move)
    else:
        check_arrival(scene)


@pytest.mark.parametrize("name", ELEMENT_ORDERS)
def test_a_cache_keeps_what_is_written(name: str) -> None:
    """The paged cache takes every plain layout as it is."""
    spec = FullAttentionSpec(block_size=4, num_kv_heads=3, head_size=6, dtype="float16")
    cache = PagedKVCache(spec, layout=name, num_layers=2, num_blocks=POOL)
    blocks = torch.tensor(TABLES[0])
    key, value = torch.rand(2, 10, 3, 6).to(torch.float16)
    cache.write(1, blocks, 0, key, value)
    assert torch.equal(torch.stack(cache.read(1, blocks, 0, 10)), torch.stack((key, value)))
    assert cache.written_blocks().nonzero().flatten().tolist() == [1, 3, 4]
