"""Tiers one behind the other: memory, a disk below it, and what else can be read from; itself a tier."""

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal

import numpy as np

from pdtx.cache import record_fence
from pdtx.errors import PdtxError, TierError
from pdtx.plan.runs import Int64s
from pdtx.tiers.base import Bools, ContentHashes, Failed, Fence, Lease, Moved, Side, Tier
from pdtx.tiers.contents import NO_HASH, known_contents
from pdtx.tiers.counters import TierUsage
from pdtx.tiers.cpu import CpuTier
from pdtx.tiers.holds import Held
from pdtx.tiers.keys import PrefixKeys
from pdtx.tiers.write_behind import Behind, WriteBehind
from pdtx.units import format_bytes

logger = logging.getLogger(__name__)

WritePolicy = Literal["through", "back"]

DRAIN_S = 10.0
"""How long close() waits for what is on its way down."""
_PROMOTE_S = 0.5
"""How long what has been loaded waits for room in memory: its request waits as long."""
_USUAL_BYTES = 16 << 20
"""Of a load, to compare tiers by."""


class TierStack(Tier):
    """The first tier is memory, where everything is stored; the second keeps what comes down from it.

    write: "through" writes every block down once it is stored, "back" when it leaves the memory. Either way the second
    tier writes it from the memory, and no block of it is used again before that has ended. What is found below is
    loaded straight into the cache, and then kept in memory too, if it takes it. Tiers behind the second are read only.
    What is in memory alone is written down by close(), as far as there is time.
    """

    name: ClassVar[str] = "stack"

    def __init__(self, tiers: Sequence[Tier], *, write: WritePolicy = "through") -> None:
        """Put tiers on each other, which are closed with the stack. Raises TierError where they do not fit together."""
        if write not in ("through", "back"):
            raise TierError(f"blocks are written through or back, not {write!r}")
        memory = tiers[0] if tiers else None
        if not isinstance(memory, CpuTier):
            raise TierError("the first tier of a stack is one of memory, which the others get their blocks from")
        sizes = {tier.name: tier.block_tokens for tier in tiers}
        if len(set(sizes.values())) > 1:
            raise TierError(f"tiers have blocks of different sizes, {sizes} tokens; give all the same")
        self.tiers, self._memory, self._write = tuple(tiers), memory, write
        self.block_tokens = memory.block_tokens
        self._closed = False
        self._behind = WriteBehind(memory, tiers[1]) if len(tiers) > 1 else None
        if self._behind is not None and write == "back":
            memory.keep_elsewhere = self._behind.leaving

    # -- loading ----------------------------------------------------------------------------------------------------

    def lookup(self, keys: PrefixKeys, places: Sequence[Int64s]) -> "StackLease":
        """Find and pin blocks, each in the first tier that has it, quick ones first; see Tier."""
        order = sorted(self.tiers, key=lambda tier: tier.seconds_for(_USUAL_BYTES, 1))
        left, leases = [np.asarray(each, np.int64) for each in places], list[tuple[Tier, Lease, tuple[Bools, ...]]]()
        try:
            for tier in order:
                lease = tier.lookup(keys, left)
                masks = tuple(np.zeros(len(keys), bool) for _ in left)
                leases.append((tier, lease, masks))
                for mask, each, found in zip(masks, left, lease.found, strict=True):
                    mask[each[found]] = True
                left = [each[~found] for each, found in zip(left, lease.found, strict=True)]
                if not any(map(len, left)):
                    break
        except BaseException:
            for _, lease, _ in leases:
                lease.release()
            raise
        return StackLease(self, keys, places, leases)

    def promote(self, keys: PrefixKeys, source: Side, moved: Sequence[Moved]) -> "Future[Moved] | None":
        """Keep blocks in memory that have been loaded from below. None where there is nothing to do, or no time."""
        if source.cache is self._memory.cache:
            return None
        places = [np.concatenate([part.places[group] for part in moved]) for group in range(len(source.tables))]
        if not any(map(len, places)):
            return None
        try:
            fence = record_fence(source.cache.device)  # of the copies, which have ended
            return self._memory.store(keys, source, places, fence, patience_s=_PROMOTE_S)
        except PdtxError:
            return None

    def is_memory(self, tier: Tier) -> bool:
        """Whether a tier is the first."""
        return tier is self._memory

    # -- storing ----------------------------------------------------------------------------------------------------

    def store(self, keys: PrefixKeys, source: Side, places: Sequence[Int64s], fence: Fence) -> "Future[Moved]":
        """Take copies of blocks into memory, see Tier; the result tells of that alone, and not of what is below."""
        behind = self._behind if self._write == "through" else None
        if behind is None:
            return self._memory.store(keys, source, places, fence)
        behind.announce()
        try:
            future = self._memory.store(keys, source, places, fence)
        except BaseException:
            behind.withdraw()
            raise
        future.add_done_callback(partial(self._stored, behind, keys, places))
        return future

    def _stored(self, behind: WriteBehind, keys: PrefixKeys, places: Sequence[Int64s], future: "Future[Moved]") -> None:
        try:
            if not future.cancelled() and future.exception() is None:
                self._keep_below(behind, keys, places, future.result())
        finally:
            behind.withdraw()

    def _keep_below(self, behind: WriteBehind, keys: PrefixKeys, places: Sequence[Int64s], moved: Moved) -> None:
        failed: dict[str, list[int]] = {}
        for each in moved.failed:
            failed.setdefault(each.group, []).append(each.place)
        names = [group.name for group in self._memory.cache.groups]
        # Those that were here already, too: they may have been refused the last time.
        behind.keep(
            keys, [each[~np.isin(each, failed.get(name, []))] for name, each in zip(names, places, strict=True)]
        )

    # -- the rest -----------------------------------------------------------------------------------------------------

    @property
    def behind(self) -> Behind:
        """What has become of blocks on their way down."""
        return self._behind.counts if self._behind is not None else Behind()

    def drain(self, deadline: float) -> bool:
        """Wait until nothing is on its way down, to a deadline in time.monotonic(). Returns whether that is so."""
        return self._behind is None or self._behind.drain(deadline)

    def usages(self) -> tuple[TierUsage, ...]:
        """Return what each tier holds, see Tier."""
        return tuple(tier.usage() for tier in self.tiers)

    def usage(self) -> TierUsage:
        """Return what the memory holds; a sum would count blocks twice, see usages(). details: of the way down."""
        usage, counts = self._memory.usage(), self.behind
        written_down = f"{counts.written.blocks} blocks, {format_bytes(counts.written.nbytes)}"
        details = {
            "tiers": ", ".join(tier.name for tier in self.tiers),
            "write": self._write,
            "written down": written_down,
            "not written down": f"{counts.failed} failed, {counts.refused} refused, {counts.under_way} under way",
        }
        return replace(usage, name=self.name, details=usage.details | details)

    def seconds_for(self, nbytes: int, num_runs: int) -> float:
        """Estimate the time of a load from the quickest tier, see Tier."""
        return min(tier.seconds_for(nbytes, num_runs) for tier in self.tiers)

    def close(self) -> None:
        """Close all tiers, see Tier, after what is to be below is there, or DRAIN_S have passed. Idempotent."""
        deadline = time.monotonic() + DRAIN_S
        if self._behind is not None and self._write == "back" and not self._closed:
            lost = self._behind.flush(deadline)
            if lost:
                logger.warning("%d blocks were in memory alone, and are lost: see what the tier below says", lost)
        self._closed = True
        self.drain(deadline)
        for tier in self.tiers:
            tier.close()


