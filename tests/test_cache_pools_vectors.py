"""Pools as vLLM 0.32 plans them, in one memory: tens of GiB, of which not one page comes to be."""

import mmap
import resource
from dataclasses import fields, replace

import numpy as np

from pdtx import kvspec
from pdtx.cache import CacheGroup, ForeignBuffer, KVCaches, Memory, group_kind
from pdtx.engine.registering import regions_of, register_cache
from pdtx.errors import LayoutError
from pdtx.kvspec import KVCacheSpec, MambaSpec, MLAAttentionSpec
from tests.foreign_scenes import Registering, group_of
from tests.vectors import Case, load_cases


def spec_032(case: Case) -> KVCacheSpec:
    """A spec of vLLM 0.32 by the fields that both versions have."""
    cls = getattr(kvspec, case["spec_class"])
    given = case["fields"]
    known = {field.name for field in fields(cls)}
    mine = {name: value for name, value in given.items() if name in known and name != "mamba_type"}
    if "shapes" in mine:
        mine |= {"shapes": tuple(map(tuple, mine["shapes"])), "dtypes": tuple(mine["dtypes"])}
    if cls is MLAAttentionSpec:
        mine = {
            name: value
            for name, value in mine.items()
            if name in ("block_size", "num_kv_heads", "head_size", "dtype", "page_size_padded", "cache_dtype_str")
        }
    made: KVCacheSpec = cls(**mine)
    return made


def layout_032(spec: KVCacheSpec, name: str, order: str) -> str:
    if isinstance(spec, MambaSpec):
        return "mamba_sd"
    if isinstance(spec, MLAAttentionSpec):
        return f"{'deepseek_indexer' if 'indexer' in name else 'mla'}_{order}"
    return f"vllm_{order}"


def caches_032(case: Case, memory: Memory) -> KVCaches:
    """A worker's groups and tensors, as vLLM has planned them."""
    worker = case["workers"][0]
    order = case["settings"].get("kv_cache_layout", "LBHNC").lower()
    if "layout" in case["name"]:
        order = case["name"].rpartition(" ")[2].lower()
    specs = [spec_032(spec) for spec in case["distinct_specs"]]
    of_layer = {name: specs[at] for name, at in case["layer_to_spec_index_per_worker"][0].items()}
    for group in worker["groups"]:
        if group["spec"]["spec_class"] != "UniformTypeKVCacheSpecs":
            of_layer |= dict.fromkeys(group["layer_names"], spec_032(group["spec"]))
    groups, buffers = list[CacheGroup](), list[ForeignBuffer]()
    for index, group in enumerate(worker["groups"]):
        name, spec = f"group{index}", of_layer[group["layer_names"][0]]
        size = 1 if isinstance(spec, MambaSpec) else spec.block_size
        groups.append(CacheGroup(name, group_kind(spec), size, worker["num_blocks"], spec, pool="one"))
        for at, tensor in enumerate(worker["tensors"]):
            if tensor["layers"][0] in group["layer_names"]:
                own = of_layer[tensor["layers"][0]]
                buffers.append(
                    ForeignBuffer(
                        f"{name}.{at}",
                        name,
                        own,
                        layout_032(own, tensor["layers"][0], order),
                        tensor["layers"],
                        worker["num_blocks"],
                        memory,
                        layer_stride=tensor["layer_stride_bytes"],
                        block_stride=tensor["block_stride_bytes"],
                        offset=tensor["offset_bytes"],
                    )
                )
    assert len(buffers) == len(worker["tensors"])
    return KVCaches.over(groups, buffers)


def untouched_memory(nbytes: int) -> Memory:
    """So many bytes of addresses, of which no page exists until somebody touches it."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which mmap has since Python 3.12
    pages = mmap.mmap(-1, nbytes, flags=flags)
    array = np.frombuffer(pages, np.uint8)
    return Memory.at(array.ctypes.data, nbytes, keep=array)


def test_vector_pools_of_vllm_in_one_memory() -> None:
    """Every pool of several tensors: tens of GiB in one memory, of which not one page comes to be."""
    counted, refused = 0, list[str]()
    for case in load_cases("pools_0.32.json"):
        if "workers" not in case or len(case["workers"][0]["tensors"]) < 2:
            continue
        if "DeepSeek-V4" in case["name"]:  # pages of several sizes in each block: no preset has such a stride
            continue
        tensors = case["workers"][0]["tensors"]
        size = tensors[0]["backing_allocation_size_bytes"]
        memory = untouched_memory(size)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            cache = caches_032(case, memory)
        except LayoutError as error:
            # A block that holds other buffers' pages beside the layout's own: not a stride that a preset has.
            refused.append(f"{case['case_id']}: {error}")
            continue
        assert cache.nbytes == size, case["case_id"]
        if all(tensor["offset_bytes"] == 0 for tensor in tensors):
            assert len({id(region) for ranks in regions_of(cache) for region in ranks}) == 1
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "memory came to be"
        counted += 1
    assert counted >= 20
    (only,) = refused  # with all layers in one buffer; see below
    assert only.startswith("pool-095: buffer group0.0: from block to block its owner has 3076352 bytes")


def test_vector_pool_whose_blocks_hold_the_pages_of_several_buffers() -> None:
    """DeepSeek V3.2 in BLNHC: a buffer for each layer, whose pages are padded to the whole block."""
    (case,) = (case for case in load_cases("pools_0.32.json") if case["case_id"] == "pool-095")
    worker = case["workers"][0]
    specs = [spec_032(spec) for spec in case["distinct_specs"]]
    of_layer = case["layer_to_spec_index_per_worker"][0]
    size = worker["tensors"][0]["backing_allocation_size_bytes"]
    memory, buffers = untouched_memory(size), list[ForeignBuffer]()
    for tensor in worker["tensors"]:
        for at, name in enumerate(tensor["layers"]):
            block, spec = tensor["block_stride_bytes"], specs[of_layer[name]]
            assert isinstance(spec, MLAAttentionSpec)
            padded: KVCacheSpec = replace(spec, page_size_padded=block)
            offset, layout = tensor["offset_bytes"] + at * tensor["layer_stride_bytes"], layout_032(spec, name, "blnhc")
            buffers.append(
                ForeignBuffer(
                    name, "g", padded, layout, [name], worker["num_blocks"], memory, block_stride=block, offset=offset
                )
            )
    cache = KVCaches.over([group_of(specs[0], worker["num_blocks"])], buffers)
    assert len(cache.buffers) == 122
    assert cache.nbytes == size
    mover = Registering()
    assert register_cache(mover, cache).nbytes == size
    assert [(region.address, region.nbytes) for region in mover.regions] == [(memory.bytes.data_ptr(), size)]
