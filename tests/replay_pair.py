"""A replay in one process: a synthetic prefill and decode node, tiers on the prefill side, no sockets for payloads."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdtx.cache import KVCaches
from pdtx.engine import KVConsumer, KVProducer, describe_cache
from pdtx.node.synthetic import SyntheticLoop
from pdtx.replay.pace import RatePace
from pdtx.replay.rows import ReplayRow
from pdtx.replay.run import Outcome, run_replay
from pdtx.replay.synthetic import Pace, SyntheticComputer, SyntheticModel
from pdtx.serving import Ended, Job
from pdtx.tiers.cpu import CpuTier
from pdtx.tiers.geometry import tier_caches
from pdtx.tiers.keys import fingerprint_of
from pdtx.tiers.prefix import PrefixCache
from pdtx.transports import make_mover
from tests.engine_pair import OPEN

FAST = 1e6
"""Tokens a second: as quick as memory can be filled."""


def write_trace(path: Path, *requests: tuple[float, int, int, Sequence[int]]) -> Path:
    """Write (timestamp, input_length, output_length, hash_ids) as a trace."""
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(names, one, strict=True))) + "\n" for one in requests))
    return path


def nobody(_: ReplayRow) -> None:
    pass


@dataclass
class ReplayPair:
    model: SyntheticModel
    producer: KVProducer
    consumer: KVConsumer
    prefix: PrefixCache | None

    def run(self, jobs: Sequence[Job], *, pace: Pace | None = None, **changes: Any) -> list[ReplayRow]:  # noqa: ANN401
        """Run jobs one after the other, unless changes say otherwise; return their rows in their order."""
        outcome = Outcome()
        computer = SyntheticComputer(self.producer.cache, tuple(self.model.specs(1)), pace or RatePace(FAST))
        told = list[Ended]()
        settings: dict[str, Any] = {"chunk_size": 64, "max_num_seqs": 1, "timeout_s": 60.0, "until": float("inf")}
        settings |= changes

        # With tiers each alone, so that what one has stored is there for the next one.
        for part in [[job] for job in jobs] if self.prefix is not None else [jobs]:
            run_replay(
                part, computer, self.producer, outcome, prefix=self.prefix, told=nobody, on_end=told.append, **settings
            )
        self.ended = told
        return sorted(outcome.rows, key=lambda row: int(row.request_id[1:]))


@contextmanager
def replay_pair(
    *,
    tier: bool = True,
    tier_tokens: int = 16,
    model: SyntheticModel | None = None,
    tokens_per_s: float = 0.0,
    num_blocks: int = 33,
) -> Iterator[ReplayPair]:
    model = model or SyntheticModel("llama-3-8b", layers=2)
    source = model.make_cache(layout="flash_attn_nhd", block_size=16, num_blocks=num_blocks)
    destination = model.make_cache(layout="flashinfer_hnd", block_size=32, num_blocks=num_blocks)

    def described(cache: KVCaches) -> Any:  # noqa: ANN401
        return describe_cache(cache, model=model.name, fingerprint=model.fingerprint)

    with ExitStack() as stack:
        prefix = None
        if tier:
            memory = tier_caches(source, block_tokens=tier_tokens, nbytes=16 << 20)
            prefix = PrefixCache(source, CpuTier(memory, like=source), fingerprint_of(source, model=model.fingerprint))
            stack.callback(prefix.close)
        consumer = KVConsumer(destination, described(destination), make_mover("inproc"), verify=True)
        stack.callback(consumer.close)
        address = consumer.listen("127.0.0.1:0", security=OPEN)
        mover = make_mover("inproc")
        stack.callback(mover.close)
        producer = KVProducer(source, described(source), mover)
        stack.callback(producer.close)
        producer.connect(address, security=OPEN)
        stop = threading.Event()
        loop = threading.Thread(target=SyntheticLoop(consumer, stop, None, lambda _: None, tokens_per_s).run)
        loop.start()
        stack.callback(loop.join)
        stack.callback(stop.set)
        yield ReplayPair(model, producer, consumer, prefix)
