"""Random requests between engines whose layers and ranks are split over processes in any way, for property tests."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import lcm

import numpy as np
from hypothesis import event
from hypothesis import strategies as st

from pdtx.cache.groups import group_kind
from pdtx.engine.specs import sharding_fields, spec_fields
from pdtx.errors import LayoutError
from pdtx.kvspec import AttentionSpec, CrossAttentionSpec, KVCacheSpec, MambaSpec
from pdtx.layout import RECORD_ORDERS, Layout, any_layout
from pdtx.parallel import rank_spec
from pdtx.protocol import BufferDescription, CacheDescription, GroupDescription
from tests.plan_oracle import Node
from tests.plan_scenes import KINDS, Kind, Page, pages_of, table_of
from tests.split_oracle import Held, ModelBuffer, Process, SplitScene

_MOST_PROCESSES = 5
"""Of an engine; where single ranks would make more, a process has them all."""


@dataclass(frozen=True)
class _Side:
    """One engine. parts: for each process its ranks, and its layers of each buffer in its own order."""

    tp_size: int
    parts: tuple[tuple[range, tuple[tuple[int, ...], ...]], ...]


@st.composite
def split_scenes(draw: st.DrawFn, names: Sequence[str] = tuple(KINDS)) -> SplitScene:
    """One request of one or two buffers of some kinds, between engines of one or more processes."""
    chosen = draw(st.lists(st.sampled_from(sorted(names)), min_size=1, max_size=2))
    kinds = [KINDS[name](draw) for name in chosen]
    num_tokens = draw(st.integers(1, 16 * max(kind.tokens_per_step for kind in kinds)))
    cached = draw(st.sampled_from([0, 0, 0, 0, 1, num_tokens // 2, num_tokens // 2, num_tokens]))
    if cached < num_tokens:  # tokens that share scales are cached together, see check_cached_tokens
        cached -= cached % lcm(*(content.moved_steps for kind in kinds for content in kind.contents.values()))
    seed = draw(st.integers(0, 1 << 32))
    random = np.random.default_rng(seed)
    buffers = tuple(
        _buffer(kind, name, number, num_tokens, cached, random)
        for number, (name, kind) in enumerate(zip(chosen, kinds, strict=True))
    )
    pages = [_pages(draw, kind) for kind in kinds]
    sides = [_side(draw, kinds, buffers, random) for _ in range(2)]
    if any(kind.together and not kind.replicated for kind in kinds):  # a page of some heads has another order
        sides[1] = replace(sides[1], tp_size=sides[0].tp_size, parts=_cut(sides[0].tp_size, buffers, random))
    processes = _processes(kinds, buffers, pages, sides, random)
    scene = SplitScene(buffers, processes[0], processes[1], seed)
    for what in _events(scene, sides):
        event(what)
    return scene


def _pages(draw: st.DrawFn, kind: Kind) -> tuple[Page, Page]:
    src, dst = draw(pages_of(kind))
    return (src, replace(dst, steps=src.steps)) if kind.together else (src, dst)


def _events(scene: SplitScene, sides: Sequence[_Side]) -> list[str]:
    layers = [held.layers for side in (scene.sources, scene.destinations) for each in side for held in each.held]
    return [
        f"source processes: {min(len(scene.sources), 3)}",
        f"destination processes: {min(len(scene.destinations), 3)}",
        f"some ranks only: {any(len(each.ranks) < side.tp_size for side in sides for each in _both(scene))}",
        f"layers apart: {any((np.diff(part) != 1).any() for part in layers)}",
        f"layers kept: {any(buffer.kept for buffer in scene.buffers)}",
        f"cached: {any(buffer.cached_tokens for buffer in scene.buffers)}",
        f"nothing moves: {not any(buffer.positions for buffer in scene.buffers)}",
    ]


def _both(scene: SplitScene) -> tuple[Process, ...]:
    return scene.sources + scene.destinations


def _buffer(
    kind: Kind, name: str, number: int, num_tokens: int, cached: int, random: np.random.Generator
) -> ModelBuffer:
    spec, num_layers = kind.make(kind.tokens_per_step), int(random.integers(1, 6))
    kept = {int(random.integers(0, num_layers))} if num_layers > 1 and random.random() < 0.2 else set[int]()
    return ModelBuffer(
        f"{name}{number}", spec, kind.contents, num_layers, frozenset(kept), num_tokens, cached,
        int(random.integers(0, 12)) if isinstance(spec, CrossAttentionSpec) else 0, isinstance(spec, MambaSpec),
        isinstance(spec, CrossAttentionSpec), kind.tokens_per_step, kind.together,
    )  # fmt: skip


def _side(draw: st.DrawFn, kinds: Sequence[Kind], buffers: Sequence[ModelBuffer], random: np.random.Generator) -> _Side:
    shared = sorted(set.intersection(*(set(kind.degrees) for kind in kinds)))
    tp_size = draw(st.sampled_from(3 * [degree for degree in shared if degree <= 4] + shared))
    return _Side(tp_size, _cut(tp_size, buffers, random))


def _cut(
    tp_size: int, buffers: Sequence[ModelBuffer], random: np.random.Generator
) -> tuple[tuple[range, tuple[tuple[int, ...], ...]], ...]:
    """Divide layers over stages, and each stage's ranks over processes."""
    layers = [
        (number, layer)
        for number, buffer in enumerate(buffers)
        for layer in range(buffer.num_layers)
        if layer not in buffer.kept or random.random() < 0.5  # the other side may be the only one to have it
    ]
    stages = int(random.integers(1, min(3, len(layers)) + 1))
    of_layer = np.sort(random.integers(0, stages, len(layers)))
    of_layer[np.sort(random.permutation(len(layers))[:stages])] = np.arange(stages)  # none is empty
    if random.random() < 0.5:  # not one after another
        layers = [layers[at] for at in random.permutation(len(layers))]
    found = list[tuple[range, tuple[tuple[int, ...], ...]]]()
    for stage in range(stages):
        own = [layer for layer, its in zip(layers, of_layer, strict=True) if its == stage]
        held = tuple(tuple(layer for number, layer in own if number == each) for each in range(len(buffers)))
        found += [(ranks, held) for ranks in _rank_groups(tp_size, random)]
    return tuple(found) if len(found) <= _MOST_PROCESSES else tuple(
        (range(tp_size), held) for held in dict.fromkeys(held for _, held in found)
    )  # fmt: skip


