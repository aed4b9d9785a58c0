"""Random transfers of every kind of cache between all layouts, rank counts and block sizes, for property tests."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import event
from hypothesis import strategies as st

from pdtx.errors import LayoutError
from pdtx.kvspec import (
    TURBOQUANT_PRESETS,
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    Segment,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    StateSharding,
    TQFullAttentionSpec,
    TurboQuantSlot,
    dtype_size,
)
from pdtx.layout import ELEMENT_ORDERS, PARTED_ORDERS, RECORD_ORDERS, STATE_ORDERS, Layout, any_layout
from pdtx.parallel import rank_spec
from pdtx.plan import needed_positions
from tests.plan_oracle import Content, Int64s, Node, Scene

ELEMENTS = tuple(ELEMENT_ORDERS)
DIFFKV = tuple(name for name in PARTED_ORDERS if "diffkv" in name)
TRANSPOSED = ("cpu_attn_lbhnc",)
DTYPES = ("uint8", "float16", "float32")


@dataclass(frozen=True)
class Kind:
    """What a layer keeps: its spec but for the block size, its presets, and what the whole model has of it.

    preset and kind of both sides are drawn from presets. tokens_per_step, together: see Scene.
    """

    make: Callable[[int], KVCacheSpec]
    presets: tuple[str, ...]
    contents: Mapping[str, Content]
    tokens_per_step: int = 1
    together: bool = False
    sharding: StateSharding | None = None

    @property
    def replicated(self) -> bool:
        """Whether every rank keeps all of it."""
        return all(content.replicated for content in self.contents.values())

    @property
    def degrees(self) -> list[int]:
        """Numbers of ranks that can share this kind equally."""
        units = {units for content in self.contents.values() if not content.replicated for units, _ in content.segments}
        return [tp for tp in (1, 2, 3, 4, 6, 8) if all(unit % tp == 0 or tp % unit == 0 for unit in units)]


def _records(presets: str) -> tuple[str, ...]:
    return tuple(name for name in RECORD_ORDERS if presets in name and "compressor" not in name)


def _heads(draw: st.DrawFn) -> int:
    return draw(st.sampled_from([1, 2, 2, 3, 4, 6]))


def _key_value(heads: int, key: int, value: int, itemsize: int) -> dict[str, Content]:
    return {
        "key": Content(key, itemsize, ((heads, 1),)),
        "value": Content(value, itemsize, ((heads, 1),)),
    }


def _plain(draw: st.DrawFn, spec: type[AttentionSpec], presets: tuple[str, ...], **more: int) -> Kind:
    heads, size, dtype = _heads(draw), draw(st.sampled_from([1, 2, 5])), draw(st.sampled_from(DTYPES))
    mode = KVQuantMode.FP8_PER_TENSOR if dtype == "uint8" else KVQuantMode.NONE
    fields: dict[str, Any] = {
        "num_kv_heads": heads, "head_size": size, "dtype": dtype, "kv_quant_mode": mode, **more
    }  # fmt: skip
    value = more.get("head_size_v", size)
    return Kind(
        lambda block_size: spec(block_size=block_size, **fields),
        presets,
        _key_value(heads, size, value, dtype_size(dtype)),
    )


def _full(draw: st.DrawFn) -> Kind:
    if draw(st.booleans()):
        return _plain(draw, SinkFullAttentionSpec, (*ELEMENTS, *TRANSPOSED), sink_len=8)
    return _plain(draw, FullAttentionSpec, (*ELEMENTS, *PARTED_ORDERS))


def _window(draw: st.DrawFn) -> Kind:
    return _plain(draw, SlidingWindowSpec, (*ELEMENTS, *PARTED_ORDERS), sliding_window=draw(st.integers(1, 12)))


def _chunk(draw: st.DrawFn) -> Kind:
    size = draw(st.integers(1, 12))
    return _plain(draw, ChunkedLocalAttentionSpec, (*ELEMENTS, *TRANSPOSED), attention_chunk_size=size)


def _cross(draw: st.DrawFn) -> Kind:
    return _plain(draw, CrossAttentionSpec, (*ELEMENTS, *TRANSPOSED))


def _diffkv(draw: st.DrawFn) -> Kind:
    value = draw(st.sampled_from([3, 4, 6]))  # never the key's size
    if draw(st.booleans()):
        return _plain(draw, SlidingWindowSpec, DIFFKV, head_size_v=value, sliding_window=draw(st.integers(1, 12)))
    return _plain(draw, FullAttentionSpec, DIFFKV, head_size_v=value)


def _one_record(
    spec: type[AttentionSpec],
    presets: tuple[str, ...],
    nbytes: int,
    *,
    ratio: int = 1,
    heads: int = 1,
    together: bool = False,
    **fields: Any,  # noqa: ANN401  # whatever the spec's class takes
) -> Kind:
    """Records that every rank keeps whole."""
    common = {"num_kv_heads": heads, **fields} | ({"compress_ratio": ratio} if ratio > 1 else {})
    content = Content(nbytes, 1, ((heads, 1),), replicated=True)
    return Kind(lambda block_size: spec(block_size=block_size, **common), presets, {"": content}, ratio, together)


def _mla(draw: st.DrawFn) -> Kind:
    presets = _records("mla")
    if draw(st.booleans()):
        return _one_record(
            MLAAttentionSpec, presets, 656, head_size=576, dtype="uint8", cache_dtype_str="fp8_ds_mla"
        )  # fmt: skip
    size, ratio = draw(st.integers(1, 9)), draw(st.sampled_from([1, 1, 2, 4]))
    return _one_record(MLAAttentionSpec, presets, 2 * size, ratio=ratio, head_size=size, dtype="bfloat16")


def _compressor(draw: st.DrawFn) -> Kind:
    size, ratio = draw(st.integers(1, 9)), draw(st.sampled_from([1, 2, 4]))
    window = draw(st.integers(1, 12))
    presets = ("deepseek_v4_compressor",)
    return _one_record(
        SlidingWindowMLASpec, presets, 4 * size, ratio=ratio, head_size=size, dtype="float32", sliding_window=window
    )


def _hidden_states(draw: st.DrawFn) -> Kind:
    size, captured = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    presets = _records("hidden_states")
    return _one_record(HiddenStateCacheSpec, presets, 2 * size, heads=captured, head_size=size, dtype="float16")


def _whole_blocks(draw: st.DrawFn) -> Kind:
    """DeepSeek V4 and the indexer: a block's data, then its scales."""
    ratio = draw(st.sampled_from([1, 4]))
    if draw(st.booleans()):
        presets = _records("deepseek_v4")
        return _one_record(
            MLAAttentionSpec, presets, 584, ratio=ratio, together=True, head_size=512, dtype="uint8", alignment=576,
            cache_dtype_str="fp8_ds_mla", model_version="deepseek_v4",
        )  # fmt: skip
    size = draw(st.sampled_from([5, 132]))
    presets = _records("deepseek_indexer")
    return _one_record(MLAAttentionSpec, presets, size, ratio=ratio, together=True, head_size=size, dtype="uint8")