class StackLease(Lease):
    """Blocks of several tiers. See Lease."""

    def __init__(
        self,
        stack: TierStack,
        keys: PrefixKeys,
        places: Sequence[Int64s],
        leases: Sequence[tuple[Tier, Lease, tuple[Bools, ...]]],
    ) -> None:
        """leases: of each tier that was asked; and for each group, by place, what it has that those before have not."""
        self._stack, self._keys, self._leases = stack, keys, leases
        everywhere = [np.logical_or.reduce([masks[group] for _, _, masks in leases]) for group in range(len(places))]
        self._everywhere = everywhere
        self.found = tuple(here[np.asarray(each, np.int64)] for here, each in zip(everywhere, places, strict=True))

    def load(self, into: Side, places: Sequence[Int64s]) -> "Future[Moved]":
        """Copy blocks into a cache, each from the tier that has it, see Lease."""
        asked = [np.asarray(each, np.int64) for each in places]
        for group, (each, here) in enumerate(zip(asked, self._everywhere, strict=True)):
            inside = (each >= 0) & (each < len(here))
            lacking = each[~inside] if not inside.all() else each[~here[each]]
            if len(lacking):
                raise TierError(f"group {into.cache.groups[group].name} block {lacking[0]} was not found")
        parts = [
            (tier, lease, [each[mask[each]] for each, mask in zip(asked, masks, strict=True)])
            for tier, lease, masks in self._leases
        ]
        # Now, for as soon as the loads have begun the lease may be released.
        hashes = known_contents(asked, [self.contents(group, each) for group, each in enumerate(asked)])
        load = _Load(self._stack, self._keys, into, asked, hashes)
        for tier, lease, part in parts:
            if any(map(len, part)):
                load.begin(tier, lease, part)
        return load.begun()

    def contents(self, group: int, places: Int64s) -> list[bytes]:
        """Return the content hashes of found blocks of a group, from the tiers that have them, see Lease."""
        found = dict.fromkeys(places.tolist(), NO_HASH)
        for _, lease, masks in self._leases:
            part = places[masks[group][places]]
            found |= zip(part.tolist(), lease.contents(group, part), strict=True)
        return [found[place] for place in places.tolist()]

    def release(self) -> None:
        """Let the blocks be evicted, see Lease."""
        for _, lease, _ in self._leases:
            lease.release()


