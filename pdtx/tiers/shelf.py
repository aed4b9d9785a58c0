"""The index of one group of a tier: which block holds what, who pins it, and what goes when room is needed.

It knows block ids and digests, and no memory: the CPU tier and the disk tier use it, and whatever counts hits only.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from itertools import repeat
from operator import eq

import numpy as np

from pdtx.errors import TierError
from pdtx.plan.runs import Int64s
from pdtx.tiers.base import Bools
from pdtx.tiers.counters import Count, GroupUsage
from pdtx.tiers.policies import make_policy

logger = logging.getLogger(__name__)

WRITE_BACK_S = 60.0
"""How long a reservation waits for what it drives out to be kept elsewhere."""

_FREE, _WRITING, _READY, _LEAVING = range(4)


@dataclass(frozen=True)
class Evicted:
    """Entries that are leaving: their blocks hold them still, until the hook's Future is done.

    contents: their content hashes, b"" where there is none.
    """

    digests: tuple[bytes, ...]
    proofs: tuple[bytes, ...]
    blocks: Int64s
    contents: tuple[bytes, ...]


Evict = Callable[[Evicted], "Future[object] | None"]
"""Told of what is leaving; returns None where its memory may be used at once. Called without the shelf's lock."""


@dataclass(frozen=True)
class Reservation:
    """What reserve() came to, for each of the keys in their order.

    blocks: to be written and then committed or cancelled; 0 where the key has none. present: it is here, or being
    written. full: there was no room. clash: its digest is that of other tokens.
    """

    blocks: Int64s
    present: Bools
    full: Bools
    clash: Bools


