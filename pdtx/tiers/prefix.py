"""A cache's way to its tiers: prompts' beginnings are fetched into a request's blocks, and kept once computed."""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace

import numpy as np

from pdtx.cache import GroupBlocks, KVCaches
from pdtx.errors import DeadlineExceeded, PdtxError, StaleBlocks, TierError
from pdtx.plan import NULL_BLOCK
from pdtx.plan.runs import Int64s
from pdtx.tiers.base import Bools, Failed, Fence, Lease, Moved, Side, Tier, check_fence
from pdtx.tiers.contents import NO_HASH, contents_to_keep
from pdtx.tiers.counters import TierUsage
from pdtx.tiers.hits import held_places, held_tokens, resume_places, usable_tokens
from pdtx.tiers.holds import Hold, Holder
from pdtx.tiers.keys import PrefixKeys, prefix_keys
from pdtx.tiers.stack import TierStack

logger = logging.getLogger(__name__)

_NOWHERE: Int64s = np.zeros(0, np.int64)
_ROUNDS = 4
"""How often what failed to load is made up for: by another tier, or a shorter prefix. After that nothing is cached."""


@dataclass(frozen=True)
class Request:
    """What of a request concerns tiers: keys, a block table for each group, and its blocks with their owner."""

    keys: PrefixKeys
    tables: tuple[Int64s, ...]
    blocks: GroupBlocks
    holder: Holder


@dataclass(frozen=True)
class Fetched:
    """What a fetch came to: the first num_tokens tokens need not be computed, or not be sent.

    places: for each group the blocks that were loaded. sources: the tiers that gave some. failed: what was found and
    could not be loaded. seconds: of the whole fetch. block_tokens: of the tiers. contents: for each group, for each of
    its places, the content hash that was stored with the block, b"" where there is none.
    """

    num_tokens: int = 0
    places: tuple[Int64s, ...] = ()
    sources: tuple[str, ...] = ()
    nbytes: int = 0
    seconds: float = 0.0
    failed: tuple[Failed, ...] = ()
    block_tokens: int = 0
    contents: tuple[tuple[bytes, ...], ...] = ()

    def first_place(self, group: int, block_tokens: int) -> int:
        """Return the first block of a group that lies in the cache, in whole, if all after num_tokens is computed."""
        if self.places and len(self.places[group]):
            return int(self.places[group][0])
        return self.num_tokens // block_tokens


@dataclass
class _Found:
    """What one tier has of a prompt: for each group, by place. A block that failed to load is not there any more."""

    tier: Tier
    lease: Lease
    masks: tuple[Bools, ...]


@dataclass
class _Work:
    """A fetch under way. loaded, contents: for each group, by place. checked: see PrefixCache.fetch()."""

    request: Request
    num_tokens: int
    deadline: float
    resume: bool
    loaded: tuple[Bools, ...]
    contents: tuple[list[bytes], ...]
    checked: bool = False
    begun: float = field(default_factory=time.monotonic)
    found: list[_Found] = field(default_factory=list)
    sources: dict[str, None] = field(default_factory=dict)
    failed: list[Failed] = field(default_factory=list)
    nbytes: int = 0


