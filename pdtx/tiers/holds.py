"""Holds on blocks: what keeps a request's blocks from another request while a store reads them."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from pdtx.cache import GroupBlocks
from pdtx.errors import TierError
from pdtx.plan import NULL_BLOCK
from pdtx.plan.runs import Int64s


class Holder(Protocol):
    """Keeps a request's blocks out of the pool while something reads or writes them."""

    def hold(self, blocks: GroupBlocks) -> None:
        """Keep blocks out of the pool, even when freed, until unhold. Raises StaleBlocks if they are not in use."""

    def unhold(self, blocks: GroupBlocks) -> None:
        """End one hold on each of blocks."""


@dataclass(frozen=True)
class Hold:
    """Blocks that came from a pool, and what can keep them out of it."""

    blocks: GroupBlocks
    holder: Holder


class Held(Enum):
    """Blocks of which a store need not take a hold."""

    BY_CALLER = "no pool hands them out, or the caller keeps them until the result is there"


def take_hold(hold: Hold | Held | None, tables: Sequence[Int64s], groups: Sequence[str]) -> Callable[[], None]:
    """Keep the blocks of a store's source from reuse; return what ends that, which may be called more than once.

    tables: block tables, int64, one for each of the named groups. Raises TierError where there is no hold, or a table
    names a block that it does not cover; StaleBlocks where the blocks have been freed.
    """
    if hold is None:
        raise TierError(
            "a store without a hold on its blocks copies nothing: give the source the request's blocks and their "
            "holder (Hold), or Held.BY_CALLER if nothing can reuse them before the result is there"
        )
    if isinstance(hold, Held):
        return lambda: None
    for name, table, own in zip(groups, tables, hold.blocks.groups, strict=True):
        foreign = table[(table != NULL_BLOCK) & ~np.isin(table, own.ids)]
        if len(foreign):
            raise TierError(
                f"group {name}: block {foreign[0]} of the table is none of those that are held; store those"
            )
    hold.holder.hold(hold.blocks)
    return _once(lambda: hold.holder.unhold(hold.blocks))


def _once(call: Callable[[], None]) -> Callable[[], None]:
    lock, calls = threading.Lock(), [call]

    def first() -> None:
        with lock:
            due = calls.pop() if calls else None
        if due is not None:
            due()

    return first