def _rank_groups(tp_size: int, random: np.random.Generator) -> list[range]:
    """All ranks in one process, each in its own, or cut anywhere."""
    cuts = random.choice(["none", "all", "some"])
    inner = [] if cuts == "none" else [at for at in range(1, tp_size) if cuts == "all" or random.random() < 0.5]
    edges = [0, *inner, tp_size]
    return [range(*edge) for edge in pairwise(edges)]


@dataclass(frozen=True)
class _Form:
    """How both sides keep the pages of a buffer. padding: bytes behind a page, where ranks keep the whole model's."""

    pages: tuple[Page, Page]
    padding: int | None


def _processes(
    kinds: Sequence[Kind],
    buffers: Sequence[ModelBuffer],
    pages: Sequence[tuple[Page, Page]],
    sides: Sequence[_Side],
    random: np.random.Generator,
) -> tuple[tuple[Process, ...], tuple[Process, ...]]:
    held: list[list[list[Held]]] = [[[] for _ in side.parts] for side in sides]
    chosen = list[_Form]()
    for number, (kind, buffer) in enumerate(zip(kinds, buffers, strict=True)):
        form, nodes = _nodes(kind, buffer, pages[number], sides, number, random)
        chosen.append(form)
        for side, of_side in enumerate(nodes):
            for at, node in of_side.items():
                held[side][at].append(Held(number, sides[side].parts[at][1][number], node))
    declaring = int(random.integers(0, 2))
    src, dst = (
        tuple(
            _process(kinds, buffers, chosen, which, sides[which], at, parts, which == declaring, random)
            for at, parts in enumerate(held[which])
        )
        for which in range(2)
    )
    return src, dst


def _nodes(
    kind: Kind, buffer: ModelBuffer, pages: tuple[Page, Page], sides: Sequence[_Side], number: int,
    random: np.random.Generator,
) -> tuple[_Form, list[dict[int, Node]]]:  # fmt: skip
    """Return each process's node of a buffer, with kernel blocks and padding as far as all of their presets can."""
    presets = [name for name in kind.presets if not kind.together or _blocks_outermost(name, kind)]
    alike = presets[int(random.integers(len(presets)))]
    names = {
        (side, at): alike if kind.together else presets[int(random.integers(len(presets)))]
        for side in range(2)
        for at, part in enumerate(sides[side].parts)
        if part[1][number]
    }
    # A description has the whole model's spec, and padding is a rank's.
    padded = all(side.tp_size == 1 for side in sides) or kind.replicated
    padding = int(random.choice([0, 8, 24])) if padded and random.random() < 0.5 else None
    split = (replace(pages[0], pages=1), replace(pages[1], pages=1))
    for form in (_Form(pages, padding), _Form(pages, None), _Form(split, padding), _Form(split, None)):
        small, large = sorted(page.steps * page.pages for page in form.pages)
        if large % small:
            continue
        state = random.bit_generator.state
        try:
            found: list[dict[int, Node]] = [{}, {}]
            for (side, at), name in names.items():
                layers = sides[side].parts[at][1][number]
                found[side][at] = _node(kind, buffer, name, form, side, sides[side].tp_size, len(layers), random)
        except LayoutError:  # a preset without kernel blocks, or whose pages cannot be padded
            random.bit_generator.state = state
            continue
        return form, found
    raise AssertionError(f"no pages that {', '.join(names.values())} can have")


