"""A prefill node's engine in a process of its own that stops itself in the middle of a payload."""

import multiprocessing
import os
import signal
import time
from functools import partial
from multiprocessing.connection import Connection as Pipe

import torch

from pdtx.cache import PagedKVCache
from pdtx.engine import KVProducer, OutboundRequest, control_channel
from pdtx.errors import PdtxError
from pdtx.kvspec import FullAttentionSpec
from pdtx.sidechannel import Dialer
from pdtx.testing.peers import is_stopped
from pdtx.transports import TransferHandle, TransferKey, make_mover
from tests.engine_pair import OPEN, attention, caches_of, describe, produce
from tests.faulty_mover import FaultyConnection, Post, faulty

BLOCKS, BLOCK = 8, 1024
TOKENS = BLOCKS * BLOCK - 2
STOPPED = f"request stopped layers 0..1 tokens 0..{TOKENS} rank 1 to 0"
_PATIENCE_S = 30.0


def model(tp_size: int) -> PagedKVCache:
    """8 blocks of 4 MiB: each sender has 16 MiB, which is more than sockets hold."""
    return attention(
        FullAttentionSpec, "full", block_size=BLOCK, layers=["layers.0"], num_blocks=BLOCKS + 1, heads=8, channels=128,
        tp_size=tp_size,
    )  # fmt: skip


def stop_in_sender_1(key: TransferKey, idle: TransferHandle, post: Post) -> TransferHandle:
    handle = post()
    if key.request_id == "stopped" and key.src_rank == 1:
        limit = time.monotonic() + 0.5
        while not handle.moved and not handle.state.final and time.monotonic() < limit:
            time.sleep(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    return handle


def try_one(producer: KVProducer, name: str, deadline_s: float) -> str:
    """Ship a request and say how it ended."""
    if not producer.wait_for_blocks(producer.blocks_needed(TOKENS), 10.0):
        return "the blocks of the request before did not come back within 10 s"
    try:
        request: OutboundRequest = producer.begin(name, list(range(TOKENS)), max_tokens=2, timeout_s=deadline_s)
        produce(producer, request)
        return producer.wait(request).text
    except PdtxError as error:
        return f"{type(error).__name__}: {error}"


def run(address: str, mover: str, deadline_s: float, renews: bool, beat_s: float, pipe: Pipe) -> None:
    """Ship "stopped", and when told to, "after"; say how each ended."""
    torch.set_num_threads(1)
    vars(control_channel)["Dialer"] = partial(Dialer, heartbeat_s=beat_s)
    cache = caches_of(model(2))
    wrap = lambda inner: FaultyConnection(inner, stop_in_sender_1, [])  # noqa: E731
    moving = faulty(make_mover(mover), wrap=wrap)
    producer = KVProducer(cache, describe(cache), moving)
    producer.connect(address, security=OPEN)
    if not renews:
        producer.core.session.problem = lambda now, moving: None  # type: ignore[method-assign]
    pipe.send(producer.engine_id)
    for name, limit_s in (("stopped", deadline_s), ("after", 10.0)):
        pipe.recv()
        pipe.send(try_one(producer, name, limit_s))
    producer.close()
    moving.close()


class StoppingProducer:
    """The process. Use in a with statement."""

    def __init__(
        self, address: str, mover: str, deadline_s: float, *, renews: bool = True, beat_s: float = 1.0
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=run, args=(address, mover, deadline_s, renews, beat_s, theirs), daemon=True
        )
        self._process.start()
        theirs.close()
        self.engine_id = self.hear()

    def go_on(self) -> None:
        self._pipe.send("go")

    def hear(self) -> str:
        assert self._pipe.poll(_PATIENCE_S), "nothing heard from the producer"
        return str(self._pipe.recv())

    @property
    def is_stopped(self) -> bool:
        assert self._process.pid is not None
        return is_stopped(self._process.pid)

    def resume(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def __enter__(self) -> "StoppingProducer":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()
