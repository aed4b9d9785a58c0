"""Processes of prefill and decode engines, each with some ranks and layers, that a test drives over pipes.

What a cache holds follows from coordinates alone, so that every process can say by itself whether all it has is right.
"""

import ctypes
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pdtx.cache import KVCaches, PagedBuffer, PagedKVCache, PagedLatentCache, PagedStateCache
from pdtx.cache.model_shapes import model_shapes
from pdtx.engine import InboundRequest, KVConsumer, KVProducer, OutboundRequest, PrefillEngine, describe_cache
from pdtx.errors import PdtxError, PeerLost
from pdtx.kvspec import FullAttentionSpec, KVCacheSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec
from pdtx.plan.runs import Int64s
from pdtx.protocol import Finished
from pdtx.transports import make_mover
from tests.engine_pair import OPEN

PATIENCE_S = 30.0


def full(heads: int, block_size: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=heads, head_size=8, dtype="bfloat16")


def model(kind: str, block_size: int) -> dict[str, KVCacheSpec]:
    """The layers of a whole model."""
    if kind == "latent":
        spec = MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=20, dtype="bfloat16")
        return {f"layers.{at}": spec for at in range(4)}
    if kind == "hybrid":
        window = SlidingWindowSpec(
            block_size=block_size, num_kv_heads=4, head_size=8, dtype="bfloat16", sliding_window=24
        )
        state = MambaSpec(block_size=block_size, shapes=((3, 12), (4, 5)), dtypes=("bfloat16", "float32"))
        kinds = [window, full(4, block_size), window, state, full(4, block_size), state]
        return {f"layers.{at}": spec for at, spec in enumerate(kinds)}
    return {f"layers.{at}": full(int(kind), block_size) for at in range(4)}


@dataclass(frozen=True)
class Side:
    """One process: of which model, which ranks and layers of it, and which process of how many."""

    kind: str
    process: int = 0
    processes: int = 1
    tp_size: int = 1
    ranks: tuple[int, ...] = (0,)
    layers: tuple[str, ...] | None = None
    layout: str = "flash_attn_nhd"
    block_size: int = 16
    mover: str = "tcp"
    not_transferred: tuple[str, ...] = ()
    engine_id: str = ""
    clock_s: float = 0.0  # how far its clocks are ahead
    options: Mapping[str, Any] = field(default_factory=dict)

    def cache(self, *, shared: bool = False) -> KVCaches:
        layouts = ("mla", "mamba_sd", self.layout) if self.kind in ("latent", "hybrid") else (self.layout,)
        groups, shapes = model_shapes(
            model(self.kind, self.block_size),
            layouts,
            num_blocks=40,
            tp_size=self.tp_size,
            tp_ranks=range(self.ranks[0], self.ranks[-1] + 1),
            held=self.layers,
        )
        return KVCaches.allocate(groups, shapes, shared=shared)


# -- contents ----------------------------------------------------------------------------------------------------------


def codes(seed: int, layer: str, *axes: int, first: int = 0) -> npt.NDArray[np.uint16]:
    """A 16-bit number for each coordinate of a layer of a request, of which axes are the extents.

    first: the number of the first step of the first axis.
    """
    base = (seed * 40503 + int(layer.rpartition(".")[2]) * 9973) & 0xFFFF
    found: npt.NDArray[np.uint32] = np.full(axes, base, np.uint32)
    for at, (extent, weight) in enumerate(zip(axes, (2654435761, 40503, 65537, 97), strict=False)):
        steps = np.arange(first if at == 0 else 0, extent + (first if at == 0 else 0), dtype=np.uint32)
        mixed = (steps * np.uint32(weight)) ^ (steps >> np.uint32(3))
        shape = [-1 if here == at else 1 for here in range(len(axes))]
        found = ((found * np.uint32(31)) ^ mixed.reshape(shape)).astype(np.uint32)
    return (found ^ (found >> np.uint32(15))).astype(np.uint16)


def elements(seed: int, layer: str, *axes: int, first: int = 0) -> torch.Tensor:
    return torch.from_numpy(codes(seed, layer, *axes, first=first).view(np.int16)).view(torch.bfloat16)


