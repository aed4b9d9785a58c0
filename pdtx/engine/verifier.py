"""Verification of a request: the consumer's cache against the producer's, element by element."""

import queue
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from pdtx.cache import BlockAllocator, PagedKVCache, Verification, compare, describe_mismatch
from pdtx.cache.allocator import NULL_BLOCK
from pdtx.cache.verify import NOTHING_COMPARED, Rows
from pdtx.engine.inbound import InboundRequest, Session
from pdtx.errors import DeadlineExceeded, PdtxError, ProtocolError, VerificationError
from pdtx.plan.runs import Int64s
from pdtx.protocol import Message, ReadReference

_REFERENCE_BYTES = 4 << 20
"""Most bytes of source data asked for at once."""


class Verifier:
    """Compares requests that have arrived in cache with what their producers show. send: sends a producer a message."""

    def __init__(
        self, cache: PagedKVCache, allocator: BlockAllocator, send: Callable[[Session, Message], None]
    ) -> None:
        self._cache, self._allocator, self._send = cache, allocator, send

    def verify(self, request: InboundRequest) -> Verification:
        """See KVConsumer.verify."""
        found = NOTHING_COMPARED
        for layer, start, rows in self._references(request):
            mine = self._cache.canonical(layer, self._block_ids(request), start, start + rows.shape[1])
            found += compare(mine, rows, layer=layer, start=start, itemsize=self._cache.layout.itemsize)
        if found.first is not None:
            size = self._cache.spec.block_size
            text = describe_mismatch(
                found.first,
                self._references(request),
                lambda token: int(request.granted_ids[token // size]),
                self._cache.layout.itemsize,
            )
            raise VerificationError(f"{found.wrong} of {found.compared} elements are wrong; first: {text}", found.wrong)
        strays = self._strays(request)
        if strays:
            raise VerificationError(f"{strays} 2-byte words outside the request's tokens were written", strays)
        return found

    def _strays(self, request: InboundRequest) -> int:
        """Count written words where no payload may lie: in free blocks, and in the request's blocks past its end."""

        def count(ids: Int64s, from_token: int = 0) -> int:
            return self._cache.unpoisoned(torch.as_tensor(ids, device=self._cache.device), from_token)

        free = self._allocator.free_blocks()
        written = self._cache.written_blocks().cpu().numpy()
        # Blocks handed out while we looked may well have been written; all others must not.
        untouched = self._allocator.untouched(free)
        # The null block is nobody's, so it is nobody's to write.
        untouched = np.append(untouched, NULL_BLOCK)
        strays = count(untouched[written[untouched]])
        if request.blocks is not None:
            used = request.num_tokens % self._cache.spec.block_size
            strays += count(request.blocks.ids[request.num_granted :])
            strays += count(request.granted_ids[-1:], used) if used else 0
        return strays

    def _block_ids(self, request: InboundRequest) -> torch.Tensor:
        return torch.as_tensor(request.granted_ids, device=self._cache.device)

    def _references(self, request: InboundRequest) -> Iterator[tuple[int, int, Rows]]:
        """Read the producer's own K/V, a bounded piece at a time: (layer, first token, rows)."""
        layout = self._cache.layout
        step = max(1, _REFERENCE_BYTES // layout.bytes_per_token)
        for layer in range(self._cache.num_layers):
            for start in range(0, request.num_tokens, step):
                stop = min(start + step, request.num_tokens)
                yield layer, start, self._read_reference(request, layer, start, stop)

    def _read_reference(self, request: InboundRequest, layer: int, start: int, stop: int) -> Rows:
        ask = ReadReference(request_id=request.request_id, layer=layer, token_start=start, token_stop=stop)
        self._send(request.session, ask)
        left = request.deadline - time.monotonic()
        try:
            answer = request.references.get(timeout=max(left, 0.0))
        except queue.Empty:
            waited = round(request.deadline - request.begun, 3)
            raise DeadlineExceeded("reference data to verify with", request.session.engine_id, waited) from None
        if isinstance(answer, PdtxError):
            raise answer
        layout = self._cache.layout
        shape = (2, stop - start, layout.extent("head"), layout.extent("channel") * layout.itemsize)
        if (answer.layer, answer.token_start, len(answer.data)) != (layer, start, int(np.prod(shape))):
            raise ProtocolError(f"{request.session.engine_id} answered with other reference data than asked for")
        return torch.frombuffer(bytearray(answer.data), dtype=torch.uint8).view(shape)
