"""The caches of a case on both sides, before any memory is there: groups, buffers, block tables, and their match."""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pdtx.bench.caches import Layers, group_name
from pdtx.bench.fragment import block_ids
from pdtx.bench.work import Role
from pdtx.cache import group_kind
from pdtx.engine.describe import CacheFacts, facts_of
from pdtx.engine.matching import Match, match_caches
from pdtx.engine.specs import spec_fields
from pdtx.errors import InputError, PdtxError, ProtocolError
from pdtx.kvspec import CrossAttentionSpec, EncoderOnlyAttentionSpec, KVCacheSpec, MambaSpec
from pdtx.layout import any_layout, layout_for, parse_layouts
from pdtx.models import layer_specs, load_config
from pdtx.parallel import rank_spec
from pdtx.plan import NULL_BLOCK, needed_positions
from pdtx.plan.runs import Int64s
from pdtx.protocol import BufferDescription, CacheDescription, GroupDescription
from pdtx.results.model import Case
from pdtx.units import ceil_div

ROLES: tuple[Role, Role] = ("prefill", "decode")

_SPARE = 4
"""One block of a pool in so many more is nobody's, so that a write beside a request meets one."""

_LEAST_SPARE = 4

_MOST_BLOCK_ID = (1 << 31) - 1


@dataclass(frozen=True)
class CaseModel:
    """The layers that a case keeps something of, in the model's order.

    layers: of each role. steps: from a layer's name to how many layers of the model are computed before it.
    """

    layers: Mapping[Role, Layers]
    steps: Mapping[str, int]
    encoder_positions: int

    @property
    def num_layers(self) -> int:
        """Layers of the model that keep something; what one of them keeps twice counts once."""
        return max(self.steps.values()) + 1


@dataclass(frozen=True)
class CaseSide:
    """One side of a case. pools: of each group."""

    facts: CacheFacts
    pools: tuple["CasePool", ...]

    @cached_property
    def tables(self) -> tuple[tuple[Int64s, ...], ...]:
        """Of each group, of each request, the null block before what is needed. Made when first asked for."""
        return tuple(pool.tables() for pool in self.pools)

    @property
    def table_entries(self) -> int:
        """Entries of all tables together."""
        return sum(pool.requests * pool.places.stop for pool in self.pools)


@dataclass(frozen=True)
class CasePool:
    """Blocks of a group, and which of them each request has.

    num_blocks: of the pool. places: in a request's table, of the blocks that it needs. recorded: tables, if they are.
    """

    num_blocks: int
    requests: int
    places: range
    mean_run: float
    seed: int
    recorded: tuple[Int64s, ...] | None = None

    def tables(self) -> tuple[Int64s, ...]:
        """Return a table for each request."""
        if self.recorded is not None:
            return self.recorded
        before = np.full(self.places.start, NULL_BLOCK, np.int64)
        counts = [len(self.places)] * self.requests
        found = block_ids(self.num_blocks, counts, self.mean_run, self.seed)
        return tuple(np.concatenate((before, ids)) for ids in found)


@dataclass(frozen=True)
class CaseShape:
    """What both stations of a case derive from the same numbers. positions: that move of a request, of each group."""

    case: Case
    model: CaseModel
    prefill: CaseSide
    decode: CaseSide
    positions: tuple[range, ...]
    match: Match

    def side(self, role: Role) -> CaseSide:
        """Return the side of a role."""
        return self.prefill if role == "prefill" else self.decode


def case_shape(case: Case, pool_requests: int) -> CaseShape:
    """Work out a case with pools for so many requests. Raises InputError, in one line, for one that cannot be."""
    if case.tokens < 1 or pool_requests < 1:
        raise InputError(f"a case needs 1 token and 1 request or more, not {case.tokens} and {pool_requests}")
    model = case_model(case)
    _check_states(case, model)
    try:
        sides = {role: _side(case, role, model, pool_requests) for role in ROLES}
        match = match_caches(sides["prefill"].facts, sides["decode"].facts)
    except ProtocolError as error:
        # Nobody has sent anything: it is the case that does not go together.
        raise InputError(f"the case cannot be: {error}") from None
    positions = _positions(_groups(model.layers["decode"]), case.tokens, model.encoder_positions)
    return CaseShape(case, model, sides["prefill"], sides["decode"], positions, match)