def fill(buffer: PagedBuffer, table: torch.Tensor, layer: int, start: int, stop: int, seed: int) -> None:
    """Write what a model would for tokens start..stop of a layer."""
    name = buffer.layer_names[layer]
    if isinstance(buffer, PagedKVCache):
        heads, size = buffer.spec.num_kv_heads, buffer.head_size
        key, value = (elements(seed + kv * 17, name, stop - start, heads, size, first=start) for kv in (0, 1))
        buffer.write(layer, table, start, key, value)
    elif isinstance(buffer, PagedLatentCache):
        buffer.write(layer, table, start, elements(seed, name, stop - start, buffer.channels, first=start))
    elif isinstance(buffer, PagedStateCache):
        buffer.write(layer, int(table[0]), states(buffer, seed, name, stop))


def states(buffer: PagedStateCache, seed: int, name: str, stop: int) -> list[torch.Tensor]:
    """The states of a layer after so many tokens."""
    shapes = zip(buffer.spec.shapes, buffer.dtypes, strict=True)
    return [
        torch.from_numpy(codes(seed + stop + at, name, *shape).astype(np.int32)).to(dtype)
        for at, (shape, dtype) in enumerate(shapes)
    ]


def wrong(buffer: PagedBuffer, table: torch.Tensor, positions: range, num_tokens: int, seed: int) -> int:
    """Count the elements of a request that are not what they should be, in all layers and ranks that are here."""
    found = 0
    for layer, name in enumerate(buffer.layer_names):
        start, stop = positions.start, positions.stop
        for rank in buffer.tp_ranks if positions else ():
            mine = buffer.common_rows(rank, rank, buffer.tp_size, layer, table, start, stop)
            units = buffer.common_units(rank, rank, buffer.tp_size)
            if isinstance(buffer, PagedKVCache):
                shape = stop - start, buffer.spec.num_kv_heads, buffer.head_size
                meant = torch.stack([elements(seed + kv * 17, name, *shape, first=start) for kv in (0, 1)])
                meant = meant[:, :, units.start : units.stop].contiguous().view(torch.uint8)
            elif isinstance(buffer, PagedLatentCache):
                meant = elements(seed, name, stop - start, buffer.channels, first=start).view(torch.uint8)
            else:
                assert isinstance(buffer, PagedStateCache)
                meant = torch.cat(
                    [one.contiguous().view(torch.uint8).reshape(-1) for one in states(buffer, seed, name, num_tokens)]
                )
            found += int((mine.reshape(-1) != meant.reshape(-1)).sum())
    return found


# -- the processes -----------------------------------------------------------------------------------------------------

Orders = Sequence[tuple[Any, ...]]


def _answer(pipe: Pipe, error: Exception) -> None:
    pipe.send(("error", type(error).__name__, str(error)))


