"""All of a node's caches: groups of layers that share block tables, and their buffers."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from pdtx.cache.aliasing import check_shared_bytes, union_bytes
from pdtx.cache.buffer import PagedBuffer
from pdtx.cache.buffer_shapes import BufferShape, ForeignBuffer, buffer_over, make_buffer
from pdtx.cache.groups import CacheGroup, group_kind
from pdtx.cache.probe import probe_buffer
from pdtx.errors import CacheError, InputError
from pdtx.plan import NULL_BLOCK
from pdtx.plan.runs import Int64s


class KVCaches:
    """A node's groups and their buffers, in an order that both nodes of a model agree on.

    Raises CacheError if buffers do not fit their groups, or share bytes that only groups of one pool may share.
    """

    def __init__(self, groups: Sequence[CacheGroup], buffers: Sequence[tuple[int, PagedBuffer]]) -> None:
        """Put buffers, each with the index of its group, together."""
        self.groups = tuple(groups)
        for group, buffer in buffers:
            buffer.group = group
        self.buffers = tuple(buffer for _, buffer in buffers)
        if not self.buffers:
            raise CacheError("a cache needs one buffer at least")
        self._check()

    def _check(self) -> None:
        first = self.buffers[0]
        for buffer in self.buffers:
            group = self.groups[buffer.group]
            for what, ours, theirs in (
                ("blocks", buffer.num_blocks, group.num_blocks),
                ("positions in a block", buffer.block_size, group.block_size),
                ("ranks", buffer.tp_size, first.tp_size),
                ("ranks here", buffer.tp_ranks, first.tp_ranks),
            ):
                if ours != theirs:
                    raise CacheError(f"buffer {buffer.name} has {ours} {what}, group {group.name} {theirs}")
        for kind, names in (("group", [g.name for g in self.groups]), ("buffer", [b.name for b in self.buffers])):
            if len(set(names)) < len(names):
                raise CacheError(f"two {kind}s have one name: {', '.join(names)}")
        self._check_pools()
        if not self.owned:
            check_shared_bytes(self.groups, self.buffers)

    def _check_pools(self) -> None:
        pools = dict[str, CacheGroup]()
        for group in self.groups:
            first = pools.setdefault(group.pool, group) if group.pool else group
            if first.num_blocks != group.num_blocks:
                raise CacheError(
                    f"groups {first.name} and {group.name} share pool {group.pool} and have {first.num_blocks} and "
                    f"{group.num_blocks} blocks"
                )

    @classmethod
    def single(cls, cache: PagedBuffer) -> "KVCaches":
        """Return the caches of a model whose layers are all in one buffer; the group is named like it."""
        kind = group_kind(cache.spec)
        group = CacheGroup(cache.name, kind, cache.block_size, cache.num_blocks, cache.spec)
        return cls([group], [(0, cache)])

    @classmethod
    def over(cls, groups: Sequence[CacheGroup], buffers: Sequence[ForeignBuffer]) -> "KVCaches":
        """Return caches over memory that others have allocated. Nothing is allocated, poisoned or written.

        Later, too, nothing but blocks that a request names is written or poisoned, and never the null block.
        Raises LayoutError for memory, strides or offsets that do not fit the named layout, CacheError for buffers that
        do not fit their groups or share bytes of different blocks, SpecError or ParallelError for impossible numbers.
        """
        return cls(groups, [(_index(groups, buffer), buffer_over(buffer)) for buffer in buffers])

    @classmethod
    def allocate(
        cls,
        groups: Sequence[CacheGroup],
        buffers: Sequence[BufferShape],
        *,
        device: str | torch.device = "cpu",
        shared: bool = False,
    ) -> "KVCaches":
        """Return caches in memory of their own, poisoned. shared: on the CPU, for other processes of this host to map.

        Raises CacheError, LayoutError, SpecError, ParallelError as over() does, InputError without the memory.
        """
        made = [(_index(groups, buffer), make_buffer(buffer, device, shared=shared)) for buffer in buffers]
        return cls(groups, made)

    @property
    def owned(self) -> bool:
        """Whether all memory was allocated here, so that bytes outside of requests are not anybody else's."""
        return all(buffer.owned for buffer in self.buffers)

    @property
    def device(self) -> torch.device:
        """Where all memory is."""
        return self.buffers[0].device

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks."""
        return self.buffers[0].tp_size

    @property
    def tp_ranks(self) -> range:
        """Those of them that this process has."""
        return self.buffers[0].tp_ranks

    def require_all_ranks(self, what: str) -> None:
        """Raise InputError unless all ranks are here. what: that needs them."""
        if len(self.tp_ranks) < self.tp_size:
            held = f"{self.tp_ranks.start}..{self.tp_ranks.stop - 1} of {self.tp_size}"
            raise InputError(f"{what} needs all ranks of the model in one process; this cache has {held}")

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers and ranks; bytes that several buffers lie in count once."""
        return union_bytes([rank.memory for buffer in self.buffers for rank in buffer.ranks])

    def poison(self, group: int, block_ids: Int64s) -> None:
        """Fill blocks of a group, shape (n,), with POISON in all its buffers; null blocks among them are left alone.

        Raises CacheError for ids that no block has.
        """
        named = np.asarray(block_ids, np.int64)
        named = named[named != NULL_BLOCK]
        if not len(named):
            return
        ids = torch.as_tensor(named, device=self.device)
        for buffer in self.buffers_of(group):
            buffer.poison(ids)

    def poison_request(self, tables: Sequence[Int64s], cached_tokens: int = 0) -> None:
        """Fill with POISON the blocks into which a request's prompt is going to be written, and no others.

        tables: the request's block table of each group, int64. cached_tokens: of the prompt's beginning that the blocks
        hold already, for other requests as well: no block with one of them is poisoned. States, and what an encoder
        made, are written whole. Raises CacheError for ids that no block has.
        """
        for index, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            self.poison(index, table[group.cached_blocks(cached_tokens) :])

    def probe(self, write: Callable[..., None], spare_block: int) -> None:
        """Check, by the owner's own write function, that every element lies where the named layouts say.

        write(layer_name, block_id, *tensors): stores one block of one layer as the owner always does. tensors, on the
        cache's device: of keys and values, key (block_size, heads, head_size) and value (block_size, heads,
        head_size_v), of all ranks that the cache has; of latent vectors one tensor (block_size / compress_ratio,
        channels); of states one tensor for each, in the shape that the spec gives it. dtype: the cache's.
        spare_block: a block that no request uses in any group. Its bytes are what they were afterwards; an owner that
        writes elsewhere than the layouts say does so here as well, so probe before the cache holds anything.

        Raises LayoutError, naming the first coordinate that is wrong and whose value was found there, CacheError for
        the null block or one that does not exist, and what write raises.
        """
        for group in self.groups:
            if not NULL_BLOCK < spare_block < group.num_blocks:
                raise CacheError(
                    f"block {spare_block} cannot be probed: group {group.name} has blocks {NULL_BLOCK + 1}.."
                    f"{group.num_blocks - 1} beside the null block"
                )
        for buffer in self.buffers:
            probe_buffer(buffer, self.groups[buffer.group].name, write, spare_block)

    def buffers_of(self, group: int) -> tuple[PagedBuffer, ...]:
        """Return a group's buffers, in their order."""
        return tuple(buffer for buffer in self.buffers if buffer.group == group)

    def buffer(self, name: str) -> PagedBuffer:
        """Return a buffer by its name. Raises CacheError."""
        found = next((buffer for buffer in self.buffers if buffer.name == name), None)
        if found is None:
            raise CacheError(f"there is no buffer {name!r}; one of {', '.join(b.name for b in self.buffers)}")
        return found


def _index(groups: Sequence[CacheGroup], buffer: BufferShape) -> int:
    """Return the index of a buffer's group. Raises CacheError."""
    names = [group.name for group in groups]
    if buffer.group not in names:
        raise CacheError(f"buffer {buffer.name} is of group {buffer.group!r}, which is none of {', '.join(names)}")
    return names.index(buffer.group)
