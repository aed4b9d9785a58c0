"""The ways that are compared: a tier's store and load, and copies of the same runs; see pdtx.bench.raw for files."""

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from pdtx.bench.scene import Tables, TierScene
from pdtx.bench.turns import Way
from pdtx.cache import KVCaches, record_fence
from pdtx.errors import PlanError, TierError
from pdtx.native import Memory, library
from pdtx.plan import Endpoint, build_plan
from pdtx.ranges import copy_ranges
from pdtx.tiers import Lease, Moved, Tier

DEADLINE_S = 300.0
"""For one store or load of all blocks; the slowest disk takes less."""


_MOST_PROMPTS = 16


def nothing() -> None:
    """Do nothing between moves."""


def store_all(tier: Tier, scene: TierScene) -> Moved:
    """Store the prompt; return what came of it. Raises TierError where blocks were refused, naming the first."""
    moved = tier.store(scene.keys(), scene.stored, scene.places, record_fence(scene.source.device)).result(DEADLINE_S)
    if moved.failed:
        raise TierError(f"the {tier.name} tier did not store {len(moved.failed)} blocks; the first: {moved.failed[0]}")
    return moved


def fill(tier: Tier, scene: TierScene) -> None:
    """Store prompts until something has to leave, so that each further one drives another out."""
    for _ in range(_MOST_PROMPTS):
        scene.turn()
        store_all(tier, scene)
        if any(group.evicted.blocks for group in tier.usage().groups):
            return
    raise TierError(f"the {tier.name} tier is not full after {_MOST_PROMPTS} prompts of {scene.blocks} blocks")


def load_all(tier: Tier, scene: TierScene) -> None:
    """Load what the tier has of the prompt; the rest of the destination stays as it was."""
    with tier.lookup(scene.keys(), scene.places) as lease:
        lease.load(scene.loaded, found_of(lease)).result(DEADLINE_S)


def found_of(lease: Lease) -> Tables:
    """Return the places that were found, for each group."""
    return tuple(np.flatnonzero(found).astype(np.int64) for found in lease.found)


class TierStore(Way):
    """Store another prompt each time, into a tier that is full of earlier ones: what goes is evicted on the way."""

    def __init__(
        self, name: str, detail: str, scene: TierScene, tier: Tier, before: Callable[[], None] = nothing
    ) -> None:
        super().__init__(name, detail, scene.nbytes)
        self._scene, self._tier, self._before = scene, tier, before

    def prepare(self) -> None:
        """See Way: every move stores another prompt."""

    def move(self) -> float:
        """See Way."""
        self._scene.turn()
        keys, stored, places = self._scene.keys(), self._scene.stored, self._scene.places
        self._before()
        begun = time.perf_counter()
        moved = self._tier.store(keys, stored, places, record_fence(self._scene.source.device)).result(DEADLINE_S)
        seconds = time.perf_counter() - begun
        if moved.failed or moved.present:
            why = str(moved.failed[0]) if moved.failed else f"{moved.present} were there before"
            raise TierError(f"the {self._tier.name} tier did not store all blocks: {why}")
        return seconds

    def count_wrong(self) -> int:
        """See Way."""
        self._scene.poison()
        load_all(self._tier, self._scene)
        return self._scene.wrong_loaded()


class TierLoad(Way):
    """Load a prompt that the tier has."""

    def __init__(
        self, name: str, detail: str, scene: TierScene, tier: Tier, before: Callable[[], None] = nothing
    ) -> None:
        super().__init__(name, detail, scene.nbytes)
        self._scene, self._tier, self._before = scene, tier, before

    def prepare(self) -> None:
        """See Way."""
        self._scene.turn()
        store_all(self._tier, self._scene)
        self._scene.poison()

    def move(self) -> float:
        """See Way."""
        with self._tier.lookup(self._scene.keys(), self._scene.places) as lease:
            places = found_of(lease)
            self._before()
            begun = time.perf_counter()
            lease.load(self._scene.loaded, places).result(DEADLINE_S)
            return time.perf_counter() - begun

    def count_wrong(self) -> int:
        """See Way."""
        return self._scene.wrong_loaded()


class CopyRuns(Way):
    """Copy the runs that a tier's blocks are made of, in a loop on one thread.

    memory: a cache of the tier's shape, not the tier's own. tables: of the prompt in it. load: out of it, and not in.
    """

    def __init__(self, scene: TierScene, memory: KVCaches, tables: Tables, *, load: bool = False) -> None:
        native = library()
        detail = "a C loop of memcpy over the same runs, one thread" if native else "torch's index operations"
        super().__init__("memcpy", detail, scene.nbytes)
        self._scene, self._memory, self._tables, self._load = scene, memory, tables, load
        self._work = nothing

    def prepare(self) -> None:
        """See Way."""
        scene = self._scene
        scene.turn()
        for buffer in self._memory.buffers:
            buffer.poison()
        store = _copy(scene.source, scene.stored.tables, self._memory, self._tables, scene.positions)
        self._work = store
        if self._load:
            store()
            scene.poison()
            self._work = _copy(self._memory, self._tables, scene.destination, scene.loaded.tables, scene.positions)

    def move(self) -> float:
        """See Way."""
        begun = time.perf_counter()
        self._work()
        return time.perf_counter() - begun

    def count_wrong(self) -> int:
        """See Way."""
        return self._scene.wrong_loaded() if self._load else self._scene.wrong_in(self._memory, self._tables)


def _copy(src: KVCaches, src_tables: Tables, dst: KVCaches, dst_tables: Tables, positions: int) -> Callable[[], None]:
    """Plan copies of a prompt's blocks, all layers; return what carries them out."""
    if src.tp_size != 1 or dst.tp_size != 1:
        raise PlanError("the yardstick copies between caches of one rank")
    native, steps = library(), list[Callable[[], None]]()
    for here, there in zip(src.buffers, dst.buffers, strict=True):
        ours, theirs = src_tables[here.group], dst_tables[there.group]
        plan = build_plan(Endpoint.of(here.layout, ours), Endpoint.of(there.layout, theirs), range(positions))
        if native is None:
            steps.append(partial(copy_ranges, here.memory, plan.source(), there.memory, plan.destination()))
            continue
        to, source = (Memory(one.memory.data_ptr(), one.memory.numel()) for one in (there, here))
        steps.append(partial(native.copy_runs, to, source, plan.flat.dst, plan.flat.src, plan.flat.nbytes))

    def work() -> None:
        for step in steps:
            step()

    return work