class _Process:
    """What both kinds can do."""

    def clock(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Prefill(_Process):
    """A process of a prefill engine: does what it is told, and says how that went."""

    def __init__(self, side: Side, pipe: Pipe) -> None:
        self.side, self.pipe = side, pipe
        self.cache = side.cache(shared=side.mover == "shm")
        description = describe_cache(self.cache, model="m", fingerprint="same", not_transferred=side.not_transferred)
        self.producer = KVProducer(
            self.cache, description, make_mover(side.mover), engine_id=side.engine_id or "prefill",
            process=side.process, processes=side.processes, **side.options,
        )  # fmt: skip
        self.requests = dict[str, tuple[OutboundRequest, int]]()
        self.done = dict[str, int]()  # tokens that are computed
        self.engines = list[Any]()

    def connect(self, *addresses: str) -> str:
        self.engines.append(self.producer.connect(addresses, security=OPEN, timeout_s=PATIENCE_S))
        return str(self.engines[-1].engine_id)

    def listen(self) -> str:
        return self.producer.listen("127.0.0.1:0", security=OPEN)

    def begin(self, name: str, num_tokens: int, seed: int, to: int = 0, timeout_s: float = PATIENCE_S) -> None:
        request = self.producer.begin(name, num_tokens=num_tokens, timeout_s=timeout_s, to=self.engines[to])
        self.requests[name] = request, seed

    def offer(
        self, name: str, num_tokens: int, seed: int, lease_s: float, generation: int | None = None
    ) -> int:  # fmt: skip
        request = self.producer.offer(name, num_tokens=num_tokens, lease_s=lease_s, generation=generation)
        self.requests[name] = request, seed
        return request.generation

    def begin_to_dialled(self, name: str, num_tokens: int, seed: int) -> None:
        """Begin a request for the consumer that has dialled."""
        self.requests[name] = self.producer.begin(name, num_tokens=num_tokens, timeout_s=PATIENCE_S), seed

    def compute(self, name: str, *chunks: int) -> None:
        """Write and ship the rest of the prompt, in chunks that end at the given tokens and at its end."""
        request, _ = self.requests[name]
        self.compute_some(name, *(stop for stop in chunks if stop > self.done.get(name, 0)), request.num_tokens)
        self.done.pop(name)
        self.producer.computed(request, 7)

    def compute_some(self, name: str, *chunks: int) -> None:
        """The same, and no more than that."""
        request, seed = self.requests[name]
        for stop in chunks:
            start = self.done.get(name, 0)
            for index, buffer in enumerate(self.cache.buffers):
                table = request.tables[buffer.group]
                for layer in range(buffer.num_layers):
                    fill(buffer, table, layer, start, stop, seed)
                    self.producer.layer_ready(request, index, layer, start, stop)
            self.done[name] = stop

    def wait(self, name: str) -> tuple[str, bool, int, int]:
        request, _ = self.requests[name]
        finished = self.producer.wait(request)
        return finished.text, finished.verified, finished.received_bytes, request.nbytes

    def cancel(self, name: str) -> None:
        self.producer.cancel(self.requests[name][0], "it is not wanted")

    def state(self, name: str) -> str:
        return self.requests[name][0].state.name

    def granted(self, name: str) -> bool:
        """Whether somebody has asked for the request, and all who have were granted blocks."""
        legs = self.requests[name][0].legs
        return bool(legs) and all(leg.grant is not None for leg in legs)

    def cut(self) -> None:
        """Break the data connections."""
        for session in self.producer.core.sessions:
            if session.route is not None:
                session.route.connection.close()

    def lose_channels(self) -> None:
        """Break the control channels."""
        for session in self.producer.core.sessions:
            channel: Any = session.channel
            channel._dialer.close(0.0, "it was cut")
            channel._lose(PeerLost("it was cut"), "it was cut")

    def all_free(self) -> bool:
        limit = time.monotonic() + PATIENCE_S
        pools = self.producer.allocator.pools
        while time.monotonic() < limit:
            if all(pool.num_free == pool.num_blocks - 1 for pool in pools):
                return True
            time.sleep(0.01)
        return False

    def counters(self) -> tuple[int, int, int]:
        return self.producer.expired, self.producer.late_reads, self.producer.unknown_reads

    def about(self) -> tuple[int, list[str]]:
        """How many sessions carry payload; layers that are not sent."""
        routes = [route for engine in self.producer.core.engines for route in engine.routes]
        return sum(route.carries for route in routes), list(self.producer.not_sent)

    def close(self) -> None:
        self.producer.close()
        self.producer.mover.close()


class Decode(_Process):
    """A process of a decode engine, likewise."""

    def __init__(self, side: Side, pipe: Pipe) -> None:
        self.side, self.pipe = side, pipe
        self.cache = side.cache(shared=side.mover == "shm")
        description = describe_cache(self.cache, model="m", fingerprint="same", not_transferred=side.not_transferred)
        self.consumer = KVConsumer(
            self.cache, description, make_mover(side.mover), verify=True, engine_id=side.engine_id or "decode",
            process=side.process, processes=side.processes, **side.options,
        )  # fmt: skip
        self.sources = list[PrefillEngine]()

    def listen(self, address: str = "127.0.0.1:0") -> str:
        return self.consumer.listen(address, security=OPEN)

    def connect(self, *addresses: str) -> str:
        self.sources.append(self.consumer.connect(addresses, security=OPEN, timeout_s=PATIENCE_S))
        return self.sources[-1].engine_id

    def pull(self, name: str, generation: int | None = None, deadline_s: float = PATIENCE_S) -> None:
        self.consumer.pull(name, self.sources[-1], generation=generation, deadline_s=deadline_s)

    def silent(self, name: str) -> int:
        """How many processes have not answered an earlier pull."""
        return self.consumer.control.call(lambda: len(self.sources[-1].failed.silent(name)))

    def poll(self, name: str) -> str:
        """How a pull that failed ended."""
        limit = time.monotonic() + PATIENCE_S
        while time.monotonic() < limit:
            for one in self.consumer.poll():
                assert one.request_id == name
                return str(one.error)
            time.sleep(0.01)
        return "nothing"

    def stop_renewing(self) -> None:
        self.consumer.control.call(setattr, self.consumer.core.pulls, "_renew_at", float("inf"))

    def take_any(self, seeds: Sequence[int]) -> tuple[str, int, int, int]:
        """As take(), of a request with one of several seeds."""
        request = self.consumer.next_ready(PATIENCE_S)
        assert request is not None, "no request became ready"
        return self._end(request, min(seeds, key=lambda seed: self._wrong(request, seed)))

    def take(self, seed: int, timeout_s: float = PATIENCE_S) -> tuple[str, int, int, int]:
        """Take the next request, verify it by the engine and by its coordinates; return what was found."""
        request = self.consumer.next_ready(timeout_s)
        assert request is not None, "no request became ready"
        return self._end(request, seed)

    def _end(self, request: InboundRequest, seed: int) -> tuple[str, int, int, int]:
        verified = self.consumer.verify(request)
        found = self._wrong(request, seed)
        self.consumer.release(request)
        self.consumer.finish(request, self._finished(request, found))
        self.consumer.let_go(request)
        return request.request_id, verified.compared, found, request.received_bytes

    def _wrong(self, request: InboundRequest, seed: int) -> int:
        found = 0
        for buffer in self.cache.buffers:
            table: Int64s = request.tables[buffer.group]
            positions = self.cache.groups[buffer.group].positions(request.num_tokens)
            found += wrong(buffer, torch.from_numpy(table.copy()), positions, request.num_tokens, seed)
        return found

    def _finished(self, request: InboundRequest, found: int) -> Finished:
        return Finished(
            request_id=request.request_id, token_ids=[7], text="done", verified=True, wrong=found,
            received_bytes=request.received_bytes, received_runs=request.received_runs, times={},
        )  # fmt: skip

    def received(self, name: str) -> int:
        """Bytes of a request that have arrived."""
        requests = self.consumer.control.call(lambda: list(self.consumer.core.requests.values()))
        return next((one.received_bytes for one in requests if one.request_id == name), -1)

    def completed(self, name: str) -> int:
        """How many processes have said that their part of a request is complete."""
        requests = self.consumer.control.call(lambda: list(self.consumer.core.requests.values()))
        asks = [ask for one in requests if one.request_id == name for ask in one.asks.values()]
        return sum(ask.complete is not None for ask in asks)

    def failed(self) -> int:
        return self.consumer.num_failed

    def all_free(self) -> bool:
        limit = time.monotonic() + PATIENCE_S
        while time.monotonic() < limit:
            if all(pool.num_free == pool.num_blocks - 1 for pool in self.consumer.allocator.pools):
                return True
            time.sleep(0.01)
        return False

    def close(self) -> None:
        self.consumer.close()


_CLONE_NEWTIME = 0x80


def _set_clocks(ahead_s: float) -> None:
    """Go on in a child whose monotonic clocks are ahead: a time namespace is for children only."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWTIME):
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/timens_offsets").write_text(f"monotonic {int(ahead_s)} 0\nboottime {int(ahead_s)} 0\n")
    child = os.fork()
    if child:
        signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_PR_SET_PDEATHSIG = 1


def run(role: type[Prefill] | type[Decode], side: Side, pipe: Pipe) -> None:
    """Carry out orders, (method, arguments), until the pipe is closed or close() was ordered."""
    if side.clock_s:
        _set_clocks(side.clock_s)
    torch.set_num_threads(1)
    one = role(side, pipe)
    pipe.send(("value", None))
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("value", getattr(one, method)(*arguments)))
        except (PdtxError, AssertionError) as error:
            _answer(pipe, error)
        if method == "close":
            return