def _per_token_head(draw: st.DrawFn) -> Kind:
    heads, size = _heads(draw), draw(st.sampled_from([1, 4, 6]))
    dtype, mode = draw(st.sampled_from([
        ("int8", KVQuantMode.INT8_PER_TOKEN_HEAD), ("uint8", KVQuantMode.FP8_PER_TOKEN_HEAD)
    ]))  # fmt: skip
    fields: dict[str, Any] = {"num_kv_heads": heads, "head_size": size, "dtype": dtype, "kv_quant_mode": mode}
    return Kind(
        lambda block_size: FullAttentionSpec(block_size=block_size, **fields),
        _records("per_token_head"),
        _key_value(heads, size + 4, size + 4, 1),
    )


def _turboquant(draw: st.DrawFn) -> Kind:
    slots = [TurboQuantSlot(preset=preset, head_size=8).slot_bytes_aligned for preset in TURBOQUANT_PRESETS]
    heads, slot = _heads(draw), draw(st.sampled_from([2, *slots]))
    fields: dict[str, Any] = {"num_kv_heads": heads, "head_size": 8, "dtype": "uint8", "tq_slot_size": slot}
    return Kind(
        lambda block_size: TQFullAttentionSpec(block_size=block_size, **fields),
        _records("turboquant"),
        {"": Content(slot, 1, ((heads, 1),))},
    )


def _nvfp4_fields(heads: int) -> dict[str, Any]:
    return {"num_kv_heads": heads, "head_size": 64, "dtype": "uint8", "kv_quant_mode": KVQuantMode.NVFP4}


def _in_one_piece(name: str) -> bool:
    """Whether K and V of a page each lie in one piece, so that elements and scales can be told apart."""
    order = RECORD_ORDERS[name]
    return order[-4] == "kv" and {"token", "head"} == set(order[-3:-1])


def _nvfp4(draw: st.DrawFn) -> Kind:
    heads = _heads(draw)
    contents = {
        f"{part} {which}": Content(size, 1, ((heads, 1),), moved_steps=together)
        for part, size, together in (("elements", 32, 1), ("scales", 4, 4))
        for which in ("key", "value")
    }
    presets = tuple(name for name in _records("nvfp4") if _in_one_piece(name))
    return Kind(lambda block_size: FullAttentionSpec(block_size=block_size, **_nvfp4_fields(heads)), presets, contents)