def _check_states(case: Case, model: CaseModel) -> None:
    """Raise InputError for states that ranks would have to share: a station has no contents for their parts."""
    name = next((name for name, spec in model.layers["decode"].items() if isinstance(spec, MambaSpec)), None)
    if name is not None and case.tp != (1, 1):
        raise InputError(f"{name} of {case.model} keeps a state, which moves with tp 1:1 only, not {_pair(case.tp)}")


def _pair(values: tuple[int, int]) -> str:
    return f"{values[0]}:{values[1]}"


def case_model(case: Case) -> CaseModel:
    """Read the model of a case. Raises InputError (ModelError) for one that cannot be read, or has no such layers."""
    config = load_config(case.model)
    layers = {role: _layers(case, config, place) for place, role in enumerate(ROLES)}
    steps = _steps(layers["decode"])
    if not steps:
        raise InputError(f"model {case.model} keeps nothing that a decoder reads; there is nothing to move")
    if case.layers is not None:
        if case.layers < 1:
            raise InputError(f"layers is {case.layers}; needs 1 or more")
        steps = {name: step for name, step in steps.items() if step < case.layers}
    kept = {role: {name: spec for name, spec in found.items() if name in steps} for role, found in layers.items()}
    return CaseModel(kept, steps, int(config.get("max_source_positions", 1)))


def _layers(case: Case, config: Mapping[str, Any], place: int) -> Layers:
    found = layer_specs(config, block_size=case.block_size[place], kv_cache_dtype=case.kv_cache_dtype)
    return {name: spec for name, spec in found.items() if not isinstance(spec, EncoderOnlyAttentionSpec)}


def _steps(layers: Layers) -> dict[str, int]:
    """Count layers by the first number in their names: latent vectors and their indexer are of one layer."""
    numbers = {name: re.search(r"\d+", name) for name in layers}
    of_model = {name: number.group() if number else name for name, number in numbers.items()}
    order = {number: step for step, number in enumerate(dict.fromkeys(of_model.values()))}
    return {name: order[number] for name, number in of_model.items()}


def _groups(layers: Layers) -> dict[str, KVCacheSpec]:
    """Return a spec of each group by the group's name."""
    found = dict[str, KVCacheSpec]()
    for spec in layers.values():
        found.setdefault(group_name(spec), spec)
    return found


def _positions(groups: Mapping[str, KVCacheSpec], tokens: int, encoder_positions: int) -> tuple[range, ...]:
    return tuple(needed_positions(spec, tokens, encoder_positions) for spec in groups.values())


def positions_in_block(spec: KVCacheSpec) -> int:
    """Return what a block table's entry stands for: a block of tokens, or one state."""
    return 1 if isinstance(spec, MambaSpec) else spec.block_size


# -- one side ----------------------------------------------------------------------------------------------------------


def _side(case: Case, role: Role, model: CaseModel, pool_requests: int) -> CaseSide:
    layers = model.layers[role]
    groups = _groups(layers)
    positions = _positions(groups, case.tokens, model.encoder_positions)
    pools = {
        name: _pool(case, role, name, spec, needed, pool_requests)
        for (name, spec), needed in zip(groups.items(), positions, strict=True)
    }
    sizes = {name: pool.num_blocks for name, pool in pools.items()}
    try:
        facts = facts_of(_describe(case, role, layers, groups, sizes, model), whose=f"the {role} side's")
    except ProtocolError as error:
        raise InputError(str(error)) from None
    return CaseSide(facts, tuple(pools.values()))