class PrefixCache:
    """Fetches and keeps what requests of one cache have in common. Safe to use from several threads.

    tier: what is kept goes there. peers: tiers that can only be read, for what the first lacks or has at a higher cost.
    fingerprint: of model and cache, see fingerprint_of. hashed: whether keep() stores content hashes by default, which
    costs one more pass over what is kept, in the background: for a node that computes what it keeps, and serves it.
    Raises TierError for tiers whose blocks are not whole blocks of the cache, or of different sizes.
    """

    def __init__(
        self,
        cache: KVCaches,
        tier: Tier | None,
        fingerprint: bytes,
        *,
        peers: Sequence[Tier] = (),
        hashed: bool = False,
    ) -> None:
        self.cache, self.tier, self.peers, self.fingerprint = cache, tier, tuple(peers), fingerprint
        self.hashed = hashed
        self._tiers = (*([tier] if tier is not None else []), *self.peers)
        if not self._tiers:
            raise TierError("a prefix cache needs a tier, or a peer's")
        self.block_tokens = self._tiers[0].block_tokens
        self._storing = set[Future[Moved]]()
        self.has_states = any(group.kind == "state" for group in cache.groups)
        self._usable = all(group.kind != "cross" for group in cache.groups)
        self._check()

    def _check(self) -> None:
        size = self.block_tokens
        for tier in self._tiers:
            if tier.block_tokens != size:
                raise TierError(
                    f"tier {tier.name} has blocks of {tier.block_tokens} tokens, {self._tiers[0].name} {size}"
                )
        for group in self.cache.groups:
            if group.counts_tokens and size % group.block_size:
                raise TierError(
                    f"blocks of {size} tokens are not whole blocks of group {group.name}, which hold "
                    f"{group.block_size}; give a multiple"
                )

    def keys(self, token_ids: Sequence[int]) -> PrefixKeys:
        """Return the names of a prompt's whole blocks."""
        return prefix_keys(token_ids, self.block_tokens, self.fingerprint)

    def usages(self) -> tuple[TierUsage, ...]:
        """Return what each tier holds and has done, those of a stack one by one."""
        parts = (tier.tiers if isinstance(tier, TierStack) else (tier,) for tier in self._tiers)
        return tuple(tier.usage() for tiers in parts for tier in tiers)

    def close(self) -> None:
        """Close all tiers. Idempotent."""
        for tier in self._tiers:
            tier.close()

    # -- fetching -----------------------------------------------------------------------------------------------------

    def fetch(
        self, request: Request, num_tokens: int, deadline: float, *, resume: bool, checked: bool = False
    ) -> Fetched:
        """Load as much of the beginning of a prompt of num_tokens into a request's blocks as the tiers have of it.

        resume: whether tokens are to be computed after it, which takes the states; else it is for a decoder, who gets
        those from elsewhere. deadline: in time.monotonic(). What cannot be loaded is a miss, and so is all behind it.
        checked: whether what is loaded will be verified: blocks without a content hash are misses then, too.
        Raises DeadlineExceeded; the blocks are held until this and what is still under way have ended.
        """
        try:
            request.holder.hold(request.blocks)
        except StaleBlocks:  # it has ended meanwhile, and they may be another's
            return Fetched()
        try:
            return self._fetch(request, num_tokens, deadline, resume=resume, checked=checked)
        finally:
            request.holder.unhold(request.blocks)

    def _fetch(self, request: Request, num_tokens: int, deadline: float, *, resume: bool, checked: bool) -> Fetched:
        blocks, groups = len(request.keys), self.cache.groups
        loaded, contents = tuple(np.zeros(blocks, bool) for _ in groups), tuple([NO_HASH] * blocks for _ in groups)
        work = _Work(request, num_tokens, deadline, resume, loaded, contents, checked)
        if not blocks or not self._usable:
            return self._result(work, 0)
        try:
            self._look_up(work)
            for _ in range(_ROUNDS):
                reached = self._reached(work)
                if not self._load(work, self._places(work, reached)):
                    return self._result(work, reached)
            return self._result(work, 0)
        finally:
            for found in work.found:
                found.lease.release()

    def _result(self, work: _Work, num_tokens: int) -> Fetched:
        places = self._places(work, num_tokens)
        self._clear(work, places)
        seconds = time.monotonic() - work.begun
        sources = tuple(work.sources) if num_tokens else ()
        contents = tuple(
            tuple(known[place] for place in each.tolist()) for known, each in zip(work.contents, places, strict=True)
        )
        failed = tuple(work.failed)
        return Fetched(num_tokens, places, sources, work.nbytes, seconds, failed, self.block_tokens, contents)

    def _clear(self, work: _Work, places: Sequence[Int64s]) -> None:
        """Leave nothing in blocks that were loaded in vain: verification looks for what lies beside a request."""
        for at, (group, loaded, used) in enumerate(zip(self.cache.groups, work.loaded, places, strict=True)):
            table, vain = work.request.tables[at], np.setdiff1d(np.flatnonzero(loaded), used)
            if group.kind == "state":
                blocks = table[:1] if len(vain) and not len(used) else table[:0]
            else:
                size = self.block_tokens // group.block_size
                blocks = table[(vain[:, None] * size + np.arange(size)).reshape(-1)]
            self.cache.poison(at, blocks)

    def _reached(self, work: _Work) -> int:
        """Return how many tokens what is found is good for."""
        groups, blocks = self.cache.groups, len(work.request.keys)
        masks = [
            np.logical_or.reduce([np.zeros(blocks, bool), *(found.masks[group] for found in work.found)])
            for group in range(len(groups))
        ]
        reach = usable_tokens if work.resume else held_tokens
        return reach(groups, self.block_tokens, masks, work.num_tokens)

    def _places(self, work: _Work, num_tokens: int) -> tuple[Int64s, ...]:
        """Return the blocks that are to be loaded so that num_tokens are there."""
        if work.resume:
            return resume_places(self.cache.groups, self.block_tokens, num_tokens)
        return held_places(self.cache.groups, self.block_tokens, num_tokens, work.num_tokens)

    def _look_up(self, work: _Work) -> None:
        """Ask the tiers, those that are quicker first, until one has all that can be had."""
        blocks = len(work.request.keys)
        everything = tuple(np.arange(blocks) for _ in self.cache.groups)
        asked = everything if work.resume else self._places(work, blocks * self.block_tokens)
        most = (work.num_tokens - work.resume) // self.block_tokens * self.block_tokens
        for tier in self._by_cost(most):
            try:
                lease = tier.lookup(work.request.keys, asked)
            except PdtxError as error:
                logger.warning("nothing is looked up in tier %s: %s", tier.name, error)
                continue
            masks = tuple(np.zeros(blocks, bool) for _ in self.cache.groups)
            for mask, places, found in zip(masks, asked, lease.found, strict=True):
                mask[places] = found
            work.found.append(_Found(tier, lease, masks))
            if work.checked:
                self._leave_unhashed(work.found[-1])
            if self._reached(work) >= most:
                return

    def _leave_unhashed(self, found: _Found) -> None:
        """Count blocks as missing with which no content hash was stored: nothing could tell whether they are right."""
        left = 0
        for group, mask in enumerate(found.masks):
            places = np.flatnonzero(mask) if self.cache.groups[group].counts_tokens else _NOWHERE
            bare = [not content for content in found.lease.contents(group, places)]
            mask[places[bare]] = False
            left += sum(bare)
        if left:
            logger.warning(
                "%d blocks of tier %s have no content hash to verify them with, and count as misses: they were stored "
                "unverified, or by an older version",
                left,
                found.tier.name,
            )

    def _by_cost(self, num_tokens: int) -> list[Tier]:
        if len(self._tiers) == 1:
            return list(self._tiers)
        per_token = sum(buffer.bytes_per_position * buffer.num_layers for buffer in self.cache.buffers)
        runs = num_tokens // self.block_tokens * sum(buffer.num_layers for buffer in self.cache.buffers)
        return sorted(self._tiers, key=lambda tier: tier.seconds_for(num_tokens * per_token, runs))

    def _load(self, work: _Work, wanted: Sequence[Int64s]) -> bool:
        """Load those of the wanted blocks that are not here yet, each from the first tier that has it.

        Returns whether anything failed, which is forgotten to have been found.
        """
        left = [places[~loaded[places]] for places, loaded in zip(wanted, work.loaded, strict=True)]
        running = list[tuple[_Found, list[Int64s], Future[Moved]]]()
        lost = False
        for found in work.found:
            part = [places[mask[places]] for places, mask in zip(left, found.masks, strict=True)]
            if not any(map(len, part)):
                continue
            left = [places[~mask[places]] for places, mask in zip(left, found.masks, strict=True)]
            try:
                running.append((found, part, self._begin_load(work, found, part)))
            except Exception as error:  # noqa: BLE001 - the loads that have begun must be waited for all the same
                lost = True
                self._forget(found, part, error)
        for found, part, future in running:
            lost = self._finish_load(work, found, part, future) or lost
        return lost

    def _begin_load(self, work: _Work, found: _Found, part: list[Int64s]) -> "Future[Moved]":
        request = work.request
        request.holder.hold(request.blocks)
        try:
            future = found.lease.load(Side(self.cache, request.tables), part)
        except BaseException:
            request.holder.unhold(request.blocks)
            raise
        future.add_done_callback(lambda _: request.holder.unhold(request.blocks))
        return future

    def _finish_load(self, work: _Work, found: _Found, part: list[Int64s], future: "Future[Moved]") -> bool:
        """Wait for a load and note what came of it; whether anything failed."""
        try:
            moved = future.result(max(0.0, work.deadline - time.monotonic()))
        except TimeoutError:
            if not future.done():
                waited = round(time.monotonic() - work.begun, 3)
                raise DeadlineExceeded("blocks of the prompt", f"tier {found.tier.name}", waited) from None
            self._forget(found, part, TierError("it took too long"))
            return True
        except Exception as error:  # noqa: BLE001 - whatever a tier's trouble is, the request can do without it
            self._forget(found, part, error)
            return True
        for group, (places, asked) in enumerate(zip(moved.places, part, strict=True)):
            work.loaded[group][places] = True
            found.masks[group][np.setdiff1d(asked, places)] = False
            for place, content in zip(places.tolist(), found.lease.contents(group, places), strict=True):
                work.contents[group][place] = content
        work.nbytes += moved.nbytes
        work.failed += moved.failed
        if moved.num_blocks:
            work.sources |= dict.fromkeys(moved.sources or (found.tier.name,))
        for failed in moved.failed:
            logger.warning("not loaded from tier %s, so that it counts as a miss: %s", found.tier.name, failed)
        return moved.num_blocks < sum(map(len, part))

    def _forget(self, found: _Found, part: list[Int64s], error: Exception) -> None:
        logger.warning("nothing is loaded from tier %s: %s", found.tier.name, error)
        for mask, places in zip(found.masks, part, strict=True):
            mask[places] = False

    # -- keeping ------------------------------------------------------------------------------------------------------

    def keep(
        self,
        request: Request,
        first_places: Sequence[int],
        num_tokens: int,
        fence: Fence,
        *,
        states: bool = True,
        hashed: bool | None = None,
        fetched: Fetched | None = None,
    ) -> "Future[Moved] | None":
        """Store the whole blocks of a request's first num_tokens, which are computed, in the background.

        first_places: for each group the first block that all lies in the cache; parts with null blocks are left out. A
        state is stored if it is the one at the end of a block, and states says that it is still the one after
        num_tokens. hashed: whether content hashes are stored with the blocks, which says that they are as the producer
        made them; by default self.hashed. fetched: what was loaded unverified of them, which keeps the hashes it had.
        The tier holds the request's blocks until that is done. Returns None if there is nothing to store, or the tier
        refused. Raises TierError without a fence.
        """
        check_fence(fence)
        places = self._kept(request, first_places, num_tokens, states=states)
        if self.tier is None or not self._usable or not any(map(len, places)):
            return None
        hold = Hold(request.blocks, request.holder)
        side = Side(self.cache, request.tables, hold=hold)
        if self.hashed if hashed is None else hashed:
            loaded = fetched or Fetched()
            side = replace(side, contents=contents_to_keep(side, self.block_tokens, loaded.places, loaded.contents))
        try:
            future = self.tier.store(request.keys, side, places, fence)
        except StaleBlocks:  # it has ended meanwhile
            return None
        except PdtxError as error:
            logger.warning("%d blocks are not kept in tier %s: %s", sum(map(len, places)), self.tier.name, error)
            return None
        self._storing.add(future)
        future.add_done_callback(self._stored)
        return future

    def settle(self, seconds: float) -> None:
        """Wait until the tiers have taken what keep() has given them, so long at most."""
        wait(tuple(self._storing), seconds)

    def _stored(self, future: "Future[Moved]") -> None:
        self._storing.discard(future)
        error = None if future.cancelled() else future.exception()
        if error is not None:
            logger.warning("blocks are not kept: %s", error)

    def _kept(
        self, request: Request, first_places: Sequence[int], num_tokens: int, *, states: bool
    ) -> tuple[Int64s, ...]:
        blocks, rest = divmod(num_tokens, self.block_tokens)
        blocks = min(blocks, len(request.keys))
        found = list[Int64s]()
        for group, first, table in zip(self.cache.groups, first_places, request.tables, strict=True):
            if group.kind == "state":
                whole = states and not rest
                found.append(np.arange(max(0, blocks - 1), blocks) if whole else _NOWHERE)
                continue
            size = self.block_tokens // group.block_size if group.kind != "cross" else 0
            rows = table[min(first, blocks) * size : blocks * size].reshape(-1, max(1, size))
            found.append(first + np.flatnonzero((rows != NULL_BLOCK).all(1)))
        return tuple(found)