class _Load:
    """A load from several tiers, and what is put into memory after it."""

    def __init__(
        self, stack: TierStack, keys: PrefixKeys, into: Side, asked: Sequence[Int64s], hashes: ContentHashes
    ) -> None:
        self._stack, self._keys, self._into, self._asked = stack, keys, into, asked
        self._hashes = hashes
        self._result, self._lock = Future[Moved](), threading.Lock()
        self._left, self._started, self._done = 1, 0, list[tuple[Tier, Moved]]()
        self._error: PdtxError | None = None
        self._result.set_running_or_notify_cancel()

    def begin(self, tier: Tier, lease: Lease, places: list[Int64s]) -> None:
        """Begin with one tier's blocks; if it takes nothing now, they have failed."""
        try:
            future = lease.load(self._into, places)
        except PdtxError as error:
            self._error = self._error or error
            with self._lock:
                self._done.append((tier, self._failed(places, error)))
            return
        with self._lock:
            self._left, self._started = self._left + 1, self._started + 1
        future.add_done_callback(partial(self._part, tier, places))

    def begun(self) -> "Future[Moved]":
        """Return the Future once all have begun. Raises what the tiers did if none has."""
        if self._error is not None and not self._started:
            raise self._error
        self._end_one()
        return self._result

    def _failed(self, places: Sequence[Int64s], error: BaseException) -> Moved:
        groups = self._into.cache.groups
        failed = tuple(
            Failed(group.name, place, str(error) or type(error).__name__)
            for group, each in zip(groups, places, strict=True)
            for place in each.tolist()
        )
        return Moved(tuple(np.zeros(0, np.int64) for _ in groups), failed)

    def _part(self, tier: Tier, places: Sequence[Int64s], future: "Future[Moved]") -> None:
        error = TierError("cancelled") if future.cancelled() else future.exception()
        with self._lock:
            self._done.append((tier, future.result() if error is None else self._failed(places, error)))
        self._end_one()

    def _end_one(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        below = [moved for tier, moved in self._done if not self._stack.is_memory(tier)]
        # The caller keeps the blocks until the result is there, and that is set after this.
        source = replace(self._into, hold=Held.BY_CALLER, contents=self._hashes)
        promoted = self._stack.promote(self._keys, source, below) if below else None
        if promoted is None:
            self._result.set_result(self._sum())
        else:
            # Its source is where the blocks were loaded to, which is the caller's again with the result.
            promoted.add_done_callback(lambda _: self._result.set_result(self._sum()))

    def _sum(self) -> Moved:
        moved = [part for _, part in self._done]
        nothing = np.zeros(0, np.int64)
        there = [
            np.concatenate([nothing, *(part.places[group] for part in moved)]) for group in range(len(self._asked))
        ]
        return Moved(
            tuple(each[np.isin(each, found)] for each, found in zip(self._asked, there, strict=True)),
            tuple(failed for part in moved for failed in part.failed),
            nbytes=sum(part.nbytes for part in moved),
            seconds=max((part.seconds for part in moved), default=0.0),
            waited=max((part.waited for part in moved), default=0.0),
            sources=tuple(tier.name for tier, part in self._done if part.num_blocks),
        )