def _pool(case: Case, role: Role, group: str, spec: KVCacheSpec, needed: range, requests: int) -> CasePool:
    """Return what is known of a group's blocks before any table is made."""
    size = positions_in_block(spec)
    first, stop = needed.start // size, ceil_div(needed.stop, size)
    places, seed = range(first, max(first, stop)), _seed(case.seed, role, group)
    by_tokens = not isinstance(spec, MambaSpec | CrossAttentionSpec)
    if case.block_tables is not None and by_tokens:
        recorded, num_blocks = _recorded(case, role, places, requests)
        return CasePool(num_blocks, requests, places, case.mean_run, seed, recorded)
    used = len(places) * requests
    return CasePool(1 + used + max(_LEAST_SPARE, used // _SPARE), requests, places, case.mean_run, seed)


def _seed(seed: int, role: Role, group: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {role} {group}".encode()).digest()[:8], "little")


def _recorded(case: Case, role: Role, places: range, requests: int) -> tuple[tuple[Int64s, ...], int]:
    """Return recorded tables. Raises InputError for too few, too short, or a block that is there twice."""
    recorded = [pair[ROLES.index(role)] for pair in case.block_tables or []][:requests]
    if len(recorded) < requests:
        raise InputError(f"{len(recorded)} block tables for {requests} requests; give one for each, or a smaller batch")
    for number, table in enumerate(recorded):
        if len(table) < places.stop:
            raise InputError(
                f"the {role} side's block table {number} has {len(table)} blocks; "
                f"{case.tokens} tokens need {places.stop} of {case.block_size[ROLES.index(role)]} each"
            )
    used = [block for table in recorded for block in table[places.start : places.stop]]
    if min(used, default=1) <= NULL_BLOCK:
        raise InputError(f"a block table of the {role} side names block {min(used)}; ids begin at 1")
    last = max(max(table[: places.stop], default=0) for table in recorded)
    if last > _MOST_BLOCK_ID:
        raise InputError(f"a block table of the {role} side names block {last:,}; ids end at {_MOST_BLOCK_ID:,}")
    if len(set(used)) < len(used):
        twice = Counter(used).most_common(1)[0][0]
        raise InputError(f"block tables of the {role} side name block {twice} twice; what is moved has one place")
    tables = tuple(np.asarray(table[: places.stop], np.int64) for table in recorded)
    return tables, max(used, default=0) + 1 + _LEAST_SPARE


def _describe(
    case: Case,
    role: Role,
    layers: Layers,
    groups: Mapping[str, KVCacheSpec],
    pools: Mapping[str, int],
    model: CaseModel,
) -> CacheDescription:
    place = ROLES.index(role)
    layouts, tp_size = parse_layouts(case.layout[place]), case.tp[place]
    kinds = dict[tuple[KVCacheSpec, str], list[str]]()
    for name, spec in layers.items():
        kinds.setdefault((spec, layout_for(spec, name, layouts)), []).append(name)
    try:
        buffers = [
            _describe_buffer(number, spec, layout, names, pools[group_name(spec)], tp_size)
            for number, ((spec, layout), names) in enumerate(kinds.items())
        ]
        return CacheDescription(
            model=case.model,
            fingerprint=hashlib.sha256(f"{case.model} {case.kv_cache_dtype}".encode()).hexdigest(),
            device="cpu",
            groups=[
                GroupDescription(
                    name=name,
                    kind=group_kind(spec),
                    block_size=positions_in_block(spec),
                    num_blocks=pools[name],
                    encoder_positions=model.encoder_positions if isinstance(spec, CrossAttentionSpec) else 0,
                )
                for name, spec in groups.items()
            ],
            buffers=buffers,
            tp_size=tp_size,
        )
    except (PdtxError, ValueError) as error:
        raise InputError(f"the {role} side's cache cannot be: {error}") from None


def _describe_buffer(
    number: int, spec: KVCacheSpec, layout: str, names: Sequence[str], num_blocks: int, tp_size: int
) -> BufferDescription:
    group = group_name(spec)
    of_rank = any_layout(layout, rank_spec(spec, tp_size), num_layers=len(names), num_blocks=num_blocks)
    return BufferDescription(
        name=group if number == 0 else f"{group}.{number}",
        group=group,
        spec=spec_fields(spec),
        layer_names=list(names),
        layout=of_rank.name,
        size_bytes=of_rank.size_bytes,
    )