def _blocks_outermost(name: str, kind: Kind) -> bool:
    """Whether a page of a layer lies in one piece, as it must where it is only right as a whole."""
    order = RECORD_ORDERS[name]
    inside = ("token", "byte") if kind.replicated else ("kv", "head", "token", "byte")
    return max(order.index(axis) for axis in ("layer", "block")) < min(order.index(a) for a in inside if a in order)


def _node(
    kind: Kind, buffer: ModelBuffer, preset: str, form: _Form, side: int, tp_size: int, num_layers: int,
    random: np.random.Generator,
) -> Node:  # fmt: skip
    """One process's own blocks of a buffer, of which it may have none before the first position that moves."""
    page = form.pages[side]
    steps = page.steps * page.pages
    places = np.unique(buffer.steps(page.steps) // steps)
    count = int(places.max(initial=-1)) + 1 + int(random.integers(0, 2))
    pool = 2 * count + 2 + int(random.integers(0, 2))
    layout = _layout(kind, preset, form, side, tp_size, num_layers, pool)
    table = table_of(str(random.choice(["consecutive", "shuffled", "sparse"])), count, pool, random)
    if random.random() < 0.7:
        table[: places.min(initial=count)] = 0
    return Node(layout, table, tp_size, steps)


def _spec(kind: Kind, form: _Form, side: int) -> KVCacheSpec:
    """Return the whole model's spec in the blocks of a side."""
    page = form.pages[side]
    spec = kind.make(page.steps * page.pages * kind.tokens_per_step)
    if form.padding is not None and isinstance(spec, AttentionSpec | MambaSpec):
        spec = replace(spec, page_size_padded=spec.page_size_bytes + form.padding)
    return spec


def _kernel_block_size(kind: Kind, form: _Form, side: int) -> int | None:
    page = form.pages[side]
    return page.steps * kind.tokens_per_step if page.pages > 1 else None


def _layout(kind: Kind, preset: str, form: _Form, side: int, tp_size: int, num_layers: int, pool: int) -> Layout:
    layout = any_layout(
        preset,
        rank_spec(_spec(kind, form, side), tp_size, kind.sharding),
        num_layers=num_layers,
        num_blocks=pool,
        kernel_block_size=_kernel_block_size(kind, form, side),
    )
    layout.require_movable()
    return layout


def _process(
    kinds: Sequence[Kind], buffers: Sequence[ModelBuffer], forms: Sequence[_Form], which: int, side: _Side, at: int,
    held: Sequence[Held], declares: bool, random: np.random.Generator,
) -> Process:  # fmt: skip
    """Describe a process: its buffers in an order of its own, each in a group of its own."""
    held = [held[place] for place in random.permutation(len(held))]
    groups, described = list[GroupDescription](), list[BufferDescription]()
    for part in held:
        number = part.number
        buffer, kind, form, layout = buffers[number], kinds[number], forms[number], part.node.layout
        groups.append(
            GroupDescription(
                name=f"group {number}",
                kind=group_kind(buffer.spec),
                block_size=1 if buffer.is_state else part.node.steps_per_block * kind.tokens_per_step,
                num_blocks=layout.parts[0].layout.extent("block") // layout.blocks_per_manager_block,
                encoder_positions=buffer.encoder_positions,
            )
        )
        described.append(
            BufferDescription(
                name=buffer.name,
                group=f"group {number}",
                spec=spec_fields(_spec(kind, form, which)),
                layer_names=[buffer.layer_name(layer) for layer in part.layers],
                layout=layout.name,
                size_bytes=layout.size_bytes,
                kernel_block_size=_kernel_block_size(kind, form, which),
                sharding=sharding_fields(kind.sharding),
            )
        )
    ranks = side.parts[at][0]
    kept = [buffer.layer_name(layer) for buffer in buffers for layer in sorted(buffer.kept)]
    description = CacheDescription(
        model="model",
        fingerprint="fingerprint",
        device="cpu",
        groups=groups,
        buffers=described,
        tp_size=side.tp_size,
        first_rank=ranks.start,
        num_ranks=len(ranks),
        not_transferred=kept if declares else [],
    )
    return Process(description, tuple(held))