class Shelf:
    """Entries in blocks 1 .. num_blocks. Safe to use from several threads.

    An entry is being written from reserve() to commit(), and then ready: found, and evicted when room is needed, but
    never while it is pinned.
    """

    def __init__(
        self,
        name: str,
        num_blocks: int,
        policy: str = "lru",
        *,
        block_nbytes: int = 0,
        on_evict: Evict | None = None,
    ) -> None:
        """name: of the group. num_blocks may be 0. block_nbytes: payload of a block. Raises TierError (the policy)."""
        self.name, self.num_blocks, self.block_nbytes, self.on_evict = name, num_blocks, block_nbytes, on_evict
        self._policy = make_policy(policy, num_blocks)
        self._index = dict[bytes, int]()
        self._digests, self._proofs, self._contents = ([b""] * (num_blocks + 1) for _ in range(3))
        self._state, self._pins = np.zeros(num_blocks + 1, np.int8), np.zeros(num_blocks + 1, np.int64)
        self._free = list(range(num_blocks, 0, -1))
        self._usage = GroupUsage(name)
        self._lock = threading.Lock()

    # -- finding ----------------------------------------------------------------------------------------------------

    def lookup(
        self, digests: Sequence[bytes], proofs: Sequence[bytes], *, pin: bool = True, use: bool = True
    ) -> Int64s:
        """Return the blocks of entries, 0 for those that are not here and ready; int64, shape (n,). Pins what it finds.

        A digest with another proof is not here. use: whether the policy hears of it, and misses are counted.
        """
        with self._lock:
            blocks = np.fromiter(map(self._index.get, digests, repeat(0)), np.int64, len(digests))
            same = np.fromiter(map(eq, map(self._proofs.__getitem__, blocks.tolist()), proofs), bool, len(digests))
            blocks[~(same & (self._state[blocks] == _READY))] = 0
            found = blocks[blocks > 0]
            if pin:
                np.add.at(self._pins, found, 1)
            if use:
                self._policy.touch([self._digests[block] for block in found.tolist()])
                self._count(self._usage.missed, len(blocks) - len(found))
        return blocks

    def contents(self, blocks: Int64s) -> list[bytes]:
        """Return the content hashes of entries that are pinned, by their blocks; b"" where there is none."""
        with self._lock:
            return [self._contents[block] for block in blocks.tolist()]

    def unhashed(self, digests: Sequence[bytes]) -> Bools:
        """Return which keys have no entry, or one without a content hash; bool, shape (n,)."""
        with self._lock:
            return np.array([not self._contents[self._index.get(digest, 0)] for digest in digests], bool)

    def forget_unhashed(self, digests: Sequence[bytes], proofs: Sequence[bytes]) -> None:
        """Drop ready entries of keys that have no content hash, so that they can be stored again with one."""
        with self._lock:
            blocks = [self._index.get(digest, 0) for digest in digests]
            same = [
                block for block, proof in zip(blocks, proofs, strict=True) if block and self._proofs[block] == proof
            ]
            bare = [block for block in same if not self._contents[block]]
        self.forget(np.array(bare, np.int64))

    def pin(self, blocks: Int64s) -> None:
        """Pin blocks once more that are pinned already."""
        with self._lock:
            np.add.at(self._pins, blocks, 1)

    def unpin(self, blocks: Int64s) -> None:
        """Take one pin from each block. Raises TierError for one that has none."""
        with self._lock:
            np.subtract.at(self._pins, blocks, 1)
            if (self._pins[blocks] < 0).any():
                np.add.at(self._pins, blocks, 1)
                raise TierError(f"group {self.name}: a block was to be unpinned that nobody pins")
            gone = blocks[(self._pins[blocks] == 0) & (self._state[blocks] == _LEAVING)]
            self._release(np.unique(gone))

    # -- storing ----------------------------------------------------------------------------------------------------

    def reserve(
        self, digests: Sequence[bytes], proofs: Sequence[bytes], *, seconds: float = WRITE_BACK_S
    ) -> Reservation:
        """Give blocks to keys that are not here, the first of them where there is not enough room.

        What is here of the keys is not driven out by the others. seconds: to wait for the hook on_evict.
        """
        with self._lock:
            reservation, evicted = self._reserve(digests, proofs)
        if evicted is not None and self.on_evict is not None:
            return self._await_hook(self.on_evict, evicted, reservation, seconds)
        return reservation

    def _reserve(self, digests: Sequence[bytes], proofs: Sequence[bytes]) -> tuple[Reservation, Evicted | None]:
        blocks, full = np.zeros(len(digests), np.int64), np.zeros(len(digests), bool)
        present, clash, new = full.copy(), full.copy(), dict[bytes, int]()
        for place, (digest, proof) in enumerate(zip(digests, proofs, strict=True)):
            block = self._index.get(digest, 0)
            if block or digest in new:
                same = proof == (self._proofs[block] if block else proofs[new[digest]])
                (present if same else clash)[place] = True
            else:
                new[digest] = place
        keep = {digests[place] for place in np.flatnonzero(present).tolist()}
        keys, room = list(new), len(self._free)
        victims = self._policy.admit(keys, min(room, len(keys)), lambda key: key in keep or self._stays(key))
        evicted = self._take_out(victims)
        given = [self._free.pop() for _ in range(min(room, len(keys)))] + evicted.blocks.tolist()
        for key, block in zip(keys, given, strict=False):
            place = new[key]
            blocks[place] = self._index[key] = block
            self._digests[block], self._proofs[block], self._state[block] = key, proofs[place], _WRITING
            self._contents[block] = b""
        for key in keys[len(given) :]:
            full[new[key]] = True
        self._count(self._usage.refused, int(full.sum() + clash.sum()))
        return Reservation(blocks, present, full, clash), evicted if victims else None

    def _stays(self, key: bytes) -> bool:
        block = self._index.get(key, 0)
        return bool(self._state[block] != _READY or self._pins[block])

    def _take_out(self, victims: Sequence[bytes]) -> Evicted:
        blocks = np.fromiter((self._index.pop(victim) for victim in victims), np.int64, len(victims))
        ids = blocks.tolist()
        proofs, contents = (tuple(kept[block] for block in ids) for kept in (self._proofs, self._contents))
        self._count(self._usage.evicted, len(victims))
        return Evicted(tuple(victims), proofs, blocks, contents)

    def _await_hook(self, hook: Evict, evicted: Evicted, reservation: Reservation, seconds: float) -> Reservation:
        """Let what is leaving be kept elsewhere; what takes too long leaves its block for later."""
        try:
            future = hook(evicted)
        except Exception as error:  # noqa: BLE001  # whatever the hook raises, the blocks have an owner already
            logger.warning("group %s: %d blocks are evicted unkept: %s", self.name, len(evicted.blocks), error)
            return reservation
        if future is None or wait([future], seconds).done:
            return reservation
        logger.warning("group %s: what is evicted was not kept within %g s; its blocks stay", self.name, seconds)
        late = np.isin(reservation.blocks, evicted.blocks)
        with self._lock:
            for block in reservation.blocks[late].tolist():
                self._drop(block)
            self._state[evicted.blocks] = _LEAVING
            self._pins[evicted.blocks] += 1
            self._count(self._usage.refused, int(late.sum()))
        future.add_done_callback(lambda _: self.unpin(evicted.blocks))
        return replace(reservation, blocks=np.where(late, 0, reservation.blocks), full=reservation.full | late)

    def commit(self, blocks: Int64s, contents: Sequence[bytes] | None = None) -> None:
        """Let entries be found whose blocks are written now. contents: their content hashes, where there are any."""
        with self._lock:
            self._check_writing(blocks)
            for block, content in zip(blocks.tolist(), contents or [b""] * len(blocks), strict=True):
                self._contents[block] = content
            self._state[blocks] = _READY
            self._count(self._usage.stored, len(blocks))

    def cancel(self, blocks: Int64s) -> None:
        """Give blocks back that were reserved and not written."""
        with self._lock:
            self._check_writing(blocks)
            for block in blocks.tolist():
                self._drop(block)
            self._release(blocks)

    def _check_writing(self, blocks: Int64s) -> None:
        if (self._state[blocks] != _WRITING).any():
            raise TierError(f"group {self.name}: a block was committed or cancelled that is not being written")

    def adopt(
        self,
        digests: Sequence[bytes],
        proofs: Sequence[bytes],
        blocks: Int64s,
        contents: Sequence[bytes] | None = None,
    ) -> None:
        """Take in entries that lie in free blocks already, as after a restart. Raises TierError for blocks in use."""
        with self._lock:
            if len(np.unique(blocks)) < len(blocks) or len(set(digests) | self._index.keys()) < len(digests) + len(
                self._index
            ):
                raise TierError(f"group {self.name}: entries to be taken in have equal blocks or digests")
            if len(blocks) and (blocks.min() < 1 or blocks.max() > self.num_blocks or self._state[blocks].any()):
                raise TierError(f"group {self.name}: entries to be taken in lie in blocks that are not free")
            known = contents or [b""] * len(digests)
            for digest, proof, block, content in zip(digests, proofs, blocks.tolist(), known, strict=True):
                self._index[digest], self._contents[block] = block, content
                self._digests[block], self._proofs[block], self._state[block] = digest, proof, _READY
            taken = set(blocks.tolist())
            self._free = [block for block in self._free if block not in taken]
            self._policy.admit(digests, len(digests), lambda _: True)

    def is_ready(self, block: int) -> bool:
        """Whether a block has an entry that can be found."""
        with self._lock:
            return bool(self._state[block] == _READY)

    def forget(self, blocks: Int64s) -> None:
        """Drop ready entries, because what they hold is of no use; what is pinned keeps its block until it is not."""
        with self._lock:
            blocks = np.unique(blocks)
            blocks = blocks[self._state[blocks] == _READY]
            for block in blocks.tolist():
                self._drop(block)
            self._state[blocks] = _LEAVING
            self._release(blocks[self._pins[blocks] == 0])

    def _drop(self, block: int) -> None:
        """Take an entry out of index and order; its block stays as it is."""
        del self._index[self._digests[block]]
        self._policy.remove(self._digests[block])

    def _release(self, blocks: Int64s) -> None:
        self._state[blocks] = _FREE
        for block in blocks.tolist():
            self._digests[block] = self._proofs[block] = self._contents[block] = b""
            self._free.append(block)

    # -- counting ---------------------------------------------------------------------------------------------------

    def _count(self, count: Count, blocks: int) -> None:
        count.add(blocks, blocks * self.block_nbytes)

    def count_loaded(self, blocks: int) -> None:
        """Count blocks that have been loaded."""
        with self._lock:
            self._count(self._usage.loaded, blocks)

    def count_failed(self, blocks: int) -> None:
        """Count blocks that were found and could not be loaded."""
        with self._lock:
            self._count(self._usage.failed, blocks)

    def entries(self) -> Evicted:
        """Return what is ready, in no order, as digests, proofs and blocks."""
        with self._lock:
            blocks = np.flatnonzero(self._state == _READY).astype(np.int64)
            kept = self._digests, self._proofs, self._contents
            digests, proofs, contents = (tuple(each[block] for block in blocks.tolist()) for each in kept)
            return Evicted(digests, proofs, blocks, contents)

    def usage(self) -> GroupUsage:
        """Return a copy of the counters as they are now."""
        with self._lock:
            now = {
                "capacity": self.num_blocks,
                "used": int(np.count_nonzero(self._state == _READY)),
                "pinned": int(np.count_nonzero(self._pins)),
            }
            counters = ("stored", "loaded", "evicted", "missed", "failed", "refused")
            return GroupUsage(
                self.name,
                **{what: Count(blocks, blocks * self.block_nbytes) for what, blocks in now.items()},
                **{what: replace(getattr(self._usage, what)) for what in counters},
            )
