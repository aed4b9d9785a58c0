"""Groups of DeepSeek V4: latent vectors of several sizes, and windows that live in the same pages.

A row ("layer tuple" in vLLM) is one layer of each page size. The first group has all latent layers that keep every
token; its page sizes are the pool's. Windows are padded up to one of them and cut into groups of equally many rows.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pdtx.errors import SpecError
from pdtx.kvspec import KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec, UniformTypeKVCacheSpecs
from pdtx.pool.config import KVCacheGroupSpec
from pdtx.units import ceil_div

Windows = dict[str, SlidingWindowMLASpec]


def deepseek_v4_groups(layers: Mapping[str, KVCacheSpec]) -> tuple[KVCacheGroupSpec, ...]:
    """Return the group of all latent layers, then the groups of windows by (block_size, sliding_window).

    Raises SpecError if no layer keeps every token, for a layer that is not latent, and for windows that do not fit.
    """
    latent: dict[str, KVCacheSpec] = {}
    windows: dict[tuple[int, int], Windows] = defaultdict(dict)
    for name, spec in layers.items():
        if isinstance(spec, SlidingWindowMLASpec):
            windows[spec.block_size, spec.sliding_window][name] = spec
        elif isinstance(spec, MLAAttentionSpec):
            latent[name] = spec
        else:
            raise SpecError(f"layer {name!r}, a {type(spec).__name__}, cannot share a pool with latent windows")
    if not latent:
        raise SpecError("latent windows need an MLAAttentionSpec layer, in whose pages they live; there is none")
    first = _group(latent)
    sizes = sorted({spec.page_size_bytes for spec in latent.values()})
    padded = [_pad_to(sizes, part) for part in windows.values()]
    rows = _rows_per_group([_count_rows(latent), *(_count_rows(part) for part in windows.values())])
    return (first, *(group for part in padded for group in _cut(part, rows)))


def _group(layers: Mapping[str, KVCacheSpec]) -> KVCacheGroupSpec:
    block_size = next(iter(layers.values())).block_size
    spec = UniformTypeKVCacheSpecs(block_size=block_size, kv_cache_specs=layers)
    return KVCacheGroupSpec(layer_names=tuple(layers), kv_cache_spec=spec)


def _count_rows(layers: Mapping[str, KVCacheSpec]) -> int:
    """Return the layers of the commonest page size."""
    return max(Counter(spec.page_size_bytes for spec in layers.values()).values())


def _rows_per_group(counts: Sequence[int]) -> int:
    """Return the rows of a group, at least counts[0], that leave the fewest empty; the most where several do."""
    candidates = range(counts[0], max(counts) + 1)
    return min(candidates, key=lambda rows: (sum(-count % rows for count in counts), -rows))


def _pad_to(sizes: Sequence[int], windows: Windows) -> Windows:
    """Return the windows with pages padded to the nearest of sizes (ascending)."""
    padded = {}
    for name, spec in windows.items():
        size = next((size for size in sizes if size >= spec.page_size_bytes), None)
        if size is None:
            raise SpecError(
                f"layer {name!r} has a page of {spec.page_size_bytes} bytes, larger than any of the latent layers' "
                f"(up to {sizes[-1]}); enlarge their block_size"
            )
        padded[name] = spec if size == spec.page_size_bytes else replace(spec, page_size_padded=size)
    return padded


def _cut(windows: Windows, rows_per_group: int) -> list[KVCacheGroupSpec]:
    """Cut layers of one window into groups of at most rows_per_group rows, dealt out in turn."""
    by_size: dict[int, list[str]] = defaultdict(list)
    for name, spec in windows.items():
        by_size[spec.page_size_bytes].append(name)
    counts = {size: len(names) for size, names in by_size.items()}
    if len(set(counts.values())) > 1:
        raise SpecError(f"latent windows of one size need as many layers of each page size, not {counts}")
    rows = list(zip(*by_size.values(), strict=True))
    groups = ceil_div(len(rows), rows_per_group)
    dealt = [[name for row in rows[group::groups] for name in row] for group in range(groups)]
    return [_group({name: windows[name] for name in names}) for names in dealt]
