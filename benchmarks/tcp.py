"""The TCP mover against a plain socket in bulk: 256 MiB of Llama-3-8B cache between two processes on loopback.

Ours: 128 random blocks of a paged cache to 128 others, 8,192 ranges of 32 KiB, put layer by layer (32 puts).
Reference: sendall and recv_into of one contiguous buffer over a second connection between the same processes, with the
same socket options. Both are timed at the sender, from the first byte given to the last confirmation received,
in turns. Every round's destination is poisoned before and compared after, outside the timed part.
"""

import multiprocessing
import secrets
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe

import numpy as np
import torch

from benchmarks.rows import Row
from pdtx.cache import PagedKVCache
from pdtx.cache.memory import allocate
from pdtx.cache.verify import NOTHING_COMPARED, compare
from pdtx.errors import PdtxError
from pdtx.kvspec import FullAttentionSpec
from pdtx.plan import Endpoint, Slices, TransferPlan, build_plan
from pdtx.plan.runs import Int64s
from pdtx.testing.codes import code_rows, codes_for, fill_codes
from pdtx.transports import Placement, Region, TransferKey
from pdtx.transports.tcp import TcpMover
from pdtx.transports.wire import tune
from pdtx.units import gb_per_s

NAME = "tcp_put_256MiB_scattered"
AT_LEAST = 0.8

LAYERS, BLOCKS, BLOCK_SIZE = 32, 128, 16
ROUNDS = 15
TOKENS = BLOCKS * BLOCK_SIZE
NBYTES = 256 << 20
SPEC = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype="bfloat16")
SESSION = "benchmark"
PATIENCE_S = 60.0


class _Side:
    """A paged cache with 128 random blocks of the request, and a contiguous buffer of the same size."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        random = np.random.default_rng(seed)
        # Both come from the same allocator, so both have pages of the same kind; both are touched before any timing.
        self.cache = PagedKVCache(SPEC, layout="flash_attn_nhd", num_layers=LAYERS, num_blocks=2 * BLOCKS + 1)
        self.block_ids: Int64s = random.permutation(2 * BLOCKS)[:BLOCKS].astype(np.int64) + 1
        self.codes = codes_for(self.cache, TOKENS)
        self.bulk = allocate(NBYTES, self.cache.device).fill_(0xAA)

    @property
    def region(self) -> Region:
        return Region(self.cache.memory)


class _Consumer(_Side):
    """Receives in a process of its own; what to do next comes over a pipe."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__(seed=2)
        self._pipe = pipe
        self._token = secrets.token_bytes(32)
        self._expected = [code_rows(self.codes, layer, range(TOKENS)) for layer in range(LAYERS)]
        self._slices = list[Slices]()

    def admit(self, _: str) -> bytes:
        return self._token

    def place(self, _: str, key: TransferKey) -> Placement:
        return Placement(self.region, self._slices[key.layer_start])

    def placed(self, _: str, key: TransferKey, nbytes: int, error: PdtxError | None) -> None:
        pass

    def closed(self, _: str, reason: str) -> None:
        pass

    def run(self) -> None:
        mover = TcpMover()
        address = mover.listen("127.0.0.1:0", self)
        listener = socket.create_server(("127.0.0.1", 0))
        self._pipe.send((address, self._token, listener.getsockname(), self.block_ids))
        source_ids = self._pipe.recv()
        self._slices = [plan.flat.destination() for plan in _plans(self.cache, source_ids, self.block_ids)]
        sock, _ = listener.accept()
        tune(sock)
        try:
            while (job := self._pipe.recv()) is not None:
                if job == "poison":
                    self.cache.poison()
                    self.bulk.fill_(0)
                    self._pipe.send(None)
                elif job == "bulk":
                    self._receive_bulk(sock)
                elif job == "check":
                    self._pipe.send(self._wrong())
        finally:
            sock.close()
            listener.close()
            mover.close()

    def _receive_bulk(self, sock: socket.socket) -> None:
        self._pipe.send(None)
        view = _bytes_of(self.bulk)
        while view:
            view = view[sock.recv_into(view) :]
        sock.sendall(b"!")

    def _wrong(self) -> tuple[int, int]:
        """Count what is wrong in the cache and in the bulk buffer."""
        blocks, found = torch.from_numpy(self.block_ids), NOTHING_COMPARED
        for layer, expected in enumerate(self._expected):
            rows = self.cache.canonical(layer, blocks, 0, TOKENS)
            found += compare(rows, expected, layer=layer, start=0, itemsize=self.codes.itemsize)
        return found.wrong, int((self.bulk != 0xAA).sum())