def _nvfp4_in_pieces(draw: st.DrawFn) -> Kind:
    heads = _heads(draw)
    return Kind(
        lambda block_size: FullAttentionSpec(block_size=block_size, **_nvfp4_fields(heads)),
        tuple(name for name in _records("nvfp4") if not _in_one_piece(name)),
        _key_value(heads, 36, 36, 1),
        together=True,
    )


def _states(draw: st.DrawFn) -> Kind:
    """Mamba 2's one convolution of x, B and C, or linear attention's three, or a short convolution alone."""
    heads, groups = draw(st.sampled_from([2, 4])), draw(st.sampled_from([1, 2]))
    inputs, dims = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    even = draw(st.sampled_from([1, 2]))  # so that a recurrent state of float32 is aligned
    x, b, c = (heads, even * draw(st.integers(1, 3))), (groups, even * draw(st.integers(1, 2))), (groups, even)
    convs: tuple[tuple[tuple[int, int], ...], ...]
    convs, recurrent = draw(st.sampled_from([
        (((x, b, c),), True), (((x, b, c),), True), (((x,), (b,), (c,)), True), (((x,),), False), ((), True)
    ]))  # fmt: skip
    contents = {
        "conv" if len(convs) == 1 else f"conv{number}": Content(inputs, 2, segments)
        for number, segments in enumerate(convs)
    }
    shapes: list[tuple[int, ...]] = [(inputs, content.width) for content in contents.values()]
    dtypes = ["bfloat16"] * len(shapes)
    if recurrent:
        contents["ssm"] = Content(dims * 2, 2 * even, ((heads, 1),))
        shapes.append((heads, dims, 2))
        dtypes.append("bfloat16" if even == 1 else "float32")
    sharding = StateSharding(
        conv=tuple(
            tuple(
                Segment(name=f"segment{place}", channels=units * width, units=units)
                for place, (units, width) in enumerate(s)
            )
            for s in convs
        ),
        heads=heads if recurrent else 0,
    )
    fields: dict[str, Any] = {"shapes": tuple(shapes), "dtypes": tuple(dtypes)}
    return Kind(
        lambda _: MambaSpec(block_size=64, **fields), tuple(STATE_ORDERS), contents, sharding=sharding
    )  # fmt: skip


KINDS: Mapping[str, Callable[[st.DrawFn], Kind]] = {
    "full": _full,
    "window": _window,
    "chunk": _chunk,
    "cross": _cross,
    "diffkv": _diffkv,
    "mla": _mla,
    "compressor": _compressor,
    "hidden_states": _hidden_states,
    "whole_blocks": _whole_blocks,
    "per_token_head": _per_token_head,
    "turboquant": _turboquant,
    "nvfp4": _nvfp4,
    "nvfp4 in pieces": _nvfp4_in_pieces,
    "states": _states,
}


@dataclass(frozen=True)
class Page:
    """A kernel's page and how many make one of the manager's blocks: steps of the positions' axis."""

    steps: int
    pages: int


@st.composite
def scenes(draw: st.DrawFn, name: str | None = None) -> Scene:
    """One transfer of a kind of KINDS, or of any."""
    name = name or draw(st.sampled_from(sorted(KINDS)))
    kind = KINDS[name](draw)
    pages = draw(pages_of(kind))
    tps = [draw(st.sampled_from(kind.degrees)) for _ in range(2)]
    layers = [draw(st.integers(1, 3)) for _ in range(2)]
    tokens = draw(_tokens(kind, pages))
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    src, dst = (draw(_nodes(kind, *side, tokens, random)) for side in zip(pages, tps, layers, strict=True))
    count = draw(st.integers(0 if draw(st.booleans()) else 1, min(layers)))
    first, dst_layer = (draw(st.integers(0, number - count)) for number in layers)
    scene = Scene(
        kind.make(src.steps_per_block * kind.tokens_per_step), src, dst, tokens, range(first, first + count), dst_layer,
        kind.contents, kind.sharding, kind.tokens_per_step, kind.together, _compatible(kind, src, dst),
    )  # fmt: skip
    for what in _events(scene):
        event(what)
    return scene


def _events(scene: Scene) -> list[str]:
    order = sorted((scene.src.steps_per_page, scene.dst.steps_per_page))
    return [
        "compatible" if scene.compatible else "not compatible",
        f"ranks {'equal' if scene.src.tp_size == scene.dst.tp_size else 'differ'}",
        f"pages {'equal' if order[0] == order[1] else 'differ'}",
        f"kernel blocks: {any(node.steps_per_block != node.steps_per_page for node in (scene.src, scene.dst))}",
        f"null blocks: {any((node.table == 0).any() for node in (scene.src, scene.dst))}",
    ]


@st.composite
def pages_of(draw: st.DrawFn, kind: Kind) -> tuple[Page, Page]:
    """Pages of which one divides the other; the manager's blocks need not."""
    if kind.sharding is not None:
        return Page(1, 1), Page(1, 1)
    small = draw(st.sampled_from([1, 2, 3, 4])) * max(content.moved_steps for content in kind.contents.values())
    factor = draw(st.sampled_from([1] * 8 + [2])) if kind.together else draw(st.sampled_from([1, 2, 3, 4]))
    sizes = (small, small * factor)
    if draw(st.booleans()):
        sizes = (sizes[1], sizes[0])
    counts = (draw(st.sampled_from([1, 1, 2, 3])) for _ in range(2))
    src, dst = (Page(size, count) for size, count in zip(sizes, counts, strict=True))
    return src, dst


@st.composite
def _tokens(draw: st.DrawFn, kind: Kind, pages: tuple[Page, Page]) -> range:
    """Positions of a whole request, of a part, or those that a decoder still needs."""
    if kind.sharding is not None:
        return range(draw(st.sampled_from([0, 0, 0, 1])), draw(st.sampled_from([1, 1, 1, 2])))
    longest = max(page.steps * page.pages for page in pages) * kind.tokens_per_step
    stop = draw(st.integers(0, min(3 * longest + 1, 30 * kind.tokens_per_step)))
    which = draw(st.sampled_from(["whole", "part", "part", "needed"]))
    if which == "needed":
        return needed_positions(kind.make(kind.tokens_per_step), stop, stop)
    return range(draw(st.integers(0, stop)) if which == "part" else 0, stop)


@st.composite
def _nodes(
    draw: st.DrawFn, kind: Kind, page: Page, tp_size: int, layers: int, tokens: range, random: np.random.Generator
) -> Node:
    """One side, with the page's kernel blocks and padding as far as the preset can have them."""
    preset = draw(st.sampled_from(kind.presets))
    padding = draw(st.sampled_from([None, None, 0, 8, 20]))
    style = draw(st.sampled_from(["consecutive", "shuffled", "sparse"]))
    extra, more = draw(st.integers(0, 1)), draw(st.integers(1, 3))
    trimmed = draw(st.sampled_from([True, True, True, False]))

    def blocks(steps: int) -> int:
        return -(-tokens.stop // (steps * kind.tokens_per_step)) + extra

    def layout(page: Page, padding: int | None) -> Layout:
        steps = page.steps * page.pages
        spec = rank_spec(kind.make(steps * kind.tokens_per_step), tp_size, kind.sharding)
        if padding is not None and isinstance(spec, AttentionSpec | MambaSpec):
            spec = replace(spec, page_size_padded=spec.page_size_bytes + padding)
        kernel = page.steps * kind.tokens_per_step if page.pages > 1 else None
        pool = 2 * blocks(steps) + 1 + more
        return any_layout(preset, spec, num_layers=layers, num_blocks=pool, kernel_block_size=kernel)

    made = None
    for form in ((page, padding), (page, None), (replace(page, pages=1), padding), (replace(page, pages=1), None)):
        try:
            made, page, padding = layout(*form), *form
        except LayoutError:  # a preset without kernel blocks, or whose pages cannot be padded
            continue
        break
    assert made is not None
    event(f"padded: {padding is not None and padding > 0}")
    steps = page.steps * page.pages
    pool = made.parts[0].layout.extent("block") // page.pages
    table = table_of(style, blocks(steps), pool, random)
    if trimmed:
        table[: tokens.start // (steps * kind.tokens_per_step)] = 0
    return Node(made, table, tp_size, steps)


def table_of(style: str, count: int, pool: int, random: np.random.Generator) -> Int64s:
    ids = np.arange(1, pool, dtype=np.int64)
    if style == "consecutive":
        first = int(random.integers(0, len(ids) - count + 1))
        return ids[first : first + count].copy()
    if style == "sparse":
        ids = ids[::2]
    return random.permutation(ids)[:count]


def _compatible(kind: Kind, src: Node, dst: Node) -> bool:
    """Whether the two layouts may be exchanged, by what is known of their insides.

    Where tokens of a page stay together, pages must be of one size and hold their heads, tokens and bytes in one order,
    and a K or V part must lie in its page, not across layers or the pool. Anything else may be exchanged.
    """
    if not kind.together:
        return True
    if src.steps_per_page != dst.steps_per_page:
        return False
    orders = []
    for node in (src, dst):
        layout = node.layout.parts[0].layout
        inside = ["head", "token", "byte"] if "kv" in layout.by_name else ["token", "byte"]
        order = [axis.name for axis in layout.axes if axis.extent > 1]
        hidden = [name for name in order if name in inside]
        within = order[order.index(hidden[0]) :]
        if set(within) & {"layer", "block"}:
            return False
        orders.append([(name, layout.extent(name)) for name in within])
    return orders[0] == orders[1]