def _plans(cache: PagedKVCache, source_ids: Int64s, destination_ids: Int64s) -> list[TransferPlan]:
    src, dst = Endpoint(cache.layout, source_ids), Endpoint(cache.layout, destination_ids)
    return [build_plan(src, dst, range(TOKENS), range(layer, layer + 1)) for layer in range(LAYERS)]


def _bytes_of(memory: torch.Tensor) -> memoryview:
    return memoryview(memory.numpy())  # type: ignore[arg-type]  # numpy's stubs leave the buffer protocol out


def _consume(pipe: Pipe) -> None:
    _Consumer(pipe).run()


class _Producer(_Side):
    """Sends, and takes the time."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__(seed=1)
        fill_codes(self.cache, self.block_ids, self.codes)
        self._pipe = pipe
        address, token, bulk_address, destination_ids = pipe.recv()
        pipe.send(self.block_ids)
        self._plans = _plans(self.cache, self.block_ids, destination_ids)
        self._mover = TcpMover()
        self._connection = self._mover.connect(address, SESSION, token, time.monotonic() + PATIENCE_S)
        self._sock = socket.create_connection(bulk_address)
        tune(self._sock)

    def close(self) -> None:
        self._pipe.send(None)
        self._sock.close()
        self._mover.close()

    def put(self) -> float:
        """Put all layers; return the seconds to the last acknowledgement."""
        begun = time.perf_counter()
        deadline = time.monotonic() + PATIENCE_S
        handles = [
            self._connection.put(TransferKey("r", layer, layer + 1, 0, TOKENS), self.region, plan.flat, deadline)
            for layer, plan in enumerate(self._plans)
        ]
        # They arrive in order: waiting for the last one first wakes this thread once, not 32 times.
        for handle in reversed(handles):
            handle.wait()
        return time.perf_counter() - begun

    def bulk_send(self) -> float:
        """Send the contiguous buffer; return the seconds to the confirmation."""
        self._ask("bulk")
        begun = time.perf_counter()
        self._sock.sendall(_bytes_of(self.bulk))
        self._sock.recv(1)
        return time.perf_counter() - begun

    def _ask(self, job: str) -> tuple[int, int]:
        self._pipe.send(job)
        answer: tuple[int, int] = self._pipe.recv()
        return answer

    def round(self, order: tuple[Callable[[], float], ...]) -> tuple[list[float], int]:
        """Run one round; return the seconds of each way, and the number of wrong elements."""
        self._ask("poison")
        seconds = [way() for way in order]
        return seconds, sum(self._ask("check"))


def measure() -> Row:
    """Run the benchmark in two processes."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_consume, args=(there,))
    process.start()
    try:
        producer = _Producer(here)
        ours, reference, wrong = list[float](), list[float](), 0
        for number in range(ROUNDS + 1):
            # Whoever comes first finds other caches than who comes second: take turns.
            ways = (producer.put, producer.bulk_send)
            seconds, bad = producer.round(ways if number % 2 else ways[::-1])
            put, bulk = seconds if number % 2 else seconds[::-1]
            wrong += bad
            if number:  # the first round warms up
                ours.append(gb_per_s(NBYTES, put))
                reference.append(gb_per_s(NBYTES, bulk))
        producer.close()
    finally:
        process.join(PATIENCE_S)
        process.kill()
    return Row(NAME, "GB/s", ours, reference, AT_LEAST, wrong)
